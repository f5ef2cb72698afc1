"""`check` and `--dry-run` read what a launch reads: every row, with the launch's own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.config import Config
from shared.errors import DataError
from trainer.__main__ import main
from trainer.check import inspection
from trainer.check.command import data_and_model
from trainer.check.finding import CheckFinding
from trainer.check.inspection import inspect
from trainer.data.row_process import NoRowCame

GOOD = [{"problem": f"{number} + 1?", "answer": str(number + 1)} for number in range(8)]
TRACE = {"problem": "2 + 3?", "completion": "<think>\nTwo and three: 2+3=5.\n</think>\n\n\\boxed{5}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build(folder, 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 64)
    return str(folder)


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def settings(folder: Path, model: str, train: list[Any], **sections: Any) -> Config:
    given = {
        "model": {"path": model, "max_tokens": 512},
        "rollout": {"max_completion_tokens": 32},
        "runs_dir": str(folder / "runs"),
    }
    data = {"train": written(folder / "train.jsonl", train), "system_prompt": ""} | sections.pop("data", {})
    return Config.model_validate(given | {"data": data} | sections)


def told(config: Config, status: str) -> list[CheckFinding]:
    return [finding for finding in data_and_model(config, None) if finding.status == status]


BAD: list[tuple[list[Any], dict[str, Any], str]] = [
    ([*GOOD * 400, {"answer": "1"}], {}, r"train\.jsonl:3201\b.* 'problem'"),
    ([*GOOD, {"problem": "x", "answer": "proof"}], {}, "every completion would be wrong"),
    ([*GOOD, "{"], {}, "is not JSON"),
    ([*GOOD, {"problem": "x", "tests": {"inputs": []}, "domain": "code"}], {}, "a test has none of args"),
    ([*GOOD, {"problem": "x", "answer": "1", "language": "english"}], {}, "is 'en' meant"),
    ([*GOOD, {"problem": "x", "answer": "1", "environment": "gues"}], {}, "did you mean guess"),
    ([], {}, "holds no problem"),
    (GOOD, {"data": {"domains": ["physics"]}}, "none of the 8 problems"),
    (GOOD, {"data": {"validation": "gone.jsonl"}}, r"data\.validation = 'gone\.jsonl': there is no such file"),
    (GOOD, {"data": {"train": "gone.parquet"}}, "there is no such file"),
    (GOOD, {"prepare": {"script": "gone.py"}}, r"prepare\.script = 'gone\.py'"),
    ([{"problem": "5 " * 600, "answer": "1"}], {}, "every problem of .* is longer than 480 tokens"),
]


@pytest.mark.parametrize(("train", "sections", "error"), BAD)
def test_what_a_launch_refuses_for_its_data_fails(
    tmp_path: Path, model: str, train: list[Any], sections: dict[str, Any], error: str
) -> None:
    config = settings(tmp_path, model, train, **sections)
    with pytest.raises(Exception, match=error) as raised:
        inspect(config).raise_first()
    [finding] = told(config, "FAIL")
    assert finding.text == str(raised.value) and finding.step


def test_demonstrations_and_offline_rows_are_read_too(tmp_path: Path, model: str) -> None:
    """All errors are told, each under its name, and the problems are counted all the same."""
    sft = {"demonstrations": written(tmp_path / "sft.jsonl", [TRACE, {"problem": "x"}]), "steps": 1}
    data = {"offline": written(tmp_path / "offline.jsonl", [{"problem": "x", "completion": "y"}])}
    config = settings(tmp_path, model, GOOD, sft=sft, data=data)
    failed = {finding.name: finding.text for finding in told(config, "FAIL")}
    assert "sft.jsonl:2" in failed["SFT"] and "offline.jsonl:1: give a" in failed["data.offline"]
    assert "8 problems" in next(one.text for one in told(config, "OK") if one.name == "data")


def test_what_a_launch_warns_of_is_a_warning(tmp_path: Path, model: str) -> None:
    sft = {"demonstrations": written(tmp_path / "sft.jsonl", [TRACE, TRACE | {"completion": "5"}]), "steps": 1}
    data = {"validation": written(tmp_path / "validation.jsonl", GOOD[:3])}
    config = settings(tmp_path, model, GOOD, sft=sft, data=data)
    copied, form = told(config, "WARN")
    assert "3 of 3 problems also stand in data.train" in copied.text and copied.step
    assert (form.name, "1 of 2 rows break the form" in form.text) == ("SFT", True)
    texts = [finding.text for finding in told(config, "OK")]
    assert any("data.train: 8 problems of" in text and "data.validation: 3 problems" in text for text in texts)
    assert f"2 of {sft['demonstrations']}" in texts and not told(config, "FAIL")


def test_a_dry_run_ends_with_the_error_of_a_launch(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [{"problem": "x", "anwser": "1"}] * 7 + [{"problem": "x", "answer": "1", "language": "english"}] * 2
    config = settings(tmp_path, model, [*GOOD, *faults])
    (tmp_path / "s.toml").write_text(f'runs_dir = "{config.runs_dir}"\n[model]\npath = "{model}"\nmax_tokens = 900\n')
    options = [f"--data.train={config.data.train}", "--data.system_prompt=", "--dry-run"]
    assert main([str(tmp_path / "s.toml"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: data.train: 9 rows of ") and "... and 2 more like these" in error
    assert error.count("unknown key 'anwser'") == 5 and error.count("is 'en' meant?") == 2, "five of each kind"
    written(tmp_path / "train.jsonl", GOOD)
    assert main([str(tmp_path / "s.toml"), *options]) == 0
    assert "data           data.train: 8 problems of" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_a_template_that_cannot_be_used_fails(tmp_path: Path) -> None:
    build(tmp_path / "model", 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 64)
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": ""}))
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    failed = {finding.name: finding.text for finding in told(settings(tmp_path, f"{tmp_path}/model", GOOD), "FAIL")}
    assert "has no chat template" in failed["template"]


def test_what_is_not_there_yet_is_named(tmp_path: Path) -> None:
    script = {"script": "examples/quickstart/prepare.py"}
    config = settings(tmp_path, "made/model", GOOD, data={"validation": "made/v.jsonl"}, prepare=script)
    found = inspect(config)
    found.raise_first()
    texts = [text for result in found.results.values() for text in result.texts]
    assert any(
        "made/v.jsonl is made at the start by examples/quickstart/prepare.py and was not read" in t for t in texts
    )
    assert any("train.jsonl" in text and "8 problems" in text for text in texts)
    (tmp_path / "runs" / "run" / "made").mkdir(parents=True)
    with pytest.raises(DataError, match=r"made/v\.jsonl': there is no such file"):
        inspect(config).raise_first()


def test_generated_and_fetched_rows_leave_nothing_behind(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    from datasets import Dataset

    Dataset.from_list([*GOOD, {"problem": "x", "answer": "proof"}]).to_parquet(str(tmp_path / "rows.parquet"))
    config = settings(tmp_path, model, GOOD, data={"train": str(tmp_path / "rows.parquet")})
    [finding] = told(config, "FAIL")
    assert f"data.train: {tmp_path / 'rows.parquet'}:9: the answer 'proof'" in finding.text
    assert not (tmp_path / "runs").exists()

    def late(*_: object) -> None:
        raise NoRowCame("late")

    monkeypatch.setattr(inspection, "data_file", late)
    assert "no row came for 60 s, so it was not read" in told(config, "WARN")[0].text
