"""Real trainer ranks for the tests: worlds of forked ranks after a single import of torch.

    python rank_scene.py FOLDER steps | cuda | replicas | FAMILY...

Every rank leaves what came of it in FOLDER/SCENE-WORLD-RANK.pt.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo  # every forked rank would import it when it makes its optimiser
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor

from rollout.weights.layout import own_pieces
from shared.config import Config
from shared.errors import NonFinite, RunError, SyncMismatch
from shared.model import language_model
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.model.logprobs import chunked_logprobs
from shared.sections import Optimiser
from shared.types import MicroBatch
from tests.families import config_of
from tests.families import reference as family_model
from tests.packed import pack_from
from tests.trainer.rank_data import MAGISTRAL, SHAPE, deal, make_folder, make_sequences
from tests.trainer.worker_scene import WorkerScene
from trainer.checkpoint import shards
from trainer.objectives.objective import Objective
from trainer.objectives.registry import read_objective
from trainer.step import fsdp, optimiser
from trainer.step.batching import plan_batch
from trainer.step.forward_backward import AuxiliaryModels, forward_backward
from trainer.step.rank import TrainerRank, build, build_frozen
from trainer.step.reference import fill
from trainer.step.sent_weights import SentWeights
from trainer.step.value_head import ValueHead

Results = dict[str, Any]
WIDE = replace(SHAPE, head_dim=16)
"""heads that FlashAttention takes"""


class Case(NamedTuple):
    """A step: the weights of its sequences, its loss, and how they are dealt."""

    aggregation: str = "group_tokens"
    settings: Objective | None = MAGISTRAL
    budget: int = 0
    """tokens of a micro-batch as a batch is planned; 0: eight micro-batches dealt in turn"""

    @property
    def whole_groups(self) -> bool:
        return self.settings is not None and self.settings.name in ("agro", "dro")

    def batches(self, rank: int, world: int) -> list[MicroBatch]:
        sequences = make_sequences(self.aggregation)
        if self.budget:
            return plan_batch(sequences, world, self.budget, together=self.whole_groups).micro_batches[rank]
        return deal(sequences, 8, rank, world)

    def step(self, decoder: Any, batches: list[MicroBatch], frozen: Any = None) -> Results:
        """This rank's sums and whole gradients; of a value head its values after a step of its own."""
        values = ValueHead(SHAPE.hidden_size, 1e-2) if self.settings and self.settings.name == "dro" else None
        compares = self.whole_groups or (self.settings and self.settings.kl)
        models = AuxiliaryModels(frozen if compares else None, values=values)
        sums = forward_backward(decoder, batches, 0.7, self.settings, models).sums
        result = {"sums": sums, "gradients": gradients(decoder)}
        if values is not None:
            values.step()
            result["gradients"]["head"] = torch.cat([values.weight.detach(), values.bias.detach()[None]])
        return result


CASES = {
    "group_tokens": Case(),
    "batch_tokens": Case("batch_tokens", read_objective({"name": "grpo"})),
    "sequence": Case("sequence", read_objective({"name": "gspo"})),
    "completions": Case("completions", read_objective({"name": "aipo"})),
    "constant": Case("constant", read_objective({"name": "reinforce"})),
    "supervised": Case("sequence", None),
    "regularised": Case(settings=read_objective({"kl": {"weight": 0.2}, "entropy_bonus": 0.05})),
    "collated": Case(budget=70),
    "agro": Case("completions", read_objective({"name": "agro"}), 60),
    "dro": Case("completions", read_objective({"name": "dro"}), 60),
}
"""every way of averaging, every kind of loss"""


def make_model(
    mesh: Any, compute: str = "float32", recompute: int = 0, device: str = "cpu", shape: DecoderConfig = SHAPE
) -> Decoder:
    """The same weights on any number of ranks."""
    whole = Decoder(shape)
    initialise(whole, seed=1)
    with torch.device("meta"):
        decoder = Decoder(shape, recompute=recompute)
    fsdp.shard(decoder, mesh, getattr(torch, compute))
    fsdp.materialise(decoder, torch.device(device))
    with torch.no_grad():
        for parameter, original in zip(decoder.parameters(), whole.parameters(), strict=True):
            rows = fsdp.rows_of(parameter)
            fsdp.local(parameter).copy_(original[rows.start : rows.stop])
    return decoder


