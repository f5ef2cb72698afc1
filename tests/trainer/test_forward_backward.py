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

SHAPE = DecoderConfig("llama", 32, 16, 24, 1, 2, 1, 8, 1e-5, 64, tied=True)
LOCAL = {"name": "distill", "teacher": {"kind": "local", "path": "somewhere"}}


def sequence(completion: list[int], logprobs: list[float], advantage: float = 1.0) -> TrainSequence:
    return make_sequence([1, 2, *completion], 2, logprobs, advantage, weight=0.5)


SEQUENCES = [sequence([3, 4, 5], [-3.0] * 3), sequence([6], [-2.0], -1.0), sequence([7, 8], [-4.0] * 2, 0.5)]


def model(seed: int, norm: float = 20.0) -> Decoder:
    """Far from uniform."""
    decoder = Decoder(SHAPE)
    initialise(decoder, seed)
    with torch.no_grad():
        decoder.model.norm.weight.mul_(norm)
    return decoder


def trained(
    settings: dict[str, Any] | None, reference: Decoder | None = None, *cut: list[TrainSequence],
    teacher: Decoder | None = None, temperature: float = 0.7,
) -> tuple[StepSums, list[torch.Tensor]]:  # fmt: skip
    """Sums and gradients of a step on SEQUENCES, as they are or cut into micro-batches."""
    decoder, objective = model(1), None if settings is None else read_objective(settings)
    batches = [MicroBatch(part) for part in cut or [SEQUENCES]]
    reply = forward_backward(decoder, batches, temperature, objective, AuxiliaryModels(reference, teacher=teacher))
    return reply, [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]


def with_column(name: str, source: Decoder, temperature: float) -> list[TrainSequence]:
    """SEQUENCES, with the log-probs of another model."""
    columns = compute_old_logprobs(source, [MicroBatch(SEQUENCES)], temperature)
    return [
        make_sequence(s.token_ids, 2, s.columns["behaviour"], s.advantages[0], s.weight, **{name: logprobs})
        for s, logprobs in zip(SEQUENCES, columns, strict=True)
    ]


