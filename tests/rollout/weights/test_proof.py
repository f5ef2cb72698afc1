"""Each kind of missed weight is found and named."""

import pytest
from msgspec.structs import replace

from rollout.weights.checksum import Columns, add_parts
from rollout.weights.proof import (
    LOGPROB_LIMITS,
    MOVE_LIMITS,
    MOVE_SHARE,
    PublishedWeights,
    Updated,
    WeightProof,
    WeightsHeld,
    compare_checksums,
    compare_held,
    compare_probe,
    compare_version,
)  # fmt: skip
from shared.errors import NonFinite, SyncMismatch

TRUTH = {"a": 11, "b": 22, "c": 2}
BEFORE = {"a": 5, "b": 6, "c": 7}


@pytest.mark.parametrize(("received", "message"), [
    ({"a": 11, "b": 22}, "engine 3 .*received no c"),
    ({**TRUTH, "d": 4}, "engine 3 .*received d, which no trainer has"),
    ({**TRUTH, "b": 6}, r"engine 3 .*b still of the previous version \(dropped\)$"),
    ({**TRUTH, "b": 9}, r"engine 3 .*b differ \(dropped or damaged\)$"),
    ({**TRUTH, "a": 22, "b": 11}, "engine 3 .*a and b are swapped$"),
    ({"a": 5, "b": 6, "c": 7}, "engine 3 .*all 3 changed tensors are those of the previous version"),
], ids=["missing", "surplus", "dropped", "damaged", "swapped", "old version"])  # fmt: skip
def test_each_miss_is_named(received, message):
    parts = [{"a": 1, "b": 2, "c": 3}, {"a": 10, "b": 20, "c": 2**64 - 1}]
    compare_checksums(add_parts(parts), dict(TRUTH), 3, BEFORE)  # added up modulo 2**64
    with pytest.raises(SyncMismatch, match=message):
        compare_checksums(TRUTH, received, 3, BEFORE)


def test_a_long_list_of_names_is_cut():
    sent = {f"t{number}": number for number in range(9)}
    with pytest.raises(SyncMismatch, match="t0, t1, t2, t3, t4 and 4 more differ"):
        compare_checksums(sent, dict.fromkeys(sent, 99), 0)


def test_a_skipped_engine_and_an_old_one_are_named():
    compare_version(1, 4, 4)
    with pytest.raises(SyncMismatch, match="engine 1 holds version 3, but version 4 was published"):
        compare_version(1, 4, 3)
    with pytest.raises(SyncMismatch, match="engine 2 confirmed nothing"):
        compare_version(2, 4, None)


