"""A real launch with --dashboard: a link, news of its steps within 2 s, and an end with it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import expect

from tests.dashboard.conftest import Dashboard, Link
from tests.serve.browser import Visitor, chromium
from tests.system.launch import Launch

pytestmark = [pytest.mark.slow, pytest.mark.soak]
LIVE = "() => Number(document.querySelector('.facts dd')?.textContent.split(' ')[0].replace(',', ''))"


def waited_for(launch: Launch, pattern: str, limit_s: float) -> str:
    """The first group of a pattern in what a launch prints."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := re.search(pattern, launch.output):
            return found[1]
        assert launch.process.poll() is None, launch.output
        time.sleep(0.2)
    raise AssertionError(launch.output)


@pytest.mark.timeout(900)
def test_a_launch_shows_itself(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "runs", options=("--dashboard",), command="trainer", steps=30)
    link = Link(waited_for(launch, r"dashboard: (http://\S+)\n", 240))
    children = [one for one in psutil.process_iter(["cmdline"]) if "dashboard" in (one.info["cmdline"] or [])
                and str(tmp_path / "runs") in (one.info["cmdline"] or [])]  # fmt: skip
    assert len(children) == 1
    end = time.monotonic() + 240
    while not (launch.run_dir / "lock").exists():  # before, the page would say that there is no such run yet
        assert time.monotonic() < end and launch.process.poll() is None, launch.output
        time.sleep(0.2)
    behind = []
    with chromium() as browser:
        visitor = Visitor(browser, link, home="/#/run")  # type: ignore[arg-type]
        expect(visitor.page.locator(".state")).to_have_text("running", timeout=120_000)
        metrics = launch.run_dir / "metrics.jsonl"
        seen, end = 0, time.monotonic() + 400
        while seen < 12 and time.monotonic() < end and launch.process.poll() is None:
            steps = metrics.read_text().count('"kind": "train"') if metrics.exists() else 0
            if steps > seen:
                written = time.monotonic()
                while (visitor.page.evaluate(LIVE) or 0) < steps and time.monotonic() - written < 10:
                    time.sleep(0.02)
                behind.append(time.monotonic() - written)
                seen = steps
            time.sleep(0.02)
        print(f"{len(behind)} steps were seen {max(behind):.2f} s after their line was written, at most")
        assert len(behind) >= 5 and max(behind) < 2
        visitor.check()
        visitor.context.close()
    assert launch.wait(400) == 0, launch.output
    psutil.wait_procs(children, timeout=20)
    assert not children[0].is_running()
    with pytest.raises(httpx.TransportError):
        httpx.get(link.url)
    served = Dashboard(tmp_path / "runs")
    found = httpx.get(f"{served.url}/api/runs/run", headers=served.link.headers, timeout=60).json()
    served.close()
    assert found["run"]["state"] == "finished" and found["run"]["step"] == 30 and found["rollouts"] == [30]


@pytest.mark.timeout(600)
def test_a_killed_launch_leaves_no_dashboard(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "runs", options=("--dashboard",), command="trainer", steps=30)
    link = Link(waited_for(launch, r"dashboard: (http://\S+)\n", 240))
    assert httpx.get(f"{link.url}/api/runs", headers=link.headers, timeout=60).status_code == 200
    ranks = [one for one in psutil.Process(launch.process.pid).children(recursive=True) if "trainer" in one.cmdline()]
    for one in ranks:  # all are known before the first dies, and its children with it
        one.kill()
    launch.process.kill()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            httpx.get(f"{link.url}/api/runs")
        except httpx.TransportError:
            return
        time.sleep(0.2)
    raise AssertionError("the dashboard is still there")
