"""The slot of adapters without an engine: workers of tensor parallelism, and the product that CPUs use for vLLM's."""

from types import SimpleNamespace
from typing import Any

import rollout.vllm_config  # first: it prepares the environment for vLLM  # noqa: F401

# isort: split
import pytest
import torch
from vllm.lora.layers import LoRAMapping, RowParallelLinearWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout.weights.adapters import AdapterSlot, multiply_by_adapter, slot_rows
from rollout.weights.checksum import checksum_rows
from rollout.weights.layout import Layout, plan_layout
from rollout.weights.proof import add_workers
from shared.errors import ModelError
from shared.model.lora import A, B

RANK, SLOT_RANK, HIDDEN, HEADS, KEYS, WORKERS = 3, 8, 16, 8, 4, 4
SIZES = {"q_proj": (HIDDEN, HEADS), "k_proj": (HIDDEN, KEYS), "v_proj": (HIDDEN, KEYS), "o_proj": (HEADS, HIDDEN)}
"""inputs and outputs of a layer's linears; keys and values of four rows lie on two workers each"""


def layout() -> Layout:
    shapes = []
    for name, (inputs, outputs) in SIZES.items():
        shapes += [(f"layers.0.{name}{A}", (RANK, inputs)), (f"layers.0.{name}{B}", (outputs, RANK))]
    return plan_layout(shapes, torch.float32, 1)


