"""A trainer rank: obeys the controller, one call after the other; all ranks receive the same calls in the same order.

    Load -> LoadBeside, where the objective needs it -> (Recall? -> Accumulate -> OptimiserStep -> MoveReference? ->
    Publish)*, SaveShard, Export, ResetOptimiser at any time between, Stop

Collectives run inside all of these but Stop and ResetOptimiser: a rank that is alone in one waits.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rollout.weights import Sender, make_sender
from shared.config import Config
from shared.errors import CheckpointError, NonFinite, RunError
from shared.messages import (
    REFERENCE,
    Accumulate,
    Accumulated,
    Done,
    Export,
    Load,
    LoadBeside,
    Loaded,
    Message,
    MoveReference,
    OptimiserStep,
    Publish,
    Published,
    Recall,
    Recalled,
    ResetOptimiser,
    Saved,
    SaveShard,
    Stepped,
    Stop,
    Written,
)
from shared.model import hf
from shared.model.config import DecoderConfig
from shared.model.cpu import given_threads, keep_freed_memory, multiplies_bfloat16_fast
from shared.model.decoder import Decoder
from shared.model.packing import pack
from shared.ranks import Role
from shared.rpc import Link, failure
from shared.types import CONTEXT, SAMPLED
from trainer import fsdp, optimiser, safetensors_file, shards
from trainer.accumulate import Beside, accumulate, recall
from trainer.memory import DTYPE_BYTES, recomputed_layers
from trainer.objectives.registry import objective_of
from trainer.objectives.regularised import Dro
from trainer.value_head import ValueHead


def serve(link: Link, config: Config, role: Role) -> None:
    """Answer the controller's calls until Stop. An error is reported to the controller and ends the rank, except a
    checkpoint that could not be written: the controller decides about that one."""
    torch.set_num_threads(given_threads())
    if role.device.type == "cpu":
        keep_freed_memory()
    # oneDNN keeps kernels for every shape that it met, 1,024 by default: with packed batches, whose shapes differ, that
    # was half a gigabyte after eight steps (SmolLM2's width, 10 layers). It reads this at its first product.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    trainer: TrainerRank | None = None
    try:
        for call_id, message in link.calls():
            with link.answering(call_id):
                if isinstance(message, Load):
                    trainer = TrainerRank(config, role, message)
                    link.reply(call_id, trainer.describe())
                elif isinstance(message, Stop):
                    if trainer is not None:
                        trainer.close()
                    trainer = None
                    link.reply(call_id, Done())
                elif trainer is None:
                    raise RunError(f"{type(message).__name__} came before Load")
                else:
                    try:
                        link.reply(call_id, trainer.obey(message))
                    except CheckpointError as error:
                        if not isinstance(message, SaveShard):
                            raise
                        link.reply(call_id, failure(error))
    finally:
        if trainer is not None:
            trainer.close()


def build(
    model_dir: Path, checkpoint_dir: Path | None, config: Config, mesh: DeviceMesh, device: torch.device
) -> tuple[Decoder, torch.optim.AdamW]:
    """Build model and optimiser of this rank, sharded from the start: no rank ever holds more than one whole tensor.

    Weights come from the checkpoint if given (moments too), else from the Hugging Face folder.
    """
    shape, settings = DecoderConfig.from_hf(hf.load_config(model_dir)), config.optimiser
    width, budget = DTYPE_BYTES[settings.compute_dtype], settings.activation_bytes
    with torch.device("meta"):
        decoder = Decoder(shape, recompute=recomputed_layers(shape, settings.micro_batch_tokens, width, budget))
    fsdp.shard(decoder, mesh, getattr(torch, settings.compute_dtype))
    fsdp.materialise(decoder, device)
    made = optimiser.make_optimiser(decoder, settings)
    if checkpoint_dir is not None:
        shards.load_shards(checkpoint_dir, decoder, made)
    else:
        load_weights(model_dir, decoder)
    return decoder, made


def build_frozen(folder: Path, config: Config, mesh: DeviceMesh, device: torch.device) -> Decoder:
    """Build a frozen model from a Hugging Face folder, sharded and computed as the policy is: equal weights give equal
    log-probs."""
    with torch.device("meta"):
        frozen = Decoder(DecoderConfig.from_hf(hf.load_config(folder))).requires_grad_(False)
    fsdp.shard(frozen, mesh, getattr(torch, config.optimiser.compute_dtype))
    fsdp.materialise(frozen, device)
    load_weights(folder, frozen)
    return frozen


@torch.no_grad()
def move(reference: Decoder, policy: Decoder, share: float) -> None:
    """reference += share (policy - reference), this rank's float32 rows; 1 makes it the policy exactly."""
    for kept, new in zip(reference.parameters(), policy.parameters(), strict=True):
        fsdp.local(kept).lerp_(fsdp.local(new), share)
    fsdp.reshard(reference)


