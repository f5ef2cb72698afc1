"""Operations by hand, beside what torch counts, of what a trainer rank says; and peaks of cards by their names."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lab.plan.times import training_flops
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder, initialise
from shared.types import CONTEXT, SAMPLED, MicroBatch, TrainSequence
from tests.packed import pack_from
from trainer.step.flops import forward_flops, packed_flops, peak_of
from trainer.step.forward_backward import StepSums, forward_backward
from trainer.step.rank import Stepped
from trainer.step_metrics import speed_metrics

TINY = DecoderConfig("llama", 40, 16, 32, layers=2, heads=2, key_heads=1, head_dim=8, norm_epsilon=1e-5,
                     max_positions=64, tied=True)  # fmt: skip


def test_operations_by_hand():
    shape = DecoderConfig("llama", 10, 4, 8, layers=2, heads=2, key_heads=1, head_dim=2, norm_epsilon=1e-5,
                          max_positions=64, tied=True)  # fmt: skip
    # query, key, value 4 * 8, output 4 * 4, feed-forward 3 * 4 * 8; 5 tokens, 3 of them with a loss
    projections = 2 * 32 * 5 + (16 + 96) * (5 + 3)
    assert 3 * packed_flops(shape, [3, 2], [-1, -1], 3) == 6 * (projections + 10 * 4 * 3 + 2 * 2 * 2 * (9 + 4))
    shared = 3 * packed_flops(shape, [3, 2], [-1, 0], 3)
    assert shared == 6 * (projections + 10 * 4 * 3 + 2 * 2 * 2 * (9 + 2 * (2 + 2 * 3)))


def test_operations_are_those_that_torch_counts_less_what_is_done_twice(monkeypatch):
    monkeypatch.setattr("shared.model.cpu.cpu_decoder.ROWS", 1)  # no stand-ins
    config = TINY
    decoder, length = Decoder(config), 12
    initialise(decoder, 0)
    decoder.to(torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = decoder(pack_from([list(range(length))], [1]))
        logprobs.sum().backward()
    loss_tokens = length - 1
    head = config.vocab_size * config.hidden_size * loss_tokens
    pairs = config.layers * config.heads * config.head_dim * length**2
    # logits are formed twice, and torch does not count the head's two gradients, which are added in place; attention
    # is counted whole, not its causal half, and its scores are formed twice
    twice = (2 - 4) * head + (14 - 6) * pairs
    assert counter.get_total_flops() == 3 * packed_flops(config, [length], [-1], loss_tokens) + twice


def test_plans_count_the_same_operations():
    lengths = [10, 20]
    assert training_flops(TINY, 30, 500) == 3 * packed_flops(TINY, lengths, [-1, -1], 30)
    assert forward_flops(TINY, 1, 1, 2 * 5) == 2 * TINY.products + 4 * TINY.layers * TINY.heads * TINY.head_dim * 5


def test_a_trainer_counts_what_its_micro_batches_hold():
    """Two completions of one prompt, which is stored once, a sequence of its own, and an empty micro-batch."""
    decoder = Decoder(TINY)
    initialise(decoder, 0)
    mask = bytes([CONTEXT] * 3 + [SAMPLED] * 2)
    shared, alone = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], [3, 2, 1, 4, 5]

    def batch(*sequences: list[int]) -> MicroBatch:
        return MicroBatch([TrainSequence(tokens, mask, 0.1, [1.0], 0, {}) for tokens in sequences])

    sums = forward_backward(decoder, [batch(*shared), batch(alone), batch()], 1.0, None)
    packed = pack_from(shared, [3, 3])
    assert packed.lengths == (3, 1, 1) and packed.prefixes == (-1, 0, 0) and len(packed.targets) == 4
    together = packed_flops(TINY, [3, 1, 1], [-1, 0, 0], 4)
    assert sums.flops == 3 * (together + packed_flops(TINY, [5], [-1], 2))


def test_speed_by_hand():
    sums, stepped = StepSums({}, {}, seconds=3.0, tokens=10, flops=8e12), Stepped(1.0, seconds=1.0)
    assert speed_metrics(sums, stepped, trainers=2, peak_flops=0.0) == {"tflops_per_device": 1.0}
    assert speed_metrics(sums, stepped, trainers=2, peak_flops=4e12) == {"tflops_per_device": 1.0, "mfu": 0.25}


@pytest.mark.parametrize(("card", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA H20", 148), ("NVIDIA GH200 480GB", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA B200", 2250),
    ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165), ("Tesla T4", 0), ("", 0),
])  # fmt: skip
def test_peaks(card, tflops):
    assert peak_of(card) == tflops * 1e12
