"""Real trainer ranks for the tests: this script forks worlds of 2, 1 and 4 gloo ranks after a single import of torch.

    python rank_scene.py FOLDER

Every rank writes what it found to FOLDER/found-WORLD-RANK.json, whole gradients and weights (rank 0) to .safetensors.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shared.config import Config
from shared.errors import NonFinite, RunError, SyncMismatch
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.sections import Optimiser
from shared.types import MicroBatch
from tests.packed import pack_from
from tests.trainer.rank_data import MAGISTRAL, SHAPE, deal, make_folder, make_sequences
from tests.trainer.worker_scene import WorkerScene
from trainer.checkpoint import shards
from trainer.objectives.objective import Objective
from trainer.objectives.registry import read_objective
from trainer.step import fsdp, optimiser
from trainer.step.batching import plan_batch
from trainer.step.forward_backward import AuxiliaryModels, forward_backward
from trainer.step.rank import build_frozen
from trainer.step.value_head import ValueHead

WORLDS = (2, 1, 4)
AGGREGATIONS = ("group_tokens", "batch_tokens", "sequence", "completions", "constant")
CUTS = {"1x32": 1, "4x8": 4, "8x4": 8}
LOSSES: dict[str, Objective | None] = {
    "sft": None,
    **{name: read_objective({"name": name}) for name in ("grpo", "aipo", "gspo", "reinforce")},
}
REGULARISED = read_objective({"kl": {"weight": 0.2}, "entropy_bonus": 0.05})
WHOLE = {name: read_objective({"name": name}) for name in ("agro", "dro")}


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


def gathered(reference: Decoder) -> list[str]:
    """Names of the parameters that are not sharded now though there are ranks to share them, or that have gradients."""
    return [
        name for name, parameter in reference.named_parameters()
        if isinstance(parameter, DTensor) is (dist.get_world_size() == 1)
        or parameter.requires_grad or parameter.grad is not None
    ]  # fmt: skip


def of_all_ranks(tensor: Tensor) -> Tensor:
    """A sharded tensor whole; a plain one is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    """Copies of the whole gradients, whose memory the next step takes; forgotten afterwards."""
    found = {
        name: of_all_ranks(parameter.grad).clone()
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }
    decoder.zero_grad(set_to_none=True)
    return found


