"""Each kind of missed weight is found and named."""

from __future__ import annotations

import pytest

from rollout.weights.checksum import add_parts
from rollout.weights.proof import LOGPROB_LIMITS, compare_checksums, compare_probe, compare_version
from shared.errors import NonFinite, SyncMismatch

PARTS = [{"a": 1, "b": 2, "c": 3}, {"a": 10, "b": 20, "c": 2**64 - 1}]
TRUTH = {"a": 11, "b": 22, "c": 2}
BEFORE = {"a": 5, "b": 6, "c": 7}


def test_parts_of_all_ranks_add_up_modulo_two_to_the_64() -> None:
    compare_checksums(add_parts(PARTS), dict(TRUTH), 0)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ({"a": 11, "b": 22}, "engine 3 .*received no c"),
        ({**TRUTH, "d": 4}, "engine 3 .*received d, which no trainer has"),
        ({**TRUTH, "b": 6}, r"engine 3 .*b still of the previous version \(dropped\)$"),
        ({**TRUTH, "b": 9}, r"engine 3 .*b differ \(dropped or damaged\)$"),
        ({**TRUTH, "a": 22, "b": 11}, "engine 3 .*a and b are swapped$"),
        ({"a": 5, "b": 6, "c": 7}, "engine 3 .*all 3 changed tensors are those of the previous version"),
    ],
    ids=["missing", "surplus", "dropped", "damaged", "swapped", "old version"],
)
def test_each_miss_is_named(received: dict[str, int], message: str) -> None:
    with pytest.raises(SyncMismatch, match=message):
        compare_checksums(TRUTH, received, 3, BEFORE)


def test_a_long_list_of_names_is_cut() -> None:
    sent = {f"t{number}": number for number in range(9)}
    with pytest.raises(SyncMismatch, match="t0, t1, t2, t3, t4 and 4 more differ"):
        compare_checksums(sent, dict.fromkeys(sent, 99), 0)


def test_a_skipped_engine_and_an_old_one_are_named() -> None:
    compare_version(1, 4, 4)
    with pytest.raises(SyncMismatch, match="engine 1 holds version 3, but version 4 was published"):
        compare_version(1, 4, 3)
    with pytest.raises(SyncMismatch, match="engine 2 confirmed nothing"):
        compare_version(2, 4, None)


def test_probe_statistics_by_hand() -> None:
    found = compare_probe([[-1.0, -2.0], [-3.0]], [[-1.01, -2.0], [-3.05]], 0, "bfloat16")
    assert (found.mean, found.p99, found.max) == pytest.approx((0.02, 0.05, 0.05))


def test_the_worst_probe_token_is_named_with_both_values() -> None:
    with pytest.raises(SyncMismatch, match=r"engine 2 .*token 2 of probe sequence 0: trainer -2\.00000, engine -2\.5"):
        compare_probe([[-1.0, -2.0]], [[-1.1, -2.5]], 2, "float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_probe_value_that_is_not_finite_is_an_error_of_its_own(value: float) -> None:
    with pytest.raises(NonFinite, match="probe sequence 0, token 1"):
        compare_probe([[-1.0]], [[value]], 0, "float32")


@pytest.mark.parametrize(("dtype", "limit"), LOGPROB_LIMITS.items())
def test_the_limit_follows_the_dtype(dtype: str, limit: float) -> None:
    assert compare_probe([[-1.0]], [[-1.0 - 0.9 * limit]], 0, dtype).mean == pytest.approx(0.9 * limit)
    with pytest.raises(SyncMismatch, match=f"the limit of {dtype}"):
        compare_probe([[-1.0]], [[-1.0 - 1.1 * limit]], 0, dtype)
