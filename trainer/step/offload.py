"""Moves a trainer's memory to the host and back, bit for bit, while engines use its GPU.

The tensors stay the same objects: only their memory is given back and taken again, so that optimiser, FSDP
and weight transfer may hold on to them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.step.fsdp import local


class HostMemory:
    """Holds the contents of tensors whose device memory was given back, in memory (pinned) that it keeps."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """address of the tensors' storage -> (that storage, its bytes on the host)"""
        self.sizes: dict[int, int] = {}
        """of the storages that are away now, bytes"""

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the memory of these tensors to the host and free it; they cannot be used until `onload`. Returns the
        bytes freed. Tensors that share memory are copied once; single numbers stay."""
        storages = {}
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if tensor.dim() and storage.nbytes():
                storages[storage._cdata] = storage
        for key, storage in storages.items():
            if key not in self.kept or self.kept[key][1].numel() != storage.nbytes():
                self.kept[key] = storage, host_bytes(storage)
            self.kept[key][1].copy_(bytes_of(storage), non_blocking=True)
        wait_for_copies(storages.values())
        for key, storage in storages.items():
            self.sizes[key] = storage.nbytes()
            if storage.resizable():
                storage.resize_(0)
            else:  # on a CPU, where an export has shown it to numpy: not freed, but nothing can take it for weights
                bytes_of(storage).fill_(0xFF)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return sum(self.sizes.values())

    @torch.no_grad()
    def onload(self) -> None:
        """Give the tensors their memory back, with the contents of before. Does nothing where none is away."""
        for key, size in self.sizes.items():
            storage, copy = self.kept[key]
            if storage.nbytes() != size:
                storage.resize_(size)
            bytes_of(storage).copy_(copy, non_blocking=True)
        wait_for_copies(self.kept[key][0] for key in self.sizes)
        self.sizes.clear()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8 over all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_bytes(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8 on the host, pinned for a GPU's storage: of exactly its size, which torch's own pinned memory would
    round up to a power of two."""
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8)
    if storage.device.type == "cuda":
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
    return memory


def wait_for_copies(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait until all copies from and to the GPUs of these storages are done."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