def whole(tensor: Tensor) -> Tensor:
    """A copy of a sharded tensor in one piece, on the CPU; a plain one is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def gradients(decoder: Any) -> dict[str, Tensor]:
    """Whole gradients, whose memory the next step takes; forgotten afterwards."""
    copies = {name: whole(each.grad) for name, each in decoder.named_parameters() if each.grad is not None}
    decoder.zero_grad(set_to_none=True)
    return copies


def state_of(decoder: Any, made: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole weights and moments."""
    copies = {}
    for name, parameter in decoder.named_parameters():
        for shard, tensor in {"weight": parameter, **made.state[parameter]}.items():
            if shard in ("weight", *shards.MOMENTS):
                copies[f"{shard}/{name}"] = whole(tensor)
    return copies


def change_a_bit(decoder: Any, name: str) -> None:
    with torch.no_grad():
        rows = fsdp.local(dict(decoder.named_parameters())[name])
        rows[-1, -1] = torch.nextafter(rows[-1, -1], torch.tensor(9.0))


class Scene:
    """What one rank does."""

    worlds: tuple[tuple[int, ...], ...] = ((2,), (1, 4))
    """those in a row run at a time; two ranks first: they write the checkpoint"""

    def __init__(self, folder: Path, rank: int, world: int):
        self.folder, self.rank, self.world, self.stores = folder, rank, world, 0
        self.results: Results = {}

    @classmethod
    def prepare(cls, folder: Path) -> None:
        make_folder(folder / "model", seed=1)
        make_folder(folder / "reference", seed=2)

    def store(self) -> dist.Store:
        self.stores += 1
        return dist.FileStore(str(self.folder / f"store-{self.world}-{self.stores}"), self.world)

    @cached_property
    def mesh(self) -> Any:
        return fsdp.join(self.store(), self.rank, self.world, torch.device("cpu"), timeout_s=600)

    def frozen(self) -> Any:
        config = Config.model_validate({"optimiser": {"compute_dtype": "float32"}})
        return build_frozen(self.folder / "reference", config, self.mesh, torch.device("cpu"))

    def run(self) -> None:
        decoder = make_model(self.mesh)
        if self.world > 1:
            self.cases(decoder)
            self.replicas()
        self.variants()
        self.bfloat16()
        self.non_finite(decoder)
        self.checkpoint()
        fsdp.leave()
        if self.world <= 2:
            WorkerScene(self.folder, self.rank, self.world).run()

    def cases(self, decoder: Decoder) -> None:
        frozen = self.frozen()
        for name, case in CASES.items():
            self.results[name] = case.step(decoder, case.batches(self.rank, self.world), frozen)
        # one rank with all long sequences, one with a single short one, the others empty, three times over
        sequences = sorted(make_sequences("group_tokens"), key=lambda sequence: -len(sequence.token_ids))
        mine = [sequences[:-1], sequences[-1:], [], []][self.rank]
        batches = [MicroBatch(mine), MicroBatch([]), MicroBatch([])]
        self.results["adversarial"] = Case().step(decoder, batches)
        self.results["reference gathered"] = [
            name for name, each in frozen.named_parameters()
            if not isinstance(each, DTensor) or each.requires_grad or each.grad is not None
        ]  # fmt: skip

    def variants(self) -> None:
        """Recomputed activations, and the path of models too large to be kept whole between micro-batches."""
        case, regularised = CASES["group_tokens"], CASES["regularised"]
        batches = case.batches(self.rank, self.world)
        self.results["recompute"] = case.step(make_model(self.mesh, recompute=1), batches)
        with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", 0):
            large = make_model(self.mesh)
            self.results["large"] = case.step(large, batches)
            self.results["large regularised"] = regularised.step(large, batches, self.frozen())
        self.untied(case, batches)

    def untied(self, case: Case, batches: list[MicroBatch]) -> None:
        """A large model whose head is a table of its own: another number of recomputed layers on each rank, their
        inputs on the host, and what is gathered while the head works."""
        shape = replace(SHAPE, tied=False)
        self.results["untied"] = case.step(make_model(self.mesh, shape=shape), batches)
        with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", 0):
            large = make_model(self.mesh, shape=shape, recompute=self.rank % 3)
        large.inputs_on_host, gathered = True, set()

        def observe(*inputs: Any, **named: Any) -> Any:
            gathered.update(name for name, each in large.named_parameters() if not isinstance(each, DTensor))
            return chunked_logprobs(*inputs, **named)

        with (
            mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", 0),
            mock.patch.object(language_model, "chunked_logprobs", observe),
        ):
            self.results["large untied"] = case.step(large, batches)
        self.results["gathered for the head"] = sorted(gathered)

    def replicas(self) -> None:
        """Two replicas, kept whole and large, whose all-reduces count; what is said of one that differs in a bit."""
        pairs = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard"))
        batches = Case().batches(self.rank, self.world)
        for name, limit in (("replicas", fsdp.KEEP_WHOLE_BYTES), ("large replicas", 0)):
            with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", limit):
                decoder = make_model(pairs)
                with mock.patch.object(_fsdp_collectives.dist, "all_reduce", wraps=dist.all_reduce) as reductions:
                    self.results[name] = Case().step(decoder, batches)
                self.results[f"{name} all-reduces"] = reductions.call_count
        dro = CASES["dro"]
        self.results["dro of replicas"] = dro.step(decoder, dro.batches(self.rank, self.world), self.frozen())
        alone = init_device_mesh("cpu", (self.world, 1), mesh_dim_names=("replicate", "shard"))
        for name, model, odd in (("pairs", decoder, self.world - 1), ("alone", make_model(alone), 1)):
            fsdp.compare_replicas(model, "before the fault")
            if self.rank == odd:
                change_a_bit(model, "model.layers.1.mlp.up_proj.weight")
            try:
                fsdp.compare_replicas(model, "after the fault")
            except SyncMismatch as error:
                self.results[f"{name} differ"] = str(error)

    def bfloat16(self) -> None:
        """Types and memory through steps in bfloat16, an update far below its resolution, and a step that begins while
        the weights are still gathered."""
        decoder, group = make_model(self.mesh, "bfloat16"), self.mesh.get_group()
        batches = Case().batches(self.rank, self.world)
        self.results["bfloat16"] = Case().step(decoder, batches)
        made = optimiser.make_optimiser(decoder, Optimiser(weight_decay=0.0))
        places = [fsdp.local(parameter).data_ptr() for parameter in decoder.parameters()]
        sums, memory = [], []
        for _ in range(2):  # the second adds to what lies there
            forward_backward(decoder, batches, 1.0, None)
            grads = [fsdp.local(parameter.grad) for parameter in decoder.parameters()]
            memory.append([grad.data_ptr() for grad in grads])
            sums.append([grad.clone() for grad in grads])
        self.results["memory"] = {
            "sharded": bool(fsdp.sharded_modules(decoder)),
            "gradient types": sorted({str(grad.dtype) for grad in grads}),
            "the same": memory[0] == memory[1],
            "of their own": len({grad.untyped_storage().data_ptr() for grad in grads if len(grad)}),
            "twice": [bool(torch.allclose(two, 2 * each)) for each, two in zip(*sums, strict=True)],
        }
        self.results["norm"] = optimiser.clip(decoder, 1e9, group)
        optimiser.clip(decoder, 1e-3, group)
        self.results["clipped norm"] = float(optimiser.global_norm(decoder, group))
        fsdp.reshard(decoder)
        optimiser.update(decoder, made, 1e-3)
        self.results["types"] = optimiser.describe_dtypes(decoder, made)
        self.results["rows stay"] = places == [fsdp.local(parameter).data_ptr() for parameter in decoder.parameters()]
        with torch.no_grad():
            decoder(pack_from([[1, 2, 3]], [1]))
        try:
            forward_backward(decoder, batches, 1.0, None)
        except RunError as error:
            self.results["gathered"] = str(error)

    def non_finite(self, decoder: Decoder) -> None:
        """Gradients of a second step are those of a fresh start; a NaN that only the last rank holds."""
        batches, copies = Case().batches(self.rank, self.world), []
        for _ in range(2):
            forward_backward(decoder, batches, 1.0, MAGISTRAL)
            copies.append(gradients(decoder))
        self.results["again"] = all(torch.equal(each, copies[1][name]) for name, each in copies[0].items())
        forward_backward(decoder, batches, 1.0, MAGISTRAL)
        if self.rank == self.world - 1:
            fsdp.local(decoder.model.layers[1].mlp.up_proj.weight.grad).view(-1)[0] = float("nan")
        try:
            optimiser.clip(decoder, 1.0, self.mesh.get_group())
        except NonFinite as error:
            self.results["non-finite"] = str(error)

    def checkpoint(self) -> None:
        """Three steps; two ranks save, everybody loads what they saved; then one more step after the load."""
        saved, writes = self.folder / "checkpoint", self.world == self.worlds[0][0]
        decoder, fresh = make_model(self.mesh), make_model(self.mesh)
        made, restored = (optimiser.make_optimiser(each, Optimiser(weight_decay=0.1)) for each in (decoder, fresh))

        def train(trained: Decoder, by: torch.optim.AdamW) -> None:
            forward_backward(trained, Case().batches(self.rank, self.world), 1.0, MAGISTRAL)
            optimiser.clip(trained, 1.0, self.mesh.get_group())
            fsdp.reshard(trained)
            optimiser.update(trained, by, 1e-3)

        for _ in range(3):
            train(decoder, made)
        self.results["trained"] = state_of(decoder, made)
        if writes:
            saved.mkdir(exist_ok=True)
            shards.ShardWriter(saved, decoder, made, self.rank, self.world).files()
            self.results["live"] = shards.checksums(decoder)
            dist.barrier()
        self.results["step"], self.results["taken"] = shards.load_shards(saved, fresh, restored)
        self.results["loaded"] = state_of(fresh, restored)
        if writes:
            train(decoder, made)
            train(fresh, restored)
            self.results |= {"went on": state_of(decoder, made), "resumed": state_of(fresh, restored)}


