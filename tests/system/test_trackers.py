"""A launch with a tracker that is killed or stopped trains the same, bit for bit, as one without."""

import os
import signal
from typing import Any

import psutil
import pytest

from shared.config import Config
from tests.system.launch import Launch
from trainer.trackers import not_installed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
SETTINGS = {"rollout__max_async_level": 0, "steps": 6, "evaluate__every": 0}
MEASURED = ("time", "tokens/", "sync/", "memory/", "tflops", "mfu")
"""beginnings of the names of what no two launches have in common"""


def numbers(launch: Launch) -> list[dict[str, Any]]:
    rows = [*launch.metrics(), *launch.metrics("evaluation")]
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


@pytest.fixture(scope="module")
def without(start, tmp_path_factory):
    return start(tmp_path_factory.mktemp("without"), **SETTINGS).finish()


@pytest.mark.parametrize("harm", [None, signal.SIGKILL, signal.SIGSTOP])
def test_a_tracker_changes_no_number_of_a_launch(harm, start, without, tmp_path):
    if any(not_installed(Config(trackers=["tensorboard"]))):
        pytest.skip('the extra "tensorboard" is not installed')
    launch = start(tmp_path, **SETTINGS, trackers=["tensorboard"])
    launch.until_step(2)
    children = psutil.Process(launch.rank_pid(0)).children()
    victim = next(child for child in children if "dashboard.track" in child.cmdline())
    if harm is not None:
        os.kill(victim.pid, harm)
    assert launch.finish().survivors() == [] and not victim.is_running()
    assert numbers(launch) == numbers(without) and len(set(launch.losses())) == 6
    assert launch.told("tracker tensorboard", "killed by signal 9") is (harm is not None)
    sent = (launch.run_dir / "trackers" / "tensorboard.sent").read_text().splitlines()
    assert (sum(line.startswith("train ") for line in sent) == 6) is (harm is None)
