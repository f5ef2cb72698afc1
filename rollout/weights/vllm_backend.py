"""The engine process's side: a vLLM weight transfer backend named "maestrale", and a few extra RPCs of its worker.

Importing this module registers the backend; vLLM imports it in the process that holds the model, because it is named as
`worker_extension_cls`. An update reads the buffers in place (host) or peer to peer (GPU): on a GPU while generation is
paused, on the CPU partly before. What the model then computes with is read back outside the pause.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rollout.routes import return_routes
from rollout.weights.adapters import AdapterSlot
from rollout.weights.cuda_ipc import DeviceShard
from rollout.weights.layout import Layout, buffer_of, read_layout
from rollout.weights.parameters import PackedReader, Target, plan_targets, read_plain, text_model
from rollout.weights.proof import Held
from rollout.weights.receiver import check_flags
from rollout.weights.shm import HostWeightBuffer, import_handle, open_buffer
from rollout.weights.slots import WeightSlots
from shared.errors import RunError
from shared.launch.watchdog import STACKS_VARIABLE, die_with_parent, open_stacks

if TYPE_CHECKING:
    from rollout.weights.cpu.loader import CpuWeightLoader

BACKEND = "maestrale"
ENGINE_VARIABLE = "MAESTRALE_ENGINE"
SLICE_S = 0.02
"""about how long packed linears that no step has read are read between two"""


@dataclass
class AttachInfo(WeightTransferInitInfo):
    """Arguments of `init_transfer_engine`, made by `WeightReceiver.engine_info`."""

    engine: int
    layout: dict[str, Any]
    rows: list[list[list[Any]]]
    path: str | None = None
    handles: list[dict[str, Any]] = field(default_factory=list)
    slots: dict[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of `receive_weights`: the version to take."""

    version: int


class DeviceWeightBuffer:
    """Reads tensors out of the GPU buffers of all trainer ranks; parts of several ranks are joined here."""

    def __init__(self, info: AttachInfo, layout: Layout, device: torch.device):
        self.layout, self.device = layout, device
        self.shards = [
            DeviceShard(layout, [(name, first, count) for name, first, count in rows], import_handle(handle))
            for rows, handle in zip(info.rows, info.handles, strict=True)
        ]
        self.parts: dict[str, list[tuple[int, int]]] = {name: [] for name in layout.places}
        for rank, shard in enumerate(self.shards):
            for number, (name, _, _) in enumerate(shard.rows):
                self.parts[name].append((rank, number))

    def version_flags(self, buffer: int) -> list[int]:
        """[world] version of each trainer rank's part."""
        return [int(shard.version_flag(buffer).item()) for shard in self.shards]

    def read(self, buffer: int, names: list[str]) -> torch.Tensor:
        """Return one whole tensor in this GPU's memory."""
        (name,) = names
        parts = self.parts[name]
        views = [self.shards[rank].rows_view(buffer, number) for rank, number in parts]
        if len(views) == 1:
            return views[0].to(self.device, non_blocking=True)
        whole = torch.empty(self.layout.places[name].shape, dtype=self.layout.dtype, device=self.device)
        for view, (rank, number) in zip(views, parts, strict=True):
            first = self.shards[rank].rows[number][1]
            whole[first : first + view.shape[0]].copy_(view, non_blocking=True)
        return whole

    def close(self) -> None:
        """Unmap the peers' buffers."""
        self.shards.clear()


