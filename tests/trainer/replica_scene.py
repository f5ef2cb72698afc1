"""Four real gloo ranks for test_replicas.py, as one replica sharded over all and as two replicas of two.

python replica_scene.py FOLDER: every rank writes what it found to FOLDER/found-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from rollout.weights.sender import HostWeightSender
from shared.config import Config
from shared.errors import SyncMismatch
from shared.types import MicroBatch
from tests.trainer.rank_data import MAGISTRAL, deal, make_folder, make_sequences
from tests.trainer.rank_scene import fork_rank, gradients, make_model
from trainer.step import fsdp
from trainer.step.batching import plan_batch
from trainer.step.forward_backward import forward_backward
from trainer.step.rank import TrainerRank

RANKS = 4
NAME = "model.layers.1.mlp.down_proj.weight"


class Scene:
    """What one rank does."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank, self.stores = folder, rank, 0
        self.found: dict[str, Any] = {}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.batches = deal(make_sequences("group_tokens"), 8, rank, RANKS)

    def run(self) -> None:
        for replicas in (1, 2):
            self.gradients(replicas)
            self.train(replicas)
        for replicas in (1, 2):
            self.resume(replicas)
        self.value_heads()
        for case in ("none", "weight", "rate", "folder", "one of four"):
            self.found[case] = self.diverge(case)
        (self.folder / f"found-{self.rank}.json").write_text(json.dumps(self.found))

    def store(self) -> dist.Store:
        self.stores += 1
        return dist.FileStore(str(self.folder / f"store-{self.stores}"), RANKS)

    def gradients(self, replicas: int) -> None:
        """Whole gradients and the norm, of a model that is kept whole and of a large one, whose all-reduces count."""
        mesh = fsdp.join(self.store(), self.rank, RANKS, torch.device("cpu"), 600, replicas)
        for kept in (True, False):
            with mock.patch.object(fsdp, "KEEP_WHOLE_BYTES", fsdp.KEEP_WHOLE_BYTES if kept else 0):
                decoder = make_model(mesh)
                with mock.patch.object(_fsdp_collectives.dist, "all_reduce", wraps=dist.all_reduce) as reductions:
                    forward_backward(decoder, self.batches, 0.7, MAGISTRAL)
                self.found[f"all-reduces {replicas} {kept}"] = reductions.call_count
                self.tensors[f"gradients {replicas} {kept}"] = gradients(decoder)
        self.compare(f"gradients {replicas} True", "gradients 1 True")
        self.compare(f"gradients {replicas} False", "gradients 1 True")
        fsdp.leave()

    def compare(self, name: str, reference: str, part: str = "") -> None:
        """Largest relative distance of a tensor from that of the reference, and whether all bits are equal."""
        assert self.tensors[name].keys() == self.tensors[reference].keys()
        names = [key for key in self.tensors[name] if key.startswith(part)]
        pairs = [(self.tensors[name][key], self.tensors[reference][key]) for key in names]
        assert len(pairs) > 10
        self.found[f"{part}{name} from {reference}"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        self.found[f"{name} is {reference}"] = all(torch.equal(a, b) for a, b in pairs)

    @contextmanager
    def launch(
        self, replicas: int, model: str = "model", checkpoint: Path | None = None, **objective: Any
    ) -> Iterator[TrainerRank]:
        """A trainer rank that has loaded, and leaves in the end."""
        config = Config.model_validate({
            "model": {"dtype": "float32"}, "optimiser": {"compute_dtype": "float32"}, "rollout": {"transport": "shm"},
            "placement": {"trainers": RANKS, "replicas": replicas}, "objective": objective,
        })  # fmt: skip
        role = SimpleNamespace(rank_in_role=self.rank, store=self.store(), device=torch.device("cpu"))
        rank = TrainerRank(config, role)  # type: ignore[arg-type]
        try:
            self.loaded = rank.load(str(self.folder / model), str(checkpoint) if checkpoint else None)
            yield rank
        finally:
            rank.stop()
            fsdp.leave()

    def steps(self, rank: TrainerRank, count: int) -> list[float]:
        """Loss of this rank and norm of each step."""
        found = []
        for _ in range(count):
            found.append(rank.forward_backward(self.batches, 0.7).sums["loss"])
            found.append(rank.step(1e-3).grad_norm)
        return found

    def keep(self, name: str, rank: TrainerRank) -> None:
        """Whole weights and moments."""
        kept = self.tensors[name] = {}
        for key, parameter in rank.decoder.named_parameters():
            held = {"weight": parameter.detach(), **rank.optimiser.state[parameter]}
            kept |= {f"{part}/{key}": held[part].full_tensor().clone() for part in ("weight", "exp_avg", "exp_avg_sq")}

    def train(self, replicas: int) -> None:
        """Three steps, an update for the engines, a checkpoint and an export; then one more step."""
        saved, exported = (self.folder / f"{name}-{replicas}" for name in ("saved", "exported"))
        saved.mkdir(exist_ok=True)
        with self.launch(replicas) as rank:
            self.found[f"steps {replicas}"] = self.steps(rank, 3)
            self.keep(f"trained {replicas}", rank)
            self.compare(f"trained {replicas}", "trained 1")
            self.compare(f"trained {replicas}", "trained 1", "weight/")
            published = rank.publish(1, [[3, 1, 4, 1, 5]])
            self.found[f"published {replicas}"] = [published.bytes, published.checksums, published.probe]
            dist.barrier()
            assert isinstance(rank.sender, HostWeightSender)
            memory, weights = rank.sender.memory, self.tensors[f"trained {replicas}"]
            self.found[f"delivered {replicas}"] = all(
                torch.equal(memory.tensor(1, name), weights[f"weight/{name}"]) for name in rank.sender.layout.places
            )
            self.found[f"saved {replicas}"] = rank.save(str(saved), 3)
            assert rank.writer is not None
            self.found[f"written {replicas}"] = [each.bytes for each in rank.writer.files().values()]
            rank.export(str(exported))
            dist.barrier()
            self.steps(rank, 1)
            self.keep(f"went on {replicas}", rank)

    def resume(self, replicas: int) -> None:
        """From the checkpoint of the other way."""
        with self.launch(replicas, checkpoint=self.folder / f"saved-{3 - replicas}") as rank:
            self.found[f"taken {replicas}"] = self.loaded.checksums
            self.keep(f"resumed {replicas}", rank)
            self.compare(f"resumed {replicas}", f"trained {3 - replicas}")
            self.steps(rank, 1)
            self.keep(f"resumed step {replicas}", rank)
            self.compare(f"resumed step {replicas}", f"went on {3 - replicas}")

    def value_heads(self) -> None:
        """A head of which every rank has all, trained beside a frozen reference by whole groups."""
        plan = plan_batch(make_sequences("completions"), RANKS, 60, together=True).micro_batches[self.rank]
        for replicas in (1, 2):
            with self.launch(replicas, name="dro", value_learning_rate=0.05) as rank:
                rank.load_frozen(str(self.folder / "other"), "reference")
                rank.forward_backward(plan, 0.7)
                rank.step(1e-2)
                assert rank.auxiliary.values is not None
                head = rank.auxiliary.values
                self.found[f"head {replicas}"] = head.optimiser.state[head.weight]["exp_avg"].tolist()

    def diverge(self, case: str) -> str:
        """What a rank says when one replica differs: a weight by one bit, a learning rate, a model folder."""
        late, replicas = self.rank >= RANKS // 2, 4 if case == "one of four" else 2
        try:
            with self.launch(replicas, "other" if late and case == "folder" else "model") as rank:
                odd = self.rank == (2 if case == "one of four" else 3)
                if odd and case in ("weight", "one of four"):
                    with torch.no_grad():
                        held = fsdp.local(dict(rank.decoder.named_parameters())[NAME])
                        held[-1, -1] = torch.nextafter(held[-1, -1], torch.tensor(9.0))
                # the fault is found in the step whose gradients it cannot have changed
                rank.forward_backward([MicroBatch([]) for _ in self.batches] if case == "weight" else self.batches, 0.7)
                rank.step(1e-3 if odd and case == "rate" else 0.0)
                dist.barrier()
        except SyncMismatch as error:
            return str(error)
        except RuntimeError as error:
            return f"a peer has left: {type(error).__name__}"
        return "equal"


def main(folder: Path) -> int:
    """Fork the ranks; returns how many failed."""
    torch.set_num_threads(1)
    make_folder(folder / "model", seed=1)
    make_folder(folder / "other", seed=2)
    ranks = [fork_rank(lambda rank=rank: Scene(folder, rank).run()) for rank in range(RANKS)]  # type: ignore[misc]
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
