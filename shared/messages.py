"""Messages between ranks: typed, tagged msgspec structs over ZeroMQ (never pickle).

Controller -> trainer and controller -> engine are calls (each has exactly one reply, a name and a deadline), except
`Generate`, whose completions come back as they end, in `Finished` events.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.types import Completion, MicroBatch


class Message(msgspec.Struct, tag=True):
    """Base of all messages: the tag is the class name."""


# ---- every rank ------------------------------------------------------------------------------------------------


class Hello(Message):
    """First message of a rank: who it is, and what it found."""

    role: str
    rank: int
    pid: int
    host: str
    details: dict[str, Any] = {}


class Failed(Message):
    """Reply of a rank whose work raised: the error's text, and its kind (a class name of `errors.py`)."""

    kind: str
    message: str
    traceback: str = ""


class Done(Message):
    """Reply without content."""


class Stop(Message):
    """Finish, free everything, reply Done, exit 0."""


# ---- controller <-> trainer ------------------------------------------------------------------------------------


class Load(Message):
    """Build model and optimiser: from the checkpoint folder if given, else from the model folder."""

    model_dir: str
    checkpoint_dir: str | None = None


class Loaded(Message):
    """Reply to Load: what the trainer holds, and how engines read its weights."""

    parameters: int
    transfer: dict[str, Any]
    """how engines attach to the weight transfer (see rollout/weights)"""
    description: dict[str, str] = {}
    """dtypes and settings to print once at start"""


class LoadBeside(Message):
    """Build a frozen model beside the policy, from a Hugging Face folder or, for a reference that moved, from a
    checkpoint; replies Done."""

    folder: str
    role: Literal["reference", "teacher"] = "reference"


class MoveReference(Message):
    """Move the reference towards the policy by `share` (1: all the way); replies Done."""

    share: float


class Accumulate(Message):
    """Forward and backward of this rank's micro-batches; every rank receives the same number."""

    micro_batches: list[MicroBatch]
    temperature: float
    sft: bool = False
    """imitate, instead of the settings' objective"""


class Recall(Message):
    """Forward only: log-probs of this rank's completion tokens under the policy as it is now."""

    micro_batches: list[MicroBatch]
    temperature: float


class Recalled(Message):
    logprobs: list[list[float]]
    """[sequences of all micro-batches, in order][completion_tokens]"""


class Accumulated(Message):
    """Sums over this rank's tokens (not means), so that the controller can add ranks up."""

    sums: dict[str, float]
    """loss, tokens, entropy, abs_logprob_difference, kl_k3, ratio, clipped_low, ... (trainer/objectives/loss.py)"""
    maxima: dict[str, float]
    seconds: float
    tokens: int
    """prompt + completion tokens put through the model"""


class OptimiserStep(Message):
    """Clip the gradients, step, zero them. The controller decides the learning rate."""

    learning_rate: float


class Stepped(Message):
    grad_norm: float
    seconds: float


class ResetOptimiser(Message):
    """Moments and step count back to zero (after SFT); replies Done."""


class Publish(Message):
    """Write the current weights for the engines as `version`, and score the probe sequences with them."""

    version: int
    probe: list[list[int]] = []
    """[sequences][tokens] prompts to score at temperature 1; empty when the proof is off"""
    proof: bool = True


class Published(Message):
    """What was written by this trainer rank, and the proof material computed from its master weights."""

    version: int
    bytes: int
    seconds: float
    checksums: dict[str, int]
    """tensor -> this rank's part of the checksum (parts of all ranks add up modulo 2**64)"""
    probe: list[list[float]] = []
    """[sequences][tokens - 1] log-probs of the probe sequences under these weights (rank 0 of the trainers only)"""


REFERENCE = "reference"
"""name of the starting policy's folder in a run, and of a moved reference's folder in a checkpoint"""


class SaveShard(Message):
    """Write this rank's part of model and optimiser state into the folder; a reference that moved into its folder
    REFERENCE."""

    folder: str
    version: int = 0
    """policy version of the checkpoint, kept in the shard too"""


class Written(msgspec.Struct, frozen=True):
    """Size and hash of a checkpoint file, as its writer knows them."""

    bytes: int
    sha256: str


class Saved(Message):
    files: dict[str, Written]
    """by name in the folder"""


class Export(Message):
    """Write a Hugging Face folder (safetensors + config + tokenizer)."""

    folder: str


# ---- controller <-> engine -------------------------------------------------------------------------------------


class GenerateRequest(msgspec.Struct, gc=False):
    """One completion to sample or to continue (`completion.token_ids` non-empty)."""

    prompt_ids: list[int]
    completion: Completion
    max_tokens: int
    """of the whole completion, tokens already there included"""
    temperature: float
    """0 is greedy"""


class Generate(Message):
    """Sample these. `hold` keeps the engine paused until all are queued (synchronous mode: same batches each time)."""

    requests: list[GenerateRequest]
    hold: bool = False


class Finished(Message, gc=False):
    """Event: completions ended; those of one moment travel together."""

    completions: list[Completion]


class Attach(Message):
    """Connect to the trainers' weight transfer (the `Loaded.transfer` of every trainer rank, in order)."""

    transfers: list[dict[str, Any]]


class Update(Message):
    """Take the weights of `version` in flight: pause, apply, label, resume; then score the probe with them."""

    version: int
    probe: list[list[int]] | None = None
    """[sequences][tokens] the trainers score them too (`Publish`); None when the proof is off"""


class Updated(Message):
    """Reply to Update: the engine holds `version`; with timings and proof material."""

    engine: int
    version: int
    seconds: dict[str, float]
    """receive, pause, apply, finish, resume, total"""
    bytes: int
    checksums: dict[str, int]
    """tensor -> checksum of what was received"""
    stall_s: float = 0.0
    """longest time without a token that running requests saw across this update"""
    stall_steps: float = 0.0
    """the same in median decode steps"""
    running: int = 0
    """requests that were running"""
    scored_version: int = -1
    """version with which the engine process itself says it scored the probe"""
    probe: list[list[float]] = []
    """[sequences][tokens - 1] log-probs"""


class Snapshot(Message):
    """Ask for all unfinished completions as they stand."""


class Snapshotted(Message):
    completions: list[Completion]


class EngineEnded(Message):
    """Event: the engine died and is being started again."""

    engine: int
    reason: str


class EngineRestarted(Message):
    """Event: the engine died and was started again; its completions continue."""

    engine: int
    seconds: float
    continued: int
    reason: str


ToTrainer = (
    Load
    | LoadBeside
    | MoveReference
    | Recall
    | Accumulate
    | OptimiserStep
    | ResetOptimiser
    | Publish
    | SaveShard
    | Export
    | Stop
)
ToEngine = Attach | Generate | Update | Snapshot | Stop
FromWorker = (
    Hello
    | Failed
    | Done
    | Loaded
    | Recalled
    | Accumulated
    | Stepped
    | Published
    | Saved
    | Finished
    | Updated
    | Snapshotted
    | EngineEnded
    | EngineRestarted
)
