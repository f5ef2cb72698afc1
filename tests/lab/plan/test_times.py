"""Times of decoding, training and updating, by hand on a machine of round numbers."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lab.plan import times
from lab.plan.scenario import MODELS, Machine
from lab.plan.times import EngineModel
from shared.model.config import DecoderConfig
from tests.lab.plan.shapes import ROUND, decoder, decoders, machines


def test_a_small_decode_batch_waits_for_memory() -> None:
    shape = MODELS["8b"]  # 16.06 GB of weights; a token's keys and values: 2 x 32 x 8 x 128 x 2 bytes
    engine = EngineModel(shape, ROUND, 1)
    assert math.isclose(engine.decode_s(0, 0), 2 * 8_030_261_248 / 5e11 + 0.001)
    assert math.isclose(engine.decode_s(64, 1000), (2 * 8_030_261_248 + 64 * 1000 * 131_072) / 5e11 + 0.001)


def test_a_large_decode_batch_waits_for_products() -> None:
    shape = MODELS["8b"]
    products = 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096  # all but the embedding and the norms
    assert shape.products == products
    flops = 8192 * (2 * products + 4 * 32 * 4096 * 10)
    assert math.isclose(EngineModel(shape, ROUND, 1).decode_s(8192, 10), flops / 5e14 + 0.001)


def test_gpus_of_an_engine_share_the_work_and_pay_for_sums() -> None:
    one, four = (EngineModel(MODELS["8b"], ROUND, width).decode_s(64, 1000) for width in (1, 4))
    assert math.isclose(four, (one - 0.001) / 4 + 0.001 + 2 * 32 * 1e-5)


@given(
    machine=machines(), shape=decoders(), running=st.floats(0.1, 1e4), factor=st.floats(1, 50),
    context=st.floats(0, 1e5),
)  # fmt: skip
def test_a_larger_batch_is_slower_but_never_in_proportion(
    machine: Machine, shape: DecoderConfig, running: float, factor: float, context: float
) -> None:
    engine = EngineModel(shape, machine, 1)
    few, many = engine.decode_s(running, context), engine.decode_s(factor * running, context)
    assert few * (1 - 1e-9) <= many <= factor * few * (1 + 1e-9)


def test_prompts_are_read_at_the_peak() -> None:
    shape = decoder()
    flops = 10 * (2 * shape.products + 4 * 2 * 8 * 5)  # 2 layers, 4 heads of 2 channels, 5 tokens before on average
    assert math.isclose(EngineModel(shape, ROUND, 2).prefill_s(10), flops / (2 * 5e14))


def test_what_a_cache_holds() -> None:
    engine = EngineModel(MODELS["8b"], ROUND, 2)
    assert math.isclose(engine.spare_bytes, 0.9 * 80e9 - 8_030_261_248 - 2 * 128_256 * 4096)
    assert engine.completions_in(131_072 * 50, 10) == 10.0, "two GPUs hold 100 tokens"


def test_floating_point_operations_of_a_training_step() -> None:
    shape = decoder()
    plain = times.training_flops(shape, tokens=30, square_tokens=500)  # e.g. two sequences, of 10 and 20 tokens
    assert plain == 6 * shape.products * 30 + 6 * (2 * 4 * 2) * 500
    assert times.training_flops(shape, 30, 500, recompute=True) == plain * 4 / 3
    assert times.training_flops(shape, 30, 500, extra_forwards=2) == plain * 5 / 3


def test_weights_and_gradients_travel_once_a_micro_batch_unless_the_model_is_small() -> None:
    large, small = MODELS["8b"], decoder()
    one = large.parameters * 3 / 4 / 4e11  # of 4 ranks each receives three quarters
    assert math.isclose(times.traffic_s(large, ROUND, 4, micro_batches=5), one * 5 * (2 + 2 + 4))
    assert math.isclose(times.traffic_s(large, ROUND, 4, micro_batches=5, rest=3), one * (40 + 3 * 2))
    assert math.isclose(times.traffic_s(small, ROUND, 4, 5), small.parameters * 3 / 4 / 4e11 * 8)
    assert times.traffic_s(large, ROUND, 1, 5) == 0
    within, across = large.parameters * 7 / 8 * 5 * 8 / 4e11, 3 * 4 * large.parameters / 8 / 5e10
    assert math.isclose(times.traffic_s(large, ROUND, 16, 5, replicas=2, steps=3), within + across)


def test_a_ring_over_nodes_uses_all_network_cards_of_a_node() -> None:
    assert ROUND.ring_bandwidth(8) == 4e11 == ROUND.ring_bandwidth(9), "8 x 5e10 is as much as the node's own"
    assert replace(ROUND, network_bandwidth=1e10).ring_bandwidth(16) == 8e10


def test_the_optimiser_and_the_write_are_bound_by_memory() -> None:
    shape = MODELS["8b"]
    assert math.isclose(times.moved_s(shape.parameters, ROUND, 4, times.OPTIMISER_BYTES), 28 * 8_030_261_248 / 4 / 5e11)
    assert math.isclose(times.moved_s(shape.parameters, ROUND, 4, times.SEND_BYTES), 6 * 8_030_261_248 / 4 / 5e11)


def test_the_busier_side_of_a_delivery_within_a_node_counts() -> None:
    shape, total = MODELS["8b"], 2 * 8_030_261_248
    few = times.delivery_s(shape.parameters, ROUND, trainers=6, engines=2, tensor_parallel=1)
    many = times.delivery_s(shape.parameters, ROUND, trainers=2, engines=3, tensor_parallel=2)
    assert math.isclose(few, total / 4e11) and math.isclose(many, total * 6 / 2 / 4e11)