def test_probe_statistics_by_hand_and_the_worst_token_is_named_with_both_values():
    found = compare_probe([[-1.0, -2.0], [-3.0]], [[-1.01, -2.0], [-3.05]], 0, "bfloat16")
    assert (found.mean, found.p99, found.max) == pytest.approx((0.02, 0.05, 0.05))
    with pytest.raises(SyncMismatch, match=r"engine 2 .*token 2 of probe sequence 0: trainer -2\.00000, engine -2\.5"):
        compare_probe([[-1.0, -2.0]], [[-1.1, -2.5]], 2, "float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_probe_value_that_is_not_finite_is_an_error_of_its_own(value):
    with pytest.raises(NonFinite, match="probe sequence 0, token 1"):
        compare_probe([[-1.0]], [[value]], 0, "float32")


@pytest.mark.parametrize(("dtype", "limit"), LOGPROB_LIMITS.items())
def test_the_limit_follows_the_dtype(dtype, limit):
    assert compare_probe([[-1.0]], [[-1.0 - 0.9 * limit]], 0, dtype).mean == pytest.approx(0.9 * limit)
    with pytest.raises(SyncMismatch, match=f"the limit of {dtype}"):
        compare_probe([[-1.0]], [[-1.0 - 1.1 * limit]], 0, dtype)


def published(version: int, whole: dict[str, int], columns: dict[str, int], before: dict[str, int]) -> PublishedWeights:
    chosen = {name: Columns([version], value, before[name]) for name, value in columns.items()}
    return PublishedWeights(version, 0, 0.0, whole, chosen)


# two ranks; "e" is the embedding and the tied head, "l" a packed linear, "n" a norm that two workers hold
OLD = [published(6, {"e": 1, "l": 2, "n": 3}, {}, {}), published(6, {"e": 6, "l": 7}, {}, {})]
NEW = [
    published(7, {"e": 10, "l": 20, "n": 30}, {"e": 40, "l": 50}, {"e": 4, "l": 5}),
    published(7, {"e": 60, "l": 70}, {"e": 80, "l": 90}, {"e": 8, "l": 9}),
]
HELD = WeightsHeld({"e": 70, "n": 60}, {"n": 2}, {"e": 120, "l": 140})


@pytest.mark.parametrize(("checksums", "columns", "message"), [
    ({}, {"l": 14}, r"sent: l still of the previous version \(dropped\)$"),
    ({}, {"e": 12}, r"sent: e as the head still of the previous version \(dropped\)$"),
    ({"e": 7}, {}, r"sent: e still of the previous version \(dropped\)$"),
    ({"n": 6}, {}, r"sent: n still of the previous version \(dropped\)$"),
    ({"n": 33}, {}, r"sent: n differ \(dropped or damaged\)$"),
    ({"e": 10 + 6}, {"l": 50 + 9}, r"sent: the rows of trainer rank 1 in e, l still of the previous version$"),
    ({"e": 7, "n": 6}, {"e": 12, "l": 14}, r"sent: all 4 changed tensors are those of the previous version: e, n"),
], ids=["linear", "head", "embedding", "copies", "one copy", "rank", "version"])  # fmt: skip
def test_what_an_engine_computes_with_is_compared(checksums, columns, message):
    compare_held(NEW, HELD, 2, OLD)
    wrong = WeightsHeld({**HELD.checksums, **checksums}, HELD.copies, {**HELD.columns, **columns})
    with pytest.raises(SyncMismatch, match=message):
        compare_held(NEW, wrong, 2, OLD)


def test_checksums_that_the_trainers_added_up_are_compared_once_and_a_failure_still_names_the_rank():
    """Rank 0 reports the sums; which rank's rows are old is seen in the parts, which are asked for then."""

    def summed(parts: list[PublishedWeights]) -> list[PublishedWeights]:
        whole = add_parts(part.checksums for part in parts)
        return [replace(part, checksums={} if number else whole) for number, part in enumerate(parts)]

    proof, parts = WeightProof("bfloat16"), [[old.checksums, new.checksums] for old, new in zip(OLD, NEW, strict=True)]
    proof.before = summed(OLD)
    replies = [Updated(engine, 7, {}, 0, HELD, scored_version=7) for engine in range(3)]
    proof.check(summed(NEW), replies, [])
    proof.name_ranks(parts)
    proof.before = summed(OLD)
    stale = WeightsHeld({**HELD.checksums, "e": 10 + 6}, HELD.copies, HELD.columns)
    with pytest.raises(SyncMismatch, match="engine 1 does not hold .*: e differ"):
        proof.check(summed(NEW), [replies[0], replace(replies[1], held=stale), replies[2]], [])
    proof.name_ranks([versions[1:] for versions in parts])
    with pytest.raises(
        SyncMismatch, match="engine 1 does not hold .*: the rows of trainer rank 1 in e still of the prev"
    ):
        proof.name_ranks(parts)


def test_a_tensor_that_was_not_read_back_is_missed():
    with pytest.raises(SyncMismatch, match="no l$"):
        compare_held(NEW, WeightsHeld(HELD.checksums, HELD.copies, {"e": 120}), 0, OLD)


@pytest.mark.parametrize(("dtype", "bias"), [("bfloat16", 0.02), ("bfloat16", 0.001), ("float32", 1e-6)])
def test_how_far_the_probe_moved_is_compared_without_what_both_versions_differ_by(dtype, bias):
    """The engine's log-probs always lie `bias` off; how far they move may differ by the limit, and no more."""
    probe, ours = [[1, 2, 3]], [[-1.0, -2.0]]
    limit = max(MOVE_LIMITS[dtype], MOVE_SHARE * bias)

    def update(proof: WeightProof, version: int, moved: float, extra: float) -> float:
        theirs = [[value + bias + moved + extra for value in row] for row in ours]
        parts = [PublishedWeights(version, 0, 0.0, probe=[[value + moved for value in row] for row in ours])]
        reply = Updated(0, version, {}, 0, WeightsHeld(), scored_version=version, probe=theirs)
        return proof.check(parts, [reply], probe)[0].moved

    for extra in (0.9 * limit, 1.1 * limit):
        proof = WeightProof(dtype)
        assert update(proof, 0, 0.0, 0.0) == 0.0
        assert update(proof, 1, 0.01, 0.0) == pytest.approx(0.0, abs=1e-6)
        if extra < limit:
            assert update(proof, 2, 0.01, extra) == pytest.approx(extra, rel=1e-3)
            continue
        with pytest.raises(SyncMismatch, match="does not compute with version 2: since version 1 2 log-probs"):
            update(proof, 2, 0.01, extra)


def test_probe_sequences_are_scored_at_first_and_then_the_less_often_the_longer_they_are():
    probe = [list(range(count)) for count in (8, 64, 256)]
    proof, scored = WeightProof("float32"), dict[int, list[int]]()
    for version in range(1, 257):
        due = proof.due(probe, version)
        rows = [[-1.0] * (len(ids) - 1) for ids in due]
        reply = Updated(0, version, {}, 0, WeightsHeld(), scored_version=version, probe=rows)
        proof.check([PublishedWeights(version, 0, 0.0, probe=rows)], [reply], due)
        for ids in due:
            scored.setdefault(len(ids), []).append(version)
    assert scored[8] == [1, *range(2, 257, 2)]
    assert scored[64] == [1, 32, 64, 96, 128, 160, 192, 224, 256]
    assert scored[256] == [1, 128, 256]
