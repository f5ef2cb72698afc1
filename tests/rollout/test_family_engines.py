"""Engines of families that transformers trains: a folder of transformers served by true vLLM, new weights brought in
flight and proved, and log-probs that are the trainer's, before and after."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rollout.local_engine import LocalEngine
from shared.model.language_model import LanguageModel
from shared.types import Completion
from tests.families import SENT, config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.tiny_llama import engine_config

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


async def sample(folder: Path, model: LanguageModel) -> list[list[tuple[list[int], Completion]]]:
    """Prompts and completions of the folder's own weights, and of others that were brought in two updates."""
    prompts = [[1, 7, 3 + index, 9] * 3 for index in range(8)]
    rounds = []
    async with LocalEngine(engine_config(max_completion_tokens=40), str(folder)) as engine:
        for factor in (1.0, 1.05, 1.05):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            if factor != 1.0:
                if engine.sender is None:
                    await engine.follow(list(model.named_parameters()))
                await engine.update()  # proved by checksums of what the engine computes with
            found = await asyncio.gather(*(engine.sample(ids, [50 + index]) for index, ids in enumerate(prompts)))
            rounds.append([(ids, completion) for ids, [completion] in zip(prompts, found, strict=True)])
    return rounds


def assert_engine_agrees(tmp_path: Path, family: str) -> None:
    """Sample thrice, and compare with the trainer's log-probs under the same weights."""
    folder = tmp_path / "model"
    reference(config_of(family, max_position_embeddings=1024)).save_pretrained(folder)  # an engine takes 640 tokens
    model, other = (load_model(folder, implementation="transformers") for _ in range(2))
    for number, found in enumerate(asyncio.run(sample(folder, model))):
        if number:
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(1.05)
        batch = pack_from([ids + completion.token_ids for ids, completion in found], [len(ids) for ids, _ in found])
        with torch.no_grad():
            own, entropy = other(batch)
        told = torch.tensor([value for _, completion in found for value in completion.logprobs])
        gap = (own - told).abs()
        print(f"{family}, weights {number}: mean {gap.mean():.1e}, max {gap.max():.1e}")
        assert gap.mean() < 1e-4, f"{family}, weights {number}"
        assert entropy.mean() > 0.1, "a distribution without entropy would agree by accident"


@pytest.mark.parametrize("family", SENT)
def test_an_engine_computes_with_the_weights_of_a_family(tmp_path: Path, family: str) -> None:
    assert_engine_agrees(tmp_path, family)
