"""The split: asynchronous is never slower than synchronous, the best is the best of all, what does not fit is said."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lab.plan import split, times
from lab.plan.scenario import CARDS, MODELS, Lengths, Machine, Scenario, Workload
from rollout.weights import network
from shared.errors import ConfigError
from tests.lab.plan.shapes import decoders, machines, workloads
from trainer.memory import WHOLE, Recomputation

ROUNDING = 1 + 1e-9


def h100(gpus: int) -> Machine:
    return replace(CARDS["h100"], gpus=gpus)


USUAL = Workload(Lengths(2000, 8000, 8000), 8000, 64, 16, 200)


def usual(model: str, gpus: int, **fixed: int) -> Scenario:
    return Scenario(MODELS[model], h100(gpus), USUAL, **fixed)


@settings(max_examples=300)
@given(shape=decoders(), machine=machines(), work=workloads(), async_level=st.integers(1, 8), data=st.data())
def test_an_asynchronous_step_is_never_longer_than_a_synchronous_one(shape, machine, work, async_level, data):
    """LlamaRL's argument, on every placement: asynchrony removes constraints and adds none."""
    scenario = Scenario(shape, machine, work)
    width = data.draw(st.sampled_from(split.widths(scenario)))
    engines = data.draw(st.integers(1, max(1, (machine.gpus - 1) // width)))
    plan = split.place(scenario, engines, width, async_level)
    assume(plan is not None)
    assert plan is not None and plan.asynchronous_s <= plan.synchronous_s * ROUNDING


def test_the_best_split_is_the_best_of_all_that_fit():
    scenario = usual("8b", 8, async_level=2)
    best = split.best(scenario)
    tried = [split.place(scenario, engines, width, 2) for width in (1, 2, 4, 8) for engines in range(1, 8)]
    assert best.asynchronous_s == min(plan.asynchronous_s for plan in tried if plan)
    assert best.trainers + best.engines * best.tensor_parallel == 8


def test_what_a_plan_proposes_fits():
    plan = split.best(usual("70b", 64))
    usable = h100(64).usable_bytes
    assert plan.trainer_memory.total <= usable and plan.weight_bytes + plan.cache_bytes <= usable
    assert plan.cache_bytes > 0 and plan.max_sequences >= 1
    assert math.isclose(plan.weight_bytes, 2 * 70_553_706_496 / plan.tensor_parallel)


def test_the_smaller_lead_is_taken_when_it_costs_little():
    equal = replace(USUAL, lengths=Lengths(2000, 2000, 2000))
    assert split.best(Scenario(MODELS["8b"], h100(8), equal)).async_level == 1, "nothing to wait for"
    assert split.best(usual("8b", 64)).async_level == 2, "the longest completion is waited for"


def test_activations_are_recomputed_only_where_they_would_not_fit():
    scenario = usual("8b", 8)
    ways = [WHOLE, Recomputation(32), Recomputation(32, inputs_on_host=True)]
    totals = [split.trainer_memory(scenario, 8, kept).total for kept in ways]

    def chosen(memory: float) -> Recomputation:
        return split.fitting(replace(scenario, machine=replace(h100(8), memory_bytes=memory / 0.9)), 8)[0]

    assert totals == sorted(totals, reverse=True)
    assert [chosen(1.001 * total) for total in totals] == ways
    assert [chosen(0.999 * total) for total in totals] == [ways[1], ways[2], ways[2]]


def test_each_node_of_trainers_holds_a_replica_where_memory_allows():
    scenario = usual("8b", 64)
    again = Recomputation(32)
    assert [split.replicas_of(scenario, trainers, again) for trainers in (8, 16, 20, 24, 32)] == [1, 2, 1, 3, 4]
    two, four = (split.trainer_memory(scenario, 32, again, replicas).total for replicas in (2, 4))
    scarce = replace(scenario, machine=replace(h100(64), memory_bytes=(two + four) / 2 / 0.9))
    assert split.replicas_of(scarce, 32, again) == 2 and two < four
    wide = split.place(usual("8b", 24), 2, 4, 1)
    assert wide and (wide.trainers, wide.replicas) == (16, 2)
    assert wide.trainer_memory.states == 16 * 8_030_261_248 / 8


def test_an_update_over_the_network_comes_over_one_link_and_a_message_later_for_each_engine():
    inside = split.place(usual("8b", 8), 1, 4, 1)
    across = split.place(usual("8b", 16), 1, 4, 1)
    wide = split.place(usual("8b", 16), 1, 4, 1, links=4)
    many = split.place(usual("8b", 64), 10, 4, 1)
    assert inside and across and wide and many
    total = 2 * 8_030_261_248
    assert math.isclose(inside.delivery_s, total / 450e9), "each GPU of the engine reads all of it"
    assert math.isclose(across.delivery_s, total / 50e9) and math.isclose(wide.delivery_s, total / 4 / 50e9)
    assert math.isclose(many.delivery_s, total / 50e9 + 9 * (32 << 20) / 50e9)


def test_what_arrives_is_counted_on_both_sides():
    """24B, Mistral Small: the embedding is the largest tensor, 131,072 x 5,120 in bfloat16 = 1.25 GiB."""
    tensor, context = 2 * 131_072 * 5_120, 500 << 20
    across, inside = (times.EngineModel(MODELS["24b"], h100(gpus), 2) for gpus in (32, 8))
    assert across.arriving_bytes == 2 * tensor + context and inside.arriving_bytes == tensor
    assert across.spare_bytes == 72e9 - across.weight_bytes - 2 * tensor - context
    beside = split.trainer_memory(usual("8b", 8), 6, WHOLE).buffers
    assert beside == 2 * 2 * 8_030_261_248 / 6 + 2 * context, "two engine GPUs open its buffers"
    assert split.trainer_memory(usual("8b", 16), 6, WHOLE).buffers == 2 * 2 * 8_030_261_248 / 6
    assert network.MESSAGE_BYTES["cuda"] == times.MESSAGE_BYTES


def test_too_few_gpus_are_said_with_what_is_missing():
    arithmetic = r"hold no split: a trainer rank of 1 needs [\d.]+ GiB .*moments 1051.3 \+ .*on their way [\d.]+ \+"
    with pytest.raises(ConfigError, match=arithmetic):
        split.best(usual("70b", 2))
    assert split.place(usual("8b", 8), engines=8, tensor_parallel=1, async_level=1) is None


def test_adapters_need_less_of_everything_that_is_trained_and_sent():
    full = usual("8b", 8)
    adapted = Scenario(MODELS["8b"], h100(8), replace(USUAL, lora_rank=16))
    count = adapted.adapters
    assert count == 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)) and full.adapters == 0
    whole, alone = (split.place(one, 4, 1, 1) for one in (full, adapted))
    assert whole is not None and alone is not None
    assert alone.trainer_memory.states == (16 * count + 2 * MODELS["8b"].parameters) / 4
    assert alone.trainer_memory.states < 0.2 * whole.trainer_memory.states
    share = count / MODELS["8b"].parameters
    assert math.isclose(alone.delivery_s, share * whole.delivery_s) and math.isclose(
        alone.write_s, share * whole.write_s
    )
    assert whole.again.layers and not alone.again.layers
    assert math.isclose(alone.train_s, whole.train_s * 2 / 4, rel_tol=0.01), "no gradients of frozen weights"
    assert split.best(Scenario(MODELS["70b"], h100(8), replace(USUAL, lora_rank=16))).engines > 0
    with pytest.raises(ConfigError, match="hold no split"):
        split.best(usual("70b", 8))
