"""vLLM's worker on the CPU, prepared before it loads a model: threads, AMX, memory that it keeps for itself, and a head
in float32."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.cpu_worker import CPUWorker

from rollout.vllm_config import THREADS_VARIABLE
from rollout.warm_up import allow_amx
from shared.model.cpu.processor import fewest_fast, keep_freed_memory, measure_threads

HEAD_WORDS = 2048
"""rows of the head that are float32 at a time"""


class CpuWorker(CPUWorker):
    """vLLM's worker with this engine's number of threads from its first packed weight on.

    oneDNN chooses the order of a packed weight by the number of threads of the thread that packs it, and vLLM's linears
    of one shape share the products that were made for the first one's order. A weight packed later with another number
    of threads would be read in a wrong order: of SmolLM2-135M in float32, loaded with one thread and updated with
    eight, q, k, v and the MLP's output.
    """

    seconds: dict[int, float] = {}

    def init_device(self) -> None:
        """Prepare this process. The parent forked with one thread, and vLLM disabled torch's own setter."""
        super().init_device()
        LogitsProcessor._apply_head = apply_head
        allow_amx()
        given, _, most = os.environ.get(THREADS_VARIABLE, "1").partition("-")
        shape, dtype = self.model_config.hf_text_config, self.model_config.dtype
        if most:
            inner = getattr(shape, "intermediate_size", 4 * shape.hidden_size)
            self.seconds = measure_threads(int(most), shape.hidden_size, inner, dtype)
        keep_freed_memory()
        torch._C.set_num_threads(fewest_fast(self.seconds) if most else int(given))

    def maestrale_threads(self) -> dict[int, float]:
        """Seconds of a layer's products by the number of threads that they were measured with; {} if none were."""
        return self.seconds


def apply_head(processor: LogitsProcessor, head: VocabParallelEmbedding, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, words] logits of hidden [tokens, hidden size], in the head's type; float32 a tile of words at a time.

    vLLM's own copies the whole head to float32 in every step: 72 ms for a token of SmolLM2-135M on a Xeon, this 18.
    """
    if processor.head_dtype in (None, hidden.dtype):
        logits: Tensor = head.quant_method.apply(head, hidden, bias=bias)
        return logits
    rows = hidden.to(processor.head_dtype)
    tiles = head.weight.split(HEAD_WORDS)
    logits = torch.cat([functional.linear(rows, tile.to(processor.head_dtype)) for tile in tiles], dim=-1)
    return logits if bias is None else logits + bias.to(processor.head_dtype)
