"""The routes of a random mixture from a true vLLM engine: whole, over cached prompts and the engine's death; replayed
in the trainer they leave a third or less of the difference of log-probs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout.local_engine import LocalEngine
from rollout.vllm_config import build_vllm_config
from shared.config import Config
from shared.types import Completion
from tests.families import config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
MIXTURE = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 2, "num_hidden_layers": 6}
Found = list[tuple[list[int], Completion]]


def settings(router_replay: bool = True) -> Config:
    return Config.model_validate(
        {
            "model": {"dtype": "bfloat16", "max_tokens": 256, "router_replay": router_replay},
            "rollout": {"cache_bytes": 32 << 20, "max_completion_tokens": 60, "max_sequences": 16},
        }
    )


async def sample(folder: Path) -> list[Found]:
    """Pairs of completions of six prompts, undisturbed, and with an engine that is killed."""
    prompts = [[1, 7, 3 + index, 9, 100 + 5 * index] * 14 for index in range(6)]

    async def pairs(engine: LocalEngine, seed: int) -> Found:
        found = await asyncio.gather(
            *(engine.sample(ids, [seed + 2 * i, seed + 1 + 2 * i]) for i, ids in enumerate(prompts))
        )
        return [(ids, one) for ids, pair in zip(prompts, found, strict=True) for one in pair]

    async with LocalEngine(settings(), str(folder)) as engine:
        rounds = [await pairs(engine, 100)]
        sampling = asyncio.ensure_future(pairs(engine, 200))
        while not (running := engine.rank.engine.snapshot()) or min(len(one.token_ids) for one in running) < 5:
            await asyncio.sleep(0.002)
        assert engine.rank.engine.llm is not None
        os.kill(engine.rank.engine.llm.pids()[0], signal.SIGKILL)
        return [*rounds, await sampling]


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_replay_leaves_a_third_of_the_difference(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    reference(config_of(family, **MIXTURE)).save_pretrained(folder)
    model = load_model(folder, implementation="transformers")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())

    def gap(found: Found, routes: Callable[[list[bytes]], list[bytes]]) -> float:
        ids, firsts = [prompt + one.token_ids for prompt, one in found], [len(prompt) for prompt, _ in found]
        with torch.no_grad():
            own, entropy = model(pack_from(ids, firsts, routes=[routes(one.routes) for _, one in found]))
        told = torch.tensor([value for _, one in found for value in one.logprobs])
        assert entropy.mean() > 0.1, "a distribution without entropy would agree by accident"
        return float((own - told).abs().mean())

    whole, killed = asyncio.run(sample(folder))
    assert all(one.restarts == 1 for _, one in killed)
    for asked in (True, False):
        made = build_vllm_config(settings(asked), str(folder), seed=0, device=torch.device("cpu"))
        assert made.aux_output_config.enabled == asked
    for name, found in (("undisturbed", whole), ("killed", killed)):
        assert all(len(one.routes) == len(prompt) + len(one.token_ids) - 1 for prompt, one in found)
        for (prompt, one), (_, other) in zip(found[::2], found[1::2], strict=True):
            assert one.routes[: len(prompt) // 32 * 32] == other.routes[: len(prompt) // 32 * 32], "of cached blocks"
        own, replayed = gap(found, lambda routes: []), gap(found, lambda routes: routes)
        moved = gap(found, lambda routes: routes[1:] + routes[:1])
        print(f"{family}, {name}: without {own:.2e}, with {replayed:.2e} ({replayed / own:.2f}), moved {moved:.2e}")
        assert 0 < replayed <= own / 3 and moved > own
