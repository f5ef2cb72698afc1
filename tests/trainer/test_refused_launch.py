"""A launch that is refused before it wrote anything leaves no folder of a run."""

from types import SimpleNamespace

import pytest

from shared.config import Config
from shared.launch.ranks import Nodes
from trainer import __main__
from trainer.run_lock import RunLock


@pytest.mark.parametrize(
    ("code", "written", "before", "left"),
    [(2, "", False, False), (1, "", False, True), (2, "metrics.jsonl", False, True), (2, "", True, True)],
)
def test_a_refused_launch_leaves_no_folder(tmp_path, monkeypatch, code, written, before, left):
    config = Config.model_validate({"name": "refused", "runs_dir": str(tmp_path)})

    def refuse(*_: object) -> int:
        lock = RunLock(config.run_dir)
        (config.run_dir / "stacks").mkdir()
        (config.run_dir / (written or "lock")).touch()
        lock.close(f"exit code {code}")
        return code

    monkeypatch.setattr("shared.launch.node.run_ranks", refuse)
    monkeypatch.setattr("trainer.data.sources.check_sources", lambda config: None)
    monkeypatch.setattr(Nodes, "ranks", lambda *_: SimpleNamespace())
    monkeypatch.setattr(Nodes, "variables", lambda *_: {})
    if before:
        config.run_dir.mkdir()
    assert __main__.launch(config, [], Nodes()) == code
    assert config.run_dir.exists() == left


def test_a_folder_that_another_launch_has_taken_stays(tmp_path):
    lock = RunLock(tmp_path / "run")
    __main__.forget_refused(tmp_path / "run")
    assert (tmp_path / "run").exists()
    lock.close("exit code 2")
    __main__.forget_refused(tmp_path / "run")
    assert not (tmp_path / "run").exists()
