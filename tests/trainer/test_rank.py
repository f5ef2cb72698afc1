"""Worker ranks driven by scripted calls, on one and on two real ranks (see worker_scene.py)."""

import hashlib
import json
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.config import Config
from shared.errors import CheckpointError
from shared.model import lora
from shared.model.adapter_folder import read_matrices, read_settings
from shared.model.cpu.processor import multiplies_bfloat16_fast
from shared.model.decoder import Decoder
from shared.progress import Progress
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.trainer.rank_data import SHAPE
from tests.trainer.worker_scene import PROBE
from trainer.checkpoint import shards
from trainer.launch import Launch
from trainer.objectives.registry import read_objective
from trainer.step import optimiser
from trainer.step.rank import LoadedTrainer, TrainerRank

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(1200)
RANKS = ((1, 0), (2, 0), (2, 1))
"""world, rank"""
LOAD, TRAIN, STEP, PUBLISH, SAVE, EXPORT, SAVE_TO_NOWHERE, RESET, STOP = range(9)


def replies(scene: Any, world: int, rank: int = 0, launch: str = "first") -> list[dict[str, Any]]:
    return json.loads((scene.folder / f"worker-{world}-{rank}.json").read_text())[launch]


def total(scene: Any, world: int, launch: str, call: int, name: str) -> float:
    """A sum over the ranks."""
    return sum(float(replies(scene, world, rank, launch)[call]["sums"][name]) for rank in range(world))


@slow
def test_every_call_has_its_reply(scene):
    step = ["StepSums", "Stepped"]
    types = {
        "first": ["LoadedTrainer", *step, "PublishedWeights", "dict", "NoneType", "RankFailed", *["NoneType"] * 2],
        "regularised": ["LoadedTrainer", "NoneType", *step, "StepSums", "NoneType"],
        "previous": ["LoadedTrainer", "NoneType", "list", *step * 2, "NoneType", "StepSums", "NoneType"],
    }
    for world, rank in RANKS:
        for launch, expected in types.items():
            assert [reply["type"] for reply in replies(scene, world, rank, launch)] == expected
    loaded = replies(scene, 2)[LOAD]
    assert loaded["parameters"] == 9358 and loaded["transfer"]["kind"] == "shm"
    assert loaded["description"]["master weights"] == loaded["description"]["moments"] == "float32"
    assert loaded["slow_dtype"] is False
    failed = replies(scene, 2, 1)[SAVE_TO_NOWHERE]
    assert failed["kind"] == "CheckpointError" and "runs_dir" in failed["message"], "and the rank goes on"
    failed = replies(scene, 2, 1, "second")[2]
    assert failed["kind"] == "NonFinite" and "completion position 1 (token id 4) is nan" in failed["message"]


@pytest.mark.parametrize("slow_dtype", [False, True])
def test_a_launch_warns_of_a_type_that_the_processor_is_slow_in(slow_dtype):
    output = StringIO()
    launch: Any = SimpleNamespace(config=Config(), progress=Progress(output))
    Launch._describe(launch, [LoadedTrainer(10, {}, {"compute": "bfloat16"}, slow_dtype=slow_dtype)])
    assert ('set optimiser.compute_dtype = "float32"' in output.getvalue()) is slow_dtype


@slow
def test_sums_of_ranks_add_up_to_the_single_rank(scene):
    single, two = replies(scene, 1)[TRAIN], [replies(scene, 2, rank)[TRAIN] for rank in (0, 1)]
    for name, value in single["sums"].items():
        assert sum(reply["sums"][name] for reply in two) == pytest.approx(value, rel=1e-5), name
    for name, value in single["maxima"].items():
        assert max(reply["maxima"][name] for reply in two) == pytest.approx(value, rel=1e-5), name
    assert sum(reply["tokens"] for reply in two) == single["tokens"]
    assert replies(scene, 2)[STEP]["grad_norm"] == pytest.approx(replies(scene, 1)[STEP]["grad_norm"], rel=1e-5)


@slow
def test_ranks_write_the_whole_model_between_them_once_and_resume_to_the_same_bits(scene):
    written = [replies(scene, 2, rank)[PUBLISH]["bytes"] for rank in (0, 1)]
    assert sum(written) == 9358 * 4 and min(written) > 0.4 * sum(written)
    for world, rank in RANKS:
        first, second = replies(scene, world, rank)[PUBLISH], replies(scene, world, rank, "second")[1]
        assert first["probe"] == second["probe"] and first["checksums"] == second["checksums"]
        assert bool(first["checksums"]) is (rank == 0), "one rank reports for all"


