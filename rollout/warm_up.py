"""The first prompts of an engine: short ones of every length, before anybody is told that it is ready.

Kernels are chosen by the number of tokens in a step, and one that kills its process must do so before a user's request
is there. Known so far: vLLM's attention for bfloat16 on processors with AMX, whose first instruction ended the process
with SIGILL where the first prompt had one to four tokens. Linux lets a process use AMX once it has asked for it
(arch_prctl; children that are forked inherit it). oneDNN asks when it first multiplies with AMX, which it leaves to
other instructions for few rows; vLLM's attention takes AMX for any number of rows and does not ask. So the engine
process asks itself (`allow_amx`), and the first prompt here is a long one, for which oneDNN asks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

LENGTHS = (64, 1, 2, 3, 4, 5, 6, 7, 8)
"""tokens of the prompts, one after the other"""
NEW_TOKENS = 2
TOKEN = 1
"""that the prompts are made of"""


def prompts(max_tokens: int) -> Iterator[list[int]]:
    """[tokens] of each. max_tokens: prompt and completion together, at most."""
    for length in LENGTHS:
        if length + NEW_TOKENS <= max_tokens:
            yield [TOKEN] * length


def allow_amx() -> None:
    """Ask Linux for AMX, where the processor has it. In the engine process, before its first step."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
