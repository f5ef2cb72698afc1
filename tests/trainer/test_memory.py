"""Bytes of a run by hand, and parameter counts against PyTorch's and the published ones."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from lab.plan.scenario import MODELS
from rollout.weights.layout import ALIGNMENT_BYTES, plan_layout, unique_shapes
from rollout.weights.shm import create_buffer
from rollout.weights.slots import WeightSlots
from shared.model import lora
from shared.model.config import DecoderConfig, MeasuredConfig
from shared.model.decoder import Decoder
from shared.model.implementation import make_model, read_shape
from tests.families import config_of
from trainer import memory
from trainer.memory import Recomputation

PUBLISHED = {
    "135m": 134_515_008, "0.6b": 596_049_920, "1.7b": 1_720_574_976, "8b": 8_030_261_248, "24b": 23_572_403_200,
    "32b": 32_762_123_264, "70b": 70_553_706_496, "405b": 405_853_388_800,
}  # fmt: skip
SMALL = DecoderConfig(
    family="llama", vocab_size=100, hidden_size=8, intermediate_size=12, layers=3, heads=4, key_heads=2, head_dim=4,
    norm_epsilon=1e-5, max_positions=64,
)  # fmt: skip


def test_known_shapes_have_the_published_number_of_parameters():
    assert {name: shape.parameters for name, shape in MODELS.items()} == PUBLISHED


@pytest.mark.parametrize("changes", [
    {}, {"tied": True}, {"qkv_bias": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    {"qk_norm": True, "family": "qwen3"},
])  # fmt: skip
def test_the_formula_counts_what_the_decoder_has(changes):
    shape = replace(SMALL, **changes)
    with torch.device("meta"):
        decoder = Decoder(shape)
    assert shape.parameters == sum(parameter.numel() for parameter in decoder.parameters())
    matrices = [p for n, p in decoder.named_parameters() if n.startswith("model.layers") and p.dim() == 2]
    assert shape.products == sum(p.numel() for p in matrices) + 100 * 8


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen3 moe", "gpt-oss", "phi4", "gemma4"])
@pytest.mark.parametrize("vocabulary", [256, 4096])
def test_the_largest_tensor_is_that_of_the_model(family, vocabulary):
    """Of a mixture it is that of all experts of a layer (Mixtral 8x7B: 1.75 GiB in bfloat16, its embedding 0.24)."""
    described = config_of(family, vocab_size=vocabulary)
    shape = read_shape(described)
    with torch.device("meta"):
        made = make_model(shape, described)
    assert shape.largest_tensor == max(parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"vocab_size": 9, "intermediate_size": 40}])
def test_the_transfer_is_counted_as_it_is_allocated(changes):
    """Made for real in host memory, in which slots and buffers have the sizes that they have on a GPU. Tensors start at
    multiples of 64 bytes, which the count leaves out."""
    shape = replace(SMALL, **changes)
    with torch.device("meta"):
        shapes = unique_shapes(list(Decoder(shape).named_parameters()))
    layout = plan_layout(shapes, torch.bfloat16, world=1)
    slots, buffers = WeightSlots.create(layout, 1, torch.device("cpu")), create_buffer(layout)
    streamed = memory.arriving_bytes(shape, 2, streamed=True) - memory.CONTEXT_BYTES
    assert 0 <= slots.memory.numel() - streamed < 2 * ALIGNMENT_BYTES
    assert streamed == 2 * memory.arriving_bytes(shape, 2, streamed=False)
    padding = memory.BUFFERS * ALIGNMENT_BYTES * (len(shapes) + 1)
    assert 0 <= buffers.memory.numel() - memory.buffer_bytes(shape.parameters, 1, 2) <= padding
    for made in (slots, buffers):
        made.close()


def test_one_layer_by_hand():
    # q 8 x 16, k and v 8 x 8 each, o 16 x 8, gate, up and down 8 x 12; two norms of 8
    assert SMALL.layer_products == 128 + 2 * 64 + 128 + 3 * 96 == 672
    assert SMALL.layer_parameters == 672 + 16
    assert SMALL.cached_values == 3 * 2 * 2 * 4


def test_a_trainers_bytes_by_hand():
    assert memory.states_bytes(1000, 4) == 16 * 1000 / 4
    assert memory.buffer_bytes(1000, 4, width=2) == 2 * 2 * 1000 / 4
    assert memory.frozen_bytes(1000, 4) == 4 * 1000 / 4 + 4 * 1000, "a small one is whole on every rank too"
    assert memory.frozen_bytes(10**9, 4) == 10**9


def test_a_small_model_stays_gathered_and_a_large_one_does_not():
    limit, large = memory.KEEP_WHOLE_BYTES // 8, MODELS["8b"]
    assert memory.whole_bytes(limit) == 4 << 30 and memory.whole_bytes(limit + 1) == 0
    assert memory.gathered_bytes(SMALL, 2) == 8 * SMALL.parameters
    assert not memory.works_in_place(2, "float32", False) and not memory.works_in_place(2, "bfloat16", False)
    alone = {(dtype, gpu) for dtype in ("float32", "bfloat16") for gpu in (False, True)}
    assert {case for case in alone if not memory.works_in_place(1, *case)} == {("bfloat16", True)}
    assert memory.whole_bytes(1000, in_place=True) == 0 and memory.frozen_bytes(1000, 1, in_place=True) == 4000
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
    assert memory.gathered_bytes(large, 2) == 6 * (layer + 128256 * 4096)
    assert memory.gathered_bytes(replace(large, tied=True), 2) == 6 * (2 * layer + 128256 * 4096)
    assert memory.gathered_bytes(replace(large, vocab_size=1000), 2) == 6 * 2 * layer


def test_activations_by_hand():
    layer = 2 * (4 * 8 + 2 * 16 + 2 * 8 + 2 * 12)
    assert memory.activation_bytes(SMALL, 10, 2) == 10 * 3 * layer
    assert memory.activation_bytes(SMALL, 10, 2, Recomputation(1)) == 10 * (1 * 2 * 8 + 2 * layer)
    assert memory.activation_bytes(SMALL, 10, 2, Recomputation(3)) == 10 * (3 * 2 * 8 + layer)
    assert memory.activation_bytes(SMALL, 10, 2, Recomputation(3, inputs_on_host=True)) == 10 * (1 * 2 * 8 + layer)
    of_transformers = MeasuredConfig(**{each.name: getattr(SMALL, each.name) for each in dataclasses.fields(SMALL)})
    assert memory.activation_bytes(of_transformers, 10, 2) == 10 * 3 * (layer + 2 * 2 * 12)


def test_no_more_layers_are_computed_twice_than_the_budget_asks_for():
    def layers(budget: int | None, tokens: int = 10, on_gpu: bool = True) -> tuple[int, bool]:
        return memory.recomputation_within(SMALL, tokens, 2, budget, on_gpu)

    whole, first = memory.activation_bytes(SMALL, 10, 2), memory.activation_bytes(SMALL, 10, 2, Recomputation(1))
    least = memory.activation_bytes(SMALL, 10, 2, Recomputation(2))
    assert layers(None) == layers(whole) == (0, False)
    assert layers(whole - 1) == layers(first) == (1, False) and layers(first - 1) == (2, False)
    assert layers(least) == (2, False)
    assert layers(least - 1) == layers(0) == (3, True), "what all layers' inputs take waits on the host"
    assert layers(least - 1, on_gpu=False) == (3, False), "which on a CPU is the same memory"
    assert layers(whole, tokens=11) == (1, False), "the budget holds for a longer sequence, too"


def test_a_cache_is_split_over_no_more_gpus_than_there_are_key_heads():
    assert [memory.cache_bytes_per_token(SMALL, 2, tensor_parallel=t) for t in (1, 2, 4)] == [96, 48, 48]
    assert [memory.cache_tokens(SMALL, 2, t, cache_bytes=960) for t in (1, 2, 4)] == [10, 20, 20]
    assert memory.weight_bytes(1000, 2, tensor_parallel=4) == 500


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.down_proj"]])
def test_adapters_are_counted_as_they_are_made_and_sent(targets):
    with torch.device("meta"):
        decoder = Decoder(SMALL)
    lora.attach(decoder, 3, 6.0, targets)
    trained = [(name, each) for name, each in decoder.named_parameters() if each.requires_grad]
    count = memory.adapter_parameters(SMALL, 3, targets)
    assert count == sum(each.numel() for _, each in trained) and memory.adapter_parameters(SMALL, 0, targets) == 0
    if targets == "all-linear":
        assert memory.largest_tensor(SMALL, 3) == max(each.numel() for _, each in trained)
    layout = plan_layout(unique_shapes(trained), torch.bfloat16, world=1)
    padding = memory.BUFFERS * ALIGNMENT_BYTES * (len(trained) + 1)
    assert 0 <= create_buffer(layout).memory.numel() - memory.buffer_bytes(count, 1, 2) <= padding


def test_states_of_adapters_by_hand():
    """SmolLM2's shape, rank 16: 4.9 M of 134.5 M parameters are trained; the frozen ones are 2 bytes each."""
    shape = MODELS["135m"]
    count = 16 * 30 * (576 + 576 + 2 * (576 + 192) + 576 + 576 + 3 * (576 + 1536))
    assert memory.adapter_parameters(shape, 16) == count == 4_884_480
    assert memory.states_bytes(shape.parameters, 2, count, 2) == (16 * count + 2 * shape.parameters) / 2
    assert memory.states_bytes(shape.parameters, 1, count, 2) < 0.17 * memory.states_bytes(shape.parameters, 1)
    assert memory.gathered_bytes(shape, 2, count) < memory.gathered_bytes(shape, 2) / 2
