"""Memory that the log-prob head takes beside its inputs, measured in a process of its own.

    python -m benchmarks.head_memory TOKENS VOCABULARY

prints the bytes by which memory of tensors rose at most during forward and backward of `chunked_logprobs`: gradients of
hidden states and weights, a chunk of logits, for bfloat16 a float32 copy of the weights. On a CPU that is resident
memory, with every tensor in pages of its own that go back when it is freed: what the allocator keeps between tensors
differs by 100 MB from run to run. Products are in bfloat16 where that is fast, else in float32, as a trainer's are.
What grows with tokens * vocabulary is what is left of four sizes when everything else is taken off:

    interaction = E(n, v) - E(n, v/k) - E(n/k, v) + E(n/k, v/k)        of a + b n + c v + d n v:  d (n - n/k) (v - v/k)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.figures import ROOT
from shared.errors import RunError
from shared.model.cpu.processor import multiplies_bfloat16_fast
from shared.model.logprobs import chunked_logprobs

HIDDEN = 576
CHILD_S = 300.0
OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536", "GLIBC_TUNABLES": ""}
"""each tensor of 64 KiB and more is mapped by itself, in pages of the usual size"""


def measured(tokens: int, vocabulary: int) -> int:
    """Measure the bytes in a child. Raises RunError with its words when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.head_memory", str(tokens), str(vocabulary)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=CHILD_S,
        env={**os.environ, **OWN_PAGES},
    )  # fmt: skip
    if done.returncode:
        raise RunError(f"the child that measures the log-prob head ended with code {done.returncode}:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def interaction(whole: int, few_words: int, few_tokens: int, few: int) -> int:
    """Return what grows with tokens * vocabulary: E(n, v), E(n, v/k), E(n/k, v), E(n/k, v/k)."""
    return whole - few_words - few_tokens + few


def beside_logits(tokens: int, vocabulary: int) -> tuple[float, float]:
    """Measure four sizes. Returns the memory beside that of float32 logits, and the same of what grows with tokens *
    vocabulary alone."""
    sizes = [(n, v) for n in (tokens, tokens // 4) for v in (vocabulary, vocabulary // 4)]
    found, logits = [measured(n, v) for n, v in sizes], [4 * n * v for n, v in sizes]
    return found[0] / logits[0], interaction(*found) / interaction(*logits)


def peak_bytes() -> int:
    """Return the largest resident memory since `forget_peak` (Linux)."""
    return status("VmHWM")


def status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RunError(f"/proc/self/status has no {name}: memory is measured on Linux only")


def forget_peak() -> None:
    """Count the largest resident memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def run(tokens: int, vocabulary: int, place: torch.device) -> None:
    """Forward and backward, of random inputs that are made before; logits are about 1, as probabilities that underflow
    slow a CPU down."""
    dtype = torch.bfloat16 if multiplies_bfloat16_fast(place.type) else torch.float32
    hidden = (HIDDEN**-0.5 * torch.randn(tokens, HIDDEN, device=place)).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, HIDDEN, device=place).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=place)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        forget_peak()
        before = status("VmRSS")
    logprobs, _ = chunked_logprobs(hidden, weight, targets, 1.0)
    logprobs.sum().backward()
    after = torch.cuda.max_memory_allocated() if place.type == "cuda" else peak_bytes()
    print(after - before)


if __name__ == "__main__":
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chunked_logprobs(torch.randn(8, HIDDEN, device=where), torch.randn(64, HIDDEN, device=where),
                     torch.zeros(8, dtype=torch.int64, device=where), 1.0)  # fmt: skip
    run(int(sys.argv[1]), int(sys.argv[2]), where)