@torch.no_grad()
def load_weights(model_dir: Path, decoder: Decoder) -> None:
    """Copy this rank's rows from a Hugging Face folder. Raises ModelError if it does not fit, NonFinite for a NaN in
    it."""
    parameters = dict(decoder.named_parameters())
    for name, tensor in hf.iterate_weights(model_dir, {name: p.shape for name, p in parameters.items()}):
        rows = fsdp.rows_of(parameters[name])
        held = tensor[rows.first : rows.first + rows.count]
        if not bool(torch.isfinite(held).all()):
            raise NonFinite(f"{name} in {model_dir} holds values that are not finite: fetch the weights again")
        fsdp.local(parameters[name]).copy_(held)
    fsdp.reshard(decoder)


class TrainerRank:
    """Model, optimiser and weight transfer of one trainer rank."""

    def __init__(self, config: Config, role: Role, message: Load):
        """Raises what `build` and `make_sender` raise."""
        self.config, self.role = config, role
        self.rank, self.world = role.rank_in_role, config.placement.trainers
        self.model_dir = Path(message.model_dir)
        self.mesh = fsdp.join(role.store, self.rank, self.world, role.device, config.deadlines.step_s)
        checkpoint = Path(message.checkpoint_dir) if message.checkpoint_dir else None
        self.decoder, self.optimiser = build(self.model_dir, checkpoint, config, self.mesh, role.device)
        self.objective = objective_of(config)
        self.beside = Beside()
        if isinstance(self.objective, Dro):
            rate = self.objective.value_learning_rate
            self.beside.values = ValueHead(self.decoder.config.hidden_size, rate, role.device)
            if checkpoint is not None:
                self.beside.values.load(checkpoint)
        self.sender: Sender = make_sender(
            config.rollout.transport,
            list(self.decoder.named_parameters()),
            getattr(torch, config.model.dtype),
            rank=self.rank,
            world=self.world,
            store=role.store,
            engines=config.placement.engines,
        )

    def describe(self) -> Loaded:
        """What this rank holds, for the controller and for the user."""
        settings = self.config.optimiser
        description = {
            **optimiser.describe_dtypes(self.decoder, self.optimiser),
            "compute": settings.compute_dtype,
            "gradient sums": "float32",
            "log-probs": "float32",
            "engines": self.config.model.dtype,
            "device": str(self.role.device),
        }
        if settings.compute_dtype == "bfloat16" and not multiplies_bfloat16_fast(self.role.device.type):
            description["compute"] += " (slow on this processor: optimiser.compute_dtype = 'float32' takes less time)"
        if self.decoder.recompute:
            description["recomputed"] = f"{self.decoder.recompute} of {len(self.decoder.model.layers)} layers"
        parameters = sum(parameter.numel() for parameter in self.decoder.parameters())
        return Loaded(parameters=parameters, transfer=self.sender.describe(), description=description)

    def obey(self, message: Message) -> Message:
        """Execute a message; returns its reply."""
        if isinstance(message, LoadBeside):
            frozen = build_frozen(Path(message.folder), self.config, self.mesh, self.role.device)
            setattr(self.beside, message.role, frozen)
            return Done()
        if isinstance(message, MoveReference):
            if self.beside.reference is None:
                raise RunError("MoveReference came before LoadBeside")
            move(self.beside.reference, self.decoder, message.share)
            return Done()
        if isinstance(message, Recall):
            return Recalled(recall(self.decoder, message.micro_batches, message.temperature))
        if isinstance(message, Accumulate):
            return self.accumulate(message)
        if isinstance(message, OptimiserStep):
            return self.step(message)
        if isinstance(message, ResetOptimiser):
            optimiser.reset(self.optimiser)
            if self.beside.values is not None:
                self.beside.values.reset()
            return Done()
        if isinstance(message, Publish):
            return self.publish(message)
        if isinstance(message, SaveShard):
            return self.save(Path(message.folder), message.version)
        if isinstance(message, Export):
            self.export(self.decoder, Path(message.folder), getattr(torch, self.config.model.dtype))
            return Done()
        raise RunError(f"a trainer rank cannot do {type(message).__name__}")

    def accumulate(self, message: Accumulate) -> Accumulated:
        """Run forward and backward of this rank's micro-batches."""
        settings = None if message.sft else self.objective
        return accumulate(self.decoder, message.micro_batches, message.temperature, settings, self.beside)

    def step(self, message: OptimiserStep) -> Stepped:
        """Clip the gradients, take one AdamW step, drop the gradients."""
        start = time.perf_counter()
        norm = optimiser.clip(self.decoder, self.config.optimiser.max_grad_norm, self.mesh.get_group())
        fsdp.reshard(self.decoder)
        optimiser.update(self.decoder, self.optimiser, message.learning_rate)
        if self.beside.values is not None:
            self.beside.values.step(self.mesh.get_group())
        return Stepped(grad_norm=norm, seconds=time.perf_counter() - start)

    def publish(self, message: Publish) -> Published:
        """Write this rank's rows for the engines; the proof comes from the master weights, not from what was
        written."""
        size_bytes, seconds = self.sender.write(message.version)
        probe = self.score(message.probe) if message.probe else []
        return Published(
            version=message.version,
            bytes=size_bytes,
            seconds=seconds,
            checksums=self.sender.checksums() if message.proof else {},
            probe=probe if self.rank == 0 else [],
        )

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of all tokens but the first, at temperature 1: [sequences][tokens - 1]. All ranks must call it."""
        masks = [bytes([CONTEXT, *[SAMPLED] * (len(sequence) - 1)]) for sequence in sequences]
        logprobs: Tensor = self.decoder(pack(sequences, masks, self.role.device), 1.0)[0]
        fsdp.reshard(self.decoder)
        return [part.tolist() for part in logprobs.cpu().split([len(sequence) - 1 for sequence in sequences])]

    def save(self, folder: Path, version: int) -> Saved:
        """Write this rank's part of a checkpoint: its rows, and on rank 0 what every rank has whole (the value head) or
        gathers (a reference that moves: first, so that a full disk fails here when no rank waits for this one)."""
        files: dict[str, Written] = {}
        if self.beside.reference is not None and self.objective.reference != "start":
            moved = folder / REFERENCE
            self.export(self.beside.reference, moved, torch.float32)
            if self.rank == 0:
                files |= {
                    f"{REFERENCE}/{path.name}": safetensors_file.written(path) for path in sorted(moved.iterdir())
                }
        files |= shards.save_shard(folder, self.decoder, self.optimiser, self.rank, self.world, version)
        if self.beside.values is not None and self.rank == 0:
            files |= self.beside.values.save(folder)
        return Saved(files)

    def export(self, model: Decoder, folder: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face folder, tokenizer included: complete or not at all."""
        gathered = fsdp.gather_full(model, dtype)
        try:
            if self.rank == 0:
                hf.save_model(folder, hf.load_config(self.model_dir), gathered, dtype, self.model_dir)
        finally:
            for _ in gathered:  # to the end on every rank, also when the disk failed: the others wait in the gather
                pass

    def close(self) -> None:
        """Free the transfer and leave the process group."""
        self.sender.close()
        fsdp.leave()