@slow
def test_probe_is_scored_with_the_weights_that_were_exported(scene):
    """The export has the tokenizer, and the type of the engines."""
    folder = scene.folder
    for world in (1, 2):
        trained, before = (
            load_model(folder / name)(pack_from(PROBE, [1, 1]))[0].detach() for name in (f"exported-{world}", "model")
        )
        for mine, theirs in zip(replies(scene, world)[PUBLISH]["probe"], trained.split([4, 2]), strict=True):
            assert mine == pytest.approx(theirs.tolist(), abs=1e-5)
        assert float((before - trained).abs().max()) > 1e-3
        assert (folder / f"exported-{world}" / "tokenizer.json").is_file()
        assert json.loads((folder / f"exported-{world}" / "config.json").read_text())["dtype"] == "float32"
    assert replies(scene, 2, 1)[PUBLISH]["probe"] == []


@slow
def test_the_reference_stays_where_it_was_while_the_policy_moves_on(scene):
    """It is the export of the weights that the policy starts with: no divergence, then a step away from it."""
    single, *two = (replies(scene, world, rank, "regularised") for world, rank in RANKS)
    for call in (2, 4):
        for name, value in single[call]["sums"].items():
            assert sum(reply[call]["sums"][name] for reply in two) == pytest.approx(value, rel=1e-4, abs=1e-4), name
    for reply in (single, *two):
        before, after = (reply[call]["sums"] for call in (2, 4))
        assert before["reference_log_ratio"] == before["regularisation"] == 0
        assert abs(after["reference_log_ratio"]) > 0.01 and after["regularisation"] != 0


@slow
def test_a_reference_moves_by_its_share_of_the_way_to_the_policy_and_is_part_of_the_checkpoint(scene):
    """A resume with it goes on bitwise the same. One that does not move is not saved."""
    began = load_file(scene.folder / "reference" / "model.safetensors")
    for world in (1, 2):
        policy = load_file(scene.folder / f"policy-{world}" / "model.safetensors")
        moved = load_file(scene.folder / f"average-{world}" / "reference" / "model.safetensors")
        assert moved.keys() == began.keys() == policy.keys()
        for name, weight in began.items():
            assert torch.equal(moved[name], weight.lerp(policy[name], 0.25)), name
        far, nearer, there = (total(scene, world, "average", call, "reference_log_ratio") for call in (2, 7, 9))
        assert there == 0 and abs(far) > 1 and abs(nearer - far) > 1
    for world, rank in RANKS:
        first, second = (replies(scene, world, rank, name) for name in ("average", "average resumed"))
        assert first[7]["sums"] == second[2]["sums"] and first[7]["maxima"] == second[2]["maxima"]
        assert second[2]["sums"]["reference_log_ratio"] != 0
        files = first[5]["value"]
        beside = {f"reference/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json") if rank == 0}
        assert {name for name in files if name.startswith("reference/")} == beside and len(files) == len(beside) + 1
        for name, written in files.items():
            content = (scene.folder / f"average-{world}" / name).read_bytes()
            assert written == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name
    assert not (scene.folder / "dro-2" / "reference").exists()


@slow
def test_old_log_probs_are_those_of_the_next_forward(scene):
    """As behaviour log-probs they give ratios of 1 before the first step, and others after it."""
    for world, rank in RANKS:
        calls = replies(scene, world, rank, "previous")
        first, second, moved = (calls[number]["sums"]["reference_log_ratio"] for number in (3, 5, 8))
        assert sum(map(len, calls[2]["value"])) == calls[3]["sums"]["tokens"] > 0
        assert calls[3]["maxima"]["abs_logprob_difference"] < 1e-6 < 0.01 < calls[5]["maxima"]["abs_logprob_difference"]
        assert calls[3]["maxima"]["ratio"] == pytest.approx(1, abs=1e-6)
        assert first == 0 and abs(second) > 0.01, "the policy of the start is the reference"
        assert moved == 0, "and now the one of now"


@slow
def test_the_value_head_is_saved_once_goes_on_bitwise_the_same_and_takes_nothing_from_the_sft(scene):
    """After its first own step every value is the learning rate away from 0, as AdamW's first step is."""
    for world, rank in RANKS:
        first, second = (replies(scene, world, rank, name) for name in ("dro", "dro resumed"))
        assert ("value_head.safetensors" in first[9]["value"]) == (rank == 0)
        for before, after in ((10, 2), (12, 4)):
            assert first[before]["sums"] == second[after]["sums"]
    single, two = ([total(scene, world, "dro", call, "loss") for call in (7, 10, 12)] for world in (1, 2))
    assert len(set(single)) == 3 and two == pytest.approx(single, rel=1e-4)
    for world in (1, 2):
        head = load_file(scene.folder / f"dro-{world}" / "value_head.safetensors")
        assert head["step/0"] == head["step/1"] == 1
        assert [float(head[name].abs().max()) for name in ("bias", "weight")] == pytest.approx([0.05] * 2, rel=1e-3)


