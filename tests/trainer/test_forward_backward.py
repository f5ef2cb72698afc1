import math
from typing import Any

import pytest
import torch

from shared.errors import NonFinite, RunError
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.types import MicroBatch, TrainSequence
from tests.packed import pack_from
from tests.trainer.sequences import make_sequence
from trainer.objectives.inputs import loss_inputs
from trainer.objectives.kl import GRADIENTS
from trainer.objectives.registry import read_objective
from trainer.step.forward_backward import (
    AuxiliaryModels,
    StepSums,
    check,
    compute_old_logprobs,
    forward_backward,
    pack_sequences,
)
from trainer.step.value_head import ValueHead

PLAIN = read_objective({})
SHAPE = DecoderConfig("llama", 32, 16, 24, 1, 2, 1, 8, 1e-5, 64, tied=True)


def sequence(completion: list[int], logprobs: list[float], advantage: float = 1.0) -> TrainSequence:
    return make_sequence([1, 2, *completion], 2, logprobs, advantage, weight=0.5)


def test_tokens_carry_the_values_of_their_completion() -> None:
    found = loss_inputs([sequence([3], [-1.0], 2.0), sequence([4, 5], [-2.0, -3.0], -1.0)], torch.zeros(3))
    assert found.behaviour.tolist() == [-1, -2, -3] and found.imitated is None
    assert found.advantages.tolist() == [2, -1, -1]
    assert found.weights.tolist() == [0.5, 0.5, 0.5]
    assert loss_inputs([], torch.zeros(0)).weights.shape == (0,)


