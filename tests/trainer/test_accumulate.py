import math

import pytest
import torch

from shared.config import Objective
from shared.errors import NonFinite, RunError
from shared.model import Decoder, DecoderConfig, initialise
from shared.types import MicroBatch, TrainSequence
from trainer.accumulate import accumulate, check, loss_tensors

SHAPE = DecoderConfig("llama", 32, 16, 24, 1, 2, 1, 8, 1e-5, 64, tied=True)


def sequence(completion: list[int], logprobs: list[float], advantage: float = 1.0) -> TrainSequence:
    return TrainSequence([1, 2, *completion], 2, logprobs, advantage, weight=0.5)


def test_tokens_carry_the_values_of_their_completion() -> None:
    found = loss_tensors(
        [sequence([3], [-1.0], 2.0), sequence([4, 5], [-2.0, -3.0], -1.0)], False, torch.device("cpu")
    )
    assert found["behaviour_logprobs"].tolist() == [-1, -2, -3]
    assert found["advantages"].tolist() == [2, -1, -1]
    assert found["weights"].tolist() == [0.5, 0.5, 0.5]
    assert loss_tensors([], False, torch.device("cpu"))["weights"].shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_log_prob_is_located(value: float) -> None:
    with pytest.raises(NonFinite, match=r"completion position 2 \(token id 7\)"):
        check(sequence([5, 6, 7], [-1.0, -1.0, value]), supervised=False)


def test_a_bad_advantage_is_refused() -> None:
    with pytest.raises(NonFinite, match="advantage nan"):
        check(sequence([5], [-1.0], math.nan), supervised=True)


def test_as_many_log_probs_as_completion_tokens_are_needed() -> None:
    with pytest.raises(RunError, match="1 log-probs came with a completion of 2 tokens"):
        check(sequence([5, 6], [-1.0]), supervised=False)
    check(sequence([5, 6], []), supervised=True)
    with pytest.raises(RunError, match="at least one token"):
        check(sequence([], []), supervised=True)


def test_temperature_changes_log_probs_as_sampling_does() -> None:
    """With behaviour log-probs taken at a temperature, scoring at that temperature finds no difference."""
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    completion = [3, 4, 5]
    for temperature in (0.6, 1.0, 1.3):
        logits = decoder(_packed([1, 2, *completion]), output="logits")[1:4] / temperature
        logprobs = logits.log_softmax(-1)[torch.arange(3), torch.tensor(completion)].tolist()
        batch = [MicroBatch([sequence(completion, logprobs)])]
        reply = accumulate(decoder, batch, "clip_higher", temperature, Objective())
        assert reply.maxima["abs_logprob_difference"] < 1e-5
        assert reply.sums["ratio"] == pytest.approx(3, abs=1e-5) and reply.tokens == 5


def test_dummies_alone_give_zero_gradients_for_every_parameter() -> None:
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    reply = accumulate(decoder, [MicroBatch([])], "clip_higher", 1.0, Objective())
    assert reply.sums["tokens"] == reply.sums["loss"] == reply.tokens == 0 and reply.maxima == {}
    for parameter in decoder.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    decoder = Decoder(SHAPE)
    initialise(decoder, 0)
    with torch.no_grad():
        decoder.model.norm.weight.fill_(math.nan)
    with pytest.raises(NonFinite, match="loss is nan over 1 tokens"):
        accumulate(decoder, [MicroBatch([sequence([3], [-1.0])])], "reinforce", 1.0, Objective())


def _packed(ids: list[int]):  # type: ignore[no-untyped-def]
    from shared.packing import pack

    return pack([ids], [1])
