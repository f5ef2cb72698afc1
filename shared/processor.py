"""What the processor is good at.

What it does not: count cores or GPUs (roles.py). Who calls this: logprob, trainer/worker, benchmarks.
"""

from __future__ import annotations

import functools

import torch


@functools.lru_cache
def multiplies_bfloat16_fast(device_type: str) -> bool:
    """Whether products of bfloat16 matrices are faster than those of float32: on GPUs, and on CPUs with matrix units
    (Intel's AMX). Without them bfloat16 took 1.7 times as long as float32 (two cores of an Intel Xeon with AVX-512 and
    its bfloat16 instructions, one thread, matrices of 576 to 3,072)."""
    return device_type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