class MaestraleTransferEngine(WeightTransferEngine[AttachInfo, UpdateInfo]):
    """Replaces the model's weights: vLLM calls init, start, receive and finish; WorkerExtension reads back."""

    init_info_cls = AttachInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        die_with_parent()
        if folder := os.environ.get(STACKS_VARIABLE):
            open_stacks(Path(folder), f"engine-{os.environ.get(ENGINE_VARIABLE, '0')}")
        self.source: HostWeightBuffer | DeviceWeightBuffer | WeightSlots | None = None
        self.loader: CpuWeightLoader | None = None
        self.thread: threading.Thread | None = None
        self.targets: list[Target] = []
        self.adapters: AdapterSlot | None = None
        """of an engine that keeps its model and receives adapters"""
        self.result: dict[str, tuple[int, int]] | None = None
        self.packed: PackedReader | None = None
        self.failure: Exception | None = None

    def init_transfer_engine(self, init_info: AttachInfo) -> None:
        """Open the buffers and plan which parameter takes which tensors."""
        self.engine = init_info.engine
        self.layout = read_layout(init_info.layout)
        if init_info.slots is not None:
            self.source = WeightSlots.open(self.layout, **init_info.slots)
        elif init_info.path is not None:
            self.source = open_buffer(init_info.path, self.layout)
        else:
            self.source = DeviceWeightBuffer(init_info, self.layout, self.device)
        if hasattr(self.model, "lora_manager"):
            self.adapters = AdapterSlot(self.model, self.layout)
        else:
            self.targets = plan_targets(self.model, self.layout)
        self.rows = [{name: (first, count) for name, first, count in rows} for rows in init_info.rows]
        if self.device.type == "cpu":
            from rollout.weights.cpu.loader import CpuWeightLoader

            self._stop_loader()
            if isinstance(self.source, HostWeightBuffer) and self.adapters is None:
                self.loader = CpuWeightLoader(self.targets, self.source, self.model_config.dtype)

    def start_weight_update(self) -> None:
        """Do nothing: weights are replaced in place."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Put the version into the model. Raises SyncMismatch if the buffer holds another one, before or afterwards."""
        source = self.source
        if source is None:
            raise RunError("the engine was not attached to the trainers' buffers")
        if self.thread is not None:
            self.thread.join()
        if isinstance(source, WeightSlots):
            self._receive_stream(source, update_info.version)
            return
        buffer = buffer_of(update_info.version)
        check_flags(source.version_flags(buffer), update_info.version, self.engine)
        if self.loader is not None:
            self.loader.take(update_info.version)
        else:
            self._load((name, source.read(buffer, [name])) for name in self.layout.places)
        check_flags(source.version_flags(buffer), update_info.version, self.engine)

    def _receive_stream(self, slots: WeightSlots, version: int) -> None:
        """Put tensors into the model as they arrive: no more than two slots of them are here in addition to it."""
        arriving = slots.tensors(version, self.engine, get_tensor_model_parallel_rank())
        if self.device.type == "cpu" and self.adapters is None:
            from rollout.weights.cpu.loader import load_stream

            load_stream(self.targets, arriving, self.model_config.dtype)
        else:
            self._load(arriving)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Put whole tensors into the model as they come, or into its adapters' slot."""
        if self.adapters is None:
            text_model(self.model).load_weights(tensors)
        else:
            for name, tensor in tensors:
                self.adapters.place(name, tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Do nothing: there is no quantisation and no layerwise reload."""

    def start_read_back(self, chosen: list[dict[str, list[int]]]) -> None:
        """Begin to read back what the model computes with: plain parameters during generation, packed linears with its
        next step. chosen: see PackedReader."""
        self.result, self.failure = None, None
        self.packed = PackedReader(self.targets, self.layout, self.model_config.dtype, self.rows, chosen)
        self.thread = threading.Thread(target=self._read_plain, name="weight read-back", daemon=True)
        self.thread.start()

    def _read_plain(self) -> None:
        on_gpu = self.device.type == "cuda"
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)) if on_gpu else contextlib.nullcontext():
                if self.adapters is not None:
                    self.result = self.adapters.read()
                else:
                    self.result = read_plain(self.targets, self.layout, get_tensor_model_parallel_rank())
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
            self.failure = error

    def take_read_back(self) -> Held | None:
        """What was read back, or None if it was not all. What no step has read is read now, for a moment."""
        assert self.packed is not None
        end = time.monotonic() + SLICE_S
        for reading in self.packed.left():
            if time.monotonic() > end:
                return None
            reading.read()
        if self.failure is not None:
            raise self.failure
        return None if self.result is None else (self.result, self.packed.checksums())

    def _stop_loader(self) -> None:
        if self.loader is not None:
            self.loader.close()
            self.loader = None

    def shutdown(self) -> None:
        """End the threads and close the buffers."""
        self._stop_loader()
        if self.thread is not None:
            self.thread.join()
        if self.source is not None:
            self.source.close()
            self.source = None


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MaestraleTransferEngine)


class WorkerExtension:
    """Further RPCs of the vLLM worker (self is the worker). Names start with maestrale_ to collide with none."""

    weight_transfer_engine: MaestraleTransferEngine

    def maestrale_start_read_back(self, chosen: list[dict[str, list[int]]]) -> None:
        """See MaestraleTransferEngine.start_read_back."""
        self.weight_transfer_engine.start_read_back(chosen)

    def maestrale_take_read_back(self) -> Held | None:
        """See MaestraleTransferEngine.take_read_back."""
        return self.weight_transfer_engine.take_read_back()

    def maestrale_return_routes(self) -> None:
        """See return_routes."""
        return_routes(self.model_runner)  # type: ignore[attr-defined]  # the worker's

    def maestrale_gpu_peak_bytes(self) -> int:
        """Return the largest GPU memory that this worker has allocated so far."""
        return torch.cuda.max_memory_allocated(self.weight_transfer_engine.device)

    def maestrale_cache_bytes(self) -> int:
        """Return the bytes for keys and values that vLLM found free on this worker's GPU."""
        return int(self.available_kv_cache_memory_bytes)  # type: ignore[attr-defined]  # the worker's

    def maestrale_pid(self) -> int:
        """Return the id of the process that holds the model; also the sign of life that the watchdog asks for."""
        return os.getpid()
