"""10,000 steps and 1 GB of rollouts: what the first paint takes, how long a search, and how much memory they need."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from playwright.sync_api import expect

from shared.metrics import METRICS
from tests.dashboard.conftest import Dashboard
from tests.dashboard.run_folders import group_of, metrics, tokenizer_of, write_lock
from tests.serve.browser import Visitor, chromium

pytestmark = [pytest.mark.slow, pytest.mark.soak]
STEPS, BYTES = 10_000, 10**9
FIRST_PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10,000 steps with every metric, and 10,000 files of 100 kB."""
    folder = tmp_path_factory.mktemp("runs") / "large"
    (folder / "rollouts").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(1, STEPS + 1):
            every = {name: 0.123456789 for name in METRICS if not name.startswith(("sft/", "evaluation/"))}
            row = {"step": step, "kind": "train", "time": step, **every, **metrics(step, STEPS)}
            stream.write(json.dumps(row) + "\n")
    tokenizer = tokenizer_of(["a few words"])
    lines, size = [], 0
    while size < BYTES // STEPS:
        lines.append(msgspec.json.encode(group_of(len(lines), 1, tokenizer)) + b"\n")
        size += len(lines[-1])
    for step in range(1, STEPS + 1):
        rare = b"".join(lines).replace(b"Anna", b"Zoe ") if step == 3 else b"".join(lines)
        (folder / f"rollouts/step_{step}.jsonl").write_bytes(rare)
    write_lock(folder, "running")
    return folder


@pytest.mark.timeout(900)
def test_ten_thousand_steps_and_a_gigabyte(folder: Path, dashboard: Callable[..., Dashboard]) -> None:
    held = sum(path.stat().st_size for path in (folder / "rollouts").iterdir())
    assert held >= BYTES
    served = dashboard(folder.parent)
    with chromium() as browser:
        for address, wanted in (("", ".runs tbody tr"), ("large", ".chart canvas"), ("large/rollouts", ".groups li")):
            visitor = Visitor(browser, served, home=f"/#/{address}")  # type: ignore[arg-type]
            begin = time.monotonic()
            visitor.page.goto(f"{served.url}/?again#/{address}")
            expect(visitor.page.locator(wanted).first).to_be_visible(timeout=60_000)
            took, paint = time.monotonic() - begin, visitor.page.evaluate(FIRST_PAINT)
            memory = served.resident_bytes / 2**20
            print(f"'{address}': first paint {paint:.0f} ms, content {took:.2f} s, server {memory:.0f} MiB")
            assert paint < 1000 and memory < 300
            visitor.check()
            visitor.context.close()
    with httpx.Client(base_url=served.url, headers=served.link.headers, timeout=60) as client:
        asked, before, longest, hits = 0, None, 0.0, []
        while True:
            begin = time.monotonic()
            query = {"text": "zoe  HAT am Anfang", **({} if before is None else {"before": before})}
            found = client.get("/api/runs/large/search", params=query).json()
            longest, asked = max(longest, time.monotonic() - begin), asked + 1
            hits += found["hits"]
            before = found["next"]
            if before is None:
                break
        memory = served.resident_bytes / 2**20
        words = f"{asked} requests, the longest {longest:.2f} s; server {memory:.0f} MiB"
        print(f"search through {held / 1e9:.2f} GB: {words}")
        assert {hit["step"] for hit in hits} == {3} and memory < 300 and longest < 10
