"""Episodes on true vLLM: no turn computes again what stands before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout.local_engine import LocalEngine
from rollout.vllm_config import CPU_BLOCK_TOKENS
from shared.types import Completion, Prompt
from tests.environments.test_host import playing, prompt_of
from tests.rollout.tiny_llama import engine_config
from tests.trainer.test_turn_agreement import EPISODES, LONGEST, TURNS, make_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]


def test_no_turn_computes_again_what_stands_before_it(tmp_path: Path) -> None:
    """Whole blocks of everything before the last token of the turn before are found in the engine's cache."""
    make_folder(tmp_path)
    found: dict[str, Any] = {}

    async def run() -> list[tuple[Prompt, Completion]]:
        settings = {"max_turns": TURNS, "max_tokens": 640, "max_completion_tokens": LONGEST}
        async with (
            LocalEngine(engine_config(max_completion_tokens=LONGEST), str(tmp_path)) as engine,
            playing(tmp_path, **settings) as played,
        ):
            assert (llm := engine.rank.engine.llm) is not None and (take := llm.on_step) is not None

            def watch(outputs: Any) -> None:
                found.update({one.request_id: one.prefill_stats for one in outputs.outputs if one.prefill_stats})
                take(outputs)

            llm.on_step = watch

            async def play(number: int) -> tuple[Prompt, Completion]:
                prompt = await played.open(prompt_of(played, "goes on", number))
                begun = engine.client.episode(number)
                return prompt, await played.play(
                    prompt, begun, lambda one: engine.client.continue_turn(prompt.token_ids, one, 1.0)
                )  # fmt: skip

            return list(await asyncio.gather(*map(play, range(EPISODES))))

    hits, asked, turns = 0, 0, 0
    for prompt, one in asyncio.run(run()):
        prefills = [stats for name, stats in found.items() if name.startswith(f"{one.group}.{one.index}.")]
        assert len(prefills) == len(one.turns)
        for before, turn, stats in zip(one.turns, one.turns[1:], prefills[1:], strict=False):
            known = len(prompt.token_ids) + before.end - 1  # the last token of a turn is read by the next one
            assert stats.num_prompt_tokens == len(prompt.token_ids) + turn.start
            assert stats.num_cached_tokens == known // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
            hits, asked, turns = hits + stats.num_cached_tokens, asked + known, turns + 1
    print(
        f"{turns} turns behind another: {hits} of {asked} tokens before them came from the cache ({hits / asked:.0%})"
    )
    assert turns > EPISODES
