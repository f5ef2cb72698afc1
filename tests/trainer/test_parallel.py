"""Tensor, context and expert parallel training, beside one rank: numbers, updates, checkpoints, refusals."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.checksum import add_parts, checksum_rows
from shared.config import Config
from shared.errors import ConfigError
from shared.model import hf
from shared.model.config import DecoderConfig, MeasuredConfig
from shared.model.parallel import check_split
from tests.process import ENVIRONMENT
from trainer import memory
from trainer.checkpoint.shard_files import iterate_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]
FLOAT32, FLOAT64 = 1.5e-6, 1e-12
"""largest difference of gradients from those of one rank, relative"""
TENSOR = ["tensor 2", "tensor 2 of 4", "tensor 4", "tensor 2, replicas 2"]
CONTEXT = ["context 2", "context 4", "tensor 2, context 2"]
MIXTURES = ["experts 2", "experts 2 of 4", "experts 4", "experts 2, context 2"]
PAIRS = ["tensor 2", "context 2"]
"""of two ranks: what every run of the tests has"""
SHAPE = DecoderConfig(
    family="qwen3", vocab_size=100, hidden_size=32, intermediate_size=48, layers=2, heads=6, key_heads=3, head_dim=8,
    norm_epsilon=1e-6, max_positions=64,
)  # fmt: skip


def soaked(*more: str) -> Any:
    return pytest.param([*more], marks=pytest.mark.soak)


def run_scene(folder: Path, *arguments: str) -> dict[str, list[Any]]:
    """placement -> what each of its ranks found."""
    scene = Path(__file__).with_name("parallel_scene.py")
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, scene, folder, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2700, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    by_name: dict[str, list[Any]] = {}
    for file in sorted(folder.glob(f"{arguments[0]}-*.pt")):
        for placement, result in torch.load(file).items():
            by_name.setdefault(placement, []).append(result)
    return by_name


@pytest.mark.parametrize(
    "placements", [PAIRS, soaked(*TENSOR[1:]), soaked(*CONTEXT[1:]), soaked("large", *CONTEXT[2:])]
)
def test_gradients_are_those_of_one_rank(tmp_path, placements):
    for placement, ranks in run_scene(tmp_path, "numbers", *placements).items():
        for cases in ranks:
            for case, gaps in cases.items():
                limit = FLOAT64 if "float64" in case else FLOAT32
                assert gaps["gradient"] < limit, (placement, case)
                assert gaps.get("norm", 0.0) < FLOAT32, (placement, case)
                assert gaps.get("values", 0.0) < 2e-6, (placement, case)
                assert gaps.get("sums", 0.0) < 1e-4, (placement, case)  # losses near zero: relative to their terms
            assert len(cases) == 10


@pytest.mark.parametrize("placements", [MIXTURES[:1], soaked(*MIXTURES[1:]), soaked("large", *MIXTURES[:1])])
def test_gradients_of_mixtures_are_those_of_one_rank(tmp_path, placements):
    """With routes of engines, with adapters of experts, recomputed; the experts alone in float64."""
    for placement, ranks in run_scene(tmp_path, "mixtures", *placements).items():
        for cases in ranks:
            assert cases.pop("float64")["gradient"] < FLOAT64
            assert len(cases) == 4
            for case, gaps in cases.items():
                assert gaps["gradient"] < FLOAT32, (placement, case)


@pytest.mark.parametrize(
    "options",
    [
        ["alone", "tensor 2", "context 2"],
        soaked("alone", "shard 2", *TENSOR, *CONTEXT),
        soaked("adapters", "alone", "shard 2", *TENSOR, *CONTEXT),
        soaked("mixture", "alone", "shard 2", *MIXTURES),
        soaked("mixture", "adapters", "alone", "shard 2", *MIXTURES),
    ],
    ids=["pairs", "all", "adapters", "mixtures", "adapters of mixtures"],
)
def test_updates_and_checkpoints_are_those_of_one_rank(tmp_path, options):
    """Two steps give the same weights up to rounding. What engines read is what was trained, with the checksums that
    prove it; every placement resumes from every other, bit for bit."""
    launched = run_scene(tmp_path, "launch", *options)
    alone = launched["alone"][0]
    for placement, ranks in launched.items():
        first = ranks[0]
        for name, tensor in alone["trained"].items():
            if name.startswith("weight/"):
                assert torch.allclose(tensor, first["trained"][name], atol=3e-4), (placement, name)
            assert all(torch.equal(one["trained"][name], first["trained"][name]) for one in ranks), (placement, name)
        for number in range(2):
            assert first[f"norm {number}"] == pytest.approx(alone[f"norm {number}"], rel=2e-5)
            assert all(one[f"norm {number}"] == first[f"norm {number}"] for one in ranks)
        assert first["parameters"] == alone["parameters"]
        assert first["probe"][0] == pytest.approx(alone["probe"][0], abs=1e-3)
        read, sums = first["engines"], add_parts(one["checksums"] for one in ranks)
        assert sums == {name: checksum_rows(tensor, 0, torch.float32) for name, tensor in read.items()}
        if "adapters" not in options:
            assert all(torch.equal(tensor, first["trained"][f"weight/{name}"]) for name, tensor in read.items())
            exported = tmp_path / f"exported-{placement}"
            shapes = {name: tensor.shape for name, tensor in read.items()}
            stored = dict(hf.iterate_weights(exported, shapes))
            assert all(torch.equal(tensor, stored[name]) for name, tensor in read.items())
        for damaged in (one["damaged"] for one in ranks if "damaged" in one):
            assert "adapters" in options or "are not those that the trainers have" in damaged
        for name, tensor in iterate_weights(tmp_path / f"saved-{placement}"):
            assert torch.equal(tensor, first["trained"][f"weight/{name}"])
    resumed = run_scene(tmp_path, "resume", *options)
    assert len(resumed) == len(launched) ** 2
    for (placement, source), ranks in resumed.items():  # type: ignore[misc]
        saved = launched[source]
        for _, state in ranks:
            assert all(torch.equal(tensor, state[name]) for name, tensor in saved[0]["trained"].items()), placement
        live = {f"trainer-{rank}-of-{len(saved)}.safetensors": one["live"] for rank, one in enumerate(saved)}
        assert live == {name: add_parts(sums[name] for sums, _ in ranks if name in sums) for name in live}


@pytest.mark.parametrize(("shape", "sizes", "message"), [
    (SHAPE, (4, 1, 1), "placement.tensor = 4: 6 attention heads do not divide by it"),
    (SHAPE, (2, 1, 1), "placement.tensor = 2: 3 key heads neither divide by it nor have whole numbers of copies"),
    (replace(SHAPE, output_bias=True), (3, 1, 1), "placement.tensor = 3: the model has biases on sums of its parts"),
    (MeasuredConfig("glm4", 9, 8, 8, 1, 4, 2, 2, 0.0, 9), (2, 1, 1), "transformers trains glm4 here"),
    (SHAPE, (1, 2, 1), "placement.context = 2: 6 attention heads and 3 key heads on a rank do not divide by it"),
    (SHAPE, (3, 4, 1), "placement.context = 4: 2 attention heads and 1 key heads"),
    (SHAPE, (1, 1, 2), "placement.experts = 2: the model has no experts in a layer"),
    (MeasuredConfig("mixtral", 9, 8, 8, 1, 4, 2, 2, 0.0, 9, experts=4), (1, 1, 3), "the model has 4 experts"),
])  # fmt: skip
def test_refuses_what_cannot_be_split(shape, sizes, message):
    with pytest.raises(ConfigError) as refused:
        check_split(shape, *sizes)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    check_split(shape, 1, 1, 1)


@pytest.mark.parametrize(("placement", "message"), [
    ({"trainers": 4, "tensor": 3}, "placement.tensor = 3 must divide placement.trainers = 4"),
    ({"trainers": 4, "tensor": 2, "context": 4}, "placement.tensor = 2 x placement.context = 4 must divide"),
    ({"trainers": 4, "experts": 3}, "placement.experts = 3 must divide placement.trainers = 4"),
    ({"trainers": 4, "experts": 2, "replicas": 2}, "placement.experts = 2 is not offered with placement.replicas = 2"),
])  # fmt: skip
def test_refuses_placements_that_do_not_fit_together(placement, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"placement": placement})


def test_a_rank_of_a_split_model_takes_less():
    shape = replace(SHAPE, heads=8, key_heads=2, intermediate_size=96)
    part = memory.part_of(shape, 4)
    assert (part.heads, part.key_heads, part.intermediate_size, part.vocab_size) == (2, 1, 24, 25)
    assert memory.part_of(shape) is shape
    whole, split = (
        memory.trainer_rank(shape, 4, 4, 64 // context, memory.WHOLE, 4, 4, tensor=tensor)
        for tensor, context in ((1, 1), (2, 2))
    )
    assert split.states == whole.states and split.gathered < whole.gathered
    assert whole.activations / 4 < split.activations < whole.activations / 2
    assert split.buffers == whole.buffers + 4 * 2 * (8 * 8 * 32 + 96 * 32) / 4
    mixture = MeasuredConfig("mixtral", 9, 8, 8, 2, 4, 2, 2, 0.0, 9, counted=4000, counted_layer=1900, experts=4,
                             counted_experts=[("experts.down_proj", 40, 80)] * 2)  # fmt: skip
    assert memory.part_of(mixture, experts=2).layer_parameters == 1900 - 400
