"""A session: the ranks of a launch in this process, called by the same clients, with the same proofs; from Python's own
rows and functions, with SFT, evaluation, checkpoints and resume. And the notebook and the loop of examples/."""

import ast
import asyncio
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples.loop import loop
from examples.quickstart.prepare import prepare
from shared.errors import ConfigError, DataError, ModelError, NonFinite, RunError, SyncMismatch
from shared.types import Completion, Group, MicroBatch, Problem, Prompt, Reward, Verdict
from tests.asynchronous import asynchronous
from tests.process import in_fresh_process
from tests.trainer.sequences import make_sequence
from trainer.session import LAUNCH_ONLY, Session
from verify.plugins import Case

ROWS = [{"problem": "1+1?", "answer": "2"}, {"question": "2+3?", "answer": "They are 5.\n#### 5"}]
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.parametrize(("option", "named"), [
    ("--placement.trainers=2", r"placement\.trainers = 2: a session does not do that"),
    ("--placement.engines=2", r"placement\.engines = 2: a session"),
    ("--placement.replicas=1", r"placement\.replicas = 1: a session"),
    ("--mode=sft", 'mode = "sft": a session'),
    ("--data.offline=rows.jsonl", r"data\.offline = \"rows\.jsonl\": a session"),
    ("--environment.name=guess", r"environment = \{\"name\" = \"guess\"\}: a session"),
    ("--rollout.max_restarts=7", r"rollout\.max_restarts = 7: a session"),
    ("--stages=[{name='a'}]", r"stages = \[.*: a session"),
    ("--objective.kl.weight=0.1", "does not have log-probs under a reference policy"),
    ("--reward.corectness=1", r"reward\.correctness"), ("--model.path=", r"model\.path is not set"),
])  # fmt: skip
def test_what_a_session_does_not_do_is_refused_before_anything_starts(option, named):
    with pytest.raises(ConfigError, match=named):
        Session("configs/quickstart.toml", option)


def test_every_setting_of_a_launch_alone_is_in_the_table_above():
    source = inspect.getsource(inspect.getmodule(test_every_setting_of_a_launch_alone_is_in_the_table_above))
    assert not [name for name in LAUNCH_ONLY if f'("--{name}' not in source]


def test_settings_are_keywords_with_the_errors_of_a_settings_file():
    def brief(case: Case) -> float:
        return 1.0

    session = Session(model="Qwen/Qwen3-0.6B", rows=ROWS, rewards=[brief], steps=7, rollout={"group_size": 4})
    config = session.config
    assert (config.model.path, config.steps, config.rollout.group_size) == ("Qwen/Qwen3-0.6B", 7, 4)
    assert config.reward.extra == {"brief": 1.0} and config.data.train.startswith("generated/rows-")
    other = Session(
        "configs/quickstart.toml", "--steps=3", model={"path": "m"}, rows="mine.csv", rewards=[brief],
        reward={"extra": {"brief": 0.25}}, steps=7,
    ).config  # fmt: skip
    assert (other.model.max_tokens, other.data.train, other.steps) == (160, "mine.csv", 3), "options come last"
    assert other.reward.extra == {"brief": 0.25} and other.data.validation == "made/validation.jsonl"
    for wrong, message in (
        (
            {"rollout": {"num_generations": 8}},
            r"given settings: unknown setting rollout\.num_generations: .*group_size",
        ),
        ({"steps": -1}, "given settings: steps = -1: must be a whole number, at least 0"),
        ({"rollout": 8}, "given settings: rollout = 8: this is a section"),
        ({"learning_rate": 1}, "unknown setting learning_rate"),
    ):
        with pytest.raises(ConfigError, match=message):
            Session(model="Qwen/Qwen3-0.6B", rows=ROWS, **wrong)


def test_what_a_notebook_shows_of_a_group_fits_a_line():
    problem = Problem("id" * 90, "word " * 900, "9" * 400)
    prompt = Prompt(3, problem, [1] * 900)
    completion = Completion(3, 0, 1, token_ids=[1] * 900, logprobs=[0.0] * 900)
    for value in (problem, prompt, completion, Group(prompt, [completion] * 16, [None] * 16)):
        assert len(repr(value)) < 200 and "\n" not in repr(value), repr(value)


