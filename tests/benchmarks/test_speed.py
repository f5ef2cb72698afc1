"""What the benchmarks of speed count and compare: models, packing, steps and the peer's mathematics, weight updates."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import head_memory, packing
from benchmarks.llama import SMOLLM2_135M, Shape, random_weights, write_model
from benchmarks.matrix import ADAPTERS, Load, measure
from benchmarks.packing import first_fit, imbalance, next_fit, padding
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
from benchmarks.weight_growth import SIZES, Size, growth, needed_bytes, of_size
from benchmarks.weight_update import ADAPTER_RANK, MEMCPY_BYTES, Times, linear_layers, parts, random_adapters
from shared.model import lora
from shared.model.decoder import Decoder, initialise
from tests.process import in_fresh_process
from trainer.objectives.registry import read_objective
from trainer.step import fsdp
from trainer.step.batching import plan_batch
from trainer.step.forward_backward import forward_backward

TINY = Shape(hidden=16, layers=2, heads=2, kv_heads=1, inner=32, vocabulary=40)
WIDE = Shape(hidden=512, layers=2, heads=8, kv_heads=4, inner=640, vocabulary=1024)
CPU = torch.device("cpu")


def test_a_model_has_its_parameters_and_its_folder_the_masters_in_bfloat16(tmp_path):
    head = 49152 * 576
    layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576
    assert SMOLLM2_135M.parameters == head + 30 * layer + 576 == 134_515_008
    write_model(tmp_path, TINY)
    stored, masters = load_file(tmp_path / "model.safetensors"), random_weights(TINY)
    assert stored.keys() == masters.keys()
    assert all(torch.equal(stored[name], masters[name].detach().to(torch.bfloat16)) for name in masters)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 16


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_padding_and_imbalance_are_those_of_a_plan(ranks):
    lengths = packing.draw_lengths(200, seed=1)
    plan = plan_batch(packing.make_sequences([min(length, 4096) for length in lengths]), ranks, 4096)
    fills = [
        sum(len(sequence.token_ids) for sequence in share[number].sequences)
        for number in range(len(plan.micro_batches[0]))
        for share in plan.micro_batches
    ]
    assert padding(fills, ranks, 4096) == pytest.approx(plan.padding_share)
    assert imbalance(fills, ranks) == pytest.approx(plan.imbalance)


def test_packing_by_hand():
    assert next_fit([6, 5, 4, 5, 10, 1], 10) == [6, 9, 5, 10, 1]
    assert first_fit([6, 5, 4, 5, 10, 1], 10) == [10, 10, 10, 1]
    assert padding([6, 9, 5], 2, 10) == pytest.approx(1 - 20 / 40), "an empty micro-batch fills the round up"
    assert imbalance([6, 9, 5], 1) == 0 and imbalance([6, 9, 5], 2) == pytest.approx((9 + 5) * 2 / 20 - 1)
    lengths = packing.draw_lengths(5000, seed=3)
    assert lengths == packing.draw_lengths(5000, seed=3) != packing.draw_lengths(5000, seed=4)
    assert min(lengths) >= 1 and max(lengths) <= 32_768, "heavy-tailed, below"
    assert sum(lengths) / len(lengths) > 1.3 * sorted(lengths)[2500]
    assert padded_batches([5, 9, 3, 8], 18) == [[1, 3], [0, 2]]
    assert padded_batches([50, 2], 18) == [[0], [1]], "one that is too long stands alone"


@pytest.mark.parametrize("tokens", [1024, 16_384])
def test_lengths_add_up_and_each_has_a_completion(tokens):
    lengths = draw_lengths(tokens, 0)
    assert sum(lengths) == tokens and lengths == draw_lengths(tokens, 0) != draw_lengths(tokens, 1)
    assert min(lengths) >= PROMPT_TOKENS + 16 and max(lengths) < LONGEST_TOKENS + PROMPT_TOKENS + 16


def test_micro_batches_hold_every_token_and_groups_can_share_a_prompt():
    batches = micro_batches(draw(4096, 0, 40), 2048)
    assert token_count(batches) == 4096 and len(batches) >= 2
    apart, together = (make_sequences([20] * 8, 40, 10, 4, one_prompt) for one_prompt in (False, True))
    assert len({tuple(sequence.token_ids[:10]) for sequence in apart}) == 8
    assert len({tuple(sequence.token_ids[:10]) for sequence in together}) == 2
    assert sum(sequence.weight * 10 for sequence in apart) == pytest.approx(1)
    assert work(TINY.decoder, micro_batches(together, 400)) < work(TINY.decoder, micro_batches(apart, 400))


def test_the_peer_pads_on_the_right_and_has_the_gradients_of_ours():
    batch = pad(make_sequences([5, 4], 40, 2), CPU)
    assert batch.mask.tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
    assert batch.weights.tolist()[1] == pytest.approx([-0.2, -0.2, 0.0])
    assert batch.behaviour.tolist()[0] == pytest.approx([-math.log(40)] * 3)
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


@pytest.mark.soak  # in make test: real ranks in tests/trainer, and the commands that measure with scripted ones
def test_a_rank_alone_makes_a_step_and_one_of_the_matrix_is_measured():
    in_fresh_process(steps)


def steps() -> None:
    """In a process of its own."""
    load = Load(Shape(hidden=64, layers=2, heads=2, kv_heads=1, inner=128, vocabulary=512), 256, ((256, 256, 256),))
    whole, adapters = measure(load, 0), measure(load, ADAPTERS)
    assert len(whole.seconds) == len(whole.shares) == 2 and min(*whole.shares, *adapters.shares, *adapters.seconds) > 0
    assert whole.memory_bytes > 50 << 20 and 0 <= whole.others <= 1
    batches = micro_batches(draw(256, 0, 40), 128)
    for dtype in ("float32", "bfloat16"):
        with alone(CPU) as mesh:
            rank = Rank(TINY.decoder, dtype, mesh, CPU)
            before = [fsdp.local(parameter).clone() for parameter in rank.decoder.parameters()]
            assert rank.step(batches) > 0
            after = [fsdp.local(parameter) for parameter in rank.decoder.parameters()]
            assert all(bool((new != old).any()) for new, old in zip(after, before, strict=True))


def test_the_fastest_setting_and_times_of_an_operation():
    slow, quick = Variant("autocast", 2048), Variant("bfloat16", 4096)
    assert fastest({slow: [3.0, 4.0], quick: [1.0, 9.0, 2.0]}) == quick
    assert compared({256: [0.2, 0.2], 1024: [0.4, 0.2]}) == {1024: [2.0, 1.0]}
    for load in (FULL, QUICK):
        assert all(load.tokens % length == 0 for length in load.lengths) and all(n % 4 == 0 for n in load.head)


def test_memory_of_the_head_that_grows_with_both_is_what_is_left(monkeypatch):
    def memory(tokens: int, vocabulary: int) -> int:
        return 7 + 3 * tokens + 5 * vocabulary + 4 * tokens * vocabulary

    assert head_memory.interaction(*(memory(*size) for size in [(8, 20), (8, 5), (2, 20), (2, 5)])) == 4 * 6 * 15
    monkeypatch.setattr(head_memory, "measured", lambda tokens, vocabulary: 640 + tokens * vocabulary)
    assert head_memory.beside_logits(8, 20) == (1.25, 0.25), "float32 logits: 640 bytes"


@pytest.mark.soak  # in make test: its parts, above
@pytest.mark.slow
def test_the_memory_of_the_head_does_not_grow_with_tokens_times_vocabulary():
    gradient = 4 * 8192 * head_memory.HIDDEN
    assert head_memory.measured(512, 8192) >= gradient, "that of the weights in float32 is part of it"
    assert head_memory.beside_logits(4096, 16_384)[1] < HEAD_TARGET


def times(scale: float) -> Times:
    return {"memcpy": [0.01 * scale], "write": [0.02 * scale], "update": [0.2 * scale], "stall": [1.5]}


def test_ratios_of_weight_updates_by_hand():
    size = Size("s", WIDE, tokens=10)
    rows = {row.name: row for row in of_size(size, 2, {"at rest": times(1.0), "decoding": times(9.0)})}
    write = rows["s, 2 engines: bandwidth of the write, bytes read and written"]
    assert write.values == pytest.approx([0.75]), "twice as long as the copy, and half as much again is moved"
    assert write.met is True and rows["s, 2 engines: stall of running requests"].met is True
    assert rows["s, 2 engines: write and update of the slowest engine"].values == pytest.approx([200.0])
    assert rows["s, 2 engines: write"].values == pytest.approx([2e-9 * WIDE.parameters / 0.02])
    assert needed_bytes(size, 2) - needed_bytes(size, 1) == 3 * size.bytes
    large = Size("large", WIDE._replace(layers=20), 10)
    ratio = large.bytes / size.bytes
    measured = {(size, 1): times(1.0), (large, 1): times(3.0 * ratio), (large, 2): times(6.0 * ratio)}
    assert {row.name: row.values for row in growth(measured)} == {
        "time of each byte (write and update), large": pytest.approx([3.0]),
        "large: update of 2 engines at once": pytest.approx([2.0]),
    }
    named = {"10 MB": 10e6, "50 MB": 50e6, "270 MB": 270e6, "1 GB": 1e9, "2 GB": 2e9}
    assert [size.name for size in SIZES] == list(named)
    assert all(abs(size.bytes / named[size.name] - 1) < 0.1 for size in SIZES)
    assert parts(SIZES[2].bytes) == [SIZES[2].bytes], "270 MB are one part"
    assert parts(2 * MEMCPY_BYTES + 5) == [MEMCPY_BYTES, MEMCPY_BYTES, 5]
    assert parts(2 * MEMCPY_BYTES) == [MEMCPY_BYTES, MEMCPY_BYTES]


def test_adapters_that_are_sent_have_the_names_and_shapes_of_the_models():
    decoder = Decoder(TINY.decoder)
    assert lora.attach(decoder, ADAPTER_RANK, 32.0) == [name for name, _ in linear_layers(TINY)]
    expected = {name: each.shape for name, each in decoder.named_parameters() if each.requires_grad}
    sent = dict(random_adapters(TINY, len(linear_layers(TINY))))
    assert {name: each.shape for name, each in sent.items()} == expected
    assert len(dict(random_adapters(TINY, 1))) == 2 and all(each.dtype == torch.float32 for each in sent.values())
