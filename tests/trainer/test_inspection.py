"""`check` and `--dry-run` read what a launch reads, every row, with the launch's own functions; what they say of data
and environments before anything is trained."""

import asyncio
import json
import re
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from environments.host import EnvironmentHost
from examples.quickstart.tiny_model import build, train_tokenizer
from shared.config import Config
from shared.errors import ConfigError, DataError, ModelError
from tests.shared.test_turns import chat_of
from tests.tables import read_table
from trainer.__main__ import main
from trainer.check import command, inspection
from trainer.check.command import data_and_model
from trainer.check.inspection import inspect
from trainer.check.plan import plan_text
from trainer.data.environment_rows import environment_lines, environment_rows, room_lines, start_episodes
from trainer.data.problem_file import read_problems
from trainer.data.row_process import NoRowCame

GOOD = [{"problem": f"{number} + 1?", "answer": str(number + 1)} for number in range(8)]
TRACE = {"problem": "2 + 3?", "completion": "<think>\nTwo and three: 2+3=5.\n</think>\n\n\\boxed{5}"}
PREPARED: dict[str, Any] = {"model": "made/model", "prepare": {"script": "examples/quickstart/prepare.py"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build(folder, 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 512)
    return str(folder)


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(folder: Path, model: str, train: list[Any], **sections: Any) -> Config:
    data = {"train": written(folder / "train.jsonl", train), "system_prompt": "", **sections.pop("data", {})}
    given = {"model": {"path": model, "max_tokens": 512}, "rollout": {"max_completion_tokens": 32}}
    return Config.model_validate({**given, "runs_dir": str(folder / "runs"), "data": data, **sections})


def findings(config: Config, status: str) -> dict[str, str]:
    """The texts of this status by the name of the finding; what is not OK has a next step."""
    chosen = [finding for finding in data_and_model(config, None) if finding.status == status]
    assert all(finding.step for finding in chosen) or status == "OK"
    return {finding.name: finding.text for finding in chosen}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", read_table("trainer/inspections"), ids=itemgetter("name"))
def test_what_a_launch_refuses_fails(tmp_path, monkeypatch, model, case):
    """So many good rows and then others."""
    monkeypatch.chdir(tmp_path)
    parity = '@environment("parity")\nclass Parity(Environment):\n    pass\n'
    (tmp_path / "mine.py").write_text(f"from environments.environment import Environment, environment\n{parity}")
    rows = [*islice(cycle(GOOD), case.get("good", 0)), *({"answer": "1", **row} for row in case.get("rows", []))]
    config = settings(tmp_path, model, rows, **case.get("settings", {}))
    for refuse in (lambda: inspect(config).raise_first(), lambda: plan_text(config)):
        with pytest.raises((ConfigError, DataError), match=case["message"]):
            refuse()
    (text,) = findings(config, "FAIL").values()
    assert re.search(case["message"], text)


def test_demonstrations_and_offline_rows_are_read_too(tmp_path, model):
    """All errors are told, each under its name, and the problems are counted all the same."""
    sft = {"demonstrations": written(tmp_path / "sft.jsonl", [TRACE, {"problem": "x"}]), "steps": 1}
    data = {"offline": written(tmp_path / "offline.jsonl", [{"problem": "x", "completion": "y"}])}
    config = settings(tmp_path, model, GOOD, sft=sft, data=data)
    failed = findings(config, "FAIL")
    assert "sft.jsonl:2" in failed["SFT"] and "offline.jsonl:1: give a" in failed["data.offline"]
    assert "8 problems" in findings(config, "OK")["data"]


def test_what_a_launch_warns_of_is_a_warning(tmp_path, model):
    sft = {"demonstrations": written(tmp_path / "sft.jsonl", [TRACE, TRACE | {"completion": "5"}]), "steps": 1}
    data = {"validation": written(tmp_path / "validation.jsonl", GOOD[:3])}
    config = settings(tmp_path, model, GOOD, sft=sft, data=data)
    copied, form = findings(config, "WARN").values()
    assert "3 of 3 problems also stand in data.train" in copied and "1 of 2 rows break the form" in form
    fine = findings(config, "OK")
    assert "data.train: 8 problems of" in fine["data"] and "data.validation: 3 problems" in fine["data"]
    assert fine["SFT"] == f"2 of {sft['demonstrations']}" and not findings(config, "FAIL")


def test_a_dry_run_ends_with_the_error_of_a_launch(tmp_path, model, capsys):
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


def test_one_fault_of_all_rows_is_one_line(tmp_path, model):
    config = settings(tmp_path, model, [{"task": "1 + 1?", "result": "2"}] * 30)
    with pytest.raises(DataError) as error:
        inspect(config).raise_first()
    (line,) = str(error.value).splitlines()
    assert "30 rows of" in line and line.count("lacks 'problem'") == 1 and line.endswith("(the same in all of them)")


def test_a_template_that_cannot_be_used_fails(tmp_path):
    build(tmp_path / "model", 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 512)
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": ""}))
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    failed = findings(settings(tmp_path, f"{tmp_path}/model", GOOD), "FAIL")
    assert "has no chat template" in failed["template"]


@pytest.mark.parametrize(("path", "max_tokens", "texts"), [
    ("runs/mine/latest", 512, ["there is no such folder; did you mean runs/mine/best?", "correct model.path"]),
    ("empty", 512, ["empty has no config.json", "name another"]),
    ("model", 4096, ["set model.max_tokens to at most 512", "change the setting that it names"]),
])  # fmt: skip
def test_each_cause_is_told_once_with_a_repair_that_fits(tmp_path, monkeypatch, model, path, max_tokens, texts):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine/best", "empty"):
        Path(folder).mkdir(parents=True)
    Path("model").symlink_to(model)
    Path("mine.toml").write_text("")
    config = settings(tmp_path, path, GOOD)
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_tokens": max_tokens})})
    monkeypatch.setattr(command.machine, "ports", lambda: command.CheckFinding("ports", "OK", ""))
    (failed,) = [each for each in command.examine(["mine.toml"], lambda *_: config) if each.status == "FAIL"]
    assert all(text in failed.line for text in texts) and failed.name == "model" and failed.line.count("again") <= 1


def test_what_is_not_there_yet_is_named(tmp_path):
    config = settings(tmp_path, train=GOOD, data={"validation": "made/v.jsonl"}, **PREPARED)
    result = inspect(config)
    result.raise_first()
    texts = "\n".join(text for each in result.results.values() for text in each.texts)
    assert "made/v.jsonl is made at the start by examples/quickstart/prepare.py and was not read" in texts
    assert re.search(r"train\.jsonl.*8 problems|8 problems.*train\.jsonl", texts)
    (tmp_path / "runs" / "run" / "made").mkdir(parents=True)
    with pytest.raises(DataError, match=r"made/v\.jsonl': there is no such file"):
        inspect(config).raise_first()


def test_generated_and_fetched_rows_leave_nothing_behind(tmp_path, model, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([*GOOD, {"problem": "x", "answer": "proof"}]).to_parquet(str(tmp_path / "r.parquet"))
    config = settings(tmp_path, model, GOOD, data={"train": str(tmp_path / "r.parquet")})
    [text] = findings(config, "FAIL").values()
    assert f"data.train: {tmp_path / 'r.parquet'}:9: the answer 'proof'" in text and not (tmp_path / "runs").exists()

    def late(*_: object) -> None:
        raise NoRowCame("late")

    monkeypatch.setattr(inspection, "data_file", late)
    assert "no row came for 60 s, so it was not read" in next(iter(findings(config, "WARN").values()))


def with_environments(folder: Path, *names: str | None, **sections: Any) -> Config:
    """Settings with a row of data for each of the environments, None for one without."""
    rows = [{"problem": "?" * number, "answer": "1"} | ({"environment": name} if name else {})
            for number, name in enumerate(names, 1)]  # fmt: skip
    return settings(folder, train=rows, **{**PREPARED, **sections})


def rows_of(config: Config) -> list[Any]:
    """The rows of the data that have an environment. Raises what a launch would be refused for."""
    result = inspect(config)
    result.raise_first()
    return result.environments


def test_environments_and_their_problems_are_told(tmp_path):
    limits = {"max_turns": 3, "turn_tokens": 9}
    config = with_environments(tmp_path, "guess", "guess", None, "retry", environment=limits)
    first, second, third = environment_lines(config, rows_of(config))
    assert first.split(maxsplit=1) == ["guess", "2 problems of data.train"]
    assert second.split(maxsplit=1) == ["retry", "1 problems of data.train"] and "at most 3 turns of 9 tokens" in third
    named = with_environments(tmp_path, "guess", None, environment={"name": "retry"})
    assert [line.split()[1] for line in environment_lines(named, rows_of(named))][:2] == ["1", "1"]
    assert findings(with_environments(tmp_path, "guess"), "OK")["environments"] == "guess 1 problems of data.train"


def test_data_without_environments_is_planned_without_a_word_of_them(tmp_path):
    config = with_environments(tmp_path, None)
    assert rows_of(config) == [] == list(room_lines(config, [])) == environment_rows([])
    assert "\nenvironments\n" not in plan_text(config) and "environments" not in findings(config, "OK")
    assert rows_of(with_environments(tmp_path, data={"train": "made/not_yet.jsonl"})) == []


def test_a_launch_names_file_and_line_too(tmp_path):
    config = with_environments(tmp_path, "guess", "gues")

    class Episodes:
        settings, host = config.environment, EnvironmentHost(config.environment, config.reward, None)

        async def start(self, problems: Any) -> None:
            await self.host.start(sorted({problem.environment for problem in problems}))

    file = read_problems(tmp_path / "train.jsonl", "data.train")
    with pytest.raises(DataError, match=r"data\.train: .*train\.jsonl:2: there is no environment 'gues'"):
        asyncio.run(start_episodes(Episodes(), [file], file.problems))


def test_the_longest_episode_is_compared_with_what_the_model_takes(tmp_path):
    """ours: <|user|>..<|assistant|> is 2 tokens around a text, and between turns too; "???" has 3 tokens. A template
    that rewrites its history is told before a launch."""
    chat_of(tmp_path, "ours")

    def lines(max_tokens: int) -> list[str]:
        limits = {"max_turns": 4, "observation_tokens": 10}
        rollout = {"max_completion_tokens": 40}
        config = with_environments(tmp_path, *["guess"] * 3, environment=limits, rollout=rollout, model=str(tmp_path))
        config = config.model_copy(update={"model": config.model.model_copy(update={"max_tokens": max_tokens})})
        return list(room_lines(config, rows_of(config)))

    [line] = lines(81)
    assert line.endswith("81 = 5 of the longest prompt + 40 sampled + 3 answers of 12, 2 of them the chat template's")
    assert len(lines(80)) == 2 and "model.max_tokens = 80 holds fewer" in lines(80)[1]
    chat_of(tmp_path, "qwen3")
    with pytest.raises(ModelError, match="rewrites its history"):
        lines(512)


SUMS = """
from environments.environment import environment
from environments.tools import ToolEnvironment, tool


@environment("sums")
class Sums(ToolEnvironment):
    @tool
    def add(self, a: int, b: int) -> int:
        "Add two whole numbers."
        return a + b
"""


def test_tools_whose_description_fills_the_context_are_refused_and_counted(tmp_path, model):
    """The model's tokenizer splits nearly every letter: the description takes several hundred tokens."""
    (tmp_path / "sums.py").write_text(SUMS)
    config = settings(tmp_path, model, GOOD, environment={"name": "sums", "plugins": [str(tmp_path / "sums.py")]})

    def with_room(max_tokens: int) -> Config:
        return config.model_copy(update={"model": config.model.model_copy(update={"max_tokens": max_tokens})})

    with pytest.raises(
        ConfigError, match=r"shortest prompt of environment sums has (\d+) tokens, (\d+) of them"
    ) as few:
        plan_text(with_room(160))
    prompt, added = map(int, re.findall(r" (\d+)(?: tokens,| of them)", str(few.value)))
    assert added > 150 and "offer fewer tools" in findings(with_room(160), "FAIL")["environments"]
    assert inspect(with_room(prompt + 2 + 32)).added == {"sums": added}
    assert f" = {prompt} of the longest prompt + " in plan_text(with_room(prompt + 2 + 32))
