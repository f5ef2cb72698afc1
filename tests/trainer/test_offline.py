"""Offline rows: what is read as groups, which objectives learn from it, and where they lead without a single sample."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict, VersionSpan
from tests.trainer.objectives.named import NAMES, example
from tests.trainer.objectives.tabular import optimum
from trainer.data.data_source import PromptFormat
from trainer.data.offline import OfflineGroups, offline_count, read_offline
from trainer.data.sources import offline_files
from trainer.objectives.inputs import LossInputs, completions_of, loss_inputs
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import complaints, objective_of, read_objective
from trainer.objectives.sequences import sequence_of
from trainer.soft_values import soft_value
from trainer.step.forward_backward import check
from trainer.step_metrics import offline_metrics

TEXTS = ["one", "two", "three"]
PAGE = Path(__file__).parents[2] / "docs" / "offline.md"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptFormat:
    folder = tmp_path_factory.mktemp("offline") / "model"
    build(folder, 0, train_tokenizer(["one two three ?"] * 9, 280), 64)
    return PromptFormat(Chat(folder), Config.model_validate({"data": {"system_prompt": ""}}).data)


def config_of(name: str, **others: Any) -> Config:
    return Config.model_validate(
        {"objective": {"name": name}, "data": {"offline": "rows.jsonl", "system_prompt": ""}, **others}
    )


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def read(path: Path, prompts: PromptFormat, name: str = "dro", **others: Any) -> OfflineGroups:
    return read_offline([path], prompts, config_of(name, **others))


def group_of(prompts: PromptFormat, rewards: list[float], logprob: float = -1.0, **changes: Any) -> Group:
    """What a run keeps of a group: completions that version 3 sampled."""
    ids = [[*prompts.chat.encode_completion(text), prompts.chat.eos_id] for text in TEXTS[: len(rewards)]]
    completions = [
        Completion(7, i, 5, one, [logprob] * len(one), [VersionSpan(3, 0, len(one))], "stop")
        for i, one in enumerate(ids)
    ]
    given = [Reward(r, 0.1, r - 0.1, 0.0, 0.0, Verdict.CORRECT if r > 0.5 else Verdict.WRONG) for r in rewards]
    prompt = Prompt(7, Problem("p7", "one ?", "1"), prompts.render("one ?"))
    found = Group(prompt, completions, [*given], [prompts.chat.decode(one) for one in ids])
    return msgspec.structs.replace(found, **changes)


def test_a_recorded_group_keeps_ids_log_probs_and_rewards_but_no_version(tmp_path: Path, prompts: PromptFormat) -> None:
    recorded = group_of(prompts, [1.0, 0.1])
    found = read(write(tmp_path / "step_1.jsonl", recorded), prompts).groups[0]
    for then, now in zip(recorded.completions, found.completions, strict=True):
        assert (now.token_ids, now.logprobs, now.spans) == (then.token_ids, then.logprobs, [])
    assert found.prompt == recorded.prompt and found.rewards == recorded.rewards and "step_1.jsonl:1" in found.source
    sequence = sequence_of(found, found.completions[0], [1.0])
    assert sequence.offline and sequence.columns["behaviour"] == recorded.completions[0].logprobs
    assert not sequence_of(recorded, recorded.completions[0], [1.0]).offline


def test_completions_that_did_not_end_are_left_out(tmp_path: Path, prompts: PromptFormat) -> None:
    recorded = group_of(prompts, [1.0, 0.1, 0.1])
    recorded.completions[1].finish_reason = "abort"
    found = read(write(tmp_path / "r.jsonl", recorded), prompts).groups[0]
    assert [one.token_ids for one in found.completions] == [recorded.completions[i].token_ids for i in (0, 2)]
    assert [one.index for one in found.completions] == [0, 1]


def test_rows_of_text_are_tokenised_as_the_run_does_and_grouped_by_their_prompts(
    tmp_path: Path, prompts: PromptFormat
) -> None:
    path = write(
        tmp_path / "r.jsonl",
        {"problem": "one ?", "completion": "one", "reward": 0.25, "source": "people"},
        {"problem": "two ?", "chosen": "two", "rejected": "one"},
        {"problem": "one ?", "completion": "two", "reward": -3},
        {"problem": "one ?", "completion": "two", "reward": 1, "system": "be right"},
        {"problem": "one ?", "completion": "three", "reward": 0},
    )
    first, pair, other, rest = read(path, prompts, rollout={"group_size": 2}).groups
    eos = prompts.chat.eos_id
    assert first.prompt.token_ids == prompts.render("one ?") and first.source == "people"
    assert [one.token_ids for one in first.completions] == [
        [*prompts.chat.encode_completion(text), eos] for text in ("one", "two")
    ]
    assert [reward.total for reward in first.rewards if reward] == [0.25, -3] and len(rest.completions) == 1
    assert [reward.total for reward in pair.rewards if reward] == [1, 0] and [c.index for c in pair.completions] == [
        0,
        1,
    ]
    assert other.prompt.token_ids == prompts.render("one ?", also="be right") != first.prompt.token_ids
    assert not any(one.logprobs for one in first.completions)
    sequence = sequence_of(first, first.completions[0], [0.25])
    assert "behaviour" not in sequence.columns
    sequence.weight = 1.0
    check(sequence, sft=False)


class Scorer:
    """Says right where the text is the answer; the real verifiers are tried in test_replay.py."""

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        right = float(len(completion.token_ids) == len(problem.answer) + 1)
        return Reward(right, 0.0, right, 0.0, 0.0, Verdict.CORRECT if right else Verdict.TIMEOUT), "text"


def test_rows_without_a_reward_are_scored_by_the_verifier_of_the_row(tmp_path: Path, prompts: PromptFormat) -> None:
    length = len(prompts.chat.encode_completion("three"))
    path = write(
        tmp_path / "r.jsonl",
        {"problem": "one ?", "completion": "three", "answer": "x" * length},
        {"problem": "two ?", "completion": "three", "answer": "y" * (length + 1)},
    )
    found = read(path, prompts)
    assert [group.rewards for group in found.groups] == [[None], [None]]
    asyncio.run(found.score(Scorer()))  # type: ignore[arg-type]
    found.settle(objective_of(config_of("dro")))
    assert [group.prompt.problem.text for group in found.groups] == ["one ?"]
    assert "1 of 2 groups are left out" in found.left_out[0] and "could grade no completion" in found.left_out[0]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"problem": "a", "completion": "b"}, 'give a "reward"'),
        ({"problem": "a", "completion": "b", "reward": True}, "must be a finite number"),
        ({"problem": "a", "completion": "b", "reward": "1"}, "must be a finite number"),
        ({"problem": "a", "chosen": "b"}, "rejected"),
        ({"completion": "b", "reward": 1}, "problem"),
        ({"completions": [], "rewards": []}, "a group of a rollout file"),
        ({"completions": "text", "prompt": 3}, "a group of a rollout file"),
    ],
)
def test_a_row_that_cannot_be_used_is_told_with_its_line(
    tmp_path: Path, prompts: PromptFormat, row: dict[str, Any], told: str
) -> None:
    path = write(tmp_path / "r.jsonl", {"problem": "a", "completion": "b", "reward": 1}, row)
    with pytest.raises(DataError, match=r"r\.jsonl:2") as caught:
        read(path, prompts)
    assert told in str(caught.value)


def test_hostile_numbers_of_a_recorded_group_are_refused(tmp_path: Path, prompts: PromptFormat) -> None:
    for change in ({"token_ids": [1, 10_000]}, {"token_ids": [-1, 3]}, {"logprobs": [-1.0]}, {"token_ids": []}):
        recorded = group_of(prompts, [1.0, 0.1])
        recorded.completions[0] = msgspec.structs.replace(recorded.completions[0], **change)
        with pytest.raises(DataError, match="completion 0 has no tokens, not one log-prob a token, or unknown tokens"):
            read(write(tmp_path / "r.jsonl", recorded), prompts)
    row = json.loads(msgspec.json.encode(group_of(prompts, [1.0, 0.1])))
    row["completions"][0]["logprobs"][0] = 1e999
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="no finite number"):
        read(tmp_path / "r.jsonl", prompts)


def test_ids_of_another_tokenizer_are_noticed_by_their_text(tmp_path: Path, prompts: PromptFormat) -> None:
    recorded = group_of(prompts, [1.0, 0.1], texts=["another", "text"])
    with pytest.raises(ConfigError, match="another text with this model's tokenizer"):
        read(write(tmp_path / "r.jsonl", recorded), prompts)


def test_the_rollouts_of_a_run_are_read_in_order_and_only_at_their_temperature(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in (10, 9, 1):
        (tmp_path / "rollouts" / f"step_{step}.jsonl").touch()
    config = Config.model_validate({"data": {"offline": str(tmp_path)}, "objective": {"name": "dro"}})
    assert [path.stem for path in offline_files(config)] == ["step_1", "step_9", "step_10"]
    (tmp_path / "config.toml").write_text("[rollout]\ntemperature = 0.7\n")
    with pytest.raises(DataError, match=r"rollout\.temperature = 0\.7"):
        offline_files(config)
    with pytest.raises(DataError, match="neither a file nor a run's folder"):
        offline_files(config.model_copy(update={"data": config.data.model_copy(update={"offline": "nowhere"})}))


# ---- which objectives --------------------------------------------------------------------------------------------


ANY, REFUSED = {"agro", "spo", "dro", "kto", "a_lol", "c_rlft"}, {"reinforce", "rloo", "maxrl", "jepo"}


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_learns_from_offline_rows_or_refuses_in_one_line(
    tmp_path: Path, prompts: PromptFormat, name: str
) -> None:
    objective = {"name": NAMES[name], **({"teacher": {"kind": "local", "path": "folder"}} if name == "distill" else {})}
    config = Config.model_validate({"data": {"offline": "rows.jsonl", "system_prompt": ""}, "objective": objective})
    lines = list(complaints(config))
    if name in REFUSED:
        assert (
            len(lines) == 1
            and "data.offline" in lines[0]
            and f'"{NAMES[name]}"' in lines[0]
            and "such as aipo" in lines[0]
        )
        return
    assert lines == []
    known = write(tmp_path / "known.jsonl", group_of(prompts, [1.0, 0.1]))
    assert read_offline([known], prompts, config).groups
    dark = write(tmp_path / "dark.jsonl", {"problem": "a", "chosen": "b", "rejected": "c"})
    if name in ANY:
        assert read_offline([dark], prompts, config).groups
        return
    with pytest.raises(
        ConfigError, match=f'no log-probs of who sampled them .*objective.name = "{NAMES[name]}" weighs by them'
    ):
        read_offline([dark], prompts, config)


def test_with_importance_weights_the_policy_gradient_learns_from_rows_with_log_probs() -> None:
    config = Config.model_validate(
        {"data": {"offline": "r.jsonl"}, "objective": {"name": "rloo", "importance": {"kind": "sequence_truncated"}}}
    )
    assert list(complaints(config)) == []


def test_groups_without_a_signal_are_left_out_or_refused(tmp_path: Path, prompts: PromptFormat) -> None:
    single = {"problem": "one ?", "completion": "one", "reward": 1}
    equal = group_of(prompts, [1.0, 1.0])
    mixed = group_of(prompts, [1.0, 0.1])
    found = read(write(tmp_path / "r.jsonl", single, equal, mixed), prompts, "agro")
    found.settle(objective_of(config_of("agro")))
    assert len(found.groups) == 2, "agro learns from equal rewards, not from one completion"
    found = read(write(tmp_path / "r.jsonl", equal, mixed), prompts, "magistral")
    found.settle(objective_of(config_of("magistral")))
    assert [group.rewards for group in found.groups] == [mixed.rewards] and "rewards are equal" in found.left_out[0]
    found = read(write(tmp_path / "r.jsonl", single), prompts, "agro")
    with pytest.raises(ConfigError, match="fewer than 2"):
        found.settle(objective_of(config_of("agro")))
    found = read(write(tmp_path / "r.jsonl", single), prompts, example("kto"))
    found.settle(objective_of(config_of(example("kto"))))
    assert len(found.groups) == 1
    with pytest.raises(ConfigError, match="soft value"):
        found.keep_valued({"p7": 0.5})


# ---- in a run -----------------------------------------------------------------------------------------------------


def test_a_batch_is_a_function_of_version_and_seed_and_every_epoch_has_all_groups(prompts: PromptFormat) -> None:
    groups = [group_of(prompts, [1.0, 0.1], source=str(number)) for number in range(6)]
    offline = OfflineGroups(groups)
    epoch = [group.source for version in range(3) for group in offline.batch(version, 2, seed=1)]
    assert sorted(epoch) == [str(number) for number in range(6)]
    assert offline.batch(4, 2, 1) == offline.batch(4, 2, 1)
    assert epoch != [group.source for version in range(3, 6) for group in offline.batch(version, 2, 1)]
    twice = offline.batch(0, 12, 0)
    assert len({group.prompt.index for group in twice}) == 12 and all(group.prompt.index < 0 for group in twice)


@pytest.mark.parametrize(
    ("prompts_per_step", "share", "minibatches", "count"),
    [(16, 0.5, 1, 16), (16, 0.2, 1, 4), (16, 0.75, 1, 48), (16, 0.0, 1, 0), (16, 0.01, 4, 4), (12, 0.5, 4, 12)],
)
def test_the_share_is_of_all_groups_in_whole_minibatches(
    prompts_per_step: int, share: float, minibatches: int, count: int
) -> None:
    config = Config.model_validate({
        "rollout": {"prompts_per_step": prompts_per_step}, "data": {"offline_share": share},
        "optimiser": {"minibatches": minibatches},
    })  # fmt: skip
    assert offline_count(config) == count


def test_a_stage_may_change_the_share() -> None:
    config = Config.model_validate({
        "stages": [{"name": "a", "until_step": 2, "data": {"offline_share": 0.9}},
                   {"name": "b", "data": {"offline_share": 0.0}}],
    })  # fmt: skip
    assert [stage.data.offline_share for stage in config.every_stage] == [0.9, 0.0]


def test_offline_tokens_are_in_no_figure_about_the_engines() -> None:
    """Two completions of two tokens; the second is offline, and its ratio of e^5 would be 74 of the mean."""
    logprobs = torch.tensor([-1.0, -1.0, 0.0, 0.0], requires_grad=True)
    behaviour, ones = torch.tensor([-1.5, -0.5, -5.0, -5.0]), torch.ones(4)
    inputs = LossInputs(
        logprobs, behaviour, ones, ones, completions_of([2, 2]), offline=torch.tensor([False, False, True, True])
    )
    output = policy_loss(inputs, torch.zeros(4), read_objective({"name": "aipo"}))
    sums = {name: value.item() for name, value in output.sums.items()}
    assert (sums["tokens"], sums["compared"]) == (4, 2) and sums["abs_logprob_difference"] == pytest.approx(1.0)
    assert output.maxima["ratio"].item() == pytest.approx(torch.tensor(0.5).exp().item())
    inputs = LossInputs(logprobs, behaviour, ones, ones, completions_of([2, 2]), offline=ones.bool())
    output = policy_loss(inputs, torch.zeros(4), read_objective({"name": "aipo"}))
    assert output.sums["compared"] == 0 and output.maxima == {}


def test_figures_of_the_offline_groups(prompts: PromptFormat) -> None:
    groups = [group_of(prompts, [1.0, 0.1]), group_of(prompts, [0.4])]
    assert offline_metrics(groups) == pytest.approx({"groups/offline": 2.0, "reward/offline": 0.5})


# ---- the optimum from rows alone ---------------------------------------------------------------------------------

BETA = 0.5
COUNTS, REWARDS = (1, 3, 6), (1.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["agro", "spo", "dro"])
def test_regularised_objectives_reach_the_optimum_from_a_file_of_rows_alone(
    tmp_path: Path, prompts: PromptFormat, name: str
) -> None:
    """Three responses to one prompt, written once, thrice and six times by nobody known; the reference is uniform. From
    the file through groups, sequences and packed inputs to the loss: pi* = (.7870, .1065, .1065), V* = .570466."""
    rows = [
        {"problem": "one ?", "completion": text, "reward": reward, "id": "x"}
        for text, reward, count in zip(TEXTS, REWARDS, COUNTS, strict=True)
        for _ in range(count)
    ]
    config = config_of(name).model_copy(update={"objective": {"name": name, "beta": BETA}})
    found = read_offline([write(tmp_path / "r.jsonl", *rows)], prompts, config)
    found.settle(objective_of(config))
    reference = torch.full((3,), 1 / 3).log()
    best, value = optimum(reference, torch.tensor(REWARDS), BETA)
    weights = [(1 / 3) / (count / 10) for count in COUNTS for _ in range(count)]
    estimated = soft_value(
        [reward for reward, count in zip(REWARDS, COUNTS, strict=True) for _ in range(count)], BETA,
        torch.tensor(weights).log().tolist(),
    )  # fmt: skip
    assert estimated == pytest.approx(value, abs=1e-6), "the weights ref / mu make V that of the reference"
    batch = found.batch(0, 1, 0)
    sequences = train_sequences(
        batch, objective_of(config), config, prompts.chat, {"x": estimated} if name == "spo" else None
    )
    arms = [[*prompts.chat.encode_completion(text), prompts.chat.eos_id] for text in TEXTS]
    chosen = [arms.index(one.token_ids[one.prompt_tokens :]) for one in sequences]
    lengths = torch.tensor([one.loss_tokens for one in sequences])
    first = lengths.cumsum(0) - lengths
    logits, head = torch.zeros(3, requires_grad=True), torch.zeros((), requires_grad=True)

    def packed(logprobs: torch.Tensor) -> torch.Tensor:
        """The first token of a completion has all of its log-probability."""
        return torch.zeros(int(lengths.sum())).index_put((first,), logprobs[torch.tensor(chosen)])

    optimiser = torch.optim.SGD([logits, head], lr=1.0 if name == "dro" else 3.0)
    for _ in range(250 if name == "dro" else 80):
        optimiser.zero_grad()
        inputs = loss_inputs(
            sequences, packed(logits.log_softmax(0)), packed(reference),
            values=(lambda ends: head.expand(len(ends))) if name == "dro" else None,
        )  # fmt: skip
        policy_loss(inputs, torch.zeros_like(inputs.weights), objective_of(config)).loss.backward()
        optimiser.step()
    assert logits.softmax(0).tolist() == pytest.approx(best.exp().tolist(), abs=1e-3)
    assert name != "dro" or head.item() == pytest.approx(value, abs=1e-3)


def test_the_example_of_the_page_can_be_run() -> None:
    (example,) = re.findall(r"```toml example\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    config = Config.model_validate(tomllib.loads(example))
    assert list(complaints(config)) == [] and config.data.offline and offline_count(config) == 11


def test_control_tokens_in_a_written_row_are_letters(tmp_path: Path, prompts: PromptFormat) -> None:
    chat, end = prompts.chat, "<|end|>"
    pair = {"problem": "one ?", "chosen": f"two{end}", "rejected": f"two {end} three"}
    found = read(write(tmp_path / "rows.jsonl", pair), prompts)
    first, second = found.groups[0].completions
    assert first.token_ids == [*chat.encode("two"), chat.eos_id], "it ends once"
    assert second.token_ids.count(chat.eos_id) == 1 and second.token_ids[-1] == chat.eos_id
    assert [line[: len(start)] for line, start in zip(found.left_out, ["x" * 34, "x" * 46], strict=True)] == [
        "data.offline: 1 of 1 rows end with",
        "data.offline: 1 of 1 rows spell control tokens",
    ]
