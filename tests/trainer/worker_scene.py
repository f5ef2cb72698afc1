"""Launches of a worker rank on the ranks of rank_scene.py, driven by scripted calls; the replies go to files.

worker-WORLD-RANK.json    name of the launch -> its replies, in the order of the calls
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

from shared.config import Config
from shared.errors import NonFinite
from shared.launch.calls import CallReply, CallRequest, encode, request
from shared.launch.messages import Message
from shared.launch.rpc import TrainerLink, framed
from shared.record_file import Written
from shared.types import MicroBatch
from tests.trainer.rank_data import deal, make_sequences
from tests.trainer.sequences import make_sequence
from trainer.checkpoint import shards
from trainer.checkpoint.safetensors_file import write
from trainer.step.rank import TrainerRank, serve

PROBE = [[3, 1, 4, 1, 5], [9, 2, 6]]
Replies = dict[int, Any]
"""number of a call -> what it returned, or Failed"""
Call = CallRequest[Any] | Callable[[Replies], CallRequest[Any]]
"""a call, or one that is made of the replies so far"""
LOAD, TRAIN, STEP = TrainerRank.load, TrainerRank.forward_backward, request(TrainerRank.step, 1e-2)
LOAD_FROZEN, MOVE = TrainerRank.load_frozen, TrainerRank.move_reference
SAVE, SAVED, EXPORT = TrainerRank.save, request(TrainerRank.saved), TrainerRank.export
EXPORT_ADAPTER = TrainerRank.export_adapter
RESET, STOP = request(TrainerRank.reset_optimiser), request(TrainerRank.stop)


class ScriptedLink(TrainerLink):
    """The controller's end replaced by a list of calls; keeps the replies: of a save, what `saved` tells in the end,
    which is asked as late as the calls allow."""

    def __init__(self, calls: Sequence[Call]):
        self.calls, self.replies, self.begun = list(calls), Replies(), 0
        self.next = 0

    def receive(self) -> bytes:
        made = self.calls[self.next]
        self.asked = made(self.replies) if callable(made) else made
        self.asks = bool(self.begun) and (self.asked.call.method is SAVE or self.asked.call.last)
        if self.asks:
            time.sleep(0.01)
            return framed(self.begun, encode(SAVED.message))
        self.next += 1
        return framed(self.next, encode(self.asked.message))

    def send(self, call_id: int, message: Message | CallReply[Any]) -> None:
        if self.asks and isinstance(message, CallReply) and message.value is None:
            return
        if self.asked.call.method is SAVE and isinstance(message, CallReply) and not self.asks:
            self.begun = call_id
            return
        self.begun = 0 if self.asks else self.begun
        assert call_id - 1 not in self.replies, "one reply a call"
        self.replies[call_id - 1] = message.value if isinstance(message, CallReply) else message


def write_late(*arguments: Any) -> Written:
    """A disk that takes nothing before the next optimiser step."""
    time.sleep(1.0)
    return write(*arguments)


class WorkerScene:
    """Launches of a worker rank: one trains, publishes, saves and exports; one resumes, publishes, meets a NaN; others
    have a model or a value head beside the policy, and resume with it."""

    def __init__(self, folder: Path, rank: int, world: int):
        self.folder, self.rank, self.world = folder, rank, world
        self.settings: dict[str, Any] = {
            "model": {"dtype": "float32"},
            "optimiser": {"compute_dtype": "float32", "learning_rate": 1e-2},
            "placement": {"trainers": world, "engines": 1},
            "rollout": {"transport": "shm"},
        }
        self.batches = deal(make_sequences("group_tokens"), 4, rank, world)
        self.load, self.train = request(LOAD, str(folder / "model")), request(TRAIN, self.batches, 0.7)

    def path(self, name: str, made: bool = True) -> str:
        """A folder of this world."""
        path = self.folder / f"{name}-{self.world}"
        if made:
            path.mkdir(exist_ok=True)
        return str(path)

    def resume(self, saved: str) -> CallRequest[Any]:
        return request(LOAD, str(self.folder / "model"), saved)

    def run(self) -> None:
        saved, exported, train = self.path("saved"), self.path("exported", made=False), self.train
        publish = request(TrainerRank.publish, 1, probe=PROBE)
        first = [
            self.load, train, STEP, publish, request(SAVE, saved, 0), request(EXPORT, exported),
            request(SAVE, str(self.folder / "absent"), 0), RESET, STOP,
        ]  # fmt: skip
        spoiled = MicroBatch([make_sequence([1, 2, 3, 4], 2, [-1.0, float("nan")], 1.0, 1.0)])
        second = [self.resume(saved), publish, request(TRAIN, [spoiled], 1.0)]
        replies = {name: self.launch(name, messages) for name, messages in (("first", first), ("second", second))}
        equal = [self.resume(saved), request(LOAD_FROZEN, exported, "reference")]
        self.settings["objective"] = {"kl": {"weight": 0.2}}
        replies["regularised"] = self.launch("regularised", [*equal, train, STEP, train, STOP])
        replies |= self.average() | self.previous(equal) | self.value_head() | self.adapters()
        (self.folder / f"worker-{self.world}-{self.rank}.json").write_bytes(msgspec.json.encode(replies))

    def average(self) -> dict[str, list[Any]]:
        """A reference that takes in a quarter of the policy, is saved, and becomes the policy; then a resume."""
        reference = {"kind": "average", "every": 2, "share": 0.25}
        self.settings["objective"] = {"kl": {"weight": 0.2, "reference": reference}}
        saved, train = self.path("average"), self.train
        first = [
            self.load, request(LOAD_FROZEN, str(self.folder / "reference"), "reference"), train, STEP,
            request(MOVE, 0.25), request(SAVE, saved, 0), request(EXPORT, self.path("policy", made=False)), train,
            request(MOVE, 1.0), train, STOP,
        ]  # fmt: skip
        second = [self.resume(saved), request(LOAD_FROZEN, f"{saved}/reference", "reference"), train, STOP]
        began = self.launch("average", first)
        return {"average": began, "average resumed": self.launch("average resumed", second)}

    def previous(self, equal: list[CallRequest[Any]]) -> dict[str, list[Any]]:
        """Two steps on a batch whose log-probs are recalled before them; then the policy is the reference."""
        kl = {"weight": 0.2, "reference": {"kind": "previous"}}
        self.settings["objective"] = {"name": "decoupled_ppo", "kl": kl}
        self.settings["optimiser"]["minibatches"] = 2

        def train(replies: Replies) -> CallRequest[Any]:
            """The same sequences as if the policy of the recall had sampled them."""
            logprobs = iter(replies[len(equal)])
            return request(TRAIN, [
                MicroBatch([
                    msgspec.structs.replace(sequence, columns={"behaviour": recalled, "old": recalled})
                    for sequence, recalled in zip(batch.sequences, logprobs, strict=False)
                ])
                for batch in self.batches
            ], 0.7)  # fmt: skip

        recall = request(TrainerRank.compute_old_logprobs, self.batches, 0.7)
        calls = [*equal, recall, train, STEP, train, STEP, request(MOVE, 1.0), train, STOP]
        return {"previous": self.launch("previous", calls)}

    def value_head(self) -> dict[str, list[Any]]:
        """Supervised steps, which the head forgets, a step of its own, a save, another step; then a resume."""
        self.settings["objective"] = {"name": "dro", "value_learning_rate": 0.05}
        saved, train, cold = self.path("dro"), self.train, request(TRAIN, self.batches, 0.7, sft=True)
        beside = request(LOAD_FROZEN, str(self.folder / "model"), "reference")
        first = [
            self.load, cold, STEP, cold, STEP, RESET, beside, train, STEP, request(SAVE, saved, 0), train, STEP, train,
            STOP,
        ]  # fmt: skip
        with mock.patch.object(shards.safetensors_file, "write", write_late):
            began = self.launch("dro", first)
        second = [self.resume(saved), beside, train, STEP, train, STOP]
        return {"dro": began, "dro resumed": self.launch("dro resumed", second)}

    def adapters(self) -> dict[str, list[Any]]:
        """Adapters compared with those of the start, a save and both exports; then a resume; and in bfloat16."""
        self.settings["objective"] = {"kl": {"weight": 0.2}}
        self.settings["optimiser"]["minibatches"] = 1
        self.settings["lora"] = {"rank": 3, "alpha": 6.0}
        saved, train = self.path("adapters"), self.train
        began, merged, alone = (self.path(name, made=False) for name in ("began", "merged", "alone"))
        beside, publish = request(LOAD_FROZEN, began, "reference"), request(TrainerRank.publish, 2, probe=PROBE)

        def once_there(replies: Replies) -> CallRequest[Any]:
            """The first rank writes: a controller would wait for its answer."""
            while not Path(began).is_dir():
                time.sleep(0.01)
            return beside

        first = [
            self.load, request(EXPORT_ADAPTER, began), once_there, train, STEP, train, STEP, publish,
            request(SAVE, saved, 0), request(EXPORT, merged), request(EXPORT_ADAPTER, alone), train,
            request(MOVE, 1.0), train, STOP,
        ]  # fmt: skip
        second = [self.resume(saved), beside, publish, train, STOP]
        replies = {"adapters": self.launch("adapters", first), "adapters resumed": self.launch("resumed", second)}
        self.settings["optimiser"]["compute_dtype"] = "bfloat16"
        rounded = [self.load, train, STEP, publish, STOP]
        self.settings["objective"] = {}
        return replies | {"adapters rounded": self.launch("adapters rounded", rounded)}

    def launch(self, name: str, calls: Sequence[Call]) -> list[Any]:
        store = dist.FileStore(str(self.folder / f"store-{name}-{self.world}"), self.world)
        role = SimpleNamespace(rank_in_role=self.rank, store=store, device=torch.device("cpu"))
        link = ScriptedLink(calls)
        with suppress(NonFinite):
            serve(link, Config.model_validate(self.settings), role)
        return [described(link.replies[number]) for number in range(len(calls))]


def described(value: Any) -> dict[str, Any]:
    """A reply for the file: its type, and its fields if it has some, else "value"."""
    kind = {"type": type(value).__name__}
    if isinstance(value, msgspec.Struct):
        return {**msgspec.to_builtins(value), **kind}
    return {"value": value, **kind}
