"""Real trainer ranks for the tests: this script forks worlds of 2, 1 and 4 gloo ranks after a single import of torch.

    python rank_scene.py FOLDER

Every rank writes what it found to FOLDER/found-WORLD-RANK.json, whole gradients and weights (rank 0) to .safetensors.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer.advantage import advantages, token_weights

from shared import hf
from shared.config import Config, Objective, Optimiser
from shared.errors import NonFinite
from shared.messages import (
    Accumulate,
    Export,
    Load,
    LoadBeside,
    Message,
    OptimiserStep,
    Publish,
    ResetOptimiser,
    SaveShard,
    Stop,
)
from shared.model import Decoder, DecoderConfig, initialise
from shared.types import MicroBatch, TrainSequence
from shared.wire import failure
from trainer import optimiser, parallel, shards
from trainer.accumulate import accumulate
from trainer.collate import collate
from trainer.worker import build_reference, serve

WORLDS = (2, 1, 4)
NORMALISERS = ("group_tokens", "batch_tokens", "sequence", "constant")
CUTS = {"1x32": 1, "4x8": 4, "8x4": 8}
CANARY = [[3, 1, 4, 1, 5], [9, 2, 6]]
LOSSES = ("grpo", "truncated_importance", "reinforce", "supervised")
REGULARISED = Objective(kl=0.2, kl_gradient="return", entropy_bonus=0.05)
# odd sizes: no dimension splits evenly, and key rows (2) and head norms (2) leave ranks of four without any
SHAPE = DecoderConfig(
    family="qwen3", vocab_size=67, hidden_size=25, intermediate_size=45, layers=2, heads=3, key_heads=1, head_dim=2,
    norm_epsilon=1e-5, max_positions=256, tied=True, qk_norm=True, initializer_range=0.15,
)  # fmt: skip


def make_sequences(normaliser: str) -> list[TrainSequence]:
    """4 groups of 8 completions of very different lengths, off-policy log-probs, one masked completion.

    Completions of a group share their prompt, which packing stores once wherever they meet."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (4, 8), generator=draw).tolist()
    lengths[0][0], lengths[3][7] = 60, 0
    rewards = torch.rand(4, 8, generator=draw).round(decimals=1).tolist()
    rewards[3][7] = None
    found = advantages(rewards, "minibatch")
    weights = token_weights(lengths, normaliser, 30)  # type: ignore[arg-type]
    prompts = torch.randint(0, 67, (4, 5), generator=draw).tolist()
    return [
        TrainSequence(
            prompts[group] + torch.randint(0, 67, (count,), generator=draw).tolist(),
            5,
            (-4 - torch.rand(count, generator=draw)).tolist(),
            found[group][sample] or 0.0,
            weights[group][sample],
        )
        for group in range(4)
        for sample, count in enumerate(lengths[group])
        if count
    ]