def test_segments_have_advantages_of_their_own_and_what_an_environment_says_has_no_loss() -> None:
    """Two turns with a reply of two tokens between them: the reply is context, predicted by nothing in the loss."""
    turns = TrainSequence(
        [1, 2, 3, 4, 8, 8, 5], bytes([0, 0, 1, 1, 0, 0, 1]), 0.5, [2.0, -1.0],
        columns={"behaviour": [-1.0, -2.0, -3.0]},
    )  # fmt: skip
    assert (turns.prompt_tokens, turns.loss_tokens, turns.segments) == (2, 3, [2, 1])
    check(turns, sft=False)
    assert loss_inputs([turns], torch.zeros(3)).advantages.tolist() == [2, 2, -1]
    packed = pack_sequences([turns], torch.device("cpu"))
    assert packed.targets.tolist() == [3, 4, 5] and packed.loss_positions.tolist() == [1, 2, 5]
    decoder = model(1)
    logits = decoder(packed, output="logits").log_softmax(-1)
    expected = [logits[position, target].item() for position, target in ((1, 3), (2, 4), (5, 5))]
    assert compute_old_logprobs(decoder, [MicroBatch([turns])], 1.0)[0] == pytest.approx(expected, abs=1e-5)
    forward_backward(decoder, [MicroBatch([turns])], 1.0, PLAIN)
    with pytest.raises(RunError, match="1 advantages came with 2 segments"):
        check(TrainSequence(turns.token_ids, turns.mask, 0.5, [1.0], columns=turns.columns), sft=False)


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        *((sequence([5, 6, 7], [-1.0, -1.0, bad]), NonFinite, r"position 2 \(token id 7\)")
          for bad in (math.nan, math.inf, -math.inf)),
        (sequence([5], [-1.0], math.nan), NonFinite, r"advantages \[nan\]"),
        # infinities of both signs too, whose sum is no number
        *((make_sequence([1, 2, 5, 6], 2, [-1.0, -1.0], 1.0, 0.5, teacher=bad), NonFinite, r"objective\.teacher")
          for bad in ([math.nan, -1.0], [math.inf, -math.inf])),
        (sequence([5, 6], [-1.0]), RunError, r"1 log-probs \(behaviour\) .* 2 tokens"),
        (make_sequence([1, 2, 3, 9, 9], 2, [-1.0], 0.0, 1.0), RunError, r"1 log-probs \(behaviour\) .* 3 tokens"),
        (sequence([], []), RunError, "at least one token"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(given: TrainSequence, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        check(given, sft=False)


def test_demonstrations_need_no_log_probs_but_sound_numbers() -> None:
    check(make_sequence([1, 2, 5, 6], 2, None, 0.0, 0.5), sft=True)
    for given in (sequence([5], [-1.0], math.nan), sequence([], [])):
        with pytest.raises((NonFinite, RunError)):
            check(given, sft=True)


def test_temperature_changes_log_probs_as_sampling_does() -> None:
    """With behaviour log-probs taken at a temperature, scoring at that temperature finds no difference."""
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    completion = [3, 4, 5]
    for temperature in (0.6, 1.0, 1.3):
        logits = decoder(pack_from([[1, 2, *completion]], [1]), output="logits")[1:4] / temperature
        logprobs = logits.log_softmax(-1)[torch.arange(3), torch.tensor(completion)].tolist()
        batch = [MicroBatch([sequence(completion, logprobs)])]
        reply = forward_backward(decoder, batch, temperature, PLAIN)
        assert reply.maxima["abs_logprob_difference"] < 1e-5
        assert reply.sums["ratio"] == pytest.approx(3, abs=1e-5) and reply.tokens == 5


def test_dummies_alone_give_zero_gradients_for_every_parameter() -> None:
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    reply = forward_backward(decoder, [MicroBatch([])], 1.0, PLAIN)
    assert reply.sums["tokens"] == reply.sums["loss"] == reply.tokens == 0 and reply.maxima == {}
    for parameter in decoder.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    with torch.no_grad():
        decoder.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFinite, match="loss is nan over 1 tokens"):
        forward_backward(decoder, [MicroBatch([sequence([3], [-1.0])])], 1.0, PLAIN)


def model(seed: int) -> Decoder:
    decoder = Decoder(SHAPE)
    initialise(decoder, seed)
    with torch.no_grad():
        decoder.model.norm.weight.mul_(20)  # far from uniform
    return decoder


SEQUENCES = [sequence([3, 4, 5], [-3.0] * 3), sequence([6], [-2.0], -1.0), sequence([7, 8], [-4.0] * 2, 0.5)]


def trained(
    batches: list[MicroBatch], settings: dict[str, Any] | None, reference: Decoder | None = None
) -> tuple[StepSums, dict[str, torch.Tensor]]:
    decoder = model(1)
    reply = forward_backward(
        decoder, batches, 0.7, None if settings is None else read_objective(settings), AuxiliaryModels(reference)
    )
    return reply, {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", GRADIENTS)
def test_regularised_steps_do_not_depend_on_packing(name: str) -> None:
    settings = {"kl": {"weight": 0.3, "gradient": name}, "entropy_bonus": 0.1}
    reference = model(2)
    one, packed = trained([MicroBatch(SEQUENCES)], settings, reference)
    cut = [MicroBatch([s]) for s in SEQUENCES] + [MicroBatch([])]
    four, single = trained(cut, settings, reference)
    assert four.sums == pytest.approx(one.sums, rel=1e-5) and abs(one.sums["reference_log_ratio"]) > 0.1
    for key, gradient in packed.items():
        torch.testing.assert_close(single[key], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)
    _, plain = trained([MicroBatch(SEQUENCES)], {})
    assert max(float((packed[key] - plain[key]).abs().max()) for key in plain) > 0.01
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_a_reference_equal_to_the_policy_changes_nothing() -> None:
    _, plain = trained([MicroBatch(SEQUENCES)], {})
    for name in GRADIENTS:
        reply, found = trained([MicroBatch(SEQUENCES)], {"kl": {"weight": 0.5, "gradient": name}}, model(1))
        assert reply.sums["reference_log_ratio"] == reply.sums["regularisation"] == 0
        assert all(torch.equal(found[key], plain[key]) for key in plain)


def test_without_kl_and_in_imitation_the_reference_is_not_run() -> None:
    """A reference of NaNs: it would spoil whatever it touches."""
    spoilt = model(1)
    with torch.no_grad():
        spoilt.model.norm.weight.fill_(math.nan)
    for settings in ({}, None):
        expected, plain = trained([MicroBatch(SEQUENCES)], settings)
        reply, found = trained([MicroBatch(SEQUENCES)], settings, spoilt)
        assert reply.sums == expected.sums and all(torch.equal(found[key], plain[key]) for key in plain)
    with pytest.raises(NonFinite, match="loss is nan"):
        trained([MicroBatch(SEQUENCES)], {"kl": {"weight": 0.5}}, spoilt)


@pytest.mark.parametrize(
    ("needed", "settings"),
    [
        ("reference model", {"kl": {"weight": 0.5}}),
        ("value head", {"name": "dro"}),
        ("teacher", {"name": "distill", "teacher": {"kind": "local", "path": "somewhere"}}),
    ],
)
def test_what_the_objective_needs_and_is_not_there_is_an_error(needed: str, settings: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=f"needs a {needed}"):
        trained([MicroBatch(SEQUENCES)], settings, None if needed == "reference model" else model(2))


def test_a_teacher_in_the_trainers_says_what_one_behind_an_address_does() -> None:
    settings = read_objective({"name": "distill", "teacher": {"kind": "local", "path": "somewhere"}})
    teacher, decoder, again = model(2), model(1), model(1)
    here = forward_backward(decoder, [MicroBatch(SEQUENCES)], 1.0, settings, AuxiliaryModels(teacher=teacher))
    told = [
        make_sequence(s.token_ids, 2, s.columns["behaviour"], s.advantages[0], s.weight, teacher=logprobs)
        for s, logprobs in zip(SEQUENCES, compute_old_logprobs(teacher, [MicroBatch(SEQUENCES)], 1.0), strict=True)
    ]
    # the second only keeps up with a rank that has more to do
    there = forward_backward(again, [MicroBatch(told), MicroBatch([])], 1.0, settings)
    assert there.sums == pytest.approx(here.sums) and abs(here.sums["teacher_log_ratio"]) > 0.1
    for one, other in zip(decoder.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_log_probs_of_the_start_of_a_batch_are_those_of_the_policy() -> None:
    """Recalled from the same weights they change nothing; from others the clip acts against them."""
    settings = read_objective({"name": "decoupled_ppo"})

    def recalled(source: Decoder) -> list[TrainSequence]:
        return [
            make_sequence(s.token_ids, 2, s.columns["behaviour"], s.advantages[0], s.weight, old=logprobs)
            for s, logprobs in zip(SEQUENCES, compute_old_logprobs(source, [MicroBatch(SEQUENCES)], 0.7), strict=True)
        ]

    plain, same, moved = (model(1) for _ in range(3))
    expected = forward_backward(plain, [MicroBatch(SEQUENCES)], 0.7, settings)
    found = forward_backward(same, [MicroBatch(recalled(model(1)))], 0.7, settings)
    assert found.sums["loss"] == pytest.approx(expected.sums["loss"], abs=1e-6)
    for one, other in zip(plain.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)
    shifted = forward_backward(moved, [MicroBatch(recalled(model(2)))], 0.7, settings)
    assert shifted.sums["clipped_low"] + shifted.sums["clipped_high"] > 0


def test_a_ground_truth_answer_is_trained_and_was_not_sampled() -> None:
    """jepo: the reasoning of two completions, then the tokens 9 9; a sequence without log-probs for them."""
    group = [
        make_sequence([1, 2, *reasoning, 9, 9], 2, [-2.0] * len(reasoning), 0.0, 0.5, 7, imitated=2)
        for reasoning in ([3, 4], [5])
    ]
    decoder = model(1)
    found = forward_backward(decoder, [MicroBatch(group)], 0.7, read_objective({"name": "jepo"}))
    assert found.sums["tokens"] == 3 and math.isfinite(found.sums["loss"])
    assert any(parameter.grad.abs().max() > 0 for parameter in decoder.parameters() if parameter.grad is not None)


def test_the_value_head_learns_the_mean_reward_of_its_prompt() -> None:
    """With the policy at its reference and never moved, V goes to the mean of r - beta l = r."""
    decoder, head = model(1), ValueHead(SHAPE.hidden_size, 0.05)
    settings = read_objective({"name": "dro"})
    group = [make_sequence([1, 2, 3], 2, [-2.0], advantage, 0.5) for advantage in (1.0, 0.0)]
    auxiliary = AuxiliaryModels(model(1), values=head)
    for _ in range(150):
        forward_backward(decoder, [MicroBatch(group)], 1.0, settings, auxiliary)
        head.step()
    _, _, states = decoder(pack_from([[1, 2, 3]], [1]), 1.0, "states")
    assert head(states[1:2]).item() == pytest.approx(0.5, abs=0.01)
