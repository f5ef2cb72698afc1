"""One SFT-trained tiny model for all launches of this folder, so that their rewards differ and weights move."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.launch import BEGUN, Launch

Start = Callable[..., Launch]


@pytest.fixture(scope="module", autouse=True)
def no_launch_is_left() -> Iterator[None]:
    """What a failed test left running ends with its file, and takes no time from the others."""
    yield
    for launch in BEGUN:
        if launch.process.poll() is None:
            launch.remember_processes()
            launch.kill()
    BEGUN.clear()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of the test's launches; it has a short name, since sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="session")
def seasoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a launch with SFT only (steps = 0)."""
    launch = Launch(
        tmp_path_factory.mktemp("seasoned"),
        steps=0,
        sft__steps=70,
        sft__batch=32,
        sft__learning_rate=5e-3,
    )
    assert launch.wait(500) == 0, launch.output[-6000:]
    return launch.run_dir


@pytest.fixture(scope="session")
def start(seasoned: Path) -> Start:
    """start(folder, section__key=value, ...) launches from the SFT-trained model."""

    def begin(folder: Path, **settings: Any) -> Launch:
        made = seasoned / "made"
        defaults = {
            "prepare__script": "",
            "model__path": str((seasoned / "latest").resolve()),
            "data__train": str(made / "train.jsonl"),
            "data__validation": str(made / "validation.jsonl"),
            "sft__demonstrations": "",
            "sft__steps": 0,
        }
        return Launch(folder, **{**defaults, **settings})

    return begin