def deal(sequences: list[TrainSequence], count: int, rank: int, world: int) -> list[MicroBatch]:
    """Cut into `count` micro-batches and deal them to ranks in turn, dummies at the end."""
    batches = [MicroBatch(sequences[start::count]) for start in range(count)]
    rounds = -(-count // world)
    batches += [MicroBatch([]) for _ in range(rounds * world - count)]
    return batches[rank::world]


def make_model(mesh: Any, compute: str = "float32", recompute: bool = False) -> Decoder:
    """The same weights on any number of ranks."""
    whole = Decoder(SHAPE)
    initialise(whole, seed=1)
    with torch.device("meta"):
        decoder = Decoder(SHAPE, recompute=recompute)
    parallel.shard(decoder, mesh, getattr(torch, compute))
    parallel.materialise(decoder, torch.device("cpu"))
    with torch.no_grad():
        for parameter, original in zip(decoder.parameters(), whole.parameters(), strict=True):
            rows = parallel.rows_of(parameter)
            parallel.local(parameter).copy_(original[rows.first : rows.first + rows.count])
    return decoder


def gathered(reference: Decoder) -> list[str]:
    """Names of the parameters that are not sharded now, or that have gradients."""
    return [
        name for name, parameter in reference.named_parameters()
        if not isinstance(parameter, DTensor) or parameter.requires_grad or parameter.grad is not None
    ]  # fmt: skip


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    """Whole gradients; forgotten afterwards."""
    found = {name: parameter.grad.full_tensor() for name, parameter in decoder.named_parameters()}  # type: ignore
    decoder.zero_grad(set_to_none=True)
    return found


class Scene:
    """What one rank does."""

    def __init__(self, folder: Path, rank: int, world: int):
        self.folder, self.rank, self.world = folder, rank, world
        self.found: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        store = dist.FileStore(str(folder / f"store-{world}"), world)
        self.mesh = parallel.join(store, rank, world, torch.device("cpu"), timeout_s=40)

    def run(self) -> None:
        decoder = make_model(self.mesh)
        self.invariance(decoder)
        self.adversarial(decoder)
        self.variants()
        self.regularised(decoder)
        self.dtypes()
        self.non_finite(decoder)
        self.checkpoint()
        (self.folder / f"found-{self.world}-{self.rank}.json").write_text(json.dumps(self.found))
        if self.rank == 0:
            save_file(self.tensors, self.folder / f"found-{self.world}.safetensors")
        parallel.leave()
        if self.world <= 2:
            WorkerScene(self.folder, self.rank, self.world).run()

    def record(
        self, name: str, decoder: Decoder, batches: list[MicroBatch], loss: str = "clip_higher",
        reference: Decoder | None = None,
    ) -> None:  # fmt: skip
        """Loss summed over ranks, metrics and whole gradients of one accumulate."""
        settings = REGULARISED if reference is not None else Objective()
        reply = accumulate(decoder, batches, loss, 0.7, settings, reference)
        parts = ["loss", "tokens", "entropy"]
        parts += ["regularisation", "reference_log_ratio"] if reference is not None else []
        total = torch.tensor([reply.sums.get(part, 0.0) for part in parts], dtype=torch.float64)
        dist.all_reduce(total)
        self.found |= {f"{name}/{part}": value for part, value in zip(parts, total.tolist(), strict=True)}
        self.tensors |= {f"{name}/{key}": value.contiguous() for key, value in gradients(decoder).items()}

    def invariance(self, decoder: Decoder) -> None:
        for normaliser in NORMALISERS:
            for cut, count in CUTS.items():
                batches = deal(make_sequences(normaliser), count, self.rank, self.world)
                self.record(f"{normaliser}/{cut}", decoder, batches)
        for loss in LOSSES:
            self.record(f"{loss}/4x8", decoder, deal(make_sequences("sequence"), 4, self.rank, self.world), loss)
        plan = collate(make_sequences("group_tokens"), self.world, 70)
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
        self.record("recompute", make_model(self.mesh, recompute=True), batches)
        with mock.patch.object(parallel, "KEEP_WHOLE_BYTES", 0):
            self.record("large", make_model(self.mesh), batches)

    def regularised(self, decoder: Decoder) -> None:
        """KL to another model and an entropy bonus: cut in two ways, with dummies, and with models too large to be kept
        whole."""

        def reference() -> Decoder:
            config = Config.model_validate({"optimiser": {"compute_dtype": "float32"}})
            return build_reference(self.folder / "reference", decoder, config, self.mesh, torch.device("cpu"))

        frozen, sequences = reference(), make_sequences("group_tokens")
        for cut, count in (("1x32", 1), ("8x4", 8)):
            self.record(
                f"regularised/{cut}", decoder, deal(sequences, count, self.rank, self.world), reference=frozen
            )
        self.found["reference gathered"] = gathered(frozen)
        with mock.patch.object(parallel, "KEEP_WHOLE_BYTES", 0):
            large, frozen = make_model(self.mesh), reference()
            self.record(
                "regularised/large", large, deal(sequences, 8, self.rank, self.world), reference=frozen
            )
        self.found["reference gathered"] += gathered(frozen)

    def dtypes(self) -> None:
        """Types after a real step in bfloat16, and an update far below bfloat16's resolution."""
        decoder = make_model(self.mesh, "bfloat16")
        made = optimiser.make_optimiser(decoder, Optimiser(weight_decay=0.0))
        batches = deal(make_sequences("group_tokens"), 4, self.rank, self.world)
        kept = [parallel.local(parameter).data_ptr() for parameter in decoder.parameters()]
        accumulate(decoder, batches, "clip_higher", 1.0, Objective())
        self.found["gradient dtypes"] = sorted({str(parameter.grad.dtype) for parameter in decoder.parameters()})  # type: ignore
        group = self.mesh.get_group()
        self.found["norm"] = optimiser.clip(decoder, 1e9, group)
        optimiser.clip(decoder, 1e-3, group)
        self.found["clipped norm"] = float(optimiser.global_norm(decoder, group))
        parallel.reshard(decoder)
        optimiser.update(decoder, made, 1e-3)
        self.found["dtypes"] = optimiser.describe_dtypes(decoder, made)
        self.found["same memory"] = kept == [parallel.local(p).data_ptr() for p in decoder.parameters()]

    def non_finite(self, decoder: Decoder) -> None:
        """A NaN that only the last rank holds is named on every rank."""
        accumulate(decoder, deal(make_sequences("sequence"), 1, self.rank, self.world), "reinforce", 1.0, Objective())
        if self.rank == self.world - 1:
            parallel.local(decoder.model.layers[1].mlp.up_proj.weight.grad).view(-1)[0] = float("nan")  # type: ignore
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
            self.found["files"] = shards.save_shard(saved, decoder, made, self.rank, self.world)
            dist.barrier()
        fresh = make_model(self.mesh)
        restored = optimiser.make_optimiser(fresh, Optimiser(weight_decay=0.1))
        self.found["step"] = shards.load_shards(saved, fresh, restored)
        self.keep("loaded", fresh, restored)
        if self.world == WORLDS[0]:
            self.train(decoder, made)
            self.train(fresh, restored)
            self.keep("went on", decoder, made)
            self.keep("resumed", fresh, restored)

    def train(self, decoder: Decoder, made: torch.optim.Optimizer) -> None:
        accumulate(
            decoder, deal(make_sequences("group_tokens"), 8, self.rank, self.world), "clip_higher", 1.0, Objective()
        )
        optimiser.clip(decoder, 1.0, self.mesh.get_group())
        parallel.reshard(decoder)
        optimiser.update(decoder, made, 1e-3)

    def keep(self, label: str, decoder: Decoder, made: torch.optim.Optimizer) -> None:
        """Whole weights and moments."""
        for name, whole in parallel.gather_full(decoder, torch.float32):
            self.tensors[f"{label}/weight/{name}"] = whole.clone()
        for name, parameter in decoder.named_parameters():
            for moment in shards.MOMENTS:
                self.tensors[f"{label}/{moment}/{name}"] = made.state[parameter][moment].full_tensor()


class ScriptedLink:
    """The controller's end replaced by a list of messages; keeps the replies."""

    def __init__(self, messages: list[Message]):
        self.messages, self.replies = messages, dict[int, Message]()

    def calls(self) -> Iterator[tuple[int, Message]]:
        return enumerate(self.messages)

    def reply(self, call_id: int, message: Message) -> None:
        assert call_id not in self.replies, "one reply a call"
        self.replies[call_id] = message

    @contextmanager
    def answering(self, call_id: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.reply(call_id, failure(error))
            raise


class WorkerScene:
    """Two launches of a worker rank: one trains, publishes, saves and exports; one resumes, publishes, meets a NaN."""

    def __init__(self, folder: Path, rank: int, world: int):
        self.folder, self.rank, self.world = folder, rank, world
        self.saved, self.exported = folder / f"saved-{world}", folder / f"exported-{world}"
        self.settings = {
            "model": {"dtype": "float32"},
            "optimiser": {"compute_dtype": "float32", "learning_rate": 1e-2},
            "placement": {"trainers": world, "engines": 1},
            "rollout": {"transport": "shm"},
        }

    def run(self) -> None:
        self.saved.mkdir(exist_ok=True)
        batches = deal(make_sequences("group_tokens"), 4, self.rank, self.world)
        publish = Publish(1, canary=CANARY)
        model, train = str(self.folder / "model"), Accumulate(batches, 0.7, "clip_higher")
        first = [
            Load(model), train, OptimiserStep(1e-2), publish, SaveShard(str(self.saved)), Export(str(self.exported)),
            SaveShard(str(self.folder / "absent")), ResetOptimiser(), Stop(),
        ]  # fmt: skip
        spoiled = MicroBatch([TrainSequence([1, 2, 3, 4], 2, [-1.0, float("nan")], 1.0, 1.0)])
        second = [Load(model, str(self.saved)), publish, Accumulate([spoiled], 1.0, "clip_higher")]
        replies = {name: self.launch(name, messages) for name, messages in (("first", first), ("second", second))}
        self.settings["objective"] = {"kl": 0.2}
        equal = [Load(model, str(self.saved)), LoadBeside(str(self.exported))]
        replies["regularised"] = self.launch("regularised", [*equal, train, OptimiserStep(1e-2), train, Stop()])
        (self.folder / f"worker-{self.world}-{self.rank}.json").write_bytes(msgspec.json.encode(replies))

    def launch(self, name: str, messages: list[Message]) -> list[Message]:
        store = dist.FileStore(str(self.folder / f"store-{name}-{self.world}"), self.world)
        role = SimpleNamespace(rank_in_role=self.rank, store=store, device=torch.device("cpu"))
        link = ScriptedLink(messages)
        with suppress(NonFinite):
            serve(link, Config.model_validate(self.settings), role)  # type: ignore[arg-type]
        return [link.replies[number] for number in range(len(messages))]


def make_folder(folder: Path, seed: int) -> None:
    """A Hugging Face folder of the scene's model, with a stand-in for a tokenizer."""
    whole = Decoder(SHAPE)
    initialise(whole, seed)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": SHAPE.vocab_size, "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size, "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.key_heads, "head_dim": SHAPE.head_dim,
        "rms_norm_eps": SHAPE.norm_epsilon, "max_position_embeddings": SHAPE.max_positions,
        "tie_word_embeddings": True,
    }  # fmt: skip
    hf.save_model(folder, config, dict(whole.named_parameters()), torch.float32)
    (folder / "tokenizer.json").write_text("{}")


def fork(worlds: tuple[int, ...], folder: Path) -> Iterator[int]:
    """Start all ranks of these worlds; yields their process ids."""
    for world in worlds:
        for rank in range(world):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    Scene(folder, rank, world).run()
                    code = 0
                except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's code
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            yield pid


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
