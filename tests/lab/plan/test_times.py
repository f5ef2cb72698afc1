"""Times of decoding, sampling, training and updating, by hand on a machine of round numbers."""

import math
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from lab.plan import split, times
from lab.plan.scenario import CARDS, MODELS, Lengths, Scenario, Workload
from lab.plan.times import EngineModel
from tests.lab.plan.shapes import ROUND, decoder, decoders, machines, work


def test_a_small_decode_batch_waits_for_memory():
    shape = MODELS["8b"]  # 16.06 GB of weights; a token's keys and values: 2 x 32 x 8 x 128 x 2 bytes
    engine = EngineModel(shape, ROUND, 1)
    assert math.isclose(engine.decode_s(0, 0), 2 * 8_030_261_248 / 5e11 + 0.001)
    assert math.isclose(engine.decode_s(64, 1000), (2 * 8_030_261_248 + 64 * 1000 * 131_072) / 5e11 + 0.001)


def test_a_large_decode_batch_waits_for_products():
    shape = MODELS["8b"]
    products = 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096  # all but the embedding and the norms
    assert shape.products == products
    flops = 8192 * (2 * products + 4 * 32 * 4096 * 10)
    assert math.isclose(EngineModel(shape, ROUND, 1).decode_s(8192, 10), flops / 5e14 + 0.001)


def test_gpus_of_an_engine_share_the_work_and_pay_for_sums():
    one, four = (EngineModel(MODELS["8b"], ROUND, width).decode_s(64, 1000) for width in (1, 4))
    assert math.isclose(four, (one - 0.001) / 4 + 0.001 + 2 * 32 * 1e-5)


@given(
    machine=machines(), shape=decoders(), running=st.floats(0.1, 1e4), factor=st.floats(1, 50),
    context=st.floats(0, 1e5),
)  # fmt: skip
def test_a_larger_batch_is_slower_but_never_in_proportion(machine, shape, running, factor, context):
    engine = EngineModel(shape, machine, 1)
    few, many = engine.decode_s(running, context), engine.decode_s(factor * running, context)
    assert few * (1 - 1e-9) <= many <= factor * few * (1 + 1e-9)


def test_prompts_are_read_at_the_peak():
    shape = decoder()
    flops = 10 * (2 * shape.products + 4 * 2 * 8 * 5)  # 2 layers, 4 heads of 2 channels, 5 tokens before on average
    assert math.isclose(EngineModel(shape, ROUND, 2).prefill_s(10), flops / (2 * 5e14))


def test_what_a_cache_holds():
    engine = EngineModel(MODELS["8b"], ROUND, 2)
    assert math.isclose(engine.spare_bytes, 0.9 * 80e9 - 8_030_261_248 - 2 * 128_256 * 4096)
    assert engine.completions_in(131_072 * 50, 10) == 10.0, "two GPUs hold 100 tokens"


def test_floating_point_operations_of_a_training_step():
    shape = decoder()
    plain = times.training_flops(shape, tokens=30, square_tokens=500)  # e.g. two sequences, of 10 and 20 tokens
    assert plain == 6 * shape.products * 30 + 6 * (2 * 4 * 2) * 500
    assert times.training_flops(shape, 30, 500, recompute=True) == plain * 4 / 3
    assert times.training_flops(shape, 30, 500, extra_forwards=2) == plain * 5 / 3
    assert times.training_flops(shape, 30, 500, frozen=True) == plain * 2 / 3, "adapters: no gradients of the weights"


def test_weights_and_gradients_travel_once_a_micro_batch_unless_the_model_is_small():
    large, small = MODELS["8b"], decoder()
    one = large.parameters * 3 / 4 / 4e11  # of 4 ranks each receives three quarters
    assert math.isclose(times.traffic_s(large, ROUND, 4, micro_batches=5), one * 5 * (2 + 2 + 4))
    assert math.isclose(times.traffic_s(large, ROUND, 4, micro_batches=5, rest=3), one * (40 + 3 * 2))
    assert math.isclose(times.traffic_s(small, ROUND, 4, 5), small.parameters * 3 / 4 / 4e11 * 8)
    assert times.traffic_s(large, ROUND, 1, 5) == 0
    within, across = large.parameters * 7 / 8 * 5 * 8 / 4e11, 3 * 4 * large.parameters / 8 / 5e10
    assert math.isclose(times.traffic_s(large, ROUND, 16, 5, replicas=2, steps=3), within + across)


