"""New weights into a vLLM model on the CPU, straight out of the shared buffer, partly before the engine pauses.

vLLM on the CPU keeps private packed (oneDNN) copies of linear weights and of the language-model head and drops the
plain ones, so writing into its parameters does nothing: each linear is packed anew, which takes four times a memcpy. A
thread sees in the buffer that a version is complete and begins to pack it beside the decode step that still runs; once
the engine pauses, both threads pack the rest, and the model gets its new linears in one go.
What it does not: GPUs, where vLLM's own load_weights copies in place. Who calls this: vllm_backend.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout.transfer.layout import BUFFERS, Layout, buffer_of
from shared.errors import DeadlineExceeded, ModelError

Linear = Callable[..., torch.Tensor]
"""(x, weight, bias) -> output: what vLLM hangs on a module as `cpu_linear`"""

POLL_S = 0.002
PACK_DEADLINE_S = 300.0
AHEAD_BYTES = 2 << 30
"""packed before the pause at most: until the exchange both the old and the new linears are in memory"""


@dataclass(frozen=True)
class Target:
    """One parameter of the vLLM model, and which neighbouring tensors of the buffer it is made of."""

    module: torch.nn.Module
    parameter: str
    sources: list[str]
    bytes: int
    plain: bool
    """the parameter holds its values (embedding, norm, bias, head); a packed linear's plain weight was dropped"""
    packed: bool
    """the module computes with a packed copy"""


def plan_targets(model: torch.nn.Module, layout: Layout) -> list[Target]:
    """Match every parameter of the model with the buffer's tensors (q, k, v -> qkv_proj, gate, up -> gate_up_proj).

    A tied head is packed from the embedding's tensor. Raises ModelError if a parameter has no source or a tensor no
    destination: then part of the model would stay old.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    targets: list[Target] = []
    unused = set(layout.places)
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            prefix = f"{parent}." if parent else ""
            sources = [f"{prefix}{part}.{name}" for part in fused.get(last, [last])]
            tied = False
            if not all(source in layout.places for source in sources):
                sources = [source for source in layout.places if source.endswith("embed_tokens.weight")]
                tied = isinstance(module, ParallelLMHead) and name == "weight" and len(sources) == 1
                if not tied:
                    wanted = f"{prefix}{last}.{name}"
                    raise ModelError(f"the engine's {path}.{name} needs {wanted}, which the trainers do not send")
            unused -= set(sources)
            size = sum(math.prod(layout.places[source].shape) for source in sources) * layout.dtype.itemsize
            packed = name == "weight" and hasattr(module, "cpu_linear")
            targets.append(Target(module, name, sources, size, parameter.numel() > 0 and not tied, packed))
    if unused:
        raise ModelError(f"the engine's model has no place for {sorted(unused)[:5]}, which trainers send")
    return targets


def pack(weight: torch.Tensor) -> Linear:
    """What vLLM would hang on a linear with this weight, [outputs, inputs]; `weight` itself is not kept."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
    linear: Linear = holder.cpu_linear  # type: ignore[assignment]  # a function, not a submodule
    return linear


@dataclass
class Batch:
    """The linears of one version, being packed by whoever has time."""

    version: int
    left: deque[Target]
    count: int
    linears: list[tuple[Target, Linear]] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failure: Exception | None = None


class Applier:
    """Keeps a vLLM model on the CPU equal to the newest version that it was told to take."""

    def __init__(
        self,
        targets: list[Target],
        read: Callable[[int, list[str]], torch.Tensor],
        slots: Callable[[int], list[int]],
        dtype: torch.dtype,
    ):
        """read(buffer, names) -> rows of neighbouring tensors, concatenated. slots(buffer) -> [world] versions."""
        self.targets, self.read, self.slots, self.dtype = targets, read, slots, dtype
        self.packed = sorted((t for t in targets if t.packed), key=lambda target: -target.bytes)
        self.batch: Batch | None = None
        """begun ahead, for a version that was not taken yet"""
        self.taken = -1
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._pack_ahead, name="weight packing", daemon=True)
        self._thread.start()

    def take(self, version: int) -> None:
        """Put the version, which must be complete in its buffer, into the model. Only between two engine steps.

        Raises what went wrong in either thread, DeadlineExceeded if the other thread does not end.
        """
        with self._lock:
            batch, self.batch, self.taken = self.batch, None, version
        if batch is None or batch.version != version:
            batch = self._new_batch(version)
        self._copy_plain(version)
        self._pack(batch, math.inf)
        end = time.monotonic() + PACK_DEADLINE_S
        for _ in range(batch.count):
            if not batch.ended.acquire(timeout=max(0.0, end - time.monotonic())):
                raise DeadlineExceeded("engine process", "packing weights", "its packing thread", PACK_DEADLINE_S)
        if batch.failure is not None:
            raise batch.failure
        for target, linear in batch.linears:
            target.module.cpu_linear = linear  # type: ignore[assignment]  # a function, not a submodule

    def close(self) -> None:
        """End the thread; the buffer is not read afterwards."""
        self._closed.set()
        self._thread.join()

    def _new_batch(self, version: int) -> Batch:
        return Batch(version, deque(self.packed), len(self.packed))

    @torch.no_grad()
    def _copy_plain(self, version: int) -> None:
        for target in self.targets:
            if target.plain:
                rows = self.read(buffer_of(version), target.sources)
                # an embedding may have padding rows behind the vocabulary
                getattr(target.module, target.parameter).data[: rows.shape[0]].copy_(rows)

    @torch.no_grad()
    def _pack(self, batch: Batch, most_bytes: float) -> None:
        """Pack what is left of the batch, up to so many bytes."""
        while most_bytes > 0:
            try:
                target = batch.left.popleft()
            except IndexError:
                return
            try:
                rows = self.read(buffer_of(batch.version), target.sources).to(self.dtype)
                held = getattr(target.module, target.parameter).shape
                if held[0] > rows.shape[0]:  # a head with padding rows
                    rows = torch.cat([rows, rows.new_zeros(held[0] - rows.shape[0], *rows.shape[1:])])
                batch.linears.append((target, pack(rows)))
            except Exception as error:  # noqa: BLE001 - raised by `take`
                batch.failure = error
            finally:
                batch.ended.release()
            most_bytes -= target.bytes

    def _pack_ahead(self) -> None:
        while not self._closed.wait(POLL_S):
            with self._lock:
                version = self._newest_complete()
                if version <= self.taken or self.batch is not None:
                    continue
                batch = self.batch = self._new_batch(version)
            self._pack(batch, AHEAD_BYTES)

    def _newest_complete(self) -> int:
        """The highest version that every trainer rank has stamped into its buffer, -1 if there is none."""
        complete = [-1]
        for buffer in range(BUFFERS):
            held = self.slots(buffer)
            if len(set(held)) == 1 and buffer_of(held[0]) == buffer:
                complete.append(held[0])
        return max(complete)
