"""Worker ranks driven by scripted calls, on one and on two real ranks (see worker_scene.py)."""

import hashlib
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from shared.config import Config
from shared.errors import CheckpointError
from shared.progress import Progress
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.trainer.worker_scene import PROBE
from trainer.checkpoint import shards
from trainer.launch import Launch
from trainer.objectives.registry import read_objective
from trainer.step import optimiser
from trainer.step.rank import LoadedTrainer, TrainerRank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RANKS = ((1, 0), (2, 0), (2, 1))
"""world, rank"""
LOAD, TRAIN, STEP, PUBLISH, SAVE, EXPORT, SAVE_TO_NOWHERE, RESET, STOP = range(9)


def replies(scene: Any, world: int, rank: int = 0, launch: str = "first") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((scene.folder / f"worker-{world}-{rank}.json").read_text())[launch]
    return found


def test_every_call_has_its_reply(scene: Any) -> None:
    expected = ["LoadedTrainer", "StepSums", "Stepped", "PublishedWeights", "dict", "NoneType", "RankFailed"]
    expected += ["NoneType"] * 2
    for world, rank in RANKS:
        assert [reply["type"] for reply in replies(scene, world, rank)] == expected


def test_a_rank_tells_what_it_holds(scene: Any) -> None:
    loaded = replies(scene, 2)[LOAD]
    assert loaded["parameters"] == 9358 and loaded["transfer"]["kind"] == "shm"
    assert loaded["description"]["master weights"] == loaded["description"]["moments"] == "float32"
    assert loaded["slow_dtype"] is False


@pytest.mark.parametrize("slow", [False, True])
def test_a_launch_warns_of_a_type_that_the_processor_is_slow_in(slow: bool) -> None:
    told = StringIO()
    scene = SimpleNamespace(config=Config(), progress=Progress(told))
    Launch._describe(cast(Launch, scene), [LoadedTrainer(10, {}, {"compute": "bfloat16"}, slow_dtype=slow)])
    warned = 'warning: this processor is slow in bfloat16: set optimiser.compute_dtype = "float32"' in told.getvalue()
    assert warned is slow


def test_sums_of_ranks_add_up_to_the_single_rank(scene: Any) -> None:
    one, two = replies(scene, 1)[TRAIN], [replies(scene, 2, rank)[TRAIN] for rank in (0, 1)]
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


