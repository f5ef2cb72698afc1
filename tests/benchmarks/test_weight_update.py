"""The benchmark of weight updates sends adapters of the layers that a model has."""

import torch

from benchmarks.llama import Shape
from benchmarks.weight_update import ADAPTER_RANK, linear_layers, random_adapters
from shared.model import lora
from shared.model.decoder import Decoder

SHAPE = Shape(hidden=16, layers=2, heads=2, kv_heads=1, inner=24, vocabulary=32)


def test_adapters_have_the_names_and_shapes_of_the_models() -> None:
    decoder = Decoder(SHAPE.decoder)
    assert lora.attach(decoder, ADAPTER_RANK, 32.0) == [name for name, _ in linear_layers(SHAPE)]
    expected = {name: each.shape for name, each in decoder.named_parameters() if each.requires_grad}
    found = dict(random_adapters(SHAPE, len(linear_layers(SHAPE))))
    assert {name: each.shape for name, each in found.items()} == expected
    assert len(dict(random_adapters(SHAPE, 1))) == 2 and all(each.dtype == torch.float32 for each in found.values())
