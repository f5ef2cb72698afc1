"""The trainer alone, on a real tiny model: what it learns from rows, that it repeats, what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from examples.quickstart.tiny_model import build, train_tokenizer
from lab import replay
from shared.chat import Chat
from shared.metrics import read_rows
from shared.model.language_model import LanguageModel
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict, VersionSpan
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.process import in_fresh_process
from tests.trainer.objectives.named import NAMES

LEARN = ("agro", "spo", "dro", "kto", "a_lol", "c_rlft", "aipo")
GOOD, BAD = (f"<think>one is the first of all numbers</think>\\boxed{{{answer}}}" for answer in (1, 2))
SETTINGS = """
name = "{name}"
runs_dir = "{folder}/runs"
steps = 8
[model]
path = "{folder}/model"
dtype = "float32"
max_tokens = 64
[data]
train = "{folder}/train.jsonl"
system_prompt = ""
offline = "{offline}"
[rollout]
prompts_per_step = 2
group_size = 4
max_completion_tokens = 24
[reward]
overlong_buffer = 8
[optimiser]
learning_rate = 3e-3
warmup_steps = 0
compute_dtype = "float32"
micro_batch_tokens = 256
[sft]
steps = 4
demonstrations = "{folder}/absent.jsonl"
"""


whole_replays = pytest.mark.soak  # in make test: each objective by hand, and what cannot be replayed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, problems, and a run of an earlier policy with one right completion in four."""
    found = tmp_path_factory.mktemp("replay")
    build(found / "model", 0, train_tokenizer(["one plus two ?", GOOD, BAD], 300), 64)
    (found / "train.jsonl").write_text(json.dumps({"problem": "one ?", "answer": "1"}) + "\n")
    chat, recorded = Chat(found / "model"), found / "recorded" / "rollouts"
    recorded.mkdir(parents=True)
    for step, text in enumerate(("one ?", "two ?"), 1):
        completions, rewards = [], list[Reward | None]()
        for index, said in enumerate((GOOD, BAD, BAD, BAD)):
            ids = [*chat.encode_completion(said), chat.eos_id]
            spans = [VersionSpan(3, 0, len(ids))]
            completions.append(Completion(step, index, 0, ids, [-0.5] * len(ids), spans, "stop"))
            verdict, total = (Verdict.CORRECT, 1.0) if index == 0 else (Verdict.WRONG, 0.1)
            rewards.append(Reward(total, 0.1, total - 0.1, 0.0, 0.0, verdict))
        group = Group(Prompt(step, Problem(text, text, "1"), chat.render(text, "")), completions, rewards,
                      [chat.decode(one.token_ids) for one in completions])  # fmt: skip
        (recorded / f"step_{step}.jsonl").write_bytes(msgspec.json.encode(group) + b"\n")
    return found


def arguments(folder: Path, name: str, offline: str = "recorded", **settings: Any) -> list[str]:
    path = folder / f"{name}.toml"
    path.write_text(SETTINGS.format(name=name, folder=folder, offline=folder / offline))
    return [str(path), *(f"--{key.replace('__', '.')}={value}" for key, value in settings.items())]


def run_all(commands: list[list[str]]) -> list[int]:
    """Exit codes; torch keeps a process group for as long as a process lives."""
    return [replay.main(command) for command in commands]


@pytest.fixture(scope="module")
def replayed(folder):
    """The folder of runs once all replays have ended well."""
    rows = [{"problem": "one ?", "completion": said, "answer": "1"} for said in (GOOD, BAD)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    commands = [arguments(folder, name, objective__name=NAMES[name]) for name in LEARN]
    commands += [
        arguments(folder, name, objective__name="dro", seed=seed, rollout__prompts_per_step=1, steps=3)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    ]
    commands.append(arguments(
        folder, "scored", "answers.jsonl", objective__name="agro", rollout__prompts_per_step=1, steps=1
    ))  # fmt: skip
    assert in_fresh_process(run_all, commands) == [0] * len(commands)
    return folder / "runs"


def lead(folder: Path, model: Path) -> float:
    """log P(right) - log P(wrong) of the response to "one ?"."""
    chat, decoder = Chat(folder / "model"), load_model(model)
    assert isinstance(decoder, LanguageModel)
    prompt = chat.render("one ?", "")
    with torch.no_grad():
        right, wrong = (
            float(decoder(pack_from([[*prompt, *chat.encode_completion(said)]], [len(prompt)]), 1.0)[0].sum())
            for said in (GOOD, BAD)
        )
    return right - wrong


@whole_replays
@pytest.mark.parametrize("name", LEARN)
def test_an_objective_learns_from_the_rollouts_of_another_policy(folder, replayed, name):
    rows = read_rows(replayed / name / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9)) and all(math.isfinite(row["loss"]) for row in rows)
    assert all(row["groups/offline"] == 2 and row["reward/offline"] == pytest.approx(1.3 / 4) for row in rows)
    assert not any({"ratio/mean", "staleness/mean", "accuracy"} & row.keys() for row in rows), "nothing was sampled"
    assert lead(folder, replayed / name / "latest") > lead(folder, folder / "model") + 0.5


@whole_replays
def test_the_same_settings_give_the_same_weights_and_another_seed_others(replayed):
    first, again, other = (
        (replayed / name / "latest" / "model.safetensors").read_bytes() for name in ("first", "again", "other")
    )
    assert first == again != other


@whole_replays
def test_rows_with_an_answer_are_scored_by_the_real_verifier(replayed):
    """A right answer is worth .9 more; format and language are worth the same in both."""
    (row,) = read_rows(replayed / "scored" / "metrics.jsonl")
    assert 0.45 <= row["reward/offline"] <= 0.65


@pytest.mark.parametrize(("settings", "told"), [
    ({"objective__name": "rloo"}, 'objective.name = "rloo" as set learns only from what its own policy samples'),
    ({"data__offline": ""}, "data.offline is not set"),
    ({"objective__name": "dro", "rollout__temperature": 0.0}, "rollout.temperature"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_one_line(folder, capsys, settings, told):
    assert replay.main(arguments(folder, "refused", **settings)) == 2
    assert told in capsys.readouterr().err and not (folder / "runs" / "refused").exists()


def test_spo_needs_log_probs_or_says_so(folder, capsys):
    (folder / "pairs.jsonl").write_text(json.dumps({"problem": "one ?", "chosen": GOOD, "rejected": BAD}) + "\n")
    assert replay.main(arguments(folder, "pairs", "pairs.jsonl", objective__name="spo")) == 2
    assert "estimates soft values from log-probs" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_left_alone(folder, capsys):
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "taken" / "metrics.jsonl").write_text("")
    assert replay.main(arguments(folder, "taken", objective__name="dro")) == 2
    assert "give this replay another name" in capsys.readouterr().err
