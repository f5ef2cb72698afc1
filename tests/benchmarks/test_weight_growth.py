"""Growth of weight updates: what is packed, what the ratios are made of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.speed.llama import SMOLLM2_135M, Shape, random_weights
from benchmarks.speed.weight_growth import ENGINES, SIZES, Figures, Repack, Size, growth, linears, needed_bytes, table
from benchmarks.weight_update import MEMCPY_BYTES, parts, time_memcpy
from rollout.weights import make_sender
from rollout.weights.layout import plan_layout
from rollout.weights.shm import open_buffer

SMALL = Shape(hidden=512, layers=2, heads=8, kv_heads=4, inner=640, vocabulary=1024)


def test_sizes_are_what_they_are_called() -> None:
    named = {"10 MB": 10e6, "50 MB": 50e6, "270 MB": 270e6, "1 GB": 1e9, "2 GB": 2e9}
    assert {size.name for size in SIZES} == named.keys() > ENGINES.keys()
    assert all(abs(size.bytes / named[size.name] - 1) < 0.1 for size in SIZES)
    sizes = [size.bytes for size in SIZES]
    assert sizes == sorted(sizes)


def test_linears_are_fused_as_vllm_fuses_them_and_the_largest_come_first() -> None:
    layout = plan_layout(SMALL.tensors(), torch.bfloat16, world=1)
    found = linears(layout)
    sources = [target.sources for target in found]
    layer = "model.layers.1."
    assert sources[:1] == [[layer.replace("1", "0") + f"mlp.{part}_proj.weight" for part in ("gate", "up")]]
    assert [layer + f"self_attn.{part}_proj.weight" for part in "qkv"] in sources
    assert [layer + "self_attn.o_proj.weight"] in sources and [layer + "mlp.down_proj.weight"] in sources
    assert ["model.embed_tokens.weight"] in sources and len(sources) == 2 * 4 + 1
    packed = sum(target.bytes for target in found)
    norms = 2 * 512 * (2 * 2 + 1)
    assert packed == 2 * SMALL.parameters - norms, "all but the norms"
    assert found[0].bytes == 2 * 640 * 512 * 2 and found[0].row_bytes == 1024


def test_the_repack_alone_packs_the_version_that_lies_there() -> None:
    weights = random_weights(SMALL)
    store = dist.HashStore()
    sender = make_sender("shm", list(weights.items()), torch.bfloat16, rank=0, world=1, store=store, engines=1)
    sender.write(0)
    with torch.no_grad():
        for weight in weights.values():
            weight.mul_(2)
    sender.write(1)
    source = open_buffer(sender.describe()["path"], sender.layout)
    repack = Repack(source)
    padded = [target.sources for target in repack.targets if id(target) in repack.padded]
    assert len(padded) == 2 and all("gate" in one[0] for one in padded), "rows of 1,024 bytes, and more than 1 MiB"
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    target = next(target for target in repack.targets if target.sources == names)
    outputs = []
    for version in (0, 1):
        assert repack.run(version) > 0
        outputs.append(repack.held[id(target)](x, None, None).float())
    whole = torch.cat([weights[name].detach() for name in names]).to(torch.bfloat16).float()
    torch.testing.assert_close(outputs[1], x.float() @ whole.T, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(outputs[1], 2 * outputs[0], rtol=2e-2, atol=2e-2)
    source.close()
    sender.close()


def figures(scale: float) -> Figures:
    return Figures([0.01 * scale], [0.02 * scale], [0.2 * scale], [0.11 * scale], [0.1 * scale], [1.5])


def test_ratios_by_hand() -> None:
    size = Size("s", SMALL, tokens=10)
    rows = {row.name: row for row in table(size, 2, figures(1.0))}
    write = rows["s, 2 engines: bandwidth of the write, bytes read and written"]
    assert write.values == pytest.approx([0.75]), "twice as long as the copy, and half as much again is moved"
    assert write.met is True
    assert rows["s, 2 engines: apply of the slowest engine"].values == pytest.approx([1.1])
    assert rows["s, 2 engines: write"].values == pytest.approx([2e-9 * SMALL.parameters / 0.02])
    assert rows["s, 2 engines: stall of running requests"].met is True


def test_growth_is_of_the_time_of_a_byte_and_of_one_engine() -> None:
    small, large = Size("small", SMALL, 10), Size("large", SMALL._replace(layers=20), 10)
    times = large.bytes / small.bytes
    measured = {
        ("small", 1): (small, figures(1.0)), ("large", 1): (large, figures(3.0 * times)),
        ("large", 2): (large, figures(6.0 * times)),
    }  # fmt: skip
    rows = {row.name: row.values for row in growth(measured)}
    assert rows == {
        "time of each byte (write and update), large": pytest.approx([3.0]),
        "large: update of 2 engines at once": pytest.approx([2.0]),
    }


def test_memory_is_asked_for_before() -> None:
    size = Size("s", SMOLLM2_135M, 10)
    assert needed_bytes(size, 2) - needed_bytes(size, 1) == 3 * size.bytes


def test_a_large_copy_is_made_of_whole_parts_and_a_rest() -> None:
    assert parts(SIZES[2].bytes) == [SIZES[2].bytes], "that of 270 MB is one"
    assert parts(2 * MEMCPY_BYTES + 5) == [MEMCPY_BYTES, MEMCPY_BYTES, 5]
    assert parts(2 * MEMCPY_BYTES) == [MEMCPY_BYTES, MEMCPY_BYTES]
    assert len(time_memcpy(1 << 20, rounds=2)) == 2