class Scene:
    """What one rank does."""

    def __init__(self, folder: Path, rank: int, world: int):
        self.folder, self.rank, self.world = folder, rank, world
        self.found: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        store = dist.FileStore(str(folder / f"store-{world}"), world)
        self.mesh = fsdp.join(store, rank, world, torch.device("cpu"), timeout_s=600)

    def run(self) -> None:
        decoder = make_model(self.mesh)
        self.invariance(decoder)
        self.adversarial(decoder)
        self.variants()
        if self.world > 1:
            self.replicas()
        self.regularised(decoder)
        self.dtypes()
        self.rounded()
        self.gradient_memory(decoder)
        self.non_finite(decoder)
        self.checkpoint()
        (self.folder / f"found-{self.world}-{self.rank}.json").write_text(json.dumps(self.found))
        if self.rank == 0:
            save_file(self.tensors, self.folder / f"found-{self.world}.safetensors")
        fsdp.leave()
        if self.world <= 2:
            WorkerScene(self.folder, self.rank, self.world).run()

    def record(
        self, name: str, decoder: Decoder, batches: list[MicroBatch], settings: Objective | None = MAGISTRAL,
        reference: Decoder | None = None, values: ValueHead | None = None,
    ) -> None:  # fmt: skip
        """Loss summed over ranks, metrics and whole gradients of one forward and backward."""
        settings = REGULARISED if reference is not None and settings is MAGISTRAL else settings
        reply = forward_backward(decoder, batches, 0.7, settings, AuxiliaryModels(reference, values=values))
        parts = ["loss", "tokens", "entropy"]
        parts += ["reference_log_ratio"] if reference is not None else []
        parts += ["regularisation"] if settings is REGULARISED else []
        total = torch.tensor([reply.sums.get(part, 0.0) for part in parts], dtype=torch.float64)
        dist.all_reduce(total)
        self.found |= {f"{name}/{part}": value for part, value in zip(parts, total.tolist(), strict=True)}
        self.tensors |= {f"{name}/{key}": value.contiguous() for key, value in gradients(decoder).items()}

    def invariance(self, decoder: Decoder) -> None:
        for loss_aggregation in AGGREGATIONS:
            for cut, count in CUTS.items():
                batches = deal(make_sequences(loss_aggregation), count, self.rank, self.world)
                self.record(f"{loss_aggregation}/{cut}", decoder, batches)
        for loss, settings in LOSSES.items():
            self.record(f"{loss}/4x8", decoder, deal(make_sequences("sequence"), 4, self.rank, self.world), settings)
        plan = plan_batch(make_sequences("group_tokens"), self.world, 70)
        self.record("group_tokens/collated", decoder, plan.micro_batches[self.rank])

    def adversarial(self, decoder: Decoder) -> None:
        """One rank with all long sequences, one with a single short one, the others empty, three times over."""
        sequences = sorted(make_sequences("group_tokens"), key=lambda sequence: -len(sequence.token_ids))
        parts = [sequences[:-1], sequences[-1:]] if self.world > 1 else [sequences]
        mine = parts[self.rank] if self.rank < len(parts) else []
        self.record("adversarial", decoder, [MicroBatch(mine), MicroBatch([]), MicroBatch([])])

    def variants(self) -> None:
        """Recomputed activations, and the path of models too large to be kept whole between micro-batches."""
        batches = deal(make_sequences("group_tokens"), 8, self.rank, self.world)
        self.record("recompute", make_model(self.mesh, recompute=1), batches)
        with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", 0):
            self.record("large", make_model(self.mesh), batches)

    def replicas(self) -> None:
        """Two replicas, kept whole and large, and what is said of one that differs in one bit."""
        pairs = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard"))
        batches = deal(make_sequences("group_tokens"), 8, self.rank, self.world)
        self.record("replicas", decoder := make_model(pairs), batches)
        with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", 0):
            self.record("large replicas", make_model(pairs), batches)
        fsdp.compare_replicas(decoder, "before the fault")
        if self.rank == self.world - 1:
            held = fsdp.local(decoder.model.layers[1].mlp.up_proj.weight).detach()
            held[-1, -1] = torch.nextafter(held[-1, -1], torch.tensor(9.0))
        try:
            fsdp.compare_replicas(decoder, "after the fault")
        except SyncMismatch as error:
            self.found["replicas differ"] = str(error)

    def regularised(self, decoder: Decoder) -> None:
        """KL to another model and an entropy bonus: cut in two ways, with dummies, and with models too large to be kept
        whole."""

        def reference() -> Decoder:
            config = Config.model_validate({"optimiser": {"compute_dtype": "float32"}})
            return build_frozen(self.folder / "reference", config, self.mesh, torch.device("cpu"))

        frozen, sequences = reference(), make_sequences("group_tokens")
        for cut, count in (("1x32", 1), ("8x4", 8)):
            self.record(f"regularised/{cut}", decoder, deal(sequences, count, self.rank, self.world), reference=frozen)
        self.whole_groups(decoder, frozen)
        self.found["reference gathered"] = gathered(frozen)
        with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", 0):
            large, frozen = make_model(self.mesh), reference()
            self.record("regularised/large", large, deal(sequences, 8, self.rank, self.world), reference=frozen)
        self.found["reference gathered"] += gathered(frozen)

    def whole_groups(self, decoder: Decoder, frozen: Decoder) -> None:
        """Objectives that compare completions of a group, or hold a value head: in one micro-batch, and by whole groups
        dealt to ranks; the head after its steps."""
        sequences = make_sequences("completions")
        for name, settings in WHOLE.items():
            values = ValueHead(SHAPE.hidden_size, 1e-2) if name == "dro" else None
            for cut, budget in (("whole", 10_000), ("cut", 60)):
                plan = plan_batch(sequences, self.world, budget, together=True)
                self.record(f"{name}/{cut}", decoder, plan.micro_batches[self.rank], settings, frozen, values)
                if values is not None:
                    values.step()
                    self.tensors[f"{name}/{cut}/head"] = torch.cat([values.weight.detach(), values.bias.detach()[None]])

    def dtypes(self) -> None:
        """Types after a real step in bfloat16, and an update far below bfloat16's resolution."""
        decoder = make_model(self.mesh, "bfloat16")
        made = optimiser.make_optimiser(decoder, Optimiser(weight_decay=0.0))
        batches = deal(make_sequences("group_tokens"), 4, self.rank, self.world)
        kept = [fsdp.local(parameter).data_ptr() for parameter in decoder.parameters()]
        forward_backward(decoder, batches, 1.0, MAGISTRAL)
        self.found["gradient dtypes"] = sorted({str(parameter.grad.dtype) for parameter in decoder.parameters()})
        group = self.mesh.get_group()
        self.found["norm"] = optimiser.clip(decoder, 1e9, group)
        optimiser.clip(decoder, 1e-3, group)
        self.found["clipped norm"] = float(optimiser.global_norm(decoder, group))
        fsdp.reshard(decoder)
        optimiser.update(decoder, made, 1e-3)
        self.found["dtypes"] = optimiser.describe_dtypes(decoder, made)
        self.found["same memory"] = kept == [fsdp.local(p).data_ptr() for p in decoder.parameters()]

    def rounded(self) -> None:
        """A step in bfloat16, and one that begins while the weights are still gathered."""
        decoder, batches = (
            make_model(self.mesh, "bfloat16"), deal(make_sequences("group_tokens"), 8, self.rank, self.world)
        )  # fmt: skip
        self.record("bfloat16", decoder, batches)
        with torch.no_grad():
            decoder(pack_from([[1, 2, 3]], [1]))
        try:
            forward_backward(decoder, batches, 1.0, None)
            self.found["gathered"] = "none"
        except RunError as error:
            self.found["gathered"] = str(error)

    def gradient_memory(self, decoder: Decoder) -> None:
        """Where the gradients of two steps lie, and whether the second ones are those of a fresh start."""
        places, values = [], []
        for _ in range(2):
            forward_backward(
                decoder, deal(make_sequences("sequence"), 2, self.rank, self.world), 1.0, LOSSES["reinforce"]
            )
            places.append([fsdp.local(parameter.grad).data_ptr() for parameter in decoder.parameters()])
            values.append(gradients(decoder))
        self.found["same gradient memory"] = places[0] == places[1]
        equal = [torch.equal(value, values[1][name]) for name, value in values[0].items()]
        self.found["same gradients again"] = all(equal)

    def non_finite(self, decoder: Decoder) -> None:
        """A NaN that only the last rank holds is named on every rank."""
        forward_backward(decoder, deal(make_sequences("sequence"), 1, self.rank, self.world), 1.0, LOSSES["reinforce"])
        if self.rank == self.world - 1:
            fsdp.local(decoder.model.layers[1].mlp.up_proj.weight.grad).view(-1)[0] = float("nan")
        try:
            optimiser.clip(decoder, 1.0, self.mesh.get_group())
        except NonFinite as error:
            self.found["non-finite"] = str(error)
        decoder.zero_grad(set_to_none=True)

    def checkpoint(self) -> None:
        """Three steps; two ranks save, everybody loads what they saved; then one more step after the load."""
        decoder = make_model(self.mesh)
        made = optimiser.make_optimiser(decoder, Optimiser(weight_decay=0.1))
        for _ in range(3):
            self.train(decoder, made)
        self.keep("trained", decoder, made)
        saved = self.folder / "checkpoint"
        if self.world == WORLDS[0]:
            saved.mkdir(exist_ok=True)
            shards.ShardWriter(saved, decoder, made, self.rank, self.world).files()
            self.found["live"] = shards.checksums(decoder)
            dist.barrier()
        fresh = make_model(self.mesh)
        restored = optimiser.make_optimiser(fresh, Optimiser(weight_decay=0.1))
        self.found["step"], self.found["taken"] = shards.load_shards(saved, fresh, restored)
        self.keep("loaded", fresh, restored)
        if self.world == WORLDS[0]:
            self.train(decoder, made)
            self.train(fresh, restored)
            self.keep("went on", decoder, made)
            self.keep("resumed", fresh, restored)

    def train(self, decoder: Decoder, made: torch.optim.Optimizer) -> None:
        forward_backward(decoder, deal(make_sequences("group_tokens"), 8, self.rank, self.world), 1.0, MAGISTRAL)
        optimiser.clip(decoder, 1.0, self.mesh.get_group())
        fsdp.reshard(decoder)
        optimiser.update(decoder, made, 1e-3)

    def keep(self, label: str, decoder: Decoder, made: torch.optim.Optimizer) -> None:
        """Whole weights and moments."""
        for name, whole in fsdp.gather_full(decoder.named_parameters(), torch.float32):
            self.tensors[f"{label}/weight/{name}"] = whole.clone()
        for name, parameter in decoder.named_parameters():
            for moment in shards.MOMENTS:
                self.tensors[f"{label}/{moment}/{name}"] = of_all_ranks(made.state[parameter][moment])


def fork_rank(run: Callable[[], None]) -> int:
    """Run a function in a forked process, which ends with code 0 or with its stack; returns the process id."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's code
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def fork(worlds: tuple[int, ...], folder: Path) -> Iterator[int]:
    """Start all ranks of these worlds; yields their process ids."""
    for world in worlds:
        for rank in range(world):
            yield fork_rank(lambda rank=rank, world=world: Scene(folder, rank, world).run())  # type: ignore[misc]


def main(folder: Path) -> int:
    """Two ranks first (they write the checkpoint), then one and four together; returns how many ranks failed."""
    torch.set_num_threads(1)
    make_folder(folder / "model", seed=1)
    make_folder(folder / "reference", seed=2)
    failed = 0
    for worlds in (WORLDS[:1], WORLDS[1:]):
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in list(fork(worlds, folder)))
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
