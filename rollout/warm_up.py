"""Runs the first prompts of an engine, short ones of every length, before it counts as ready.

Kernels are chosen by the number of tokens in a step, and one that kills its process must do so before a user's
request arrives. Known so far: vLLM's attention for bfloat16 on processors with AMX, where a first prompt of one to
four tokens ended the process with SIGILL. Linux lets a process use AMX once it has asked for it (arch_prctl; forked
children inherit that). The likely reason, by the machine code of vLLM 0.32 for CPUs: only oneDNN asks, when it first
multiplies with AMX, and not for few rows. So the engine process asks itself (`allow_amx`), and the first prompt here
is a long one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

    from rollout.stream import TokenLLM

LENGTHS = (64, 1, 2, 3, 4, 5, 6, 7, 8)
"""tokens of each prompt, in order"""
NEW_TOKENS = 2
TOKEN = 1
"""token id that the prompts consist of"""


class Died(Exception):
    """The engine died of a prompt."""

    def __init__(self, prompt: list[int]):
        self.words = f"{len(prompt)} token{'s' * (len(prompt) > 1)}"
        super().__init__(f"died of a prompt of {self.words}")


async def warm_up(llm: TokenLLM, max_tokens: int) -> float:
    """Run `prompts` in a new engine of training. Returns the seconds that it took. Raises Died. Sets `on_step` and
    `on_end`, which the caller may replace afterwards."""
    from vllm import SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    began = time.monotonic()
    for number, prompt in enumerate(prompts(max_tokens)):
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def look(outputs: EngineCoreOutputs, ended: asyncio.Future[None] = ended) -> None:
            if any(output.finish_reason is not None for output in outputs.outputs) and not ended.done():
                ended.set_result(None)

        def fail(error: BaseException, ended: asyncio.Future[None] = ended) -> None:
            if not ended.done():
                ended.set_exception(error)

        llm.on_step, llm.on_end = look, fail
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, detokenize=False)
        try:
            await llm.submit(f"warm-up {number}", prompt, params, salt="warm-up")
            await ended
        except EngineDeadError as error:
            raise Died(prompt) from error
    return time.monotonic() - began


def prompts(max_tokens: int) -> Iterator[list[int]]:
    """Yield each prompt, [tokens]. max_tokens: prompt and completion together, at most."""
    for length in LENGTHS:
        if length + NEW_TOKENS <= max_tokens:
            yield [TOKEN] * length


def allow_amx() -> None:
    """Ask Linux for AMX if the processor has it. To be called in the engine process before its first step."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
