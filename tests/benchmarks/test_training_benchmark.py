"""What the training benchmark counts and compares: operations, sequences, the peer's batches and its mathematics."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import head_memory
from benchmarks.llama import Shape
from benchmarks.step import (
    LONGEST_TOKENS,
    PROMPT_TOKENS,
    Rank,
    alone,
    draw,
    draw_lengths,
    make_sequences,
    micro_batches,
    token_count,
    work,
)
from benchmarks.step_peer import Peer, Variant, pad, padded_batches
from benchmarks.training import FULL, HEAD_TARGET, QUICK, compared, fastest
from shared.model.decoder import Decoder, initialise
from tests.process import in_fresh_process
from trainer.objectives.registry import read_objective
from trainer.step import fsdp
from trainer.step.forward_backward import forward_backward

TINY = Shape(hidden=16, layers=2, heads=2, kv_heads=1, inner=32, vocabulary=40)
CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [1024, 4096, 16_384])
def test_lengths_add_up_and_each_has_a_completion(tokens: int) -> None:
    lengths = draw_lengths(tokens, 0)
    assert sum(lengths) == tokens and lengths == draw_lengths(tokens, 0) != draw_lengths(tokens, 1)
    assert min(lengths) >= PROMPT_TOKENS + 16 and max(lengths) < LONGEST_TOKENS + PROMPT_TOKENS + 16


def test_micro_batches_hold_every_token_and_groups_can_share_a_prompt() -> None:
    batches = micro_batches(draw(4096, 0, 40), 2048)
    assert token_count(batches) == 4096 and len(batches) >= 2
    apart, together = (make_sequences([20] * 8, 40, 10, 4, one_prompt) for one_prompt in (False, True))
    assert len({tuple(sequence.token_ids[:10]) for sequence in apart}) == 8
    assert len({tuple(sequence.token_ids[:10]) for sequence in together}) == 2
    assert sum(sequence.weight * 10 for sequence in apart) == pytest.approx(1)
    assert work(TINY.decoder, micro_batches(together, 400)) < work(TINY.decoder, micro_batches(apart, 400))


def test_padded_batches_by_hand() -> None:
    assert padded_batches([5, 9, 3, 8], 18) == [[1, 3], [0, 2]]
    assert padded_batches([50, 2], 18) == [[0], [1]], "one that is too long stands alone"


def test_the_peer_pads_on_the_right() -> None:
    batch = pad(make_sequences([5, 4], 40, 2), CPU)
    assert batch.mask.tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
    assert batch.weights.tolist()[1] == pytest.approx([-0.2, -0.2, 0.0])
    assert batch.behaviour.tolist()[0] == pytest.approx([-math.log(40)] * 3)


def test_the_peer_has_the_gradients_of_ours() -> None:
    sequences = make_sequences([9, 14, 11], 40, 4)
    decoder = Decoder(TINY.decoder)
    initialise(decoder, 0)
    forward_backward(decoder, micro_batches(sequences, 20), 1.0, read_objective({}))
    peer = Peer(TINY, "float32", CPU)
    peer.model.load_state_dict(decoder.state_dict(), strict=False)
    for chosen in padded_batches([9, 14, 11], 28):
        peer.loss(pad([sequences[index] for index in chosen], CPU)).backward()
    theirs = {name: parameter.grad for name, parameter in peer.model.named_parameters()}
    assert theirs.keys() == dict(decoder.named_parameters()).keys()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_alone_makes_a_step(dtype: str) -> None:
    in_fresh_process(one_step, dtype)


def one_step(dtype: str) -> None:
    """In a process of its own."""
    batches = micro_batches(draw(256, 0, 40), 128)
    with alone(CPU) as mesh:
        rank = Rank(TINY.decoder, dtype, mesh, CPU)
        before = [fsdp.local(parameter).clone() for parameter in rank.decoder.parameters()]
        assert rank.step(batches) > 0
        moved = [bool((fsdp.local(parameter) != old).any())
                 for parameter, old in zip(rank.decoder.parameters(), before, strict=True)]  # fmt: skip
    assert all(moved)


def test_the_fastest_setting_and_times_of_an_operation() -> None:
    slow, quick = Variant("autocast", 2048), Variant("bfloat16", 4096)
    assert fastest({slow: [3.0, 4.0], quick: [1.0, 9.0, 2.0]}) == quick
    assert compared({256: [0.2, 0.2], 1024: [0.4, 0.2]}) == {1024: [2.0, 1.0]}


def test_memory_that_grows_with_both_is_what_is_left() -> None:
    def memory(tokens: int, vocabulary: int) -> int:
        return 7 + 3 * tokens + 5 * vocabulary + 4 * tokens * vocabulary

    sizes = [(8, 20), (8, 5), (2, 20), (2, 5)]
    assert head_memory.interaction(*(memory(n, v) for n, v in sizes)) == 4 * (8 - 2) * (20 - 5)
    assert head_memory.interaction(*(memory(n, v) - 4 * n * v for n, v in sizes)) == 0


def test_memory_of_the_head_stands_beside_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_memory, "measured", lambda tokens, vocabulary: 640 + tokens * vocabulary)
    assert head_memory.beside_logits(8, 20) == (1.25, 0.25), "float32 logits: 640 bytes"


@pytest.mark.slow
def test_a_child_measures_the_head() -> None:
    found = head_memory.measured(512, 8192)
    assert found >= 4 * 8192 * head_memory.HIDDEN, "the gradient of the weights in float32 is part of it"


@pytest.mark.soak  # in make test: its parts, above
@pytest.mark.slow
def test_the_memory_of_the_head_does_not_grow_with_tokens_times_vocabulary() -> None:
    assert head_memory.beside_logits(4096, 16_384)[1] < HEAD_TARGET


def test_loads_can_be_measured() -> None:
    for load in (FULL, QUICK):
        assert all(load.tokens % length == 0 for length in load.lengths)
        assert all(tokens % 4 == 0 for tokens in load.head)
        of = {dtype: {variant.precision for variant in variants} for dtype, variants in load.variants.items()}
        assert of == {"bfloat16": {"autocast", "bfloat16"}, "float32": {"float32"}}
