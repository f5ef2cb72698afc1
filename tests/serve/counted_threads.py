"""vLLM's worker on the CPU that also tells how many threads it computes with. Imported in the engine process alone."""

import torch

from rollout.cpu_worker import CpuWorker


class CountedThreads(CpuWorker):
    """A worker that can be asked for its threads."""

    def count_threads(self) -> int:
        """Return the threads of the calling thread's products."""
        return torch.get_num_threads()
