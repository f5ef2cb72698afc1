"""Puts new weights into a vLLM model on the CPU, straight from the shared buffer, partly before the engine pauses.

vLLM on the CPU keeps private packed (oneDNN) copies of linear weights and of the language-model head and drops the
plain ones, so writing into its parameters does nothing: each linear is packed anew, which takes several memcpys. A
thread sees in the buffer that a version is complete and begins to pack it during the decode step that still runs; once
the engine pauses, both threads pack the rest, and the model gets its new linears all at once.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from rollout.weights.layout import BUFFERS, buffer_of
from rollout.weights.parameters import ExpertOrder, Linear, Target
from rollout.weights.shm import HostWeightBuffer
from shared.errors import DeadlineExceeded

POLL_S = 0.01
"""seconds between two checks for a new version; each takes the interpreter lock from the concurrent decode step"""
SWITCH_S = 0.0002
"""seconds that a thread keeps the interpreter lock while another waits; Python's 5 ms would slow every decode step"""
CONFLICT_BYTES = 1024
GAP = 32
"""elements after each row"""
SCRATCH_BYTES = 64 << 20
LEAST_PADDED_BYTES = 1 << 20
"""with AMX, vLLM packs weights of up to this many bytes for another kernel, and then refuses rows with gaps"""
PACK_DEADLINE_S = 300.0
AHEAD_BYTES = 2 << 30
"""limit of second copies of packed linears: those packed before the pause, and the memory kept for the next"""


def needs_padding(target: Target, item_bytes: int) -> bool:
    """Whether to pad the rows: if their starts fall into few cache sets, packing is several times slower."""
    conflicts = target.row_bytes % CONFLICT_BYTES == 0 and target.bytes > LEAST_PADDED_BYTES
    return conflicts and padded_bytes(target, item_bytes) <= SCRATCH_BYTES


def padded_bytes(target: Target, item_bytes: int) -> int:
    """Bytes of a target's rows with a gap after each."""
    return target.bytes + target.bytes // target.row_bytes * GAP * item_bytes