def test_tokens_carry_the_values_of_their_completion_and_of_their_segment():
    """Two turns with a reply of two tokens between them: the reply is context, predicted by nothing in the loss."""
    inputs = loss_inputs([sequence([3], [-1.0], 2.0), sequence([4, 5], [-2.0, -3.0], -1.0)], torch.zeros(3))
    assert inputs.behaviour.tolist() == [-1, -2, -3] and inputs.imitated is None
    assert inputs.advantages.tolist() == [2, -1, -1] and inputs.weights.tolist() == [0.5, 0.5, 0.5]
    assert loss_inputs([], torch.zeros(0)).weights.shape == (0,)
    columns = {"behaviour": [-1.0, -2.0, -3.0]}
    turns = TrainSequence([1, 2, 3, 4, 8, 8, 5], bytes([0, 0, 1, 1, 0, 0, 1]), 0.5, [2.0, -1.0], columns=columns)
    assert (turns.prompt_tokens, turns.loss_tokens, turns.segments) == (2, 3, [2, 1])
    check(turns, sft=False)
    assert loss_inputs([turns], torch.zeros(3)).advantages.tolist() == [2, 2, -1]
    packed, decoder = pack_sequences([turns], torch.device("cpu")), model(1)
    assert packed.targets.tolist() == [3, 4, 5] and packed.loss_positions.tolist() == [1, 2, 5]
    logits = decoder(packed, output="logits").log_softmax(-1)
    expected = [logits[position, target].item() for position, target in ((1, 3), (2, 4), (5, 5))]
    assert compute_old_logprobs(decoder, [MicroBatch([turns])], 1.0)[0] == pytest.approx(expected, abs=1e-5)
    forward_backward(decoder, [MicroBatch([turns])], 1.0, read_objective({}))


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
        (TrainSequence([1, 2, 3, 4], bytes([0, 1, 0, 1]), 0.5, [1.0], columns={"behaviour": [-1.0, -1.0]}), RunError,
         "1 advantages came with 2 segments"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(given, error, named):
    with pytest.raises(error, match=named):
        check(given, sft=False)


def test_demonstrations_need_no_log_probs_but_sound_numbers():
    check(make_sequence([1, 2, 5, 6], 2, None, 0.0, 0.5), sft=True)
    for given in (sequence([5], [-1.0], math.nan), sequence([], [])):
        with pytest.raises((NonFinite, RunError)):
            check(given, sft=True)


def test_temperature_changes_log_probs_as_sampling_does():
    """With behaviour log-probs taken at a temperature, scoring at that temperature finds no difference."""
    decoder, completion = model(0, 1.0), [3, 4, 5]
    for temperature in (0.6, 1.0, 1.3):
        logits = decoder(pack_from([[1, 2, *completion]], [1]), output="logits")[1:4] / temperature
        logprobs = logits.log_softmax(-1)[torch.arange(3), torch.tensor(completion)].tolist()
        batch = [MicroBatch([sequence(completion, logprobs)])]
        reply = forward_backward(decoder, batch, temperature, read_objective({}))
        assert reply.maxima["abs_logprob_difference"] < 1e-5
        assert reply.sums["ratio"] == pytest.approx(3, abs=1e-5) and reply.tokens == 5


def test_dummies_alone_give_zero_gradients_for_every_parameter():
    reply, gradients = trained({}, None, [])
    assert reply.sums["tokens"] == reply.sums["loss"] == reply.tokens == 0 and reply.maxima == {}
    assert len(gradients) == len([*model(1).parameters()]) and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", GRADIENTS)
def test_regularised_steps_do_not_depend_on_packing(name):
    """A reference equal to the policy changes nothing."""
    settings, reference = {"kl": {"weight": 0.3, "gradient": name}, "entropy_bonus": 0.1}, model(2)
    whole, packed = trained(settings, reference)
    four, single = trained(settings, reference, *([s] for s in SEQUENCES), [])
    assert four.sums == pytest.approx(whole.sums, rel=1e-5) and abs(whole.sums["reference_log_ratio"]) > 0.1
    _, plain = trained({})
    for cut, gradient in zip(single, packed, strict=True):
        torch.testing.assert_close(cut, gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)
    assert max(float((each - other).abs().max()) for each, other in zip(packed, plain, strict=True)) > 0.01
    assert all(parameter.grad is None for parameter in reference.parameters())
    reply, same = trained({"kl": {"weight": 0.5, "gradient": name}}, model(1))
    assert reply.sums["reference_log_ratio"] == reply.sums["regularisation"] == 0
    assert all(torch.equal(each, other) for each, other in zip(same, plain, strict=True))


def test_without_kl_and_in_imitation_the_reference_is_not_run():
    """A reference of NaNs: it would spoil whatever it touches. A loss that is not finite is an error."""
    spoilt = model(1, math.nan)
    for settings in ({}, None):
        (expected, plain), (reply, gradients) = trained(settings), trained(settings, spoilt)
        assert reply.sums == expected.sums
        assert all(torch.equal(each, other) for each, other in zip(gradients, plain, strict=True))
    with pytest.raises(NonFinite, match="loss is nan over 6 tokens"):
        trained({"kl": {"weight": 0.5}}, spoilt)


@pytest.mark.parametrize(
    ("needed", "settings"),
    [("reference model", {"kl": {"weight": 0.5}}), ("value head", {"name": "dro"}), ("teacher", LOCAL)],
)
def test_what_the_objective_needs_and_is_not_there_is_an_error(needed, settings):
    with pytest.raises(RunError, match=f"needs a {needed}"):
        trained(settings, None if needed == "reference model" else model(2))


def test_a_teacher_in_the_trainers_says_what_one_behind_an_address_does():
    here, gradients = trained(LOCAL, teacher=model(2), temperature=1.0)
    # the second only keeps up with a rank that has more to do
    there, same = trained(LOCAL, None, with_column("teacher", model(2), 1.0), [], temperature=1.0)
    assert there.sums == pytest.approx(here.sums) and abs(here.sums["teacher_log_ratio"]) > 0.1
    torch.testing.assert_close(same, gradients)


def test_the_log_probs_of_the_start_of_a_batch_are_those_of_the_policy():
    """Recalled from the same weights they change nothing; from others the clip acts against them."""
    settings = {"name": "decoupled_ppo"}
    expected, gradients = trained(settings)
    reply, same = trained(settings, None, with_column("old", model(1), 0.7))
    assert reply.sums["loss"] == pytest.approx(expected.sums["loss"], abs=1e-6)
    torch.testing.assert_close(same, gradients, atol=1e-6, rtol=1e-4)
    shifted, _ = trained(settings, None, with_column("old", model(2), 0.7))
    assert shifted.sums["clipped_low"] + shifted.sums["clipped_high"] > 0


def test_a_ground_truth_answer_is_trained_and_was_not_sampled():
    """jepo: the reasoning of two completions, then the tokens 9 9; a sequence without log-probs for them."""
    group = [
        make_sequence([1, 2, *reasoning, 9, 9], 2, [-2.0] * len(reasoning), 0.0, 0.5, 7, imitated=2)
        for reasoning in ([3, 4], [5])
    ]
    reply, gradients = trained({"name": "jepo"}, None, group)
    assert reply.sums["tokens"] == 3 and math.isfinite(reply.sums["loss"])
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("value", "slope"), [(0.0, -0.5), (0.5, 0.0), (1.0, 0.5)])
def test_the_value_head_is_drawn_to_the_mean_reward_of_its_prompt(value, slope):
    """With the policy at its reference the gradient of V is sum_i weight_i (V - r_i), of rewards 1 and 0."""
    decoder, head = model(1), ValueHead(SHAPE.hidden_size, 0.05)
    torch.nn.init.constant_(head.bias, value)
    group = [make_sequence([1, 2, 3], 2, [-2.0], advantage, 0.5) for advantage in (1.0, 0.0)]
    auxiliary = AuxiliaryModels(model(1), values=head)
    forward_backward(decoder, [MicroBatch(group)], 1.0, read_objective({"name": "dro"}), auxiliary)
    _, _, states = decoder(pack_from([[1, 2, 3]], [1]), 1.0, "states")
    assert head.bias.grad.item() == pytest.approx(slope, abs=1e-6)
    torch.testing.assert_close(head.weight.grad, slope * states[1] / SHAPE.hidden_size**0.5, atol=1e-5, rtol=1e-4)
