"""Offline rows: what is read as groups, which objectives learn from it, and where they lead without a single sample."""

import asyncio
import json
import re
import tomllib
from operator import itemgetter
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
from tests.tables import read_table
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
ANY, REFUSED = {"agro", "spo", "dro", "kto", "a_lol", "c_rlft"}, {"reinforce", "rloo", "maxrl", "jepo"}
BETA = 0.5
COUNTS, REWARDS = (1, 3, 6), (1.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline") / "model"
    build(folder, 0, train_tokenizer(["one two three ?"] * 9, 280), 64)
    return PromptFormat(Chat(folder), Config.model_validate({"data": {"system_prompt": ""}}).data)


def config_of(name: str, **others: Any) -> Config:
    data = {"offline": "rows.jsonl", "system_prompt": ""}
    return Config.model_validate({"objective": {"name": name}, "data": data, **others})


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "r.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def read(folder: Path, prompts: PromptFormat, *rows: Any, name: str = "dro", **others: Any) -> OfflineGroups:
    return read_offline([write(folder, *rows)], prompts, config_of(name, **others))


def settled(folder: Path, prompts: PromptFormat, name: str, *rows: Any) -> OfflineGroups:
    """What an objective learns from of these rows."""
    offline = read(folder, prompts, *rows, name=name)
    offline.settle(objective_of(config_of(name)))
    return offline


def ids_of(prompts: PromptFormat, text: str) -> list[int]:
    return [*prompts.chat.encode_completion(text), prompts.chat.eos_id]


def group_of(prompts: PromptFormat, *rewards: float, **changes: Any) -> Group:
    """What a run keeps of a group: completions that version 3 sampled."""
    ids = [ids_of(prompts, text) for text in TEXTS[: len(rewards)]]
    completions = [
        Completion(7, i, 5, each, [-1.0] * len(each), [VersionSpan(3, 0, len(each))], "stop")
        for i, each in enumerate(ids)
    ]
    given = [Reward(r, 0.1, r - 0.1, 0.0, 0.0, Verdict.CORRECT if r > 0.5 else Verdict.WRONG) for r in rewards]
    prompt = Prompt(7, Problem("p7", "one ?", "1"), prompts.render("one ?"))
    group = Group(prompt, completions, [*given], [prompts.chat.decode(each) for each in ids])
    return msgspec.structs.replace(group, **changes)


def test_a_recorded_group_keeps_ids_log_probs_and_rewards_but_no_version(tmp_path, prompts):
    recorded = group_of(prompts, 1.0, 0.1, 0.1)
    recorded.completions[1].finish_reason = "abort"
    [group] = read(tmp_path, prompts, recorded).groups
    kept = [recorded.completions[0], recorded.completions[2]]
    for index, (then, now) in enumerate(zip(kept, group.completions, strict=True)):
        assert (now.token_ids, now.logprobs, now.spans, now.index) == (then.token_ids, then.logprobs, [], index)
    assert group.prompt == recorded.prompt and "r.jsonl:1" in group.source
    assert group.rewards == [recorded.rewards[0], recorded.rewards[2]]
    sequence = sequence_of(group, group.completions[0], [1.0])
    assert sequence.offline and sequence.columns["behaviour"] == recorded.completions[0].logprobs
    assert not sequence_of(recorded, recorded.completions[0], [1.0]).offline


def test_rows_of_text_are_tokenised_as_the_run_does_and_grouped_by_their_prompts(tmp_path, prompts):
    first, pair, other, rest = read(
        tmp_path, prompts,
        {"problem": "one ?", "completion": "one", "reward": 0.25, "source": "people"},
        {"problem": "two ?", "chosen": "two", "rejected": "one"},
        {"problem": "one ?", "completion": "two", "reward": -3},
        {"problem": "one ?", "completion": "two", "reward": 1, "system": "be right"},
        {"problem": "one ?", "completion": "three", "reward": 0}, rollout={"group_size": 2},
    ).groups  # fmt: skip
    assert first.prompt.token_ids == prompts.render("one ?") and first.source == "people"
    assert [each.token_ids for each in first.completions] == [ids_of(prompts, "one"), ids_of(prompts, "two")]
    assert [reward.total for reward in first.rewards if reward] == [0.25, -3] and len(rest.completions) == 1
    assert [reward.total for reward in pair.rewards if reward] == [1, 0] and [c.index for c in pair.completions] == [
        0,
        1,
    ]
    assert other.prompt.token_ids == prompts.render("one ?", also="be right") != first.prompt.token_ids
    assert not any(each.logprobs for each in first.completions)
    sequence = sequence_of(first, first.completions[0], [0.25])
    assert "behaviour" not in sequence.columns
    sequence.weight = 1.0
    check(sequence, sft=False)


def test_control_tokens_in_a_written_row_are_letters(tmp_path, prompts):
    chat, end = prompts.chat, "<|end|>"
    offline = read(tmp_path, prompts, {"problem": "one ?", "chosen": f"two{end}", "rejected": f"two {end} three"})
    first, second = offline.groups[0].completions
    assert first.token_ids == [*chat.encode("two"), chat.eos_id], "it ends once"
    assert second.token_ids.count(chat.eos_id) == 1 and second.token_ids[-1] == chat.eos_id
    ending, spelling = offline.left_out
    assert ending.startswith("data.offline: 1 of 1 rows end with")
    assert spelling.startswith("data.offline: 1 of 1 rows spell control tokens")


class Scorer:
    """Says right where the text is the answer; the real verifiers are tried in test_replay.py."""

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        right = float(len(completion.token_ids) == len(problem.answer) + 1)
        return Reward(right, 0.0, right, 0.0, 0.0, Verdict.CORRECT if right else Verdict.TIMEOUT), "text"


def test_rows_without_a_reward_are_scored_by_the_verifier_of_the_row(tmp_path, prompts):
    length = len(prompts.chat.encode_completion("three"))
    rows = [
        {"problem": f"{name} ?", "completion": "three", "answer": "x" * (length + n)}
        for n, name in enumerate(("one", "two"))
    ]
    offline = read(tmp_path, prompts, *rows)
    assert [group.rewards for group in offline.groups] == [[None], [None]]
    asyncio.run(offline.score(Scorer()))
    offline.settle(objective_of(config_of("dro")))
    assert [group.prompt.problem.text for group in offline.groups] == ["one ?"]
    assert "1 of 2 groups are left out" in offline.left_out[0] and "could grade no completion" in offline.left_out[0]


@pytest.mark.parametrize("case", read_table("trainer/cases", of="offline rows"), ids=itemgetter("name"))
def test_a_row_that_cannot_be_used_is_told(tmp_path, prompts, case):
    with pytest.raises(DataError, match=rf"r\.jsonl:2(?s:.*){re.escape(case['message'])}"):
        read(tmp_path, prompts, {"problem": "a", "completion": "b", "reward": 1}, case["row"])


def test_hostile_numbers_and_ids_of_another_tokenizer_are_refused(tmp_path, prompts):
    for change in ({"token_ids": [1, 10_000]}, {"token_ids": [-1, 3]}, {"logprobs": [-1.0]}, {"token_ids": []}):
        recorded = group_of(prompts, 1.0, 0.1)
        recorded.completions[0] = msgspec.structs.replace(recorded.completions[0], **change)
        with pytest.raises(DataError, match="completion 0 has no tokens, not one log-prob a token, or unknown tokens"):
            read(tmp_path, prompts, recorded)
    row = json.loads(msgspec.json.encode(group_of(prompts, 1.0, 0.1)))
    row["completions"][0]["logprobs"][0] = 1e999
    path = write(tmp_path)
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="no finite number"):
        read_offline([path], prompts, config_of("dro"))
    with pytest.raises(ConfigError, match="another text with this model's tokenizer"):
        read(tmp_path, prompts, group_of(prompts, 1.0, 0.1, texts=["another", "text"]))


