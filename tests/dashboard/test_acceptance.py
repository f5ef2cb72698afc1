"""A real launch with --dashboard: a link, news of its steps within 2 s, and an end with it; and a run of 10,000 steps
and 1 GB of rollouts: what the first paint takes, how long a search, and how much memory they need."""

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from playwright.sync_api import expect

from shared.metrics import METRICS
from tests.dashboard.conftest import Dashboard, Link
from tests.dashboard.run_folders import group_of, metrics, tokenizer_of, write_lock
from tests.serve.browser import Visitor, chromium
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1200)]
STEPS, BYTES = 10_000, 10**9
LIVE = "() => Number(document.querySelector('.facts dd')?.textContent.split(' ')[0].replace(',', ''))"
FIRST_PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime"""


def wait_for(launch: Launch, condition: Callable[[], Any]) -> Any:
    while not (value := condition()):
        assert launch.process.poll() is None, launch.output
        time.sleep(0.02)
    return value


def test_a_launch_shows_itself(tmp_path):
    launch = Launch(tmp_path / "runs", options=("--dashboard",), command="trainer", steps=30)
    link = Link(wait_for(launch, lambda: re.search(r"dashboard: (http://\S+)\n", launch.output))[1])
    [child] = [one for one in psutil.process_iter(["cmdline"])
               if {"dashboard", str(tmp_path / "runs")} <= {*(one.info["cmdline"] or [])}]  # fmt: skip
    wait_for(launch, (launch.run_dir / "lock").exists)  # before, the page would say that there is no such run yet
    log, behind = launch.run_dir / "metrics.jsonl", list[float]()

    def steps() -> int:
        return log.read_text().count('"kind": "train"') if log.exists() else 0

    with chromium() as browser:
        visitor = Visitor(browser, link, home="/#/run")  # type: ignore[arg-type]
        expect(visitor.page.locator(".state")).to_have_text("running", timeout=120_000)
        seen = 0
        while seen < 12:
            seen = wait_for(launch, lambda before=seen: (now := steps()) > before and now)
            written = time.monotonic()
            wait_for(launch, lambda now=seen: (visitor.page.evaluate(LIVE) or 0) >= now)
            behind.append(time.monotonic() - written)
        print(f"{len(behind)} steps were seen {max(behind):.2f} s after their line was written, at most")
        assert len(behind) >= 5 and max(behind) < 2
        visitor.check()
        visitor.context.close()
    assert launch.wait(400) == 0, launch.output
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()
    served = Dashboard(tmp_path / "runs")
    overview = httpx.get(f"{served.url}/api/runs/run", headers=served.link.headers, timeout=60).json()
    served.close()
    assert overview["run"]["state"] == "finished" and overview["run"]["step"] == 30 and overview["rollouts"] == [30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 10,000 steps with every metric, and 10,000 files of 100 kB."""
    folder = tmp_path_factory.mktemp("runs") / "large"
    (folder / "rollouts").mkdir(parents=True)
    every = {name: 0.123456789 for name in METRICS if not name.startswith(("sft/", "evaluation/"))}
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(1, STEPS + 1):
            row = {"step": step, "kind": "train", "time": step, **every, **metrics(step, STEPS)}
            stream.write(json.dumps(row) + "\n")
    tokenizer, lines = tokenizer_of(["a few words"]), b""
    while len(lines) < BYTES // STEPS:
        lines += msgspec.json.encode(group_of(lines.count(b"\n"), 1, tokenizer)) + b"\n"
    for step in range(1, STEPS + 1):
        rare = lines.replace(b"Anna", b"Zoe ") if step == 3 else lines
        (folder / f"rollouts/step_{step}.jsonl").write_bytes(rare)
    write_lock(folder, "running")
    return folder


def test_ten_thousand_steps_and_a_gigabyte(folder, dashboard):
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

    def search(client: httpx.Client) -> Iterator[tuple[list[Any], float]]:
        before: dict[str, int] | None = {}
        while before is not None:
            begin, query = time.monotonic(), {"text": "zoe  HAT am Anfang", **before}
            page = client.get("/api/runs/large/search", params=query).json()
            before = None if page["next"] is None else {"before": page["next"]}
            yield page["hits"], time.monotonic() - begin

    with httpx.Client(base_url=served.url, headers=served.link.headers, timeout=60) as client:
        parts, seconds = zip(*search(client), strict=True)
    memory = served.resident_bytes / 2**20
    print(f"search: {len(parts)} requests, the longest {max(seconds):.2f} s; server {memory:.0f} MiB")
    assert {hit["step"] for hits in parts for hit in hits} == {3} and memory < 300 and max(seconds) < 10
