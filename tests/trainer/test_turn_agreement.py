"""Episodes on true vLLM, whose weights change between turns and within them: the engine's log-prob of every sampled
token is the trainer's under the token's own version, as closely as for completions of one turn. Behind an update within
a turn the engine reads on from keys and values of the weights before, in episodes as in completions of one turn.
Without an update no turn computes again what stands before it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from rollout.local_engine import LocalEngine
from rollout.vllm_config import CPU_BLOCK_TOKENS
from shared.model import hf
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder, initialise
from shared.model.packing import pack
from shared.types import Completion, Group, Prompt
from tests.environments.test_host import playing, prompt_of
from tests.model_folder import load_model
from tests.rollout.test_agreement import COMMON, FAMILIES
from tests.rollout.tiny_llama import engine_config
from tests.shared.test_turns import chat_of
from trainer.objectives.sequences import sequence_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
CLOSE = 2e-4
TURNS, EPISODES, LONGEST = 6, 24, 400
ENDS = list(range(40, 49))
"""tokens that end a turn, beside the template's own: a random model ends one after some thirty tokens"""
Weights = dict[str, torch.Tensor]


def make_folder(folder: Path) -> Decoder:
    """A random model with the chat template of Qwen 2.5."""
    ends = [chat_of(folder, "qwen2_5").eos_id, *ENDS]
    config = {**COMMON, **FAMILIES["LlamaForCausalLM"], "architectures": ["LlamaForCausalLM"], "eos_token_id": ends}
    decoder = Decoder(DecoderConfig.from_hf({**config, "vocab_size": 271}))
    initialise(decoder, seed=3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    hf.save_model(folder, {**config, "vocab_size": 271}, dict(decoder.named_parameters()), torch.float32)
    return decoder


class Sampled(NamedTuple):
    """What was sampled while the weights changed."""

    episodes: list[tuple[Prompt, Completion]]
    single: list[tuple[Prompt, Completion]]
    """completions of one turn"""
    weights: dict[int, Weights]
    """by version"""


async def sample(folder: Path, decoder: Decoder) -> Sampled:
    """Sample episodes, then completions of one turn, with an update whenever the one before it is there."""
    start = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    weights: dict[int, Weights] = {}

    async def update(engine: LocalEngine) -> None:
        generator = torch.Generator().manual_seed(len(weights))
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.copy_(start[name] * (1 + 0.1 * torch.randn(parameter.shape, generator=generator)))
        weights[len(weights)] = {name: value.detach().clone() for name, value in decoder.named_parameters()}
        await engine.update()

    async def follow(engine: LocalEngine) -> None:
        while True:
            await asyncio.sleep(0.02)
            await update(engine)

    settings = {"max_turns": TURNS, "max_tokens": 640, "max_completion_tokens": LONGEST}
    async with (
        LocalEngine(engine_config(max_completion_tokens=LONGEST), str(folder)) as engine,
        playing(folder, **settings) as played,
    ):
        await engine.follow(list(decoder.named_parameters()))
        await update(engine)
        prompts = [await played.open(prompt_of(played, "goes on", number)) for number in range(EPISODES)]

        async def play(prompt: Prompt) -> Completion:
            begun = engine.client.episode(prompt.index)
            return await played.play(
                prompt, begun, lambda one: engine.client.continue_turn(prompt.token_ids, one, 1.0)
            )  # fmt: skip

        async def once(prompt: Prompt) -> Completion:
            return (await engine.sample(prompt.token_ids, [100 + prompt.index]))[0]

        following = asyncio.ensure_future(follow(engine))
        episodes = await asyncio.gather(*map(play, prompts))
        single = await asyncio.gather(*map(once, prompts))
        assert not following.done(), following.exception()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return Sampled(
        list(zip(prompts, episodes, strict=True)), list(zip(prompts, single, strict=True)), weights
    )  # fmt: skip


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sampled]:
    folder = tmp_path_factory.mktemp("model")
    return folder, asyncio.run(sample(folder, make_folder(folder)))


class Tokens(NamedTuple):
    """The sampled tokens of many completions, as training sees them."""

    told: torch.Tensor
    """[tokens] the engine's log-probs"""
    own: torch.Tensor
    """[tokens] the trainer's, its weights those of the token's version"""
    after: torch.Tensor
    """[tokens] whether an update came within the turn before it: the engine's cache holds keys and values of weights
    from before, and the trainer's forward does not"""


