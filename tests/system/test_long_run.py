"""A launch of many steps of a trivial model: no process, no folder and no line of output grows with the steps, but by
rule. `SOAK_STEPS=3000 python -m pytest --soak -n 0 -s tests/system/test_long_run.py` prints what each process has.
"""

import os
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
GROWTH_KIB = 4096
"""of a process in the second half, for what an allocator keeps"""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(24 * 3600)]


class Size(NamedTuple):
    """Of one process."""

    rss_kib: int
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
            size = Size(one.memory_info().rss >> 10, one.num_fds(), one.num_threads())
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


def test_nothing_grows_with_the_steps_but_by_rule(tmp_path, temporary):
    launch = Launch(
        tmp_path, command="trainer", steps=STEPS, sft__steps=0, sft__demonstrations="", evaluate__every=0,
        checkpoint__every=max(STEPS // 5, 1), rollout__prompts_per_step=2, rollout__group_size=2,
        rollout__max_completion_tokens=8, reward__overlong_buffer=1, rollout__keep_bytes=KEPT_BYTES,
        deadlines__sync_s=300,
    )  # fmt: skip
    taken: list[dict[str, Size]] = []
    folders: list[dict[str, tuple[int, int]]] = []
    for part in range(1, PARTS):
        launch.until(lambda part=part: len(launch.metrics()) >= STEPS * part // PARTS, 12 * 3600)
        taken.append(sizes(launch))
        folders.append({**files(launch.run_dir), "TMPDIR": (sum(count for count, _ in files(temporary).values()), 0)})
    assert launch.wait(12 * 3600) == 0, launch.output[-3000:]
    assert launch.survivors() == []
    half = len(taken) // 2
    days = STEPS * (len(taken) - 1 - half) / PARTS / DAY_STEPS
    assert taken[-1].keys() == taken[half].keys()
    for name, size in taken[-1].items():
        before = taken[half][name]
        print(f"{name:46} {size}, {(size.rss_kib - before.rss_kib) / 1024 / days:+,.0f} MiB a day")
        assert size.rss_kib <= before.rss_kib * 1.02 + GROWTH_KIB, (name, before, size)
        assert size.descriptors <= before.descriptors + 2 and size.threads <= before.threads + 1, (name, before, size)
    for name, (count, size_bytes) in folders[-1].items():
        more = (size_bytes - folders[half][name][1]) / days
        print(f"{name:46} {count:,} files of {size_bytes:,} bytes; {more / 1e6:+,.1f} MB a day")
    count, size_bytes = folders[-1]["rollouts"]
    assert size_bytes <= KEPT_BYTES and count < STEPS * 0.8
    assert launch.told("rollouts/ has reached rollout.keep_bytes")
    assert folders[-1]["TMPDIR"] == folders[half]["TMPDIR"] and files(temporary) == {}
    assert [row["step"] for row in launch.metrics()] == list(range(1, STEPS + 1))
    assert len(launch.output) < 400 * STEPS
