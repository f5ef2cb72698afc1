"""Worker ranks driven by scripted calls, on one and on two real ranks (see rank_scene.py)."""

import json
from typing import Any

import pytest

from shared.hf import load_model
from shared.packing import pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
CANARY = [[3, 1, 4, 1, 5], [9, 2, 6]]
LOAD, ACCUMULATE, STEP, PUBLISH, SAVE, EXPORT, SAVE_TO_NOWHERE, RESET, STOP = range(9)


def replies(scene: Any, world: int, rank: int = 0, launch: str = "first") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((scene.folder / f"worker-{world}-{rank}.json").read_text())[launch]
    return found


def test_every_call_has_its_reply(scene: Any) -> None:
    expected = ["Loaded", "Accumulated", "Stepped", "Published", "Saved", "Done", "Failed", "Done", "Done"]
    for world, rank in ((1, 0), (2, 0), (2, 1)):
        assert [reply["type"] for reply in replies(scene, world, rank)] == expected


def test_a_rank_tells_what_it_holds(scene: Any) -> None:
    loaded = replies(scene, 2)[LOAD]
    assert loaded["parameters"] == 9358 and loaded["transfer"]["kind"] == "shm"
    assert loaded["description"]["master weights"] == loaded["description"]["moments"] == "float32"


def test_sums_of_ranks_add_up_to_the_single_rank(scene: Any) -> None:
    one, two = replies(scene, 1)[ACCUMULATE], [replies(scene, 2, rank)[ACCUMULATE] for rank in (0, 1)]
    for name, value in one["sums"].items():
        assert sum(reply["sums"][name] for reply in two) == pytest.approx(value, rel=1e-5), name
    for name, value in one["maxima"].items():
        assert max(reply["maxima"][name] for reply in two) == pytest.approx(value, rel=1e-5), name
    assert sum(reply["tokens"] for reply in two) == one["tokens"]
    assert replies(scene, 2)[STEP]["grad_norm"] == pytest.approx(replies(scene, 1)[STEP]["grad_norm"], rel=1e-5)


def test_ranks_write_the_whole_model_between_them_once(scene: Any) -> None:
    written = [replies(scene, 2, rank)[PUBLISH]["bytes"] for rank in (0, 1)]
    assert sum(written) == 9358 * 4 and min(written) > 0.4 * sum(written)
    assert all(replies(scene, 2, rank)[PUBLISH]["checksums"] for rank in (0, 1))


def test_canary_is_scored_with_the_weights_that_were_exported(scene: Any) -> None:
    for world in (1, 2):
        canary = replies(scene, world)[PUBLISH]["canary"]
        trained, before = (
            load_model(scene.folder / name)(pack(CANARY, [1, 1]))[0].detach() for name in (f"exported-{world}", "model")
        )
        expected = [part.tolist() for part in trained.split([4, 2])]
        for mine, theirs in zip(canary, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        assert float((before - trained).abs().max()) > 1e-3
    assert replies(scene, 2, 1)[PUBLISH]["canary"] == []


def test_an_export_has_the_tokenizer_and_the_type_of_the_engines(scene: Any) -> None:
    folder = scene.folder / "exported-2"
    assert (folder / "tokenizer.json").is_file()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_rank_goes_on(scene: Any) -> None:
    failed = replies(scene, 2, 1)[SAVE_TO_NOWHERE]
    assert failed["kind"] == "CheckpointError" and "runs_dir" in failed["message"]


def test_a_resumed_rank_publishes_bitwise_the_same(scene: Any) -> None:
    for world, rank in ((1, 0), (2, 0), (2, 1)):
        first, second = replies(scene, world, rank)[PUBLISH], replies(scene, world, rank, "second")[1]
        assert first["canary"] == second["canary"] and first["checksums"] == second["checksums"]


def test_the_reference_stays_where_it_was_while_the_policy_moves_on(scene: Any) -> None:
    """It is the export of the weights that the policy starts with: no divergence, then a step away from it."""
    for world, rank in ((1, 0), (2, 0), (2, 1)):
        found = replies(scene, world, rank, "regularised")
        types = ["Loaded", "Done", "Accumulated", "Stepped", "Accumulated", "Done"]
        assert [reply["type"] for reply in found] == types
    one = replies(scene, 1, 0, "regularised")
    two = [replies(scene, 2, rank, "regularised") for rank in (0, 1)]
    for call in (2, 4):
        for name, value in one[call]["sums"].items():
            assert sum(reply[call]["sums"][name] for reply in two) == pytest.approx(value, rel=1e-4, abs=1e-4), name
    for reply in (one, *two):
        before, after = (reply[call]["sums"] for call in (2, 4))
        assert before["reference_log_ratio"] == before["regularisation"] == 0
        assert abs(after["reference_log_ratio"]) > 0.01 and after["regularisation"] != 0


def test_a_log_prob_that_is_not_finite_stops_the_rank_and_is_located(scene: Any) -> None:
    failed = replies(scene, 2, 1, "second")[2]
    assert failed["kind"] == "NonFinite"
    assert "completion position 1 (token id 4) is nan" in failed["message"]