def pad_rows(rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Copy [rows, columns] into the scratch memory with a gap after each row. Returns the copy."""
    count, columns = rows.shape
    copy = scratch[: count * (columns + GAP)].view(count, columns + GAP)[:, :columns]
    return copy.copy_(rows)


def pack(weight: torch.Tensor) -> Linear:
    """Return the function that vLLM makes for a linear with this weight [outputs, inputs]; the weight is not kept."""
    module = SimpleNamespace(weight=weight)  # takes the place of the module that vLLM packs a weight for
    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    linear: Linear = module.cpu_linear
    return linear


@dataclass
class Batch:
    """The linears of one version, which `CpuWeightLoader.take` and the thread that packs ahead share as work."""

    version: int
    left: deque[Target]
    linears: list[tuple[Target, Linear]] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failure: Exception | None = None


class CpuWeightLoader:
    """Puts versions into a vLLM model on the CPU; a thread begins to pack the newest one before `take`."""

    def __init__(self, targets: list[Target], weights: HostWeightBuffer, dtype: torch.dtype):
        self.weights, self.dtype = weights, dtype
        self.plain = [target for target in targets if target.plain]
        self.packed = sorted((t for t in targets if t.packed), key=lambda target: -target.bytes)
        # made once: while an engine runs, every call into torch waits for the interpreter lock
        self.views = [
            {id(target): weights.view(buffer, target.sources) for target in targets} for buffer in range(BUFFERS)
        ]
        padded = [t for t in self.packed if needs_padding(t, dtype.itemsize)]
        self.padded = {id(target) for target in padded}
        self.scratch_bytes = max((padded_bytes(target, dtype.itemsize) for target in padded), default=0)
        self.scratch = self._make_scratch()
        sizes = itertools.accumulate(target.bytes for target in self.packed)
        self.doubled = {id(target) for target, size in zip(self.packed, sizes, strict=True) if size <= AHEAD_BYTES}
        """id() of the targets whose linears may be in memory twice"""
        self.batch: Batch | None = None
        """batch that was begun ahead, for a version that is not taken yet"""
        self.taken = -1
        self.kept: dict[int, object] = {}
        """id(target) -> the linear before the present one"""
        sys.setswitchinterval(SWITCH_S)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._pack_ahead, args=(torch.get_num_threads(),), name="weight packing", daemon=True
        )
        self._thread.start()

    def take(self, version: int) -> None:
        """Put the version, which must be complete in its buffer, into the model. Only between two engine steps.

        Raises the error of either thread, DeadlineExceeded if the other thread does not end.
        """
        with self._lock:
            batch, self.batch, self.taken = self.batch, None, version
        if batch is None or batch.version != version:
            batch = self._new_batch(version)
        self._place_plain(version)
        self._pack(batch, self.scratch, ahead=False)
        end = time.monotonic() + PACK_DEADLINE_S
        for _ in self.packed:
            if not batch.ended.acquire(timeout=max(0.0, end - time.monotonic())):
                raise DeadlineExceeded("engine process", "packing weights", "its packing thread", PACK_DEADLINE_S)
        if batch.failure is not None:
            raise batch.failure
        for target, linear in batch.linears:
            self._exchange(target, linear)

    def close(self) -> None:
        """End the thread; the buffer is not read afterwards."""
        self._closed.set()
        self._thread.join()

    def _new_batch(self, version: int) -> Batch:
        return Batch(version, deque(self.packed))

    def _rows(self, version: int, target: Target) -> torch.Tensor:
        """Return the rows of the target's tensors in the model's dtype, without a copy where possible."""
        buffer = buffer_of(version)
        rows = self.views[buffer][id(target)]
        if rows is None:
            rows = self.weights.read(buffer, target.sources)
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    @torch.no_grad()
    def _place_plain(self, version: int) -> None:
        """Point plain parameters at their rows in the buffer, which does not change while this version is held."""
        for target in self.plain:
            parameter, rows = getattr(target.module, target.parameter), self._rows(version, target)
            if target.experts:
                parameter.data.copy_(ExpertOrder.of(target, tuple(rows.shape)).pack(rows))
            elif parameter.shape == rows.shape and parameter.dtype == rows.dtype:
                parameter.data = rows
            else:  # an embedding with padding rows after the vocabulary; a bias that is kept in fp32
                parameter.data[: rows.shape[0]].copy_(rows)

    def _claim(self, batch: Batch, ahead: bool) -> Target | None:
        """Take the next target for this thread; None if there is none left."""
        with self._lock:
            if not batch.left or (ahead and id(batch.left[0]) not in self.doubled):
                return None
            return batch.left.popleft()

    @torch.no_grad()
    def _pack(self, batch: Batch, scratch: torch.Tensor, ahead: bool) -> None:
        """Pack what is left of the batch; `ahead`: only what may be in memory twice, which comes first."""
        while (target := self._claim(batch, ahead)) is not None:
            try:
                rows = self._rows(batch.version, target)
                shape = getattr(target.module, target.parameter).shape
                if shape[0] > rows.shape[0]:  # a head with padding rows
                    rows = torch.cat([rows, rows.new_zeros(shape[0] - rows.shape[0], *rows.shape[1:])])
                elif id(target) in self.padded:
                    rows = pad_rows(rows, scratch)
                self.kept.pop(id(target), None)
                batch.linears.append((target, pack(rows)))
            except Exception as error:  # noqa: BLE001 - raised by `take`
                batch.failure = error
            finally:
                batch.ended.release()

    def _exchange(self, target: Target, linear: Linear) -> None:
        """Give the module its new linear. The old one is kept until its successor is packed, right into its memory:
        freed now, other allocations would take parts of it, and first touches of new pages cost more than packing."""
        if id(target) in self.doubled:
            self.kept[id(target)] = target.module.cpu_linear
        target.module.cpu_linear = linear  # type: ignore[assignment]  # a function, not a submodule

    def _make_scratch(self) -> torch.Tensor:
        return torch.empty(self.scratch_bytes // self.dtype.itemsize, dtype=self.dtype)

    def _pack_ahead(self, threads: int) -> None:
        """threads: with which the model was loaded. OpenMP counts them for each thread by itself, and a weight packed
        with another number would be read in a wrong order (see cpu_worker.py)."""
        torch._C.set_num_threads(threads)  # vLLM disabled torch's own setter
        scratch = self._make_scratch()
        while not self._closed.wait(POLL_S):
            with self._lock:
                version = self._newest_complete()
                if version <= self.taken or self.batch is not None:
                    continue
                batch = self.batch = self._new_batch(version)
            self._pack(batch, scratch, ahead=True)

    def _newest_complete(self) -> int:
        """The highest version that every trainer rank has stamped into its buffer, -1 if there is none."""
        complete = [-1]
        for buffer in range(BUFFERS):
            versions = self.weights.version_flags(buffer)
            if len(set(versions)) == 1 and buffer_of(versions[0]) == buffer:
                complete.append(versions[0])
        return max(complete)


@torch.no_grad()
def load_stream(targets: list[Target], tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Put tensors into the model while the engine is paused. A tensor is copied or packed before the next one comes;
    those of a fused weight are kept until it is complete."""
    takers: dict[str, list[Target]] = {}
    for target in targets:
        for source in target.sources:
            takers.setdefault(source, []).append(target)
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        for target in takers[name]:
            if len(target.sources) == 1:
                put(target, tensor.to(dtype))
                continue
            kept[name] = tensor.to(dtype, copy=True)
            if all(source in kept for source in target.sources):
                put(target, torch.cat([kept.pop(source) for source in target.sources]))


def put(target: Target, rows: torch.Tensor) -> None:
    """Copy or pack the rows into the target's module; none of their memory is kept."""
    parameter = getattr(target.module, target.parameter)
    if target.experts:
        parameter.data.copy_(ExpertOrder.of(target, tuple(rows.shape)).pack(rows))
    elif target.plain:
        (parameter.data[: rows.shape[0]] if rows.ndim else parameter.data).copy_(rows)
    if target.packed:
        if parameter.shape[0] > rows.shape[0]:  # a head with padding rows
            rows = torch.cat([rows, rows.new_zeros(parameter.shape[0] - rows.shape[0], *rows.shape[1:])])
        elif needs_padding(target, rows.element_size()):
            rows = pad_rows(rows, rows.new_empty(padded_bytes(target, rows.element_size()) // rows.element_size()))
        target.module.cpu_linear = pack(rows)  # type: ignore[assignment]  # a function, not a submodule
