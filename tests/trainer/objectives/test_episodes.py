"""Episodes of several turns: their gradient is that of their turns, and what credit and divergences mean over them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from shared.config import Config
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.types import Completion, Group, MicroBatch, Problem, Prompt, Reward, TrainSequence, Turn, Verdict
from tests.trainer.objectives.named import NAMES, PUBLISHED
from trainer.objectives.advantage import turn_advantages
from trainer.objectives.inputs import loss_inputs
from trainer.objectives.loss import policy_loss
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import complaints, read_objective
from trainer.step.forward_backward import AuxiliaryModels, compute_old_logprobs, forward_backward, pack_sequences

SHAPE = DecoderConfig("llama", 32, 16, 24, 1, 2, 1, 8, 1e-5, 64, tied=True)
WHOLE = ("a_lol", "agro", "dro", "kto", "sharpening")
"""objectives whose factor is one number of the whole episode"""
TURNS = sorted(name for name, one in PUBLISHED.items() if not one.kind.several_turns and name not in WHOLE)


def model(seed: int, shape: DecoderConfig = SHAPE, spread: float = 3.0) -> Decoder:
    decoder = Decoder(shape)
    initialise(decoder, seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(spread)
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
    for one, values in zip(made, logprobs, strict=True):
        names = ("behaviour", "old", "teacher")
        one.columns = {name: [value + draw.gauss(0, 0.2) for value in values] for name in names}
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
def test_the_gradient_of_an_episode_is_that_of_its_turns(name: str) -> None:
    """Several turns in one sequence, and each as a sequence of its own: the same step, for rewards of the episode and
    of its turns."""
    decoder, settings, models = model(1), objective(name), AuxiliaryModels(reference=model(2), teacher=None)

    def gradient(sequences: list[TrainSequence]) -> Tensor:
        decoder.zero_grad()
        forward_backward(decoder, [MicroBatch(sequences)], 1.0, settings, models)
        return torch.cat([one.grad.double().flatten() for one in decoder.parameters() if one.grad is not None])

    for seed in range(2):
        whole = episodes(decoder, seed)
        turns = [turn for one in whole for turn in apart(one)]
        assert len(turns) == sum(len(one.segments) for one in whole) == 12
        expected = gradient(turns)
        assert expected.norm() > 1e-3
        assert float((gradient(whole) - expected).norm() / expected.norm()) < 1e-6
    other = gradient([merged(one) for one in whole])
    assert float((other - expected).norm() / expected.norm()) > 1e-3, "a loss on what an environment says would be seen"


def test_ratios_are_means_of_a_turn_where_they_are_means() -> None:
    """gspo, two turns of 2 and 1 tokens with log-ratios 0.2, 0.4 | -0.6: s = exp(0.3), exp(0.3), exp(-0.6)."""
    one = TrainSequence(
        [9, 1, 2, 9, 3], bytes([0, 1, 1, 0, 1]), 1.0, [1.0, 1.0], columns={"behaviour": [-1.2, -1.4, -0.4]}
    )
    inputs = loss_inputs([one], torch.tensor([-1.0, -1.0, -1.0]))
    ratios = read_objective({"name": "gspo"}).ratios(inputs)  # type: ignore[attr-defined]
    assert ratios.tolist() == pytest.approx([1.349859, 1.349859, 0.548812], rel=1e-5)
    assert inputs.completions.sums(inputs.logprobs - inputs.behaviour).tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_a_factor_of_an_episode_is_of_all_its_turns(name: str) -> None:
    """The gradient is that of each turn's log-probs times a factor of the episode, in which log pi/ref is summed over
    all turns. agro and dro: of the regularised reward r - beta log pi/ref; kto: of what is felt of it beside the
    group's others; a_lol: of the advantage times the clipped ratio; sharpening: of what the reference says of it beside
    the group's others, each token times its ratio, at most 2."""
    decoder, reference, settings = model(1), model(2), objective(name)
    whole = [replace(one, advantages=one.advantages[:1] * len(one.segments)) for one in episodes(decoder, 5)]
    packed = pack_sequences(whole, torch.device("cpu"))
    logprobs = decoder(packed, 1.0)[0]
    said = reference(packed, 1.0)[0].detach()
    inputs = loss_inputs(whole, logprobs, said, values=lambda first: torch.full((6,), 0.3))
    of = inputs.completions
    assert of.count == 6 and of.turns == 12
    got = torch.autograd.grad(policy_loss(inputs, torch.zeros_like(logprobs), settings).loss, logprobs)[0]
    rewards = torch.tensor([one.advantages[0] for one in whole])
    ratios, said = of.sums((logprobs - said).detach()), of.sums(said)
    regular, weights = rewards - 0.1 * ratios, torch.tensor([one.weight for one in whole])

    def mean_of_group(values: Tensor) -> Tensor:
        return values.view(2, 3).mean(1).repeat_interleave(3)

    if name == "dro":
        factor = -weights * (regular - 0.3)
    elif name == "a_lol":
        factor = -weights * (rewards - 0.3).clamp(min=0) * ratios.exp().clamp(0.1, 1.9)
    elif name == "kto":
        signs, others = torch.where(rewards > 0.5, 1.0, -1.0), (3 * mean_of_group(ratios) - ratios) / 2
        felt = torch.sigmoid(signs * 0.1 * (ratios - others.clamp(min=0)))
        factor = -weights * signs * felt * (1 - felt)
    elif name == "sharpening":
        factor = -weights * (rewards + 1.5 * (said - mean_of_group(said)))
        got = got / (logprobs.detach() - inputs.behaviour).exp().clamp(max=2.0)
    else:  # 1/2 sum_i w_i n/(n - 1) (R_i - mean R)^2 / beta over each group of 3
        pulls = weights * (regular - mean_of_group(regular))
        factor = -1.5 * (pulls - mean_of_group(pulls))
    torch.testing.assert_close(got, factor[of.index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["return", "sequence_k2", "sequence_k3"])
def test_divergences_are_those_of_the_whole_episode(name: str) -> None:
    """All episodes of two turns of one token, with a reply that depends on the first: the expected gradient is that of
    KL(pi || ref) over both turns, what the first does to the second included."""
    shape = DecoderConfig("llama", 6, 16, 24, 1, 2, 1, 8, 1e-5, 64, tied=True)
    policy, reference, behaviour = (model(seed, shape, 4.0) for seed in (0, 1, 0 if name == "return" else 2))
    whole = [TrainSequence([0, first, (first + 2) % 6, 1, second], bytes([0, 1, 0, 0, 1]), 1.0, [0.0, 0.0], number)
             for number, (first, second) in enumerate(itertools.product(range(6), repeat=2))]  # fmt: skip
    packed = pack_sequences(whole, torch.device("cpu"))
    with torch.no_grad():
        mu, ref = (one(packed, 1.0)[0] for one in (behaviour, reference))
    for one, values in zip(whole, mu.view(-1, 2), strict=True):
        one.columns, one.weight = {"behaviour": values.tolist()}, float(values.sum().exp())
    assert sum(one.weight for one in whole) == pytest.approx(1.0, abs=1e-5)
    settings, logprobs = objective("reinforce", kl={"weight": 1.0, "gradient": name}), policy(packed, 1.0)[0]
    loss = policy_loss(loss_inputs(whole, logprobs, ref), torch.zeros_like(logprobs), settings).loss
    sums = logprobs.view(-1, 2).sum(1)
    exact = (sums.exp() * (sums - ref.view(-1, 2).sum(1))).sum()
    gradient, expected = (
        torch.cat([g.flatten() for g in torch.autograd.grad(one, list(policy.parameters()), retain_graph=True)])
        for one in (loss, exact)
    )
    assert exact > 0.01
    assert float((gradient - expected).norm() / expected.norm()) < 1e-4


def episode(
    index: int, *rewards: float | None, verdict: Verdict = Verdict.WRONG, total: float = 0.0
) -> tuple[Completion, Reward]:
    """Turns of one token each with a reply of one between them."""
    turns = [Turn(2 * turn, 2 * turn + 1, reward) for turn, reward in enumerate(rewards)]
    count = 2 * len(turns) - 1
    one = Completion(0, index, 0, [7] * count, [-1.0] * count, finish_reason="stop", turns=turns)
    return one, Reward(total, 0.0, total, 0.0, 0.0, verdict)


def group_of(*pairs: tuple[Completion, Reward]) -> Group:
    prompt = Prompt(0, Problem("p", "?", "1", environment="guess"), [1, 2])
    return Group(prompt, [one for one, _ in pairs], [reward for _, reward in pairs], [""] * len(pairs))


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
def test_a_turn_is_credited_with_the_discounted_rewards_from_it_on(
    group: Group, name: str, discount: float, expected: list[list[float] | None]
) -> None:
    [rows] = turn_advantages([group], read_objective({"name": name}).advantage, discount)
    assert rows == [None if row is None else pytest.approx(row) for row in expected]


def test_sequences_carry_the_advantages_of_their_turns() -> None:
    plain = read_objective({"name": "dr_grpo"})

    def trained(group: Group, **environment: Any) -> list[list[float]]:
        return [each.advantages for each in train_sequences([group], plain, settings_of(credit="turn", **environment))]

    three = group_of(episode(0, 1.0, 0.0), episode(1, 0.0, 1.0), episode(2, 0.0, 0.0))
    assert trained(three) == [pytest.approx(row) for row in ([1 / 3, -1 / 3], [1 / 3, 2 / 3], [-2 / 3, -1 / 3])]
    two = group_of(episode(0, 0.0, 2.0), episode(1, 0.0, 0.0))  # "retry" without a reward for the first answer
    assert trained(two, discount=0.0) == [[0.0, 1.0], [0.0, -1.0]]


def test_objectives_that_cannot_be_trained_on_episodes_say_why() -> None:
    refused = {name for name, one in PUBLISHED.items() if one.kind.several_turns}
    assert refused == {"f_dpg", "jepo", "spo"}
    for name in refused:
        line = objective(name).refusal("guess")
        assert f'objective.name = "{NAMES[name]}"' in line and '"guess"' in line and "use another objective" in line
    assert objective("magistral").refusal("guess") == ""
    assert "compares answers" in objective("majority").refusal("guess")
    config = settings_of(name="guess").model_copy(update={"objective": {"name": "spo"}})
    assert any("samples its soft values" in line for line in complaints(config))


@pytest.mark.parametrize("advantage", ["pass_at_k", "maxrl", "each_reward"])
def test_credit_by_turn_needs_a_mean_to_compare_with(advantage: str) -> None:
    config = settings_of(credit="turn").model_copy(
        update={"objective": {"name": "reinforce", "advantage": {"kind": advantage}}}
    )
    assert any("environment.credit" in line and '"leave_one_out"' in line for line in complaints(config))
    allowed = config.model_copy(update={"objective": {"name": "rloo"}})
    assert not any("environment.credit" in line for line in complaints(allowed))


def test_a_discount_without_credit_by_turn_is_refused() -> None:
    [line] = read_objective({"name": "dr_grpo"}).contradictions(settings_of(discount=0.5))
    assert line.startswith("environment.discount = 0.5 has no effect")
