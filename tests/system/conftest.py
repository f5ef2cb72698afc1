"""One SFT-trained tiny model for all launches of this folder, so that their rewards differ and weights move."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.launch import BEGUN, Launch

Start = Callable[..., Launch]
STEPS = 6
"""of `run`"""


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


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A whole asynchronous launch with two trainers, SFT included."""
    return Launch(
        tmp_path_factory.mktemp("run"), placement__trainers=2, steps=STEPS, rollout__max_completion_tokens=100,
        rollout__max_sequences=4, checkpoint__every=2, evaluate__every=3, prepare__options__max_tokens=400,
        sft__steps=70, sft__batch=32, sft__learning_rate=5e-3,
    ).finish()  # fmt: skip


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
