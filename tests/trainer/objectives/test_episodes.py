"""Episodes of several turns: their gradient is that of their turns, and what credit and divergences mean over them."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from shared.config import Config
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.types import Completion, Group, MicroBatch, Problem, Prompt, Reward, TrainSequence, Turn, Verdict
from tests.trainer.objectives.named import NAMES, PUBLISHED
from trainer.objectives.advantage import diverse, turn_advantages, turns_differ
from trainer.objectives.inputs import completions_of, loss_inputs
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import complaints, read_objective
from trainer.step.forward_backward import AuxiliaryModels, compute_old_logprobs, forward_backward, pack_sequences

SHAPE = DecoderConfig("llama", 32, 16, 24, 1, 2, 1, 8, 1e-5, 64, tied=True)
WHOLE = ("a_lol", "agro", "dro", "kto", "sharpening")
"""objectives whose factor is one number of the whole episode"""
TURNS = sorted(name for name, each in PUBLISHED.items() if not each.kind.several_turns and name not in WHOLE)


def model(seed: int) -> Decoder:
    decoder = Decoder(SHAPE)
    initialise(decoder, seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3.0)
    return decoder


def objective(name: str, **given: Any) -> Any:
    teacher = {"teacher": {"kind": "local", "path": "some/folder"}} if name == "distill" else {}
    return read_objective({"name": NAMES[name], **teacher, **given})


def episodes(decoder: Decoder, seed: int) -> list[TrainSequence]:
    """Two groups of three episodes of one to three turns; behaviour and old log-probs near those of the policy."""
    draw, made = random.Random(seed), list[TrainSequence]()
    for number in range(6):
        ids, mask, turns = [draw.randrange(32) for _ in range(4)], bytes(4), 1 + number % 3
        for turn in range(turns):
            sampled, heard = draw.randint(1, 6), draw.randint(1, 3) * (turn < turns - 1)
            ids += [draw.randrange(32) for _ in range(sampled + heard)]
            mask += b"\1" * sampled + bytes(heard)
        made.append(TrainSequence(ids, mask, draw.random(), [draw.gauss(0, 1) for _ in range(turns)], number // 3))
    logprobs = compute_old_logprobs(decoder, [MicroBatch(made)], 1.0)
    for each, values in zip(made, logprobs, strict=True):
        names = ("behaviour", "old", "teacher")
        each.columns = {name: [value + draw.gauss(0, 0.2) for value in values] for name in names}
    return made


def apart(sequence: TrainSequence) -> list[TrainSequence]:
    """The turns as sequences of their own, each with everything before it as its prompt."""
    turns, place, here = [], 0, 0
    for run, (sampled, tokens) in enumerate((kind, len(list(same))) for kind, same in itertools.groupby(sequence.mask)):
        if sampled:
            columns = {name: values[here : here + tokens] for name, values in sequence.columns.items()}
            ids, mask = sequence.token_ids[: place + tokens], bytes(place) + b"\1" * tokens
            advantages = [sequence.advantages[run // 2]]
            turns.append(TrainSequence(ids, mask, sequence.weight, advantages, sequence.group, columns))
            here += tokens
        place += tokens
    return turns


def merged(sequence: TrainSequence) -> TrainSequence:
    """One turn, of all that comes after the prompt: what an environment says is trained too."""
    rest = len(sequence.mask) - sequence.prompt_tokens
    columns = {name: values + [0.0] * (rest - len(values)) for name, values in sequence.columns.items()}
    mask = bytes(sequence.prompt_tokens) + b"\1" * rest
    return replace(sequence, mask=mask, advantages=sequence.advantages[:1], columns=columns)


@pytest.mark.parametrize("name", TURNS)
def test_the_gradient_of_an_episode_is_that_of_its_turns(name):
    """Several turns in one sequence, and each as a sequence of its own: the same step, for rewards of the episode and
    of its turns."""
    decoder, settings, models = model(1), objective(name), AuxiliaryModels(reference=model(2), teacher=None)

    def gradient(sequences: list[TrainSequence]) -> Tensor:
        decoder.zero_grad()
        forward_backward(decoder, [MicroBatch(sequences)], 1.0, settings, models)
        return torch.cat([each.grad.double().flatten() for each in decoder.parameters() if each.grad is not None])

    for seed in range(2):
        whole = episodes(decoder, seed)
        turns = [turn for each in whole for turn in apart(each)]
        assert len(turns) == sum(len(each.segments) for each in whole) == 12
        expected = gradient(turns)
        assert expected.norm() > 1e-3
        assert float((gradient(whole) - expected).norm() / expected.norm()) < 1e-6
    other = gradient([merged(each) for each in whole])
    assert float((other - expected).norm() / expected.norm()) > 1e-3, "a loss on what an environment says would be seen"


def test_ratios_are_means_of_a_turn_where_they_are_means():
    """gspo, two turns of 2 and 1 tokens with log-ratios 0.2, 0.4 | -0.6: s = exp(0.3), exp(0.3), exp(-0.6)."""
    sequence = TrainSequence(
        [9, 1, 2, 9, 3], bytes([0, 1, 1, 0, 1]), 1.0, [1.0, 1.0], columns={"behaviour": [-1.2, -1.4, -0.4]}
    )
    inputs = loss_inputs([sequence], torch.tensor([-1.0, -1.0, -1.0]))
    ratios = read_objective({"name": "gspo", "ratio_reference": {"kind": "rollout"}}).ratios(inputs)  # type: ignore[attr-defined]
    assert ratios.tolist() == pytest.approx([1.349859, 1.349859, 0.548812], rel=1e-5)
    assert inputs.completions.sums(inputs.logprobs - inputs.behaviour).tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize(
    "chosen",
    [*({"name": name} for name in WHOLE),
     *({"name": "reinforce", "kl": {"weight": 1.0, "gradient": kind}}
       for kind in ("return", "sequence_k2", "sequence_k3"))],
    ids=str,
)  # fmt: skip
def test_a_factor_of_an_episode_is_of_all_its_turns(chosen):
    """Sums of log pi/ref, and so divergences, are those of the whole episode, what a turn does to later ones included:
    loss and gradient are those of the same tokens in one turn, whose values test_loss.py and test_tabular.py hold."""
    decoder, settings = model(1), objective(**chosen)
    whole = [replace(each, advantages=each.advantages[:1] * len(each.segments)) for each in episodes(decoder, 5)]
    packed = pack_sequences(whole, torch.device("cpu"))
    logprobs = decoder(packed, 1.0)[0].detach().requires_grad_()
    reference, values = model(2)(packed, 1.0)[0].detach(), torch.full((6,), 0.3)
    inputs = loss_inputs(whole, logprobs, reference, values=lambda first: values)
    assert inputs.completions.count == 6 and inputs.completions.turns == 12
    counts, groups = [each.loss_tokens for each in whole], [each.group for each in whole]
    one_turn = dataclasses.replace(inputs, completions=completions_of(counts, groups))
    several, alone = (policy_loss(each, torch.zeros_like(logprobs), settings).loss for each in (inputs, one_turn))
    assert several.item() == alone.item()
    expected = torch.autograd.grad(alone, logprobs)[0]
    assert torch.equal(torch.autograd.grad(several, logprobs)[0], expected) and expected.abs().max() > 1e-4


def episode(
    index: int, *rewards: float | None, verdict: Verdict = Verdict.WRONG, total: float = 0.0
) -> tuple[Completion, Reward]:
    """Turns of one token each with a reply of one between them."""
    turns = [Turn(2 * turn, 2 * turn + 1, reward) for turn, reward in enumerate(rewards)]
    count = 2 * len(turns) - 1
    completion = Completion(0, index, 0, [7] * count, [-1.0] * count, finish_reason="stop", turns=turns)
    return completion, Reward(total, 0.0, total, 0.0, 0.0, verdict)


def group_of(*pairs: tuple[Completion, Reward]) -> Group:
    prompt = Prompt(0, Problem("p", "?", "1", environment="guess"), [1, 2])
    return Group(prompt, [completion for completion, _ in pairs], [reward for _, reward in pairs], [""] * len(pairs))


def settings_of(**environment: Any) -> Config:
    return Config.model_validate({"environment": environment, "model": {"path": "m"}, "data": {"train": "t"}})


SEVERAL = group_of(
    episode(0, 1.0, -1.0, 1.0), episode(1, 0.0, 0.0), episode(2, 2.0), episode(3, 9.0, verdict=Verdict.CRASH)
)
TWO = group_of(episode(0, 1.0, -1.0, 1.0), episode(1, 2.0))
VERIFIED = group_of(
    episode(0, None, None, verdict=Verdict.CORRECT, total=1.0), episode(1, None, None), episode(2, None, total=0.5)
)


@pytest.mark.parametrize(
    ("group", "name", "discount", "expected"),
    [
        # returns (1 0 1), (0 0), (2), and one that is not graded. Means 1, 0 and 1 at turns 1, 2 and 3
        (SEVERAL, "dr_grpo", 1.0, [[0.0, 0.0, 0.0], [-1.0, 0.0], [1.0], None]),
        (SEVERAL, "rloo", 1.0, [[0.0, 0.0, 0.0], [-1.5, 0.0], [1.5], None]),
        # deviation sqrt(2/3) at turn 1, none at the others; over the minibatch that of 0 0 0 -1 0 1: sqrt(1/3)
        (SEVERAL, "grpo", 1.0, [[0.0, 0.0, 0.0], [-(1.5**0.5), 0.0], [1.5**0.5], None]),
        (SEVERAL, "magistral", 1.0, [[0.0, 0.0, 0.0], [-(3**0.5), 0.0], [3**0.5], None]),
        # returns (1 - 1/2 + 1/4, -1 + 1/2, 1) = (.75 -.5 1) and (2); with 0 the rewards themselves
        (TWO, "dr_grpo", 0.5, [[-0.625, 0.0, 0.0], [0.625]]),
        (TWO, "dr_grpo", 0.0, [[-0.5, 0.0, 0.0], [0.5]]),
        # a verifier's total is the reward of the last turn
        (VERIFIED, "dr_grpo", 1.0, [[0.5, 0.5], [-0.5, -0.5], [0.0]]),
    ],
)
def test_a_turn_is_credited_with_the_discounted_rewards_from_it_on(group, name, discount, expected):
    [rows] = turn_advantages([group], read_objective({"name": name}).advantage, discount)
    assert rows == [None if row is None else pytest.approx(row) for row in expected]


REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=3)


@given(episodes=st.lists(REWARDS, min_size=1, max_size=4), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_group_is_kept_exactly_where_a_turn_of_it_has_an_advantage(episodes, discount):
    group = group_of(*(episode(index, *rewards, total=sum(rewards)) for index, rewards in enumerate(episodes)))
    [rows] = turn_advantages([group], read_objective({"name": "dr_grpo"}).advantage, discount)
    assert turns_differ(group, discount) == any(value for row in rows for value in row or [])


def test_earlier_is_better_also_where_all_solve_it():
    """Solved at turns 1, 2 and 3: equal totals, and returns 1, 1/2 and 1/4 with discount 1/2."""
    group = group_of(
        *(episode(turns, *[0.0] * turns, 1.0, verdict=Verdict.CORRECT, total=1.0) for turns in range(3)),
    )
    assert turns_differ(group, 0.5) and not diverse(group.rewards, "total")
    crashed = group_of(episode(0, 1.0, total=1.0), episode(1, 0.0, 1.0, verdict=Verdict.CRASH, total=1.0))
    assert not turns_differ(crashed, 0.5), "one that is not graded is compared with nothing"


def test_sequences_carry_the_advantages_of_their_turns():
    plain = read_objective({"name": "dr_grpo"})

    def trained(group: Group, **environment: Any) -> list[list[float]]:
        return [each.advantages for each in train_sequences([group], plain, settings_of(credit="turn", **environment))]

    three = group_of(episode(0, 1.0, 0.0), episode(1, 0.0, 1.0), episode(2, 0.0, 0.0))
    assert trained(three) == [pytest.approx(row) for row in ([1 / 3, -1 / 3], [1 / 3, 2 / 3], [-2 / 3, -1 / 3])]
    two = group_of(episode(0, 0.0, 2.0), episode(1, 0.0, 0.0))  # "retry" without a reward for the first answer
    assert trained(two, discount=0.0) == [[0.0, 1.0], [0.0, -1.0]]


def test_objectives_that_cannot_be_trained_on_episodes_say_why():
    refused = {name for name, each in PUBLISHED.items() if each.kind.several_turns}
    assert refused == {"f_dpg", "jepo", "spo"}
    for name in refused:
        line = objective(name).refusal("guess")
        assert f'objective.name = "{NAMES[name]}"' in line and '"guess"' in line and "use another objective" in line
    assert objective("magistral").refusal("guess") == ""
    assert "compares answers" in objective("majority").refusal("guess")
    config = settings_of(name="guess").model_copy(update={"objective": {"name": "spo"}})
    assert any("samples its soft values" in line for line in complaints(config))


@pytest.mark.parametrize("advantage", ["pass_at_k", "maxrl", "each_reward"])
def test_credit_by_turn_needs_a_mean_to_compare_with(advantage):
    config = settings_of(credit="turn").model_copy(
        update={"objective": {"name": "reinforce", "advantage": {"kind": advantage}}}
    )
    assert any("environment.credit" in line and '"leave_one_out"' in line for line in complaints(config))
    allowed = config.model_copy(update={"objective": {"name": "rloo"}})
    assert not any("environment.credit" in line for line in complaints(allowed))


def test_a_discount_without_credit_by_turn_is_refused():
    [line] = read_objective({"name": "dr_grpo"}).contradictions(settings_of(discount=0.5))
    assert line.startswith("environment.discount = 0.5 has no effect")