def test_a_folder_whose_steps_cannot_be_gone_on_with_is_left_alone(tmp_path):
    session = Session("configs/quickstart.toml", f"--runs_dir={tmp_path}", "--name=taken")
    (tmp_path / "taken").mkdir()
    line = '{"kind": "train", "step": 1}\n'
    (tmp_path / "taken" / "metrics.jsonl").write_text(line)
    with (
        mock.patch("trainer.data.sources.prepare"),
        pytest.raises(DataError, match=r"data\.train = .*: there is no such file"),
    ):
        asyncio.run(session.start())
    assert (tmp_path / "taken" / "metrics.jsonl").read_text() == line
    assert json.loads((tmp_path / "taken" / "lock").read_bytes())["ended"]


@pytest.mark.parametrize("before", [(), ("notes.txt",), ("notes.txt", "generated/other.jsonl")])
def test_a_session_that_is_refused_leaves_what_was_there_and_nothing_of_its_own(tmp_path, before):
    session = Session(model=tmp_path / "gone", rows=ROWS, runs_dir=str(tmp_path), name="refused")
    folder = tmp_path / "refused"
    for name in before:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for _ in range(2):
        with pytest.raises(ModelError, match="gone"):
            asyncio.run(session.start())
        left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert left - {"lock", "phases.jsonl"} == set(before) and folder.exists() == bool(before)


def test_rows_that_were_there_stay_when_a_session_is_refused(tmp_path):
    session = Session(model=tmp_path / "gone", rows=ROWS, runs_dir=str(tmp_path), name="refused")
    path = Path(session.config.locate(session.config.data.train))
    path.parent.mkdir(parents=True)
    path.write_text("older rows\n")
    with pytest.raises(ModelError, match="gone"):
        asyncio.run(session.start())
    assert path.is_file()


@pytest.mark.parametrize(("verdicts", "raises"), [
    ([Verdict.CRASH, Verdict.NO_ANSWER], True), ([Verdict.CRASH, Verdict.WRONG], False), ([Verdict.NO_ANSWER], False),
])  # fmt: skip
@asynchronous
async def test_a_reward_that_fails_for_every_completion_ends_the_call_that_samples(tmp_path, verdicts, raises):
    session = Session(model="x", rows=ROWS, runs_dir=str(tmp_path))
    rewards: list[Any] = [Reward(0, 0, 0, 0, 0, verdict, reason="reward f: ValueError") for verdict in verdicts]
    prompt = Prompt(0, Problem("a", "1+1?", "2"), [1])
    session.solver = mock.AsyncMock(solve=mock.AsyncMock(return_value=Group(prompt, [], rewards)))
    if raises:
        with pytest.raises(RunError, match="no completion could be graded: reward f: ValueError"):
            await session.sample([prompt])
    else:
        assert len(await session.sample([prompt])) == 1


def test_the_page_shows_a_session_that_can_be_made(monkeypatch):
    page = (NOTEBOOK.parents[1] / "docs" / "session.md").read_text()
    examples, names = re.findall(r"```python\n(.*?)```", page, re.DOTALL), {"__name__": "__main__"}
    stand_in = mock.MagicMock()
    monkeypatch.setattr("maestrale.Session", stand_in, raising=False)
    for example in examples:
        exec(example, names)
        assert Session(**stand_in.call_args.kwargs).config.steps == 20
    assert len(examples) == 2


# ---- with a real engine --------------------------------------------------------------------------------------------


def tailed(completions: list[str], answer: list[str], **more: Any) -> list[float]:
    """A reward that needs a column, and is another one for each completion."""
    return [len(answer[0]) + len(completion) / 1000 for completion in completions]


def session_in(folder: Path, **more: Any) -> Session:
    """Of the tiny model, on rows that begin with a response, so that nearly all completions are well formed."""
    made = folder / "made"
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    begun = [{**row, "prefix": r"<think>We add the two numbers here.</think>It is \boxed{7}."} for row in rows]
    return Session(
        model={"path": str(made / "model"), "dtype": "float32", "max_tokens": 96}, rows=begun,
        **{"rewards": [tailed]} | more, name="parts", runs_dir=str(folder), steps=3, data={"system_prompt": ""},
        sft={"demonstrations": str(made / "demonstrations.jsonl"), "steps": 2, "batch": 8},
        rollout={"group_size": 4, "prompts_per_step": 2, "max_completion_tokens": 16, "cache_bytes": 1 << 25},
        reward={"overlong_buffer": 8}, optimiser={"compute_dtype": "float32"}, checkpoint={"every": 2},
        evaluate={"greedy": False},
    )  # fmt: skip


