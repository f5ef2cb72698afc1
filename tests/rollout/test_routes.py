"""The routes of a random mixture from a true vLLM engine: whole, over cached prompts and the engine's death; replayed
in the trainer they leave a third or less of the difference of log-probs."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout.local_engine import LocalEngine
from rollout.vllm_config import build_vllm_config
from shared import route_files
from shared.config import Config
from shared.types import Completion
from tests.families import config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.test_agreement import Found

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
MIXTURE = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 2, "num_hidden_layers": 6}


def settings(router_replay: bool = True, runs_dir: Path = Path()) -> Config:
    sizes = {"cache_bytes": 32 << 20, "max_completion_tokens": 60, "max_sequences": 16}
    model = {"dtype": "bfloat16", "max_tokens": 256, "router_replay": router_replay}
    return Config.model_validate({"model": model, "rollout": sizes, "runs_dir": str(runs_dir)})


async def sample(folder: Path, config: Config) -> tuple[Found, Found]:
    """Pairs of completions of six prompts, undisturbed, and with an engine that is killed."""
    prompts = [[1, 7, 3 + index, 9, 100 + 5 * index] * 14 for index in range(6)]

    async def pairs(engine: LocalEngine, seed: int) -> Found:
        tasks = (engine.sample(ids, [seed + 2 * i, seed + 1 + 2 * i]) for i, ids in enumerate(prompts))
        return [(ids, one) for ids, pair in zip(prompts, await asyncio.gather(*tasks), strict=True) for one in pair]

    async with LocalEngine(config, str(folder)) as engine:
        engine.keep_routes = True
        whole = await pairs(engine, 100)
        sampling = asyncio.ensure_future(pairs(engine, 200))
        while not (running := engine.rank.engine.unfinished()) or min(len(one.token_ids) for one in running) < 5:
            await asyncio.sleep(0.002)
        assert engine.rank.engine.llm is not None
        os.kill(engine.rank.engine.llm.pids()[0], signal.SIGKILL)
        return whole, await sampling


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_replay_leaves_a_third_of_the_difference(tmp_path, family):
    folder = tmp_path / "model"
    reference(config_of(family, **MIXTURE)).save_pretrained(folder)
    model = load_model(folder, implementation="transformers")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())

    config = settings(runs_dir=tmp_path)

    def rows(one: Completion) -> list[bytes]:
        return [row for file in one.routes for row in route_files.read(config.run_dir, file)]

    def gap(found: Found, routes: Callable[[list[bytes]], list[bytes]]) -> float:
        ids, firsts = [prompt + one.token_ids for prompt, one in found], [len(prompt) for prompt, _ in found]
        with torch.no_grad():
            logprobs, entropy = model(pack_from(ids, firsts, routes=[routes(rows(one)) for _, one in found]))
        assert entropy.mean() > 0.1, "a distribution without entropy would agree by accident"
        return float((logprobs - torch.tensor([x for _, one in found for x in one.logprobs])).abs().mean())

    whole, killed = asyncio.run(sample(folder, config))
    assert all(one.restarts == 1 for _, one in killed)
    for asked in (True, False):
        made = build_vllm_config(settings(asked), str(folder), seed=0, device=torch.device("cpu"))
        assert made.aux_output_config.enabled == asked
    for found in (whole, killed):
        assert all(len(rows(one)) == len(prompt) + len(one.token_ids) - 1 for prompt, one in found)
        for (prompt, one), (_, other) in zip(found[::2], found[1::2], strict=True):
            cached = len(prompt) // 32 * 32
            assert rows(one)[:cached] == rows(other)[:cached]
        without, replayed = gap(found, lambda routes: []), gap(found, lambda routes: routes)
        moved = gap(found, lambda routes: routes[1:] + routes[:1])
        print(f"{family}: without {without:.2e}, with {replayed:.2e} ({replayed / without:.2f}), moved {moved:.2e}")
        assert {file.parent.name for file in config.run_dir.glob("routes/*/*")}
        assert 0 < replayed <= without / 3 and moved > without