def test_the_rollouts_of_a_run_are_read_in_order_and_only_at_their_temperature(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for step in (10, 9, 1):
        (tmp_path / "rollouts" / f"step_{step}.jsonl").touch()
    config = Config.model_validate({"data": {"offline": str(tmp_path)}, "objective": {"name": "dro"}})
    assert [path.stem for path in offline_files(config)] == ["step_1", "step_9", "step_10"]
    (tmp_path / "config.toml").write_text("[rollout]\ntemperature = 0.7\n")
    with pytest.raises(DataError, match=r"rollout\.temperature = 0\.7"):
        offline_files(config)
    with pytest.raises(DataError, match="no such file, and no run's folder"):
        offline_files(Config.model_validate({"data": {"offline": "nowhere"}, "objective": {"name": "dro"}}))


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_learns_from_offline_rows_or_refuses_in_one_line(tmp_path, prompts, name):
    objective = {"name": NAMES[name], **({"teacher": {"kind": "local", "path": "folder"}} if name == "distill" else {})}
    config = config_of("", objective=objective)
    lines = list(complaints(config))
    if name in REFUSED:
        (line,) = lines
        assert all(part in line for part in ("data.offline", f'"{NAMES[name]}"', "such as aipo"))
        return
    assert lines == [] and read_offline([write(tmp_path, group_of(prompts, 1.0, 0.1))], prompts, config).groups
    unknown = write(tmp_path, {"problem": "a", "chosen": "b", "rejected": "c"})
    if name in ANY:
        assert read_offline([unknown], prompts, config).groups
        return
    message = f'no log-probs of who sampled them .*objective.name = "{NAMES[name]}" weighs by them'
    with pytest.raises(ConfigError, match=message):
        read_offline([unknown], prompts, config)


def test_with_importance_weights_the_policy_gradient_learns_from_rows_with_log_probs():
    weighted = {"name": "rloo", "importance": {"kind": "sequence_truncated"}}
    assert list(complaints(config_of("", objective=weighted))) == []


def test_groups_without_a_signal_are_left_out_or_refused(tmp_path, prompts):
    single = {"problem": "one ?", "completion": "one", "reward": 1}
    equal, mixed = group_of(prompts, 1.0, 1.0), group_of(prompts, 1.0, 0.1)
    agro = settled(tmp_path, prompts, "agro", single, equal, mixed)
    assert len(agro.groups) == 2, "agro learns from equal rewards, not from one completion"
    magistral = settled(tmp_path, prompts, "magistral", equal, mixed)
    assert [group.rewards for group in magistral.groups] == [mixed.rewards]
    assert "rewards are equal" in magistral.left_out[0]
    with pytest.raises(ConfigError, match="fewer than 2"):
        settled(tmp_path, prompts, "agro", single)
    kto = settled(tmp_path, prompts, example("kto"), single)
    assert len(kto.groups) == 1
    with pytest.raises(ConfigError, match="soft value"):
        kto.keep_valued({"p7": 0.5})


def test_a_batch_is_a_function_of_version_and_seed_and_every_epoch_has_all_groups(prompts):
    offline = OfflineGroups([group_of(prompts, 1.0, 0.1, source=str(number)) for number in range(6)])
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
def test_the_share_is_of_all_groups_in_whole_minibatches_and_may_be_that_of_a_stage(
    prompts_per_step, share, minibatches, count
):
    given = {"rollout": {"prompts_per_step": prompts_per_step}, "optimiser": {"minibatches": minibatches}}
    stages = [{"name": "a", "until_step": 2}, {"name": "b", "data": {"offline_share": 0.0}}]
    config = Config.model_validate({**given, "data": {"offline_share": share}, "stages": stages})
    assert offline_count(config) == count
    assert [stage.data.offline_share for stage in config.every_stage] == [share, 0.0]


def test_offline_tokens_are_in_no_figure_about_the_engines():
    """Two completions of two tokens; the second is offline, and its ratio of e^5 would be 74 of the mean."""
    logprobs = torch.tensor([-1.0, -1.0, 0.0, 0.0], requires_grad=True)
    behaviour, ones = torch.tensor([-1.5, -0.5, -5.0, -5.0]), torch.ones(4)

    def output(*offline: bool) -> Any:
        inputs = LossInputs(logprobs, behaviour, ones, ones, completions_of([2, 2]), offline=torch.tensor(offline))
        return policy_loss(inputs, torch.zeros(4), read_objective({"name": "aipo"}))

    half = output(False, False, True, True)
    sums = {name: value.item() for name, value in half.sums.items()}
    assert (sums["tokens"], sums["compared"]) == (4, 2) and sums["abs_logprob_difference"] == pytest.approx(1.0)
    assert half.maxima["ratio"].item() == pytest.approx(torch.tensor(0.5).exp().item())
    whole = output(True, True, True, True)
    assert whole.sums["compared"] == 0 and whole.maxima == {}


def test_figures_of_the_offline_groups(prompts):
    metrics = offline_metrics([group_of(prompts, 1.0, 0.1), group_of(prompts, 0.4)])
    assert metrics == pytest.approx({"groups/offline": 2.0, "reward/offline": 0.5})


@pytest.mark.parametrize("name", ["agro", "spo", "dro"])
def test_regularised_objectives_reach_the_optimum_from_rows_alone(tmp_path, prompts, name):
    """Three responses to one prompt, written once, thrice and six times by nobody known; the reference is uniform. From
    the file through groups, sequences and packed inputs to the loss: pi* = (.7870, .1065, .1065), V* = .570466."""
    drawn = [arm for arm, count in enumerate(COUNTS) for _ in range(count)]
    rows = [{"problem": "one ?", "completion": TEXTS[arm], "reward": REWARDS[arm], "id": "x"} for arm in drawn]
    config = config_of("", objective={"name": name, "beta": BETA})
    offline = read_offline([write(tmp_path, *rows)], prompts, config)
    offline.settle(objective_of(config))
    reference = torch.full((3,), 1 / 3).log()
    best, value = optimum(reference, torch.tensor(REWARDS), BETA)
    weights = torch.tensor([(1 / 3) / (COUNTS[arm] / 10) for arm in drawn])
    estimated = soft_value([REWARDS[arm] for arm in drawn], BETA, weights.log().tolist())
    assert estimated == pytest.approx(value, abs=1e-6), "the weights ref / mu make V that of the reference"
    values = {"x": estimated} if name == "spo" else None
    sequences = train_sequences(offline.batch(0, 1, 0), objective_of(config), config, prompts.chat, values)
    arms = [ids_of(prompts, text) for text in TEXTS]
    chosen = torch.tensor([arms.index(each.token_ids[each.prompt_tokens :]) for each in sequences])
    lengths = torch.tensor([each.loss_tokens for each in sequences])
    first = lengths.cumsum(0) - lengths
    logits, head = torch.zeros(3, requires_grad=True), torch.zeros((), requires_grad=True)

    def packed(logprobs: torch.Tensor) -> torch.Tensor:
        """The first token of a completion has all of its log-probability."""
        return torch.zeros(int(lengths.sum())).index_put((first,), logprobs[chosen])

    def expected(ends: torch.Tensor) -> torch.Tensor:
        return head.expand(len(ends))

    optimiser = torch.optim.SGD([logits, head], lr=1.0 if name == "dro" else 3.0)
    for _ in range(250 if name == "dro" else 80):
        optimiser.zero_grad()
        logprobs = packed(logits.log_softmax(0))
        inputs = loss_inputs(sequences, logprobs, packed(reference), values=expected if name == "dro" else None)
        policy_loss(inputs, torch.zeros_like(inputs.weights), objective_of(config)).loss.backward()
        optimiser.step()
    assert logits.softmax(0).tolist() == pytest.approx(best.exp().tolist(), abs=1e-3)
    assert name != "dro" or head.item() == pytest.approx(value, abs=1e-3)


def test_the_example_of_the_page_can_be_run():
    (text,) = re.findall(r"```toml example\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    config = Config.model_validate(tomllib.loads(text))
    assert list(complaints(config)) == [] and config.data.offline and offline_count(config) == 11