async def begins(folder: Path) -> Session:
    """SFT, an evaluation, a step, saved; then a sequence with a NaN, and an update whose first tensor changes between
    the write and the checksums."""
    async with session_in(folder) as session:
        measured = await session.evaluate([{"problem": "1+1?", "answer": "2"}])
        assert measured.problems == measured.completions == 1 and measured.samples[0].problem.text == "1+1?"
        rank, trainers = session.trainer, session.loop.learner.trainers
        before = [parameter.detach().clone() for parameter in rank.decoder.parameters()]
        groups = await session.sample(session.draw())
        formed = [reward for group in groups for reward in group.rewards if reward and reward.format]
        assert formed and all(1 < reward.extra["tailed"] < 3 for reward in formed)
        assert (await session.step(groups))["grad_norm"] > 0
        assert any(not torch.equal(a, b) for a, b in zip(before, rank.decoder.parameters(), strict=True))
        assert (await session.save()).name == "step_1"
        with pytest.raises(RunError, match="a step needs publish first: the engine has version 0 of 1"):
            await session.step(groups)

        spoiled = MicroBatch([make_sequence([1, 2, 3, 4], 2, [-1.0, float("nan")], 1.0, 1.0)])
        with pytest.raises(NonFinite, match="log-prob at completion position"):
            await trainers.forward_backward([[spoiled]])

        write = rank.sender.write

        def late(version: int) -> Any:
            try:
                return write(version)
            finally:
                next(rank.decoder.parameters()).detach().add_(0.01)

        with mock.patch.object(rank.sender, "write", late), pytest.raises(SyncMismatch, match="does not hold"):
            await session.publish()
    return session


async def goes_on(folder: Path) -> None:
    """The same call goes on from what was saved, to the end by itself; another reward is refused."""
    async with session_in(folder) as session:
        assert session.version == session.published == 1
        await session.train()
        assert session.version == session.published == 3
        await session.train()  # nothing is left to do
        assert (await session.export()).resolve().name == "step_3"
        with pytest.raises(ConfigError, match="there is nothing to evaluate"):
            await session.evaluate()

    def tailed(case: Case) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="rewards: tailed: sha256 .* -> sha256 "):
        await session_in(folder, rewards=[tailed]).start()


def whole_session(folder: Path) -> None:
    options = {"problems": 40, "validation": 4, "languages": ["en"], "operations": [1, 1], "max_tokens": 96}
    (folder / "made").mkdir()
    prepare(folder / "made", options, 0)
    session = asyncio.run(begins(folder))
    assert not dist.is_initialized() and session.trainer.sender is None
    asyncio.run(goes_on(folder))
    lines = (folder / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["sft", "sft", "train", "train", "train"]


@pytest.mark.soak  # .ci/run runs it
@pytest.mark.timeout(600)
def test_a_session_imitates_evaluates_saves_and_goes_on_and_raises_what_its_calls_raise(tmp_path):
    in_fresh_process(whole_session, tmp_path)


def learn(folder: Path) -> list[float]:
    """The example, as it stands."""
    return asyncio.run(loop(f"--runs_dir={folder}"))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns_with_a_real_engine_and_proves_its_updates(tmp_path):
    means = in_fresh_process(learn, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "loop" / "metrics.jsonl").read_text().splitlines()]
    assert len(means) == len(rows) == 20 and means[-1] > means[0] + 0.2
    assert rows[0]["logprob_difference/mean"] < 1e-4 and max(row["sync/logprob_diff_max"] for row in rows) < 1e-3
    assert all(row["staleness/max"] == 0 for row in rows) and rows[-1]["sync/bytes"] > 0
    assert (tmp_path / "loop" / "latest" / "model.safetensors").is_file()
    assert len(list((tmp_path / "loop" / "rollouts").iterdir())) == 20


# ---- the notebook ----------------------------------------------------------------------------------------------------


def run_notebook(folder: Path) -> dict[str, Any]:
    """What the notebook's variables are after its cells ran, one after the other in one event loop, as in Jupyter."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    os.symlink(NOTEBOOK.parent, folder / "examples")
    os.chdir(folder)

    async def run() -> None:
        for number, cell in enumerate(cells):
            code = compile("".join(cell["source"]), f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if inspect.iscoroutine(awaited := eval(code, names)):
                await awaited

    asyncio.run(run())
    return {name: names[name].accuracy for name in ("before", "after")}


@pytest.mark.soak  # a minute; .ci/run runs it
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_learns_from_its_first_cell_to_its_last(tmp_path):
    accuracy = in_fresh_process(run_notebook, tmp_path)
    assert accuracy["after"] > accuracy["before"] + 0.1
    assert (tmp_path / "runs" / "notebook" / "latest" / "model.safetensors").is_file()


def test_the_notebook_has_no_outputs_and_every_cell_of_code_is_python():
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    for cell in book["cells"]:
        assert cell["id"] and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