class CudaScene(Scene):
    """The steps of two ranks on two GPUs, in either type."""

    worlds = ((2,),)

    def run(self) -> None:
        device = torch.device("cuda", self.rank)
        mesh = fsdp.join(self.store(), self.rank, self.world, device, timeout_s=600)
        for compute in ("float32", "bfloat16"):
            decoder = make_model(mesh, compute, device=str(device), shape=WIDE)
            self.results[compute] = Case().step(decoder, Case().batches(self.rank, self.world))
        self.results["backend"] = dist.get_backend(mesh.get_group())
        fsdp.leave()


class ReplicaScene(Scene):
    """Four ranks through the calls of a launch, as one replica sharded over all and as two replicas of two."""

    worlds = ((4,),)

    def run(self) -> None:
        self.batches = Case().batches(self.rank, self.world)
        for replicas in (1, 2):
            self.results[f"of {replicas}"] = self.train(replicas)
        for replicas in (1, 2):
            self.results[f"of {replicas}"] |= self.resume(replicas)
        for case in ("none", "rate", "folder"):
            self.results[case] = self.diverge(case)

    @contextmanager
    def launch(self, replicas: int, model: str = "model", checkpoint: Path | None = None) -> Iterator:
        """A trainer rank that has loaded, and leaves in the end."""
        config = Config.model_validate({
            "model": {"dtype": "float32"}, "optimiser": {"compute_dtype": "float32"}, "rollout": {"transport": "shm"},
            "placement": {"trainers": self.world, "replicas": replicas},
        })  # fmt: skip
        role = SimpleNamespace(rank_in_role=self.rank, store=self.store(), device=torch.device("cpu"))
        rank: Any = TrainerRank(config, role)
        try:
            self.loaded = rank.load(str(self.folder / model), str(checkpoint) if checkpoint else None)
            yield rank
        finally:
            rank.stop()
            fsdp.leave()

    def steps(self, rank: Any, count: int) -> list[float]:
        """Loss of this rank and norm of each step."""
        pairs = [(rank.forward_backward(self.batches, 0.7).sums["loss"], rank.step(1e-3).grad_norm)
                 for _ in range(count)]  # fmt: skip
        return [number for pair in pairs for number in pair]

    def train(self, replicas: int) -> Results:
        """Three steps, an update for the engines, a checkpoint and an export; then one more step."""
        saved, exported = (self.folder / f"{name}-{replicas}" for name in ("saved", "exported"))
        saved.mkdir(exist_ok=True)
        with self.launch(replicas) as rank:
            results: Results = {"steps": self.steps(rank, 3), "trained": state_of(rank.decoder, rank.optimiser)}
            published = rank.publish(1, [[3, 1, 4, 1, 5]])
            results |= {"published": published.bytes, "checksums": published.checksums, "parts": rank.checksum_parts()}
            dist.barrier()
            results["delivered"] = all(
                torch.equal(rank.sender.memory.tensor(1, name), results["trained"][f"weight/{name}"])
                for name in rank.sender.layout.places
            )
            results["saved"] = rank.save(str(saved), 3)
            [results["written"]] = [each.bytes for each in rank.writer.files().values()]
            rank.export(str(exported))
            dist.barrier()
            self.steps(rank, 1)
            return results | {"went on": state_of(rank.decoder, rank.optimiser)}

    def resume(self, replicas: int) -> Results:
        """From the checkpoint of the other way."""
        with self.launch(replicas, checkpoint=self.folder / f"saved-{3 - replicas}") as rank:
            results = {"taken": self.loaded.checksums, "resumed": state_of(rank.decoder, rank.optimiser)}
            self.steps(rank, 1)
            return results | {"resumed step": state_of(rank.decoder, rank.optimiser)}

    def diverge(self, case: str) -> str:
        """What a rank says when one replica differs: a learning rate, a model folder."""
        try:
            with self.launch(2, "reference" if self.rank >= 2 and case == "folder" else "model") as rank:
                rank.forward_backward(self.batches, 0.7)
                rank.step(1e-3 if self.rank == 3 and case == "rate" else 0.0)
                dist.barrier()
        except SyncMismatch as error:
            return str(error)
        except RuntimeError as error:
            return f"a peer has left: {type(error).__name__}"
        return "equal"