def test_a_ring_over_nodes_uses_all_network_cards_of_a_node():
    assert ROUND.ring_bandwidth(8) == 4e11 == ROUND.ring_bandwidth(9), "8 x 5e10 is as much as the node's own"
    assert replace(ROUND, network_bandwidth=1e10).ring_bandwidth(16) == 8e10


def test_the_optimiser_and_the_write_are_bound_by_memory():
    shape = MODELS["8b"]
    assert math.isclose(times.moved_s(shape.parameters, ROUND, 4, times.OPTIMISER_BYTES), 28 * 8_030_261_248 / 4 / 5e11)
    assert math.isclose(times.moved_s(shape.parameters, ROUND, 4, times.SEND_BYTES), 6 * 8_030_261_248 / 4 / 5e11)


def test_the_busier_side_of_a_delivery_within_a_node_counts():
    shape, total = MODELS["8b"], 2 * 8_030_261_248
    few = times.delivery_s(shape.parameters, ROUND, trainers=6, engines=2, tensor_parallel=1)
    many = times.delivery_s(shape.parameters, ROUND, trainers=2, engines=3, tensor_parallel=2)
    assert math.isclose(few, total / 4e11) and math.isclose(many, total * 6 / 2 / 4e11)


TEN = Lengths(10, 10, 10)
MIXED = Lengths(20, 60, 60)


@dataclass(frozen=True)
class Simple(EngineModel):
    """A decode step of 1 s and 0.1 s a completion; prompts cost nothing."""

    def decode_s(self, running: float, context: float) -> float:
        """See above."""
        return 1 + 0.1 * running

    def prefill_s(self, prompt_tokens: float) -> float:
        """Nothing."""
        return 0.0


ENGINE = Simple(decoder(), ROUND, 1)


def test_equal_completions_started_together():
    sampled = times.sampling_times(ENGINE, work(TEN), engines=2, slots=2)  # two each: 10 steps of 1.2 s
    assert math.isclose(sampled.together_s, 12) and math.isclose(sampled.full_s, 12)


def test_completions_without_a_seat_wait():
    sampled = times.sampling_times(ENGINE, work(TEN), engines=2, slots=1)  # one after the other: 20 steps of 1.1 s
    assert math.isclose(sampled.together_s, 22) and math.isclose(sampled.full_s, 22)


def test_the_longest_completion_keeps_a_thinning_batch_alive():
    many = Lengths(10, 40, 400)
    sampled = times.sampling_times(ENGINE, work(many, prompts=1000, group=1000), engines=1, slots=1e6)
    longest = many.longest(10**6)
    assert 100 < longest < 400
    assert math.isclose(sampled.together_s, longest + 0.1 * 10**6 * many.mean), "each token is paid once"


def test_more_open_completions_fill_the_engines_better():
    first, two = (
        times.sampling_times(ENGINE, work(TEN), engines=2, slots=100, async_level=async_level).full_s
        for async_level in (1, 2)
    )
    assert math.isclose(first, 12) and math.isclose(two, 2 * 10 * 1.4 / 4)


def test_groups_without_signal_are_sampled_in_vain():
    wasted = times.sampling_times(ENGINE, work(TEN, kept=0.5), engines=2, slots=2)
    assert math.isclose(wasted.full_s, 24) and math.isclose(wasted.together_s, 24)


def test_the_longest_completion_at_the_load_of_its_step():
    sampled = times.sampling_times(ENGINE, work(MIXED, prompts=100, group=100), engines=1, slots=1e9, async_level=1)
    # three batches' worth of 10,000 x 20 tokens over 60 positions would run: 10,000 less what is cut
    running = 3 * 10_000 * MIXED.mean / 60
    assert math.isclose(sampled.decode_s, 1 + 0.1 * running, rel_tol=1e-6)
    assert math.isclose(sampled.longest_s, 60 * (1 + 0.1 * running), rel_tol=1e-6)


def test_the_straggler_has_the_time_of_its_slot_and_of_one_overtaking():
    usual = Workload(Lengths(2000, 8000, 8000), 8000, 64, 16, 200)
    plan = split.place(Scenario(MODELS["8b"], replace(CARDS["h100"], gpus=64), usual), 4, 4, async_level=2)
    assert plan is not None
    assert plan.bounds["longest completion"] == (plan.sampling.longest_s + plan.train_s + plan.update_s) / 4
