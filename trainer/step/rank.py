"""A trainer rank: answers the controller's calls, one after the other; all ranks get the same calls in the same order.

    load -> load_frozen, where the objective needs it -> (compute_old_logprobs? -> forward_backward -> step ->
    move_reference? -> publish -> (offload -> onload)?)*, save -> saved*, export; set_objective, reset_optimiser; stop

Calls that train, load, score, publish, save or export are collectives: a rank that is alone in one waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rollout.weights import WeightSender, make_sender
from rollout.weights.proof import PublishedWeights
from shared import route_files
from shared.config import Config
from shared.errors import CheckpointError, NonFinite, RunError
from shared.launch.calls import call
from shared.launch.ranks import RankInfo
from shared.launch.rpc import TrainerLink
from shared.model import hf, lora
from shared.model.adapter_folder import merged_weights, read_matrices, save_adapter
from shared.model.cpu.processor import given_threads, keep_freed_memory, multiplies_bfloat16_fast
from shared.model.implementation import make_model, read_shape
from shared.model.language_model import LanguageModel
from shared.model.packing import pack
from shared.model.parallel import ALONE, Parallel, Peers, whole_shape
from shared.record_file import Written
from shared.types import CONTEXT, SAMPLED, MicroBatch
from trainer.checkpoint import safetensors_file, shards
from trainer.checkpoint.safetensors_file import REFERENCE
from trainer.memory import DTYPE_BYTES, Recomputation, recomputation_within
from trainer.objectives.objective import Need, moves
from trainer.objectives.registry import objective_of
from trainer.step import forward_backward, fsdp, optimiser, reference
from trainer.step.flops import peak_of
from trainer.step.forward_backward import AuxiliaryModels, StepSums
from trainer.step.offload import HostMemory
from trainer.step.reference import KeptAdapters
from trainer.step.sent_weights import SentWeights
from trainer.step.value_head import ValueHead


class LoadedTrainer(msgspec.Struct):
    """What a trainer rank holds, and how engines read its weights."""

    parameters: int
    transfer: dict[str, Any]
    """how engines attach to the weight transfer (see rollout/weights)"""
    description: dict[str, str]
    """dtypes and settings to print once at start"""
    checksums: dict[str, dict[str, int]] = {}
    """file of a checkpoint -> parameter -> checksum of the weights that this rank took from it (`load_shards`)"""
    peak_flops: float = 0.0
    """dense bfloat16 peak of its card, FLOP/s; 0 on a CPU, and for a card that trainer/step/flops.py does not list"""
    slow_dtype: bool = False
    """computes in bfloat16 on a processor that multiplies float32 faster"""


class Stepped(msgspec.Struct):
    """The gradient's norm before clipping, the seconds of the step, and the rank's largest GPU memory so far."""

    grad_norm: float
    seconds: float
    gpu_peak_bytes: int = 0
    """allocated by torch on its card; 0 on a CPU"""


def serve(link: TrainerLink, config: Config, role: RankInfo) -> None:
    """Answer the controller's calls until `stop`. An error is reported to the controller and ends the rank, except a
    checkpoint that could not be written: the controller decides about that one."""
    torch.set_num_threads(given_threads())
    if role.device.type == "cpu":
        keep_freed_memory()
    # oneDNN keeps kernels for every shape that it met, 1,024 by default: with packed batches, whose shapes differ, that
    # was half a gigabyte after eight steps (SmolLM2's width, 10 layers). It reads this at its first product.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    rank = TrainerRank(config, role)
    try:
        link.serve(rank)
    finally:
        rank.stop()


def build(
    model_dir: Path, checkpoint_dir: Path | None, config: Config, mesh: DeviceMesh, device: torch.device,
    parallel: Parallel = ALONE,
) -> tuple[LanguageModel, torch.optim.AdamW, dict[str, dict[str, int]]]:  # fmt: skip
    """Build model and optimiser of this rank, sharded from the start: no rank ever holds more than one whole tensor.

    Weights come from the checkpoint if given (moments too, and checksums: `load_shards`), else from the Hugging Face
    folder; with adapters these do, and the frozen weights come from the folder.
    """
    described, settings = hf.load_config(model_dir), config.optimiser
    shape = read_shape(described, config.model.implementation, config.model.max_tokens)
    with torch.device("meta"):
        decoder = make_model(shape, described, parallel=parallel)
    if config.lora.rank:
        lora.attach(decoder, config.lora.rank, config.lora.alpha, config.lora.targets)
    fsdp.shard(decoder, mesh, getattr(torch, settings.compute_dtype))
    fsdp.materialise(decoder, device)
    made = optimiser.make_optimiser(decoder, settings)
    load_weights(model_dir, decoder, beside_checkpoint=checkpoint_dir is not None)
    if checkpoint_dir is not None:
        return decoder, made, shards.load_shards(checkpoint_dir, decoder, made)[1]
    if config.lora.rank:
        shapes = {name: whole_shape(parameter) for name, parameter in fsdp.trained(decoder)}
        reference.fill(decoder, lora.first_values(shapes, config.seed))
    return decoder, made, {}


def build_frozen(
    folder: Path, config: Config, mesh: DeviceMesh, device: torch.device, parallel: Parallel = ALONE
) -> LanguageModel:
    """Build a frozen model from a Hugging Face folder that gives, with the policy's weights, the policy's log-probs."""
    described = hf.load_config(folder)
    with torch.device("meta"):
        shape = read_shape(described, config.model.implementation, config.model.max_tokens)
        frozen = make_model(shape, described, parallel=parallel).requires_grad_(False)
    fsdp.shard(frozen, mesh, getattr(torch, config.optimiser.compute_dtype))
    fsdp.materialise(frozen, device)
    load_weights(folder, frozen)
    return frozen


@torch.no_grad()
def load_weights(model_dir: Path, decoder: LanguageModel, beside_checkpoint: bool = False) -> None:
    """Copy this rank's rows from a Hugging Face folder; beside_checkpoint: of what a checkpoint does not hold, which is
    all that is not trained. Raises ModelError if it does not fit, NonFinite for a NaN in it."""
    stored = {name: held for name, held in decoder.stored() if not name.endswith((lora.A, lora.B))}
    left_out = {name for name, _ in fsdp.trained(decoder)} if beside_checkpoint else set()
    if stored.keys() <= left_out:
        return
    for name, tensor in hf.iterate_weights(model_dir, {name: whole_shape(one) for name, one in stored.items()}):
        if name in left_out:
            continue
        values = fsdp.part_of(tensor, stored[name])
        if not bool(torch.isfinite(values).all()):
            raise NonFinite(f"{name} in {model_dir} holds values that are not finite: fetch the weights again")
        fsdp.local(stored[name]).copy_(values)
    fsdp.reshard(decoder)
    fsdp.compare_replicas(decoder, f"after the load of {model_dir}")


class TrainerRank:
    """Model, optimiser and weight transfer of one trainer rank."""

    decoder: LanguageModel
    optimiser: torch.optim.AdamW
    model_dir: Path
    mesh: DeviceMesh

    def __init__(self, config: Config, role: RankInfo):
        self.config, self.role = config, role
        self.rank, self.world = role.rank_in_role, config.placement.trainers
        self.objective = objective_of(config)
        self.auxiliary = AuxiliaryModels()
        self.sender: WeightSender | None = None
        self.parts: list[dict[str, int]] = []
        """[versions] this rank's parts of the checksums of the last two versions"""
        self.writer: shards.ShardWriter | None = None  # of the checkpoint that was begun last
        self.extra_files: dict[str, Written] = {}  # in that checkpoint besides, written already
        self.host = HostMemory()

    @call("load of the model", deadline="start")
    def load(self, model_dir: str, checkpoint_dir: str | None = None) -> LoadedTrainer:
        """Build model and optimiser, from the checkpoint if given. Raises what `build` and `make_sender` raise."""
        checksums = self.load_policy(Path(model_dir), Path(checkpoint_dir) if checkpoint_dir else None)
        self.sent = SentWeights(self.decoder)
        self.sender = make_sender(
            self.config.rollout.transport, self.sent.named, getattr(torch, self.config.model.dtype),
            rank=self.rank, world=self.world, store=self.role.store, engines=self.config.placement.engines,
            changes=self.sent.changes,
        )  # fmt: skip
        in_bfloat16 = self.config.optimiser.compute_dtype == "bfloat16"
        return LoadedTrainer(
            parameters=sum(whole_shape(parameter).numel() for parameter in self.decoder.parameters()),
            transfer=self.sender.describe(), description=self.describe(), checksums=checksums,
            peak_flops=peak_of(self.card),
            slow_dtype=in_bfloat16 and not multiplies_bfloat16_fast(self.role.device.type),
        )  # fmt: skip

    def load_policy(self, model_dir: Path, checkpoint: Path | None = None) -> dict[str, dict[str, int]]:
        """Join the other trainers and build model, optimiser and value head; returns the checksums of `build`."""
        self.model_dir, role, placement = model_dir, self.role, self.config.placement
        self.mesh = fsdp.join(role.store, self.rank, self.world, role.device, self.config.deadlines.step_s, placement)
        self.parallel, self.group = fsdp.meet(role.device, placement), fsdp.replica_group(self.mesh)
        meshes = self.mesh, role.device, self.parallel
        self.decoder, self.optimiser, checksums = build(model_dir, checkpoint, self.config, *meshes)
        if Need.VALUE in self.objective.needs:
            rate = self.objective.in_force["value_learning_rate"]
            self.auxiliary.values = ValueHead(self.decoder.config.hidden_size, rate, role.device, self.config.sharers)
            if checkpoint is not None:
                self.auxiliary.values.load(checkpoint)
        return checksums

    @property
    def card(self) -> str:
        """Name of its card; "" on a CPU."""
        return torch.cuda.get_device_name(self.role.device) if self.role.device.type == "cuda" else ""

    def recomputation(self, tokens: int) -> Recomputation:
        """What is computed again in the backward pass of a micro-batch of so many tokens."""
        settings, on_gpu = self.config.optimiser, self.role.device.type != "cpu"
        width, tokens = DTYPE_BYTES[settings.compute_dtype], -(-tokens // self.config.placement.context)
        if self.parallel.experts is not None:  # a layer that is computed again calls all who have its experts
            dist.all_reduce(most := torch.tensor(tokens, device=self.role.device), dist.ReduceOp.MAX)
            tokens = int(most)
        return recomputation_within(self.decoder.local, tokens, width, settings.activation_bytes, on_gpu)

    def describe(self) -> dict[str, str]:
        """Dtypes and settings, for the user."""
        description = {
            **optimiser.describe_dtypes(self.decoder, self.optimiser),
            "compute": self.config.optimiser.compute_dtype,
            "gradient sums": "float32",
            "log-probs": "float32",
            "engines": self.config.model.dtype,
            "device": f"{self.role.device} {self.card}".rstrip(),
            **({"replicas": f"{self.mesh.size(0)} of {self.mesh.size(1)} trainers"} if self.mesh.ndim > 1 else {}),
            **{f"{name} peers": str(one.size) for name, one in vars(self.parallel).items() if isinstance(one, Peers)},
        }
        if self.config.lora.rank:
            count = sum(whole_shape(parameter).numel() for _, parameter in fsdp.trained(self.decoder))
            way = "" if self.config.sends_adapters else ", merged for the engines"
            rank = f"rank {self.config.lora.rank}, alpha {self.config.lora.alpha:g}{way}"
            description["adapters"] = f"{count / 1e6:.2f} M parameters ({rank}) on frozen weights"
        if again := self.recomputation(self.config.optimiser.micro_batch_tokens).layers:
            description["recomputed"] = f"{again} of {len(self.decoder.layers)} layers of a full micro-batch"
        return description

    @call("load of the {role} model", deadline="start")
    def load_frozen(self, folder: str, role: Literal["reference", "teacher"]) -> None:
        """Build a frozen model next to the policy, from a Hugging Face folder or, for a reference that moved, from a
        checkpoint. The reference of a policy with adapters is other adapters (docs/lora.md)."""
        if role == "reference" and self.config.lora.rank:
            kept = self.auxiliary.reference = KeptAdapters(self.decoder, self.settle)
            with kept.in_force():
                reference.fill(self.decoder, read_matrices(Path(folder)).items())
            return
        frozen = build_frozen(Path(folder), self.config, self.mesh, self.role.device, self.parallel)
        setattr(self.auxiliary, role, frozen)

    @call("move of the reference model", deadline="step")
    def move_reference(self, share: float) -> None:
        """Move the reference towards the policy by `share` (1: all the way)."""
        if self.auxiliary.reference is None:
            raise RunError("move_reference came before load_frozen")
        reference.move(self.auxiliary.reference, self.decoder, share)

    @call("log-probs of the batch", deadline="step")
    def compute_old_logprobs(self, micro_batches: list[MicroBatch], temperature: float) -> list[list[float]]:
        """Forward only: [sequences of all micro-batches, in order][loss tokens] log-probs under the policy as it is."""
        route_files.read_all(self.config.run_dir, micro_batches)
        return forward_backward.compute_old_logprobs(self.decoder, micro_batches, temperature)

    @call("objective of the trainers", deadline="step")
    def set_objective(self, table: dict[str, Any]) -> None:
        """Go on with another [objective]."""
        self.objective = objective_of(self.config.model_copy(update={"objective": table}))

    @call("forward and backward", deadline="step")
    def forward_backward(self, micro_batches: list[MicroBatch], temperature: float, sft: bool = False) -> StepSums:
        """Run this rank's micro-batches, the same number on every rank. sft: imitate, instead of the objective."""
        objective = None if sft else self.objective
        route_files.read_all(self.config.run_dir, micro_batches)
        return forward_backward.forward_backward(
            self.decoder, micro_batches, temperature, objective, self.auxiliary, self.recomputation
        )

    @call("optimiser step", deadline="step")
    def step(self, learning_rate: float) -> Stepped:
        """Clip the gradients, take one AdamW step, drop the gradients."""
        start = time.perf_counter()
        fsdp.add_copies(self.decoder)
        norm = optimiser.clip(self.decoder, self.config.optimiser.max_grad_norm, self.group)
        fsdp.reshard(self.decoder)
        self.settle()
        optimiser.update(self.decoder, self.optimiser, learning_rate)
        fsdp.compare_replicas(self.decoder, "after an optimiser step")
        if self.auxiliary.values is not None:
            self.auxiliary.values.step()
        peak = torch.cuda.max_memory_allocated(self.role.device) if self.role.device.type == "cuda" else 0
        return Stepped(norm, time.perf_counter() - start, peak)

    @call("reset of the optimiser", deadline="step")
    def reset_optimiser(self) -> None:
        """Set moments and step count back to zero."""
        self.settle()
        optimiser.reset(self.optimiser)
        if self.auxiliary.values is not None:
            self.auxiliary.values.reset()

    @call("weights to staging", deadline="sync")
    def publish(self, version: int, probe: list[list[int]], proof: bool = True) -> PublishedWeights:
        """Write this rank's rows for the engines as `version`, and score the probe with them; the proof comes from the
        master weights, not from what was written.

        probe: [sequences][tokens], scored at temperature 1; empty when the proof is off.
        """
        assert self.sender is not None
        self.sent.gather()
        size_bytes, seconds = self.sender.write(version)
        scored = self.score(probe) if probe else []
        published = PublishedWeights(version, size_bytes, seconds, probe=scored if self.rank == 0 else [])
        if proof:
            published.add_checksums(self.sender)
            self.parts = [*self.parts[-1:], published.checksums]
            published.checksums = fsdp.add_checksums(published.checksums, self.sender.layout.places, self.role.device)
        self.sent.joined.clear()
        return published

    @call("parts of the checksums", deadline="step")
    def checksum_parts(self) -> list[dict[str, int]]:
        """Return this rank's parts of the checksums of the last two versions, the older one first."""
        return self.parts

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of all tokens but the first, at temperature 1: [sequences][tokens - 1]. All ranks must call it."""
        masks = [bytes([CONTEXT, *[SAMPLED] * (len(sequence) - 1)]) for sequence in sequences]
        logprobs: Tensor = self.decoder(pack(sequences, masks, self.role.device), 1.0)[0]
        fsdp.reshard(self.decoder)
        return [part.tolist() for part in logprobs.cpu().split([len(sequence) - 1 for sequence in sequences])]

    def settle(self) -> None:
        """Before weights or moments change, move or are freed: let a checkpoint that is being written have them."""
        if self.writer is not None:
            self.writer.settle()

    @call("checkpoint of the trainers", deadline="step", survives=(CheckpointError,))
    def save(self, folder: str, version: int) -> dict[str, int]:
        """Begin to write this rank's part of a checkpoint: its rows, and on rank 0 what every rank has whole (the value
        head) or gathers (a reference that moves: first, so that a full disk fails here when no rank waits for this
        one). `saved` says when all of it is on the disk.

        Returns parameter -> checksum of this rank's rows as they are now. version: of the policy, for the shard.
        """
        path, self.extra_files = Path(folder), {}
        if self.writer is not None:
            self.writer.join()  # one that was given up
        if self.auxiliary.reference is not None and moves(self.objective):
            moved = path / REFERENCE
            self.write_reference(moved)
            if self.rank == 0:
                self.extra_files |= {
                    f"{REFERENCE}/{file.name}": safetensors_file.written(file) for file in sorted(moved.iterdir())
                }
        if self.auxiliary.values is not None and self.rank == 0:
            self.extra_files |= self.auxiliary.values.save(path)
        self.writer = shards.ShardWriter(path, self.decoder, self.optimiser, self.rank, self.world, version)
        return shards.checksums(self.decoder)

    @call("writing of the checkpoint", deadline="step", survives=(CheckpointError,))
    def saved(self) -> dict[str, Written] | None:
        """What was written since `save`, by name; None while the disk is at it. Raises CheckpointError."""
        assert self.writer is not None
        return None if not self.writer.outcome.done() else self.extra_files | self.writer.files()

    @call("export", deadline="step")
    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder in the engines' dtype, adapters merged."""
        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        gathered = fsdp.gather_full(fsdp.trained(self.decoder), dtype)
        if self.config.lora.rank:
            matrices = dict(fsdp.gather_full(fsdp.trained(self.decoder), torch.float32))
            scale = self.config.lora.alpha / self.config.lora.rank
            gathered = iter(()) if self.rank else merged_weights(self.model_dir, matrices, scale)
        self.write_model(gathered, Path(folder), dtype)

    @call("export of the adapters", deadline="step")
    def export_adapter(self, folder: str) -> None:
        """Write the adapters that the policy has now as a PEFT folder, complete or not at all. A collective."""
        matrices = dict(fsdp.gather_full(fsdp.trained(self.decoder), torch.float32))
        if self.rank == 0:
            settings = self.config.lora
            save_adapter(Path(folder), matrices, settings.rank, settings.alpha, str(self.model_dir))

    def write_reference(self, folder: Path) -> None:
        """Write a reference that moves: a model, or adapters. A collective."""
        frozen = self.auxiliary.reference
        if isinstance(frozen, KeptAdapters):
            with frozen.in_force():
                self.export_adapter(str(folder))
        elif frozen is not None:
            self.write_model(fsdp.gather_full(frozen.named_parameters(), torch.float32), folder, torch.float32)

    def write_model(self, gathered: Iterator[tuple[str, Tensor]], folder: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face folder, tokenizer included: complete or not at all. A collective."""
        try:
            if self.rank == 0:
                hf.save_trained(folder, self.model_dir, gathered, dtype)
        finally:
            for _ in gathered:  # to the end on every rank, also when the disk failed: the others wait in the gather
                pass

    @call("offload of the trainers", deadline="step")
    def offload(self) -> None:
        """Leave the GPU to the engines: weights and moments, and the other models, move to the host."""
        self.settle()
        models = (self.decoder, self.auxiliary.reference, self.auxiliary.teacher)
        weights = [parameter for model in models if model is not None for parameter in model.parameters()]
        self.host.offload([*weights, *(value for state in self.optimiser.state.values() for value in state.values())])

    @call("return of the trainers' memory", deadline="step")
    def onload(self) -> None:
        """Bring back what `offload` moved, if anything."""
        self.host.onload()

    @call("stop of the trainers", deadline=60, last=True)
    def stop(self) -> None:
        """Free the weight transfer and leave the process group. May be called again."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None
            fsdp.leave()