ADAPTERS, EXPERTS = ", adapters", ", experts"


class FamilyScene(Scene):
    """The same step on models of several families. Of "FAMILY, adapters" only adapters are trained; of "FAMILY,
    experts, adapters" also those of experts, and each rank tells what it sends."""

    worlds = ((1,), (3,))
    families: Sequence[str] = ()

    @classmethod
    def prepare(cls, folder: Path) -> None:
        for family in cls.families:
            name = family.removesuffix(ADAPTERS).removesuffix(EXPERTS)
            family_model(config_of(name)).save_pretrained(folder / family)
            (folder / family / "tokenizer.json").write_text("{}")

    def run(self) -> None:
        batches = deal(make_sequences("group_tokens"), 6, self.rank, self.world)
        for family in self.families:
            targets = {"targets": ["all-linear", "experts"]} if EXPERTS in family else {}
            config = Config.model_validate({
                "model": {"implementation": "transformers"}, "optimiser": {"compute_dtype": "float32"},
                "lora": {"rank": 3 if family.endswith(ADAPTERS) else 0, **targets},
            })  # fmt: skip
            decoder, made, _ = build(self.folder / family, None, config, self.mesh, torch.device("cpu"))
            if config.lora.rank:  # B is zero at first, and so are the gradients of A
                draw = torch.Generator().manual_seed(4)
                matrices = [
                    (name, torch.randn(each.shape, generator=draw) * 0.1) for name, each in fsdp.trained(decoder)
                ]
                fill(decoder, matrices)
            if targets:
                self.results["sent"] = self.sent(decoder)
                self.results["matrices"] = {name: whole(each) for name, each in fsdp.trained(decoder)}
            forward_backward(decoder, batches, 1.0, MAGISTRAL)
            fsdp.reshard(decoder)
            self.results[family] = gradients(decoder)
            forward_backward(decoder, batches, 1.0, MAGISTRAL)
            fsdp.reshard(decoder)
            optimiser.update(decoder, made, 1e-3)
            dist.barrier()
        fsdp.leave()

    def sent(self, decoder: Any) -> list[tuple[str, int, Tensor]]:
        """(name, first row, rows) of what this rank sends."""
        weights = SentWeights(decoder)
        weights.gather()
        pieces = [replace(each, change=weights.changes.get(each.name)) for each in own_pieces(weights.named, self.rank)]
        return [(each.name, each.first_row, each.values.clone()) for each in pieces]


SCENES: dict[str, type[Scene]] = {"steps": Scene, "cuda": CudaScene, "replicas": ReplicaScene}


def run_rank(made: type[Scene], folder: Path, name: str, rank: int, world: int) -> int:
    """Run a rank in a forked process, which ends with code 0 or with its stack; returns the process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        scene = made(folder, rank, world)
        scene.run()
        torch.save(scene.results, folder / f"{name}-{world}-{rank}.pt")
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path, *names: str) -> int:
    """Returns how many ranks failed."""
    torch.set_num_threads(1)
    FamilyScene.families, name = names, names[0] if names[0] in SCENES else "families"
    made = SCENES.get(name, FamilyScene)
    made.prepare(folder)
    failed = 0
    for row in made.worlds:
        ranks = [run_rank(made, folder, name, rank, world) for world in row for rank in range(world)]
        failed += sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