def trained(folder: Path, found: list[tuple[Prompt, Completion]], weights: dict[int, Weights]) -> Tokens:
    """Make training sequences, and let the trainer's model score them under every version."""
    decoder = load_model(folder)
    rows = [sequence_of(Group(prompt, [one], [None]), one, [0.0]) for prompt, one in found]
    versions, after = list[int](), list[bool]()
    for _, one in found:
        begun = {turn.start for turn in one.turns} or {0}
        first = -1
        for span in one.spans:
            first = span.version if span.start in begun else first
            versions += [span.version] * (span.end - span.start)
            after += [span.version != first] * (span.end - span.start)
    batch, of = pack([row.token_ids for row in rows], [row.mask for row in rows]), torch.tensor(versions)
    own = torch.full((len(batch.targets),), torch.nan)
    for version in sorted(set(versions)):
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.copy_(weights[version][name])
            own[of == version] = decoder(batch)[0][of == version]
    told = torch.tensor([value for row in rows for value in row.columns["behaviour"]])
    return Tokens(told, own, torch.tensor(after))


def test_updates_between_turns_and_within_them_leave_each_token_the_logprob_of_its_own_version(
    sampled: tuple[Path, Sampled],
) -> None:
    folder, (episodes, single, weights) = sampled
    several, alone = trained(folder, episodes, weights), trained(folder, single, weights)
    gaps = {name: (one.told - one.own).abs() for name, one in (("turns", several), ("single", alone))}
    for name, one in (("turns", several), ("single", alone)):
        before, within = gaps[name][~one.after], gaps[name][one.after]
        print(
            f"{name}: {len(before)} tokens of the version that began the turn, largest difference {before.max():.1e}; "
            f"{len(within)} behind an update within it, mean {within.mean():.3f}, largest {within.max():.3f}"
        )
        assert len(before) > 20 and len(within) > 200 and before.max() < CLOSE
    between = sum(
        one.spans[number].end in {turn.end for turn in one.turns} and one.spans[number].version < following.version
        for _, one in episodes for number, following in enumerate(one.spans[1:])
    )  # fmt: skip
    assert between > 20 and sum(len(one.turns) > 2 for _, one in episodes) > EPISODES // 2
    assert several.own.std() > 0.5, "a distribution without entropy would agree by accident"
    within = {name: gaps[name][one.after].mean() for name, one in (("turns", several), ("single", alone))}
    assert within["turns"] < 1.5 * within["single"], "an update within a turn weighs as much as in a single one"


def off_by_one(one: Completion) -> Completion:
    """The second turn begins and ends a token too early: the observations beside it are taken one position off."""
    first, second, *others = one.turns
    return replace(one, turns=[first, replace(second, start=second.start - 1, end=second.end - 1), *others])


def of_the_wrong_version(one: Completion) -> Completion:
    """One span says the version before its own, or the next one."""
    first, *others = one.spans
    return replace(one, spans=[replace(first, version=first.version + (1 if first.version == 0 else -1)), *others])


def exchanged(one: Completion) -> Completion:
    """The last token of an observation comes before the one ahead of it."""
    token_ids, place = list(one.token_ids), one.turns[1].start
    token_ids[place - 2 : place] = reversed(token_ids[place - 2 : place])
    return replace(one, token_ids=token_ids)


@pytest.mark.parametrize("fault", [off_by_one, of_the_wrong_version, exchanged])
def test_a_token_in_the_wrong_place_or_a_wrong_version_would_be_seen(
    sampled: tuple[Path, Sampled], fault: Callable[[Completion], Completion]
) -> None:
    folder, (episodes, _, weights) = sampled
    for prompt, one in itertools.islice(((p, one) for p, one in episodes if len(one.turns) > 2), 4):
        sound, wrong = (trained(folder, [(prompt, each)], weights) for each in (one, fault(one)))
        gaps = [
            (each.told - each.own).abs()[~(sound if len(each.told) == len(sound.told) else each).after].max()
            for each in (sound, wrong)
        ]
        print(f"{fault.__name__}: largest difference {gaps[0]:.1e}, with the fault {gaps[1]:.3f}")
        assert gaps[0] < CLOSE and gaps[1] > 10 * CLOSE


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
