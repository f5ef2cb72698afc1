"""A launch of many steps of a trivial model: no process, no folder and no line of output grows with the steps, but by
rule. `SOAK_STEPS=3000 python -m pytest --soak -n 0 -s tests/system/test_long_run.py` prints what each process has.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.system.launch import Launch

STEPS = int(os.environ.get("SOAK_STEPS", "300"))
PARTS = 20
"""figures are taken so often"""
KEPT_BYTES = 200_000
"""of rollouts/"""
DAY_STEPS = 24 * 3600 / 1.4
"""steps of a day, of 1.4 s each as the quickstart's"""
GROWTH_MIB = 4
"""of a process in the second half, for what an allocator keeps"""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(24 * 3600)]


class Size(NamedTuple):
    """Of one process; memory as the kernel counts it for each, and as it is shared out among all of the machine."""

    rss_kib: int
    pss_kib: int
    descriptors: int
    threads: int


def sizes(launch: Launch) -> dict[str, Size]:
    """What each process has, by its place in the tree and its command."""
    found: dict[str, Size] = {}
    launcher = psutil.Process(launch.process.pid)
    for one in (launcher, *launcher.children(recursive=True)):
        try:
            rank, line = one.environ().get("RANK"), one.cmdline()
            name = f"rank {rank}" if one.ppid() == launcher.pid and rank else (line[2:3] or line)[0]
            name = "launcher" if one == launcher else name.rpartition("/")[2][:40]
            memory = one.memory_full_info()
            size = Size(memory.rss >> 10, memory.pss >> 10, one.num_fds(), one.num_threads())
            found[f"{name} {sum(other.startswith(name) for other in found) + 1}"] = size
        except (psutil.Error, IndexError):
            continue  # it has just ended
    return found


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Entry of a folder -> files and bytes below it."""
    found = {}
    for entry in sorted(folder.iterdir()):
        every = [path.stat().st_size for path in (entry, *entry.rglob("*")) if path.is_file()]
        found[entry.name] = (len(every), sum(every))
    return found


def test_nothing_grows_with_the_steps_but_by_rule(tmp_path: Path, temporary: Path) -> None:
    launch = Launch(
        tmp_path, command="trainer", steps=STEPS, sft__steps=0, sft__demonstrations="", evaluate__every=0,
        checkpoint__every=max(STEPS // 5, 1), rollout__prompts_per_step=2, rollout__group_size=2,
        rollout__max_completion_tokens=8, reward__overlong_buffer=1, rollout__keep_bytes=KEPT_BYTES,
        deadlines__sync_s=300,
    )  # fmt: skip
    taken: list[dict[str, Size]] = []
    folders: list[dict[str, tuple[int, int]]] = []
    began = time.monotonic()
    for part in range(1, PARTS):
        launch.until(lambda part=part: len(launch.metrics()) >= STEPS * part // PARTS, 12 * 3600)
        taken.append(sizes(launch))
        counts, lengths = zip(*files(temporary).values(), strict=True)
        folders.append({**files(launch.run_dir), "TMPDIR": (sum(counts), sum(lengths))})
        print(f"\n{STEPS * part // PARTS:,} steps, {time.monotonic() - began:.0f} s")
        for name, size in taken[-1].items():
            print(f"  {name:44} {size.rss_kib / 1024:7.1f} MiB ({size.pss_kib / 1024:7.1f} shared out), "
                  f"{size.descriptors} descriptors, {size.threads} threads")  # fmt: skip
        print("  " + ", ".join(f"{name} {count} of {size:,} bytes" for name, (count, size) in folders[-1].items()))
    assert launch.wait(12 * 3600) == 0, launch.output[-3000:]
    assert launch.survivors() == []
    middle, end = taken[len(taken) // 2], taken[-1]
    steps = STEPS * (len(taken) - 1 - len(taken) // 2) / PARTS
    for name, size in end.items():
        grown = [now - before for now, before in zip(size, middle[name], strict=True)]
        a_day = grown[0] / steps * DAY_STEPS / 1024
        print(f"{name:46} {grown[0]:+7,} KiB, {grown[2]:+} descriptors, {grown[3]:+} threads in {steps:.0f} steps; "
              f"{a_day:+,.0f} MiB in {DAY_STEPS:,.0f}")  # fmt: skip
    for name, (count, size) in folders[-1].items():
        more = (size - folders[len(taken) // 2][name][1]) / steps * DAY_STEPS
        print(f"{name:46} {count:,} files of {size:,} bytes; {more / 1e6:+,.1f} MB in {DAY_STEPS:,.0f} steps")
    assert end.keys() == middle.keys()
    for name, size in end.items():
        before = middle[name]
        assert size.rss_kib <= before.rss_kib * 1.02 + GROWTH_MIB * 1024, (name, before, size)
        assert size.descriptors <= before.descriptors + 2 and size.threads <= before.threads + 1, (name, before, size)
    kept = folders[-1]["rollouts"]
    assert kept[1] <= KEPT_BYTES and kept[0] < STEPS * 0.8 and launch.told("rollouts/ has reached rollout.keep_bytes")
    assert folders[-1]["TMPDIR"][0] == folders[len(taken) // 2]["TMPDIR"][0]
    assert [row["step"] for row in launch.metrics()] == list(range(1, STEPS + 1))
    assert files(temporary) == {} and len(launch.output) < 400 * STEPS