@slow
def test_adapters_of_any_number_of_ranks(scene):
    """Only they travel and are kept; ranks take the same steps, the reference is the frozen model; a resume goes on
    bitwise the same; frozen weights in bfloat16 learn with float32 adapters."""
    load, train, step_again, publish, later, moved = 0, 3, 6, 7, 11, 13
    decoder, names = Decoder(SHAPE), set[str]()
    lora.attach(decoder, 3, 6.0)
    count = sum(each.numel() for each in decoder.parameters() if each.requires_grad)
    for world, rank in RANKS:
        first, second = replies(scene, world, rank, "adapters"), replies(scene, world, rank, "adapters resumed")
        assert first[load]["parameters"] == 9358 + count
        assert "rank 3, alpha 6" in first[load]["description"]["adapters"]
        names |= load_file(scene.folder / f"adapters-{world}" / f"trainer-{rank}-of-{world}.safetensors").keys()
        assert first[publish]["checksums"] == second[2]["checksums"] and first[publish]["probe"] == second[2]["probe"]
        assert first[later]["sums"] == second[3]["sums"]
        rounded = replies(scene, world, rank, "adapters rounded")
        assert rounded[load]["description"]["master weights"] == rounded[load]["description"]["moments"] == "float32"
        assert rounded[2]["grad_norm"] > 0 and rounded[load]["slow_dtype"] is not multiplies_bfloat16_fast("cpu")
    assert len(names) == 3 * 2 * 7 * SHAPE.layers and all("lora_" in name for name in names)
    for world in (1, 2):
        assert sum(replies(scene, world, rank, "adapters")[publish]["bytes"] for rank in range(world)) == 4 * count
        exact = total(scene, 1, "adapters", train, "entropy")
        assert total(scene, world, "adapters rounded", 1, "entropy") == pytest.approx(exact, rel=0.02)
    for call in (train, 5, later, moved):
        for name in ("loss", "entropy", "regularisation", "reference_log_ratio"):
            single, two = (total(scene, world, "adapters", call, name) for world in (1, 2))
            assert two == pytest.approx(single, rel=1e-4, abs=1e-4), (call, name)
    single, two = (replies(scene, world, 0, "adapters")[step_again]["grad_norm"] for world in (1, 2))
    assert two == pytest.approx(single, rel=1e-5) and single > 0
    assert total(scene, 1, "adapters", train, "reference_log_ratio") == 0, "B is zero"
    assert abs(total(scene, 1, "adapters", later, "reference_log_ratio")) > 0.01
    assert total(scene, 1, "adapters", moved, "reference_log_ratio") == 0, "the reference is the policy now"


@slow
def test_exports_are_the_frozen_weights_with_the_adapters_added(scene):
    """The probe is scored as they do."""
    base = load_file(scene.folder / "model" / "model.safetensors")
    for world in (1, 2):
        folders = {name: scene.folder / f"{name}-{world}" for name in ("began", "alone", "merged")}
        assert not any(value.any() for name, value in read_matrices(folders["began"]).items() if lora.B in name)
        assert read_settings(folders["alone"]).rank == 3
        matrices, merged = read_matrices(folders["alone"]), load_file(folders["merged"] / "model.safetensors")
        changed = 0
        for name, weight in base.items():
            layer = name.removesuffix(".weight")
            added = 2 * matrices[layer + lora.B] @ matrices[layer + lora.A] if layer + lora.A in matrices else 0
            torch.testing.assert_close(merged[name], weight + added, rtol=0, atol=1e-7)
            changed += not torch.equal(merged[name], weight)
        assert changed == 7 * SHAPE.layers
        scored = load_model(folders["merged"])(pack_from(PROBE, [1, 1]))[0].tolist()
        assert sum(replies(scene, world, 0, "adapters")[7]["probe"], []) == pytest.approx(scored, abs=1e-5)


def test_a_reference_that_moved_is_gathered_before_a_disk_can_fail(monkeypatch, tmp_path):
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


@pytest.mark.parametrize(("change", "first_change"), [
    (lambda rank: TrainerRank.step(rank, 1e-3), "update"), (TrainerRank.reset_optimiser, "reset"),
    (TrainerRank.offload, "offload"),
])  # fmt: skip
def test_a_checkpoint_under_way_is_asked_before_weights_or_moments_change(monkeypatch, change, first_change):
    events: list[str] = []
    monkeypatch.setattr(optimiser, "clip", lambda *_: 1.0)
    for name in ("update", "reset"):
        monkeypatch.setattr(optimiser, name, lambda *_, name=name: events.append(name))
    rank: Any = SimpleNamespace(
        config=Config(), decoder=torch.nn.Linear(2, 2), optimiser=SimpleNamespace(state={}),
        role=SimpleNamespace(device=torch.device("cpu")),
        group=None, settle=lambda: events.append("settle"),
        auxiliary=SimpleNamespace(reference=None, teacher=None, values=None),
        host=SimpleNamespace(offload=lambda _: events.append("offload")),
    )  # fmt: skip
    change(rank)
    assert events == ["settle", first_change]
