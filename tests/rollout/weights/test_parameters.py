"""What a model's parameters hold is read back, whole or as some worker has it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rollout.engine  # noqa: F401 - prepares the environment for vLLM

from rollout.weights.checksum import add_parts, checksum_rows, choose_columns  # isort: skip
from rollout.weights.layout import Layout, plan_layout
from rollout.weights.parameters import PackedReader, Target, read_plain
from rollout.weights.proof import PublishedWeights, add_workers, compare_held
from shared.errors import SyncMismatch
from tests.rollout.weights.update_scene import packs

# of a model with 4 heads and 2 key heads of 8 channels, on four workers
SHAPES = [
    ("embed", (37, 16)), ("q", (32, 16)), ("k", (16, 16)), ("v", (16, 16)), ("o", (16, 32)), ("gate", (24, 16)),
    ("up", (24, 16)), ("norm", (16,)),
]  # fmt: skip
WORKERS = 4
DTYPE = torch.bfloat16


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def worker_targets(worker: int, held: dict[str, torch.Tensor]) -> list[Target]:
    """The parameters that vLLM's layers have on a worker."""

    def cut(name: str, count: int, number: int) -> torch.Tensor:
        return held[name][count * number : count * (number + 1)].to(DTYPE)

    first, padded = 10 * worker, torch.zeros(16, 16, dtype=DTYPE)
    padded[: min(37, first + 10) - first] = held["embed"][first : first + 10].to(DTYPE)
    indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=min(37, first + 10))
    qkv = torch.cat([cut("q", 8, worker), cut("k", 8, worker // 2), cut("v", 8, worker // 2)])
    made: list[tuple[list[str], torch.Tensor, dict[str, Any]]] = [
        (["embed"], padded, {"shard_indices": indices}),
        (["q", "k", "v"], qkv, {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "num_kv_head_replicas": 2}),
        (["o"], held["o"][:, 8 * worker : 8 * worker + 8].to(DTYPE).contiguous(), {}),
        (["gate", "up"], torch.cat([cut("gate", 6, worker), cut("up", 6, worker)]), {}),
        (["norm"], held["norm"].to(DTYPE), {}),
    ]
    return [
        Target(SimpleNamespace(weight=value, **more), "weight", sources, 0, 0, True, False)  # type: ignore[arg-type]
        for sources, value, more in made
    ]


def test_tensor_parallel_workers_together_hold_what_the_trainers_sent_and_one_stale_slice_is_named():
    layout: Layout = plan_layout(SHAPES, DTYPE, 1)
    held, old = weights(), {name: value * 1.1 for name, value in weights().items()}
    published, before = (
        PublishedWeights(version, 0, 0.0, {name: checksum_rows(value, 0, DTYPE) for name, value in values.items()})
        for version, values in ((1, held), (0, old))
    )

    def read(worker: int, values: dict[str, torch.Tensor]) -> Any:
        return read_plain(worker_targets(worker, values), layout, worker), {}

    workers = [read(worker, held) for worker in range(WORKERS)]
    found = add_workers(workers, layout)
    assert found.copies == {"k": 2, "v": 2, "norm": WORKERS}
    compare_held([published], found, 0, [before])
    for name, _ in SHAPES:
        workers[3] = read(3, {**held, name: old[name]})
        with pytest.raises(SyncMismatch, match=f"sent: {name} differ"):
            compare_held([published], add_workers(workers, layout), 0, [before])
    stale = [read(worker, {**held, "o": old["o"], "k": old["k"]}) for worker in range(WORKERS)]
    with pytest.raises(SyncMismatch, match="sent: k, o still of the previous version"):
        compare_held([published], add_workers(stale, layout), 0, [before])


def test_a_slice_that_no_worker_holds_is_an_error():
    layout = plan_layout(SHAPES, DTYPE, 1)
    workers = [(read_plain(worker_targets(worker, weights()), layout, worker), {}) for worker in range(WORKERS - 1)]
    with pytest.raises(SyncMismatch, match=r"hold 480 values of embed beside 0 whole copies"):
        add_workers(workers, layout)


@pytest.mark.parametrize("carried", [True, False])
def test_packed_linears_are_read_by_products_with_unit_vectors(carried):
    """Two trainer ranks; the second chose other columns, and has no rows of k."""
    from rollout.weights.cpu.loader import pack

    shapes = [("q", (64, 48)), ("k", (32, 48))]
    generator = torch.Generator().manual_seed(1)
    held = {name: torch.randn(shape, generator=generator) for name, shape in shapes}
    rows = [{"q": (0, 40), "k": (0, 32)}, {"q": (40, 24)}]
    for dtype in filter(packs, (torch.bfloat16, torch.float32)):
        layout = plan_layout(shapes, dtype, 2)
        linear = pack(torch.cat([held["q"], held["k"]]).to(dtype))
        module: Any = SimpleNamespace(cpu_linear=linear, weight=torch.empty(0))
        target = Target(module, "weight", ["q", "k"], 0, 0, False, True)
        for version in (0, 7, 50):
            parts = [
                {
                    name: choose_columns(held[name][first : first + count], first, version + 3 * rank, dtype, None)
                    for name, (first, count) in held_rows.items()
                }
                for rank, held_rows in enumerate(rows)
            ]
            chosen = [{name: part.numbers for name, part in columns.items()} for columns in parts]
            reader = PackedReader([target], layout, dtype, rows, chosen)
            if carried:
                x = torch.randn(5, 48, generator=generator).to(dtype)
                torch.testing.assert_close(module.cpu_linear(x, module.weight, None), linear(x, module.weight, None))
            for reading in reader.left():
                assert not carried
                reading.read()
            assert module.cpu_linear is linear
            expected = add_parts({name: part.checksum for name, part in columns.items()} for columns in parts)
            assert read_plain([target], layout) == {} and reader.checksums() == expected
