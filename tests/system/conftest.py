"""One SFT-trained tiny model for all launches of this folder, so that their rewards differ and weights move."""

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.system.launch import BEGUN, Launch

Start = Callable[..., Launch]
STEPS = 12
"""of `run`"""


class Killed(NamedTuple):
    """A launch after the death of a rank."""

    launch: Launch
    victim: int
    """pid"""
    code: int
    survivors: list[str]
    losses: list[float]


@pytest.fixture(scope="module", autouse=True)
def no_launch_is_left():
    """What a failed test left running ends with its file, and takes no time from the others."""
    yield
    for launch in BEGUN:
        if launch.process.poll() is None:
            launch.kill()
    BEGUN.clear()


@pytest.fixture
def temporary(monkeypatch):
    """The temporary folder of the test's launches; it has a short name, since sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def imitate(folder: Path) -> Launch:
    """Begin a launch in SFT mode."""
    general = folder / "general.jsonl"
    general.write_text('{"problem": "Tom has 3 apples.", "completion": "In the beginning there are 3 apples."}\n')
    return Launch(
        folder, command="trainer", mode="sft", sft__steps=70, sft__batch=32, sft__learning_rate=5e-3,
        sft__general=str(general), sft__general_share=0.02, evaluate__every=35, checkpoint__every=10,
        prepare__options__max_tokens=400,
    )  # fmt: skip


@pytest.fixture(scope="session")
def imitation(tmp_path_factory):
    """A launch in SFT mode."""
    return imitate(tmp_path_factory.mktemp("imitation")).finish()


def begin(folder: Path) -> Launch:
    """Begin the launch that most tests look at: SFT, then steps of two trainers, each on what the last one sampled."""
    return Launch(
        folder, placement__trainers=2, steps=STEPS, rollout__max_completion_tokens=100, rollout__max_sequences=4,
        rollout__max_async_level=0, checkpoint__every=4, evaluate__every=6, prepare__options__max_tokens=400,
        sft__steps=70, sft__batch=32, sft__learning_rate=5e-3,
    )  # fmt: skip


@pytest.fixture(scope="session")
def killed(tmp_path_factory):
    """It, killed in a trainer between two checkpoints."""
    launch = begin(tmp_path_factory.mktemp("run"))
    launch.until(lambda: len(launch.metrics()) >= 6)
    victim = launch.signal_rank(2, signal.SIGKILL)
    code, left = launch.wait(), launch.survivors()
    return Killed(launch, victim, code, left, launch.losses())


@pytest.fixture(scope="session")
def run(killed):
    """It, gone on to its end."""
    return begin(killed.launch.run_dir.parent).finish()


@pytest.fixture(scope="session")
def seasoned(request):
    """Run folder of an SFT-trained model."""
    return request.getfixturevalue("imitation" if request.config.getoption("--soak") else "run").run_dir


@pytest.fixture(scope="session")
def start(seasoned):
    """start(folder, section__key=value, ...) launches from the SFT-trained model."""
    made = seasoned / "made"
    defaults = {
        "prepare__script": "", "model__path": str((seasoned / "latest").resolve()),
        "data__train": str(made / "train.jsonl"), "data__validation": str(made / "validation.jsonl"),
        "sft__demonstrations": "", "sft__steps": 0,
    }  # fmt: skip
    return lambda folder, **settings: Launch(folder, **{**defaults, **settings})
