"""Where a session finds what an objective compares with (reference, soft values), at the start and after a resume."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.progress import Progress
from shared.types import Problem
from tests.trainer.test_data import LetterChat
from trainer.data.data_source import DataSource, PromptFormat
from trainer.launch import Launch
from trainer.soft_values import FILE, SoftValues, settings_of
from trainer.stages import Stages
from trainer.step.rank import TrainerRank


class Exporting:
    """Trainers that write what `export` asks for."""

    def __init__(self) -> None:
        self.exported: list[Path] = []

    async def call(self, method: object, folder: str) -> None:
        assert method is TrainerRank.export
        self.exported.append(make(Path(folder)))


KL = {"weight": 0.1}


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def find(runs: Path, newest: Path | None, version: int, **objective: Any) -> tuple[Path, int]:
    """The folder, and how many models were exported for it."""
    config, trainers = Config.model_validate({"runs_dir": str(runs), "objective": objective}), Exporting()
    session: Any = SimpleNamespace(config=config, trainers=trainers)
    return asyncio.run(Launch._reference_folder(session, newest, version)), len(trainers.exported)


def test_the_policy_of_the_start_is_written_once_and_found_again(tmp_path: Path) -> None:
    kept, checkpoint = tmp_path / "run" / "reference", tmp_path / "step_3"
    assert find(tmp_path, None, 0, kl=KL) == (kept, 1)
    assert find(tmp_path, checkpoint, 3, kl=KL) == (kept, 0)
    assert find(tmp_path, None, 0, kl=KL) == (kept, 1), "a run that starts anew starts with another policy"


def test_a_reference_that_moves_is_that_of_the_checkpoint_and_one_that_does_not_never_is(tmp_path: Path) -> None:
    kept, moved = make(tmp_path / "run" / "reference"), make(tmp_path / "step_3" / "reference")
    assert find(tmp_path, moved.parent, 3, kl={**KL, "reference": {"kind": "average"}}) == (moved, 0)
    assert find(tmp_path, moved.parent, 3, kl={**KL, "reference": {"kind": "start"}}) == (kept, 0)
    assert find(tmp_path, moved.parent, 3, name="dro", reference={"kind": "previous", "every": 2}) == (moved, 0)
    assert find(tmp_path, tmp_path / "step_4", 4, kl={**KL, "reference": {"kind": "average"}}) == (kept, 0)


def test_a_run_that_began_without_a_reference_cannot_take_one_later(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"began without objective\.kl"):
        find(tmp_path, tmp_path / "step_3", 3, kl=KL)
    assert find(tmp_path, tmp_path / "step_0", 0, kl=KL) == (tmp_path / "run" / "reference", 1), "not yet begun"


def value(runs: Path, version: int, kept: float | None = None) -> dict[str, float]:
    """The soft values that a run of spo goes on with at a version; kept: that of its one problem in the folder."""
    given = {"runs_dir": str(runs), "steps": 1, "objective": {"name": "spo"}, "data": {"system_prompt": ""}}
    config = Config.model_validate(given)
    if kept is not None:
        config.run_dir.mkdir()
        (config.run_dir / FILE).write_bytes(SoftValues(settings_of(config), {"p": kept}).content())
    prompts = PromptFormat(LetterChat(), config.data)  # type: ignore[arg-type]
    source = DataSource([Problem("p", "?", "1")], Stages(config), prompts)
    learner = SimpleNamespace(offline=None, values=None)
    run: Any = SimpleNamespace(ledger=SimpleNamespace(version=version), source=source, scorer=None, learner=learner)
    session: Any = SimpleNamespace(config=config, engines=None, progress=Progress(io.StringIO()))
    asyncio.run(Launch._value_prompts(session, run))
    found: dict[str, float] = run.learner.values
    return found


def test_soft_values_that_were_not_sampled_at_the_start_cannot_be_had_later(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'lacks the soft values of 1 problems, "p" .* start another one'):
        value(tmp_path, 3)
    assert value(tmp_path, 3, kept=0.25) == {"p": 0.25}
    path = tmp_path / "run" / FILE
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.75"))
    with pytest.raises(DataError, match="changed after it was written"):
        value(tmp_path, 3)
