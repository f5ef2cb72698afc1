"""Launches of a worker rank on the ranks of rank_scene.py, driven by scripted calls; the replies go to files.

worker-WORLD-RANK.json    name of the launch -> its replies, in the order of the calls
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from shared.config import Config
from shared.errors import NonFinite
from shared.messages import (
    Accumulate,
    Export,
    Load,
    LoadBeside,
    Message,
    MoveReference,
    OptimiserStep,
    Publish,
    Recall,
    Recalled,
    ResetOptimiser,
    SaveShard,
    Stop,
)
from shared.rpc import failure
from shared.types import MicroBatch
from tests.trainer.rank_data import deal, make_sequences
from tests.trainer.sequences import make_sequence
from trainer.rank import serve

PROBE = [[3, 1, 4, 1, 5], [9, 2, 6]]
Call = Message | Callable[[dict[int, Message]], Message]
"""a message, or one that is made of the replies so far"""


class ScriptedLink:
    """The controller's end replaced by a list of messages; keeps the replies."""

    def __init__(self, messages: Sequence[Call]):
        self.messages, self.replies = messages, dict[int, Message]()

    def calls(self) -> Iterator[tuple[int, Message]]:
        for number, message in enumerate(self.messages):
            yield number, message(self.replies) if callable(message) else message

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
    """Launches of a worker rank: one trains, publishes, saves and exports; one resumes, publishes, meets a NaN; others
    have a model or a value head beside the policy, and resume with it."""

    def __init__(self, folder: Path, rank: int, world: int):
        self.folder, self.rank, self.world = folder, rank, world
        self.saved, self.exported = folder / f"saved-{world}", folder / f"exported-{world}"
        self.settings: dict[str, Any] = {
            "model": {"dtype": "float32"},
            "optimiser": {"compute_dtype": "float32", "learning_rate": 1e-2},
            "placement": {"trainers": world, "engines": 1},
            "rollout": {"transport": "shm"},
        }

    def run(self) -> None:
        self.saved.mkdir(exist_ok=True)
        batches = deal(make_sequences("group_tokens"), 4, self.rank, self.world)
        publish = Publish(1, probe=PROBE)
        model, train = str(self.folder / "model"), Accumulate(batches, 0.7)
        first = [
            Load(model), train, OptimiserStep(1e-2), publish, SaveShard(str(self.saved)), Export(str(self.exported)),
            SaveShard(str(self.folder / "absent")), ResetOptimiser(), Stop(),
        ]  # fmt: skip
        spoiled = MicroBatch([make_sequence([1, 2, 3, 4], 2, [-1.0, float("nan")], 1.0, 1.0)])
        second = [Load(model, str(self.saved)), publish, Accumulate([spoiled], 1.0)]
        replies = {name: self.launch(name, messages) for name, messages in (("first", first), ("second", second))}
        equal = [Load(model, str(self.saved)), LoadBeside(str(self.exported))]
        self.settings["objective"] = {"kl": 0.2}
        replies["regularised"] = self.launch("regularised", [*equal, train, OptimiserStep(1e-2), train, Stop()])
        replies |= self.average(model, train) | self.previous(equal, batches) | self.value_head(model, train)
        (self.folder / f"worker-{self.world}-{self.rank}.json").write_bytes(msgspec.json.encode(replies))

    def average(self, model: str, train: Message) -> dict[str, list[Message]]:
        """A reference that takes in a quarter of the policy, is saved, and becomes the policy; then a resume."""
        self.settings["objective"] = {
            "kl": 0.2, "reference": "average", "reference_every": 2, "reference_share": 0.25,
        }  # fmt: skip
        saved, policy = self.folder / f"average-{self.world}", self.folder / f"policy-{self.world}"
        saved.mkdir(exist_ok=True)
        first = [
            Load(model), LoadBeside(str(self.folder / "reference")), train, OptimiserStep(1e-2), MoveReference(0.25),
            SaveShard(str(saved)), Export(str(policy)), train, MoveReference(1.0), train, Stop(),
        ]  # fmt: skip
        second = [Load(model, str(saved)), LoadBeside(str(saved / "reference")), train, Stop()]
        return {
            "average": self.launch("average", first), "average resumed": self.launch("average resumed", second),
        }  # fmt: skip

    def previous(self, equal: list[Message], batches: list[MicroBatch]) -> dict[str, list[Message]]:
        """Two steps on a batch whose log-probs are recalled before them; then the policy is the reference."""
        self.settings["objective"] = {
            "name": "decoupled_ppo", "kl": 0.2, "reference": "previous", "reference_every": 1,
        }  # fmt: skip
        self.settings["optimiser"]["minibatches"] = 2
        recalled, step = len(equal), OptimiserStep(1e-2)

        def train(replies: dict[int, Message]) -> Message:
            """The same sequences as if the policy of the recall had sampled them."""
            reply = replies[recalled]
            assert isinstance(reply, Recalled)
            logprobs = iter(reply.logprobs)
            told = [
                MicroBatch([
                    msgspec.structs.replace(sequence, columns={"behaviour": found, "old": found})
                    for sequence, found in zip(batch.sequences, logprobs, strict=False)
                ])
                for batch in batches
            ]  # fmt: skip
            return Accumulate(told, 0.7)

        calls = [*equal, Recall(batches, 0.7), train, step, train, step, MoveReference(1.0), train, Stop()]
        return {"previous": self.launch("previous", calls)}

    def value_head(self, model: str, train: Message) -> dict[str, list[Message]]:
        """Supervised steps, which the head forgets, a step of its own, a save, another step; then a resume."""
        self.settings["objective"], step = {"name": "dro", "value_learning_rate": 0.05}, OptimiserStep(1e-2)
        saved, cold = self.folder / f"dro-{self.world}", msgspec.structs.replace(train, sft=True)
        saved.mkdir(exist_ok=True)
        beside = LoadBeside(model)
        first = [
            Load(model), cold, step, cold, step, ResetOptimiser(), beside, train, step, SaveShard(str(saved)), train,
            step, train, Stop(),
        ]  # fmt: skip
        second = [Load(model, str(saved)), beside, train, step, train, Stop()]
        return {"dro": self.launch("dro", first), "dro resumed": self.launch("dro resumed", second)}

    def launch(self, name: str, messages: Sequence[Call]) -> list[Message]:
        store = dist.FileStore(str(self.folder / f"store-{name}-{self.world}"), self.world)
        role = SimpleNamespace(rank_in_role=self.rank, store=store, device=torch.device("cpu"))
        link = ScriptedLink(messages)
        with suppress(NonFinite):
            serve(link, Config.model_validate(self.settings), role)  # type: ignore[arg-type]
        return [link.replies[number] for number in range(len(messages))]
