"""A true vLLM engine whose weight loader can be told to leave something out, and two trainer ranks in this process.

The faults are planted where the model takes new weights; what the trainers send is right. vLLM forks its process on a
CPU, so it inherits the loader set here, and the page in which this process writes what is to go wrong.
"""

import asyncio
import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout.local_engine import LocalEngine  # first: it prepares the environment for vLLM

# isort: split
import pytest
import torch
import torch.distributed as dist
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout.weights.cpu import loader
from rollout.weights.cpu.loader import Linear
from rollout.weights.layout import Slice, plan_layout, unique_shapes
from rollout.weights.parameters import Target
from rollout.weights.proof import PublishedWeights, Updated
from rollout.weights.sender import HostWeightSender
from rollout.worker import EngineRank
from shared.config import Config
from shared.model.language_model import LanguageModel
from shared.sections import Optimiser
from shared.types import Completion
from tests.packed import pack_from
from trainer.step.optimiser import make_optimiser
from trainer.step.rank import TrainerRank
from trainer.step.sent_weights import SentWeights

RANKS = 2
PAGE = mmap.mmap(-1, mmap.PAGESIZE)
"""what goes wrong at the next update, as JSON"""
Update = tuple[list[PublishedWeights], list[Updated]]


def plant(fault: dict[str, Any]) -> None:
    """skip_packed, skip_plain = names of tensors ("linears": all but the head's, "head"); old = names of tensors whose
    rows come from the version before ("all"), only those of trainer rank `rank` if given."""
    PAGE[:] = json.dumps(fault).encode().ljust(mmap.PAGESIZE)


def fault() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PAGE[:].strip(b"\0 ") or b"{}")
    return found


class FaultyLoader(loader.CpuWeightLoader):
    """Leaves out what the page says."""

    def _rows(self, version: int, target: Target) -> torch.Tensor:
        rows, planned = super()._rows(version, target), fault()
        if not any(name in planned.get("old", []) for name in ("all", *target.sources)):
            return rows
        old, rows, start = super()._rows(version - 1, target), rows.clone(), 0
        for source in target.sources:
            count = self.weights.layout.places[source].rows
            first = rank_rows(count, planned["rank"]) if "rank" in planned else slice(0, count)
            if planned["old"] == ["all"] or source in planned["old"]:
                rows[start + first.start : start + first.stop] = old[start + first.start : start + first.stop]
            start += count
        return rows

    def _place_plain(self, version: int) -> None:
        everything, skipped = self.plain, fault().get("skip_plain", [])
        self.plain = [target for target in everything if target.sources[0] not in skipped]
        super()._place_plain(version)
        self.plain = everything

    def _exchange(self, target: Target, linear: Linear) -> None:
        skipped, head = fault().get("skip_packed", []), isinstance(target.module, ParallelLMHead)
        if not any(name in skipped for name in ("head" if head else "linears", *([] if head else target.sources))):
            super()._exchange(target, linear)


def packs(dtype: torch.dtype) -> bool:
    """Whether vLLM packs linears of this type on this processor (bfloat16 wants AVX-512): else they multiply with the
    plain weight, and there is no packed copy to leave out."""
    return loader.pack(torch.zeros(64, 64, dtype=dtype)).__closure__ is not None


def rank_rows(count: int, rank: int) -> slice:
    """A trainer rank's rows of a tensor, as FSDP2 cuts it."""
    share = -(-count // RANKS)
    return slice(min(count, rank * share), min(count, (rank + 1) * share))


class UpdateScene:
    """Weights that move, and an engine that follows; it has an event loop of its own."""

    def __init__(self, folder: Path, decoder: LanguageModel, config: Config, place: str, faulty: type):
        """folder: of the model that the engine starts with. faulty: what the engine has at `place`."""
        self.decoder, self.dtype, self.version = decoder, config.model.dtype, -1
        self.runner, self.engine = asyncio.Runner(), LocalEngine(config, str(folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, faulty)
            self.runner.run(self.engine.start())
        sent = SentWeights(decoder)
        named = sent.named
        layout, store = plan_layout(unique_shapes(named), getattr(torch, self.dtype), RANKS), dist.HashStore()

        def sender(rank: int) -> HostWeightSender:
            cuts = [(name, value, rank_rows(len(value), rank)) for name, value in named]
            pieces = [
                Slice(name, value.detach()[rows], rows.start, sent.changes.get(name)) for name, value, rows in cuts
            ]
            return HostWeightSender("shm", layout, pieces, rank, store, 1)

        with ThreadPoolExecutor(RANKS) as pool:
            self.senders = list(pool.map(sender, range(RANKS)))
        self.generator = torch.Generator().manual_seed(5)
        lengths = (12, 40, 200)
        self.probe = [torch.randint(3, 256, (count,), generator=self.generator).tolist() for count in lengths]
        self.optimiser = make_optimiser(decoder, Optimiser(learning_rate=1e-6))
        self.before = self.sample()
        """completions of the model of the folder"""
        self.runner.run(self.engine.attach([each.describe() for each in self.senders]))

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()
        for sender in self.senders:
            sender.close()

    def sample(self, seeds: tuple[int, ...] = (1, 2)) -> list[Completion]:
        """Completions of 97 tokens, whose keys and values are cached."""
        return self.runner.run(self.engine.sample(list(range(3, 100)), seeds))

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Move every weight by noise of this share of its tensor's size."""
        for parameter in self.decoder.parameters():
            size = parameter.square().mean().sqrt() * share
            parameter.add_(torch.randn(parameter.shape, generator=self.generator) * size)

    def step(self) -> None:
        """A true step of AdamW on random tokens."""
        tokens = torch.randint(3, 256, (64,), generator=self.generator).tolist()
        (-self.decoder(pack_from([tokens], [8]))[0].mean()).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def update(self, **fault: Any) -> Update:
        """Publish the weights as they are, with a fault planted; what the trainers and the engine say of it."""
        plant(fault)
        try:
            return self.runner.run(self.publish())
        finally:
            plant({})

    async def publish(self) -> Update:
        self.version += 1
        published = []
        for rank, sender in enumerate(self.senders):
            size_bytes, seconds = sender.write(self.version)
            scored = self.score() if rank == 0 else []
            published.append(PublishedWeights(self.version, size_bytes, seconds, probe=scored))
            published[-1].add_checksums(sender)
        chosen = [part.chosen for part in published]
        return published, await self.engine.client.call(EngineRank.update, self.version, self.probe, chosen)

    def score(self) -> list[list[float]]:
        """The trainers' log-probs of the probe."""
        place: Any = SimpleNamespace(decoder=self.decoder, role=SimpleNamespace(device="cpu"))
        return TrainerRank.score(place, self.probe)