def worker(number: int) -> Any:
    """A worker's model as the slot sees it: q, k and v in one LoRA layer, o in another that splits inputs."""
    widths = [HEADS // WORKERS, KEYS // 2, KEYS // 2]
    qkv = SimpleNamespace(
        n_slices=3,
        tp_size=WORKERS,
        tp_rank=number,
        output_ids=(number, number // 2, number // 2),
        lora_a_stacked=[torch.full((1, 1, SLOT_RANK, HIDDEN), 9.0) for _ in widths],
        lora_b_stacked=[torch.full((1, 1, width, SLOT_RANK), 9.0) for width in widths],
    )
    o = RowParallelLinearWithLoRA.__new__(RowParallelLinearWithLoRA)
    torch.nn.Module.__init__(o)
    o.n_slices, o.tp_size, o.tp_rank = 1, WORKERS, number
    o.lora_a_stacked = (torch.full((1, 1, SLOT_RANK, HEADS // WORKERS), 9.0),)
    o.lora_b_stacked = (torch.full((1, 1, HIDDEN, SLOT_RANK), 9.0),)
    manager = SimpleNamespace(
        modules={"layers.0.qkv_proj": qkv, "layers.0.o_proj": o},
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
        lora_index_to_id=[1],
        list_adapters=dict,
        added=[],
    )
    manager.add_adapter, manager.activate_adapter = manager.added.append, manager.added.append
    return SimpleNamespace(lora_manager=manager)


def test_the_workers_hold_the_whole_adapter_between_them():
    plan, generator = layout(), torch.Generator().manual_seed(1)
    whole = {name: torch.randn(place.shape, generator=generator) for name, place in plan.places.items()}
    workers = [worker(number) for number in range(WORKERS)]
    slots = [AdapterSlot(model, plan) for model in workers]
    for slot in slots:
        for name, value in whole.items():
            slot.place(name, value)
    held = add_workers([(slot.read(), {}) for slot in slots], plan)
    for name, value in whole.items():
        copies = held.copies.get(name, 1)
        assert held.checksums[name] == copies * checksum_rows(value, 0, torch.float32) % (1 << 64), name
        assert copies == {"o_proj" + A: 1, "q_proj" + B: 1, "k_proj" + B: 2, "v_proj" + B: 2}.get(name[9:], WORKERS)
    keys = workers[3].lora_manager.modules["layers.0.qkv_proj"].lora_b_stacked[1][0, 0]
    assert torch.equal(keys[:, :RANK], whole["layers.0.k_proj" + B][2:]), "the fourth worker has the second half"
    assert (keys[:, RANK:] == 9).all(), "nothing is written outside the adapter's rank"
    workers[0].lora_manager.remove_all_adapters()
    slots[0].place("layers.0.q_proj" + A, whole["layers.0.q_proj" + A] + 1)
    assert slots[0].read()["layers.0.q_proj" + A] != slots[1].read()["layers.0.q_proj" + A]


def test_a_matrix_without_a_layer_is_refused():
    shapes = [("layers.0.gate_proj" + A, (RANK, HIDDEN)), ("layers.0.gate_proj" + B, (HIDDEN, RANK))]
    with pytest.raises(ModelError, match=r"no place for \['layers.0.gate_proj.lora_A.weight'"):
        AdapterSlot(worker(0), plan_layout(shapes, torch.float32, 1))


def fused_worker(slices: list[int], parts: list[str]) -> Any:
    """A model whose one LoRA layer computes what the folder holds as one matrix, in slices of these widths."""
    layer = SimpleNamespace(
        n_slices=len(slices), tp_size=1, tp_rank=0,
        lora_a_stacked=[torch.zeros(1, 1, SLOT_RANK, HIDDEN) for _ in slices],
        lora_b_stacked=[torch.zeros(1, 1, width, SLOT_RANK) for width in slices],
    )  # fmt: skip
    model = worker(0)
    model.lora_manager.modules = {"layers.0.gate_up_proj": layer}
    model.lora_manager.packed_modules_mapping = {"gate_up_proj": parts}
    return model


@pytest.mark.parametrize(("slices", "parts"), [([6, 6], ["gate_proj", "up_proj"]), ([12], ["gate_up_proj"])])
def test_a_matrix_that_is_fused_in_the_folder_is_cut_as_the_engine_has_it(slices, parts):
    """GLM-4's gate and up lie in two slices of vLLM's layer, Phi-4's in one."""
    name, generator = "layers.0.gate_up_proj", torch.Generator().manual_seed(4)
    plan = plan_layout([(name + A, (RANK, HIDDEN)), (name + B, (12, RANK))], torch.float32, 1)
    whole = {each: torch.randn(place.shape, generator=generator) for each, place in plan.places.items()}
    model = fused_worker(slices, parts)
    slot = AdapterSlot(model, plan)
    for each, value in whole.items():
        slot.place(each, value)
    layer, x = model.lora_manager.modules[name], torch.randn(5, HIDDEN, generator=generator)
    stacks = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
    found = torch.cat([x @ a[0, 0].T @ b[0, 0].T for a, b in stacks], 1)
    torch.testing.assert_close(found, x @ whole[name + A].T @ whole[name + B].T)
    held = add_workers([(slot.read(), {})], plan)
    assert held.copies == ({name + A: 2} if len(slices) == 2 else {})
    for each, value in whole.items():
        copies = held.copies.get(each, 1)
        assert held.checksums[each] == copies * checksum_rows(value, 0, torch.float32) % (1 << 64)
    layer.lora_b_stacked[-1][0, 0, -1, 0] += 1.0
    assert add_workers([(slot.read(), {})], plan).checksums[name + B] != held.checksums[name + B]
    layer.tp_size = 2
    with pytest.raises(ModelError, match=r"^rollout.tensor_parallel: set it to 1.* gate_up_proj$"):
        AdapterSlot(model, plan)


def test_keys_that_are_values_too_are_refused():
    model = worker(0)
    model.config = SimpleNamespace(attention_k_eq_v=True)
    with pytest.raises(ModelError, match=r"^lora.targets: keys of this model are its values too"):
        AdapterSlot(model, layout())


def test_each_row_is_multiplied_by_its_own_adapter_and_those_without_one_by_none():
    multiply_by_adapter()
    slots, generator = 2, torch.Generator().manual_seed(2)
    wrapper = PunicaWrapperCPU(64, max_batches=8, device="cpu")
    x = torch.randn(6, HIDDEN, generator=generator)
    a = tuple(torch.randn(slots, 1, RANK, HIDDEN, generator=generator) for _ in range(2))
    b = tuple(torch.randn(slots, 1, width, RANK, generator=generator) for width in (8, 4))
    for ids in ([7, 7, 0, 0, 5, 7], [7] * 6, [0] * 6):
        wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids), is_prefill=True), [5, 7], slots + 1, 100)
        start = torch.randn(6, 12, generator=generator)
        found = start.clone()
        wrapper.add_lora_linear(found, x, a, b, 2.0, (8, 4))
        for row, adapter in enumerate(ids):
            slot = {5: 0, 7: 1}.get(adapter)
            parts = [x[row] @ m[slot, 0].T @ n[slot, 0].T for m, n in zip(a, b, strict=True)] if adapter else []
            expected = start[row] + (2 * torch.cat(parts) if parts else 0)
            torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_rows_of_one_adapter_are_taken_whole():
    assert slot_rows(torch.tensor([-1, -1])) == {}
    assert slot_rows(torch.tensor([1, 1])) == {1: None}
    found = slot_rows(torch.tensor([1, -1, 0, 1]))
    assert {slot: rows.tolist() for slot, rows in found.items() if rows is not None} == {0: [2], 1: [0, 3]}