def test_probe_is_scored_with_the_weights_that_were_exported(scene: Any) -> None:
    for world in (1, 2):
        probe = replies(scene, world)[PUBLISH]["probe"]
        trained, before = (
            load_model(scene.folder / name)(pack_from(PROBE, [1, 1]))[0].detach()
            for name in (f"exported-{world}", "model")
        )
        expected = [part.tolist() for part in trained.split([4, 2])]
        for mine, theirs in zip(probe, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        assert float((before - trained).abs().max()) > 1e-3
    assert replies(scene, 2, 1)[PUBLISH]["probe"] == []


def test_an_export_has_the_tokenizer_and_the_type_of_the_engines(scene: Any) -> None:
    folder = scene.folder / "exported-2"
    assert (folder / "tokenizer.json").is_file()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_rank_goes_on(scene: Any) -> None:
    failed = replies(scene, 2, 1)[SAVE_TO_NOWHERE]
    assert failed["kind"] == "CheckpointError" and "runs_dir" in failed["message"]


def test_a_resumed_rank_publishes_bitwise_the_same(scene: Any) -> None:
    for world, rank in RANKS:
        first, second = replies(scene, world, rank)[PUBLISH], replies(scene, world, rank, "second")[1]
        assert first["probe"] == second["probe"] and first["checksums"] == second["checksums"]


def test_the_reference_stays_where_it_was_while_the_policy_moves_on(scene: Any) -> None:
    """It is the export of the weights that the policy starts with: no divergence, then a step away from it."""
    for world, rank in RANKS:
        found = replies(scene, world, rank, "regularised")
        types = ["LoadedTrainer", "NoneType", "StepSums", "Stepped", "StepSums", "NoneType"]
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


def total(scene: Any, world: int, launch: str, call: int, name: str) -> float:
    """A sum over the ranks."""
    return sum(float(replies(scene, world, rank, launch)[call]["sums"][name]) for rank in range(world))


def test_a_reference_moves_by_its_share_of_the_way_to_the_policy(scene: Any) -> None:
    began = load_file(scene.folder / "reference" / "model.safetensors")
    for world in (1, 2):
        policy = load_file(scene.folder / f"policy-{world}" / "model.safetensors")
        moved = load_file(scene.folder / f"average-{world}" / "reference" / "model.safetensors")
        assert moved.keys() == began.keys() == policy.keys()
        for name, weight in began.items():
            assert torch.equal(moved[name], weight.lerp(policy[name], 0.25)), name
        far, nearer, there = (total(scene, world, "average", call, "reference_log_ratio") for call in (2, 7, 9))
        assert there == 0 and abs(far) > 1 and abs(nearer - far) > 1


def test_a_reference_that_moved_is_part_of_the_checkpoint_with_its_sizes(scene: Any) -> None:
    for world, rank in RANKS:
        files = replies(scene, world, rank, "average")[5]["value"]
        beside = {name for name in files if name.startswith("reference/")}
        expected = {"config.json", "model.safetensors", "tokenizer.json"} if rank == 0 else set()
        assert beside == {f"reference/{name}" for name in expected} and len(files) == len(beside) + 1
        for name, written in files.items():
            found = (scene.folder / f"average-{world}" / name).read_bytes()
            assert written == {"bytes": len(found), "sha256": hashlib.sha256(found).hexdigest()}, name


def test_a_resume_with_the_moved_reference_goes_on_bitwise_the_same(scene: Any) -> None:
    for world, rank in RANKS:
        first, second = (replies(scene, world, rank, name) for name in ("average", "average resumed"))
        assert first[7]["sums"] == second[2]["sums"] and first[7]["maxima"] == second[2]["maxima"]
        assert second[2]["sums"]["reference_log_ratio"] != 0


def test_a_reference_that_does_not_move_is_not_saved(scene: Any) -> None:
    assert not (scene.folder / "dro-2" / "reference").exists()


def test_old_log_probs_are_those_of_the_next_forward(scene: Any) -> None:
    """As behaviour log-probs they give ratios of 1 before the first step, and others after it."""
    types = [
        "LoadedTrainer", "NoneType", "list", "StepSums", "Stepped", "StepSums", "Stepped", "NoneType", "StepSums",
        "NoneType",
    ]  # fmt: skip
    for world, rank in RANKS:
        found = replies(scene, world, rank, "previous")
        assert [reply["type"] for reply in found] == types
        assert sum(map(len, found[2]["value"])) == found[3]["sums"]["tokens"] > 0
        assert found[3]["maxima"]["abs_logprob_difference"] < 1e-6
        assert found[3]["maxima"]["ratio"] == pytest.approx(1, abs=1e-6)
        assert found[5]["maxima"]["abs_logprob_difference"] > 0.01
        assert found[3]["sums"]["reference_log_ratio"] == 0, "the policy of the start is the reference"
        assert abs(found[5]["sums"]["reference_log_ratio"]) > 0.01
        assert found[8]["sums"]["reference_log_ratio"] == 0, "and now the one of now"


def test_the_value_head_is_saved_once_and_goes_on_bitwise_the_same(scene: Any) -> None:
    for world, rank in RANKS:
        first, second = (replies(scene, world, rank, name) for name in ("dro", "dro resumed"))
        assert ("value_head.safetensors" in first[9]["value"]) == (rank == 0)
        for before, after in ((10, 2), (12, 4)):
            assert first[before]["sums"] == second[after]["sums"]
    losses = [total(scene, 1, "dro", call, "loss") for call in (7, 10, 12)]
    assert len(set(losses)) == 3
    for call in (7, 10, 12):
        assert total(scene, 2, "dro", call, "loss") == pytest.approx(total(scene, 1, "dro", call, "loss"), rel=1e-4)


def test_the_value_head_takes_nothing_from_the_sft(scene: Any) -> None:
    """After its first own step every value is the learning rate away from 0, as AdamW's first step is."""
    for world in (1, 2):
        head = load_file(scene.folder / f"dro-{world}" / "value_head.safetensors")
        assert head["step/0"] == head["step/1"] == 1
        assert float(head["bias"].abs()) == pytest.approx(0.05, rel=1e-3)
        assert float(head["weight"].abs().max()) == pytest.approx(0.05, rel=1e-3)


def test_a_reference_that_moved_is_gathered_before_a_disk_can_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the ranks whose disk is well would wait in the gather for the one that failed."""
    done: list[str] = []

    def full(*_: object) -> None:
        done.append("shard")
        raise CheckpointError("no space left")

    monkeypatch.setattr(shards, "ShardWriter", full)
    rank: Any = SimpleNamespace(
        auxiliary=SimpleNamespace(reference=object(), values=None), rank=1, world=2, decoder=None, optimiser=None,
        objective=read_objective({"kl": {"weight": 0.1, "reference": {"kind": "average"}}}), writer=None,
        write_reference=lambda *_: done.append("gather"),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="no space left"):
        TrainerRank.save(rank, str(tmp_path), 1)
    assert done == ["gather", "shard"]


@pytest.mark.parametrize(
    ("change", "first_change"),
    [(lambda rank: TrainerRank.step(rank, 1e-3), "update"), (TrainerRank.reset_optimiser, "reset"),
     (TrainerRank.offload, "offload")],
)  # fmt: skip
def test_a_checkpoint_under_way_is_asked_before_weights_or_moments_change(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], first_change: str
) -> None:
    events: list[str] = []
    monkeypatch.setattr(optimiser, "clip", lambda *_: 1.0)
    for name in ("update", "reset"):
        monkeypatch.setattr(optimiser, name, lambda *_, name=name: events.append(name))
    rank: Any = SimpleNamespace(
        config=Config(), decoder=torch.nn.Linear(2, 2), optimiser=SimpleNamespace(state={}),
        role=SimpleNamespace(device=torch.device("cpu")),
        mesh=SimpleNamespace(get_group=lambda _: None), settle=lambda: events.append("settle"),
        auxiliary=SimpleNamespace(reference=None, teacher=None, values=None),
        host=SimpleNamespace(offload=lambda _: events.append("offload")),
    )  # fmt: skip
    change(rank)
    assert events == ["settle", first_change]
