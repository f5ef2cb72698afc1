"""Ranks that split a model, a stream or a mixture, beside one rank that has all of it.

    python parallel_scene.py FOLDER numbers | mixtures | launch | resume [adapters] [mixture] [large] PLACEMENT...

Every rank leaves what came of it in FOLDER/SCENE-WORLD-RANK.pt.
"""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shared.config import Config
from shared.errors import SyncMismatch
from shared.model import hf, lora
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.model.parallel import ALONE, Parallel, cut_of, split_experts, whole_shape
from shared.types import MicroBatch
from tests.families import config_of
from tests.families import reference as family_model
from tests.packed import pack_from
from tests.trainer.rank_data import make_sequences
from tests.trainer.rank_scene import Results, Scene, run_rank
from trainer.checkpoint import shards
from trainer.objectives.registry import read_objective
from trainer.step import fsdp, optimiser
from trainer.step.forward_backward import AuxiliaryModels, forward_backward
from trainer.step.rank import TrainerRank, build
from trainer.step.reference import fill
from trainer.step.value_head import ValueHead

QWEN3 = DecoderConfig(
    family="qwen3", vocab_size=67, hidden_size=25, intermediate_size=45, layers=2, heads=8, key_heads=2, head_dim=6,
    norm_epsilon=1e-5, max_positions=512, tied=False, qk_norm=True, initializer_range=0.15,
)  # fmt: skip
QWEN2 = replace(QWEN3, family="qwen2", heads=4, key_heads=1, intermediate_size=44, tied=True, qk_norm=False,
                qkv_bias=True)  # fmt: skip
"""one key head, of which every tensor peer has a copy; a tied head; biases"""
SHAPES: dict[str, dict[str, int]] = {
    "alone": {"trainers": 1},
    "shard 2": {"trainers": 2},
    "tensor 2": {"trainers": 2, "tensor": 2},
    "tensor 2 of 4": {"trainers": 4, "tensor": 2},
    "tensor 4": {"trainers": 4, "tensor": 4},
    "context 2": {"trainers": 2, "context": 2},
    "context 4": {"trainers": 4, "context": 4},
    "tensor 2, context 2": {"trainers": 4, "tensor": 2, "context": 2},
    "tensor 2, replicas 2": {"trainers": 4, "tensor": 2, "replicas": 2},
}
"""name -> placement"""
OBJECTIVES = {
    "magistral": read_objective({}),
    "regularised": read_objective({"kl": {"weight": 0.2}, "entropy_bonus": 0.05}),
    "distill": read_objective({"name": "distill", "teacher": {"kind": "local", "path": "teacher"}}),
    "imitate": None,
    "valued": read_objective({"name": "dro"}),
}
DRAWN = 0.05
"""size of the adapters' values: B is zero at first, and so are the gradients of A"""


def fresh(shape: DecoderConfig, seed: int, wide: bool = False, rank: int = 0, **named: Any) -> Decoder:
    """A decoder of whose tensors peers have the rest, on no device; `rank`: of adapters."""
    with torch.device("meta"):
        decoder = Decoder(shape, **named)
    if rank:
        lora.attach(decoder, rank, 2.0)
    return decoder.double() if wide else decoder


def whole_model(shape: DecoderConfig, seed: int, wide: bool = False, rank: int = 0) -> Decoder:
    decoder = Decoder(shape)
    initialise(decoder, seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter += 0.1 * torch.sin(torch.arange(len(parameter)) + seed)
    if rank:
        lora.attach(decoder, rank, 2.0)
        draw = torch.Generator().manual_seed(9)
        for _, one in fsdp.trained(decoder):
            one.data = torch.randn(one.shape, generator=draw) * DRAWN
    return decoder.double() if wide else decoder


def part_model(like: Decoder, mesh: Any, parallel: Any, wide: bool, rank: int = 0, recompute: int = 0) -> Decoder:
    """This rank's part of a model."""
    decoder = fresh(like.config, 0, wide, rank, parallel=parallel, recompute=recompute)
    fsdp.shard(decoder, mesh, torch.float64 if wide else torch.float32)
    fsdp.materialise(decoder, torch.device("cpu"))
    fill(decoder, like.named_parameters())
    return decoder


def whole(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor of this rank's rows of a parameter, in one piece."""
    values = (tensor.full_tensor() if fsdp.is_sharded(tensor) else tensor).detach()
    return fsdp.join_parts(values, cut_of(like), whole_shape(like)).clone()


def whole_gradients(decoder: Decoder) -> dict[str, Tensor]:
    fsdp.add_copies(decoder)
    fsdp.reshard(decoder)
    copies = {name: whole(one.grad, one) for name, one in fsdp.trained(decoder) if one.grad is not None}
    decoder.zero_grad(set_to_none=True)
    return copies


def free_loss(decoder: Decoder, share: int, shares: int) -> dict[str, Tensor]:
    """Gradients of a clipped loss with an entropy term in the decoder's own type, of three groups with shared prompts
    and a long sequence, over as many ranks."""
    draw = torch.Generator().manual_seed(4)
    groups = [
        [torch.randint(0, 67, (5,), generator=draw).tolist() + torch.randint(0, 67, (n,), generator=draw).tolist()
         for n in lengths] for lengths in ((3, 17, 9), (24, 5), (90,))
    ]  # fmt: skip
    for group in groups:
        for sequence in group[1:]:
            sequence[:5] = group[0][:5]
    batches = [pack_from(group, [5] * len(group)) for group in groups]
    for number in range(share, len(batches) + shares - 1, shares):
        empty = number >= len(batches)
        batch = batches[0 if empty else number]
        logprobs, entropy = decoder(batch, 0.7)
        steps = torch.arange(len(logprobs), dtype=logprobs.dtype)
        ratio = (logprobs - logprobs.detach() - 0.3 * steps.sin()).exp()
        loss = -(torch.minimum(ratio, ratio.clamp(0.8, 1.28)) * steps.cos()).sum() - 0.05 * (entropy * steps).sum()
        (loss * (0.0 if empty else 0.01)).backward()
        if number + shares >= len(batches) + shares - 1:
            break
    return whole_gradients(decoder)


def batches_of(share: int, shares: int, objective: str = "") -> list[MicroBatch]:
    sequences = make_sequences("completions" if objective == "valued" else "group_tokens")
    if objective == "valued":
        groups = [[one for one in sequences if one.group == number] for number in range(4)]
        return [MicroBatch(group) for group in groups[share::shares]]
    return [MicroBatch(sequences[share::shares][:9]), MicroBatch(sequences[share::shares][9:])]


def stepped(decoder: Decoder, objective: str, frozen: Any, share: int, shares: int, sharers: int = 1) -> Results:
    values = ValueHead(decoder.config.hidden_size, 1e-2, sharers=sharers) if objective == "valued" else None
    models = AuxiliaryModels(reference=frozen, teacher=frozen, values=values)
    outcome = forward_backward(decoder, batches_of(share, shares, objective), 0.7, OBJECTIVES[objective], models)
    result = {"sums": outcome.sums, "gradients": whole_gradients(decoder)}
    if values is not None:
        with mock.patch.object(values.optimiser, "step"), mock.patch.object(values.optimiser, "zero_grad"):
            values.step()
        result["values"] = torch.cat([values.weight.grad, values.bias.grad[None]])
    return result


CASES: dict[str, tuple[DecoderConfig, dict[str, Any], str]] = {
    "float64": (QWEN3, {"wide": True}, ""),
    "float64, copies of keys, tied, biases": (QWEN2, {"wide": True}, ""),
    "float64, adapters": (QWEN3, {"wide": True, "rank": 3}, ""),
    "float64, recomputed": (QWEN3, {"wide": True, "recompute": 1}, ""),
    "magistral": (QWEN3, {}, "magistral"),
    "reference and entropy": (QWEN2, {}, "regularised"),
    "distilled": (QWEN3, {}, "distill"),
    "imitated": (QWEN3, {"recompute": 2}, "imitate"),
    "adapters": (QWEN2, {"rank": 3}, "magistral"),
    "valued": (QWEN2, {}, "valued"),
}
"""name -> shape, how it is made, objective ("": `free_loss`)"""


class Numbers(Scene):
    """Gradients of every case in every placement, beside those of one rank."""

    worlds = ((2,), (4,))
    expected: ClassVar[dict[str, Results]] = {}
    placements: ClassVar[dict[str, dict[str, int]]] = SHAPES
    wholes: ClassVar[dict[str, Decoder]] = {}

    @classmethod
    def prepare(cls, folder: Path) -> None:
        for name, (shape, how, objective) in CASES.items():
            how = {key: value for key, value in how.items() if key != "recompute"}
            model = cls.wholes[name] = whole_model(shape, 1, **how)
            if objective:
                cls.expected[name] = stepped(model, objective, whole_model(shape, 2).requires_grad_(False), 0, 1)
            else:
                cls.expected[name] = {"gradients": free_loss(model, 0, 1)}
            squares = sum(float(one.double().square().sum()) for one in cls.expected[name]["gradients"].values())
            cls.expected[name]["norm"] = squares**0.5

    def run(self) -> None:
        for name, placement in self.placements.items():
            if placement["trainers"] == self.world:
                self.results[name] = self.compare(placement)

    def compare(self, placement: dict[str, int]) -> dict[str, dict[str, float]]:
        """case -> the largest difference of a parameter's gradient, of a sum and of the norm, relative."""
        settings = Config.model_validate({"placement": placement})
        device = torch.device("cpu")
        mesh = fsdp.join(self.store(), self.rank, self.world, device, 600, settings.placement)
        parallel, outcomes = fsdp.meet(device, settings.placement), {}
        share, shares = self.rank // settings.sharers, settings.shares
        group = fsdp.replica_group(mesh)
        for case, (shape, how, objective) in CASES.items():
            how = {"wide": False} | how
            decoder = part_model(self.wholes[case], mesh, parallel, **how)
            expected = self.expected[case]
            if objective:
                frozen = part_model(whole_model(shape, 2), mesh, parallel, False).requires_grad_(False)
                outcome = stepped(decoder, objective, frozen, share, shares, settings.sharers)
            else:
                outcome = {"gradients": free_loss(decoder, share, shares)}
            assert outcome["gradients"].keys() == expected["gradients"].keys()
            gaps = {
                name: float((one - outcome["gradients"][name]).double().norm())
                for name, one in expected["gradients"].items()
            }
            outcomes[case] = {
                "gradient": sum(gap**2 for gap in gaps.values()) ** 0.5 / expected["norm"],
                "parameter": max(gap / float(expected["gradients"][name].norm()) for name, gap in gaps.items()),
            }
            if objective == "valued":
                gap = (outcome["values"] - expected["values"]).norm() / expected["values"].norm()
                outcomes[case]["values"] = float(gap)
            elif objective:
                sums = {name: torch.tensor(value).double() for name, value in outcome["sums"].items()}
                for one in sums.values():
                    dist.all_reduce(one)
                outcomes[case]["sums"] = max(
                    abs(float(one) / settings.sharers - expected["sums"][name]) / max(1.0, abs(expected["sums"][name]))
                    for name, one in sums.items()
                )
                forward_backward(
                    decoder, batches_of(share, shares), 0.7, OBJECTIVES[objective], AuxiliaryModels(frozen, frozen)
                )
                fsdp.add_copies(decoder)
                norm = float(optimiser.global_norm(decoder, group))
                outcomes[case]["norm"] = abs(norm / expected["norm"] - 1)
        fsdp.leave()
        return outcomes


MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 moe": ("qwen3 moe", {}),
    "mixtral, recomputed": ("mixtral", {"recompute": 2}),
    "replayed routes": ("qwen3 moe", {"routes": True}),
    "adapters of experts": ("mixtral", {"rank": 3}),
}
SPLIT_MIXTURES: dict[str, dict[str, int]] = {
    "experts 2": {"trainers": 2, "experts": 2},
    "experts 2 of 4": {"trainers": 4, "experts": 2},
    "experts 4": {"trainers": 4, "experts": 4},
    "experts 2, context 2": {"trainers": 4, "experts": 2, "context": 2},
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 67, "hidden_size": 25, "intermediate_size": 45,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


class Launches(Scene):
    """Ranks through the calls of a launch in every placement: two steps, an update for the engines, a checkpoint and an
    export."""

    placements: ClassVar[dict[str, dict[str, int]]] = SHAPES | SPLIT_MIXTURES
    adapters, mixture = 0, False

    @classmethod
    def prepare(cls, folder: Path) -> None:
        for name, seed in (("model", 1), ("reference", 2)):
            if cls.mixture:
                family_model(config_of("qwen3 moe")).save_pretrained(folder / name)
            else:
                hf.save_model(folder / name, CONFIG, dict(whole_model(QWEN3, seed).named_parameters()), torch.float32)
            (folder / name / "tokenizer.json").write_text("{}")

    @contextmanager
    def launch(self, placement: dict[str, int], checkpoint: Path | None = None) -> Iterator[Any]:
        config = Config.model_validate({
            "model": {"dtype": "float32"}, "optimiser": {"compute_dtype": "float32"}, "rollout": {"transport": "shm"},
            "objective": {"kl": {"weight": 0.2}, "entropy_bonus": 0.05}, "placement": placement,
            "lora": {"rank": self.adapters, "targets": ["all-linear", "experts"] if self.mixture else "all-linear"},
        })  # fmt: skip
        role = SimpleNamespace(rank_in_role=self.rank, store=self.store(), device=torch.device("cpu"))
        rank: Any = TrainerRank(config, role)
        try:
            self.loaded = rank.load(str(self.folder / "model"), str(checkpoint) if checkpoint else None)
            yield rank
        finally:
            rank.stop()
            fsdp.leave()

    def state(self, rank: Any) -> dict[str, Tensor]:
        """Whole weights and moments."""
        copies = {}
        for name, one in fsdp.trained(rank.decoder):
            for kind, tensor in {"weight": one, **rank.optimiser.state[one]}.items():
                if kind in ("weight", *shards.MOMENTS):
                    copies[f"{kind}/{name}"] = whole(tensor, one)
        return copies

    def run(self) -> None:
        for name, placement in self.placements.items():
            if placement["trainers"] == self.world:
                self.results[name] = self.train(name, placement)

    def train(self, name: str, placement: dict[str, int]) -> Results:
        saved, settings = self.folder / f"saved-{name}", Config.model_validate({"placement": placement})
        saved.mkdir(exist_ok=True)
        results: Results = {}
        with self.launch(placement) as rank:
            if not self.adapters:
                rank.load_frozen(str(self.folder / "reference"), "reference")
            share = self.rank // settings.sharers
            for number in range(2):
                rank.forward_backward(batches_of(share, settings.shares), 0.7, self.adapters > 0)
                results[f"norm {number}"] = rank.step(1e-3).grad_norm
            results["trained"] = self.state(rank)
            results["parameters"] = self.loaded.parameters
            if placement.get("tensor", 1) > 1:
                results["damaged"] = self.damage(rank)
            published = rank.publish(1, [[3, 1, 4, 1, 5]])
            results |= {"checksums": published.checksums, "probe": published.probe, "rows": rank.sender.rows}
            dist.barrier()
            results["engines"] = {one: rank.sender.memory.tensor(1, one).clone() for one in rank.sender.layout.places}
            results["live"] = rank.save(str(saved), 3)
            rank.writer.files()
            rank.export(str(self.folder / f"exported-{name}"))
            dist.barrier()
        return results

    def damage(self, rank: Any) -> str:
        """What is said of a bit that was lost on the way to whole rows."""
        whole_rows = dist.all_to_all_single

        def lose(arrived: Tensor, *others: Any, **named: Any) -> None:
            whole_rows(arrived, *others, **named)
            if rank.parallel.tensor.rank == 0:
                arrived.view(-1)[:1].nextafter_(torch.tensor(9.0))

        with mock.patch.object(dist, "all_to_all_single", lose):
            try:
                rank.sent.gather()
            except SyncMismatch as error:
                return str(error)
        return ""


class Resumes(Launches):
    """The second half: a resume from the checkpoint of every placement."""

    def store(self) -> dist.Store:
        self.stores += 1
        return dist.FileStore(str(self.folder / f"resume-store-{self.world}-{self.stores}"), self.world)

    def run(self) -> None:
        for name, placement in self.placements.items():
            if placement["trainers"] == self.world:
                for other in self.placements:
                    with self.launch(placement, self.folder / f"saved-{other}") as rank:
                        self.results[name, other] = self.loaded.checksums, self.state(rank)


class Mixtures(Scene):
    """Gradients of mixtures whose experts are split, beside those of one rank."""

    placements: ClassVar[dict[str, dict[str, int]]] = SPLIT_MIXTURES
    expected: ClassVar[dict[str, dict[str, Tensor]]] = {}
    worlds = ((2,), (4,))

    @classmethod
    def prepare(cls, folder: Path) -> None:
        for family in ("qwen3 moe", "mixtral"):
            family_model(config_of(family)).save_pretrained(folder / family)
            (folder / family / "tokenizer.json").write_text("{}")
        for case in MIXTURES:
            cls.expected[case] = cls.gradients(folder, case, SimpleNamespace(device_type="cpu"), ALONE, 0, 1)

    @staticmethod
    def gradients(folder: Path, case: str, mesh: Any, parallel: Parallel, share: int, shares: int) -> dict[str, Tensor]:
        family, how = MIXTURES[case]
        config = Config.model_validate({
            "model": {"implementation": "transformers"}, "optimiser": {"compute_dtype": "float32"},
            "lora": {"rank": how.get("rank", 0), "targets": ["all-linear", "experts"]},
        })  # fmt: skip
        decoder, _, _ = build(folder / family, None, config, mesh, torch.device("cpu"), parallel)
        draw = torch.Generator().manual_seed(4)
        if config.lora.rank:
            fill(decoder, [(name, torch.randn(whole_shape(one), generator=draw) * 0.1)
                           for name, one in fsdp.trained(decoder)])  # fmt: skip
        decoder.recompute = how.get("recompute", 0)
        sequences = make_sequences("group_tokens")
        if how.get("routes"):
            drawn = torch.rand(len(sequences), 65, 3, 4, generator=draw).argsort(-1)[..., :2]
            for number, sequence in enumerate(sequences):
                drawn[number, :5] = drawn[0, :5]  # a prompt that is stored once has the routes of one
                rows = drawn[number, : len(sequence.token_ids)].flatten(1).tolist()
                sequence.routes = [bytes(one) for one in rows]
        mine = sequences[share::shares]
        batches = [MicroBatch(mine[:9]), MicroBatch(mine[9:]), MicroBatch([])]
        forward_backward(decoder, batches, 0.7, OBJECTIVES["magistral"])
        return whole_gradients(decoder)

    def run(self) -> None:
        for name, placement in self.placements.items():
            if placement["trainers"] == self.world:
                settings, device = Config.model_validate({"placement": placement}), torch.device("cpu")
                mesh = fsdp.join(self.store(), self.rank, self.world, device, 600)
                parallel = fsdp.meet(device, settings.placement)
                self.same = parallel.same_experts.get_group()
                self.results[name] = {}
                for case in MIXTURES:
                    share, expected = self.rank // settings.sharers, self.expected[case]
                    split = self.gradients(self.folder, case, mesh, parallel, share, settings.shares)
                    assert split.keys() == expected.keys()
                    gaps = {key: float((one - split[key]).norm()) for key, one in expected.items()}
                    norm = sum(float(one.square().sum()) for one in expected.values()) ** 0.5
                    self.results[name][case] = {
                        "gradient": sum(gap**2 for gap in gaps.values()) ** 0.5 / norm,
                        "parameter": max(gap / float(expected[key].norm()) for key, gap in gaps.items()),
                    }
                self.results[name]["float64"] = self.alone(parallel.experts)
                fsdp.leave()

    def alone(self, peers: Any) -> dict[str, float]:
        """The experts of a layer in float64, with gates and more tokens on one rank than on another."""
        torch.manual_seed(5)
        config = Qwen3MoeConfig(hidden_size=12, moe_intermediate_size=20, num_experts=8, num_experts_per_tok=2)
        config._experts_implementation = "eager"
        wholes = Qwen3MoeExperts(config).double()
        for one in wholes.parameters():
            one.data = torch.randn(one.shape, dtype=torch.float64)
        inputs = []
        for number in range(self.world):
            tokens = 3 + 5 * number
            inputs.append((torch.randn(tokens, 12, dtype=torch.float64, requires_grad=True),
                           torch.rand(tokens, 8).argsort(-1)[:, :2] // (1 + (number == 1)),
                           torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True)))  # fmt: skip
        outputs = [wholes(*one) for one in inputs]
        sum((one**2).sum() for one in outputs).backward()
        part, own = copy.deepcopy(wholes), 8 // peers.size
        split_experts([part], peers)
        for one, all_of_it in zip(part.parameters(), wholes.parameters(), strict=True):
            one.data = all_of_it.data[own * peers.rank :][:own].clone()
        hidden, index, gates = inputs[self.rank]
        mine, weights = hidden.detach().requires_grad_(), gates.detach().requires_grad_()
        output = part(mine, index, weights)
        (output**2).sum().backward()
        pairs = [(output, outputs[self.rank]), (mine.grad, hidden.grad), (weights.grad, gates.grad)]
        for one, all_of_it in zip(part.parameters(), wholes.parameters(), strict=True):
            gradient = one.grad
            dist.all_reduce(gradient, group=self.same)
            pairs.append((gradient, all_of_it.grad[own * peers.rank :][:own]))
        return {"gradient": max(float((one - other).detach().norm() / other.detach().norm()) for one, other in pairs)}


def main(folder: Path, name: str, *placements: str) -> int:
    """Returns how many ranks failed."""
    torch.set_num_threads(1)
    made = {"numbers": Numbers, "launch": Launches, "resume": Resumes, "mixtures": Mixtures}[name]
    Launches.adapters, Launches.mixture = 3 * ("adapters" in placements), "mixture" in placements
    if "large" in placements:  # as of a model that is not kept whole between micro-batches
        fsdp.KEEP_WHOLE_BYTES = 0
    placements = tuple(one for one in placements if one not in ("adapters", "mixture", "large"))
    made.placements = {key: value for key, value in made.placements.items() if not placements or key in placements}
    worlds = sorted({one["trainers"] for one in made.placements.values()})
    made.prepare(folder)
    failed = 0
    for world in worlds:
        ranks = [run_rank(made, folder, name, rank, world) for rank in range(world)]
        failed += sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
