"""Episodes on true vLLM, whose weights change between turns and within them: the engine's log-prob of every sampled
token is the trainer's under the token's own version, as closely as for completions of one turn. Behind an update within
a turn the engine reads on from keys and values of the weights before, in episodes as in completions of one turn.
Without an update no turn computes again what stands before it."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

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

pytestmark = [pytest.mark.soak, pytest.mark.timeout(360)]  # in make test: rollout/test_engine.py, of one turn
CLOSE = 2e-4
TURNS, EPISODES, LONGEST = 5, 12, 200
ENDS = list(range(40, 49))
"""tokens that end a turn, beside the template's own: a random model ends one after some thirty tokens"""
Played = list[tuple[Prompt, Completion]]
Weights = dict[int, dict[str, torch.Tensor]]
"""by version"""


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
    """Episodes before any update, whose prefills are kept by request; then episodes and completions of one turn while
    the weights changed."""

    folder: Path
    still: Played
    prefills: dict[str, Any]
    episodes: Played
    single: Played
    weights: Weights


async def sample(folder: Path) -> Sampled:
    """Sample with an update whenever the one before it is there, once there are to be any."""
    decoder = make_folder(folder)
    start = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    weights, prefills = Weights(), dict[str, Any]()

    async def update(engine: LocalEngine) -> None:
        generator = torch.Generator().manual_seed(len(weights))
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.copy_(start[name] * (1 + 0.1 * torch.randn(parameter.shape, generator=generator)))
        weights[len(weights)] = {name: value.detach().clone() for name, value in decoder.named_parameters()}
        await engine.update()

    async def follow(engine: LocalEngine) -> None:
        while True:
            await asyncio.sleep(0.05)
            await update(engine)

    settings = {"max_turns": TURNS, "max_tokens": 640, "max_completion_tokens": LONGEST}
    async with (
        LocalEngine(engine_config(max_completion_tokens=LONGEST), str(folder)) as engine,
        playing(folder, **settings) as played,
    ):
        llm: Any = engine.rank.engine.llm
        take = llm.on_step

        def watch(outputs: Any) -> None:
            prefills.update({each.request_id: each.prefill_stats for each in outputs.outputs if each.prefill_stats})
            take(outputs)

        async def play(number: int) -> tuple[Prompt, Completion]:
            prompt = await played.open(prompt_of(played, "goes on", number))
            begun = engine.client.episode(number)
            return prompt, await played.play(
                prompt, begun, lambda each: engine.client.continue_turn(prompt.token_ids, each, 1.0)
            )

        async def once(prompt: Prompt) -> tuple[Prompt, Completion]:
            return prompt, (await engine.sample(prompt.token_ids, [100 + prompt.index]))[0]

        llm.on_step = watch
        still = await asyncio.gather(*map(play, range(EPISODES)))
        llm.on_step = take
        await engine.follow(list(decoder.named_parameters()))
        await update(engine)
        following = asyncio.ensure_future(follow(engine))
        episodes = await asyncio.gather(*map(play, range(EPISODES, 2 * EPISODES)))
        single = await asyncio.gather(*(once(prompt) for prompt, _ in episodes))
        assert not following.done(), following.exception()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return Sampled(folder, still, prefills, episodes, single, weights)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    return asyncio.run(sample(tmp_path_factory.mktemp("model")))


class Tokens(NamedTuple):
    """The sampled tokens of many completions, as training sees them."""

    engine: torch.Tensor
    """[tokens] the engine's log-probs"""
    trainer: torch.Tensor
    """[tokens] the trainer's, its weights those of the token's version"""
    after: torch.Tensor
    """[tokens] whether an update came within the turn before it: the engine's cache holds keys and values of weights
    from before, and the trainer's forward does not"""

    def gaps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances of tokens of the version that began their turn, and of those behind an update within it."""
        gaps = (self.engine - self.trainer).abs()
        return gaps[~self.after], gaps[self.after]


def trained(folder: Path, pairs: Played, weights: Weights) -> Tokens:
    """Make training sequences, and let the trainer's model score them under every version."""
    decoder = load_model(folder)
    rows = [sequence_of(Group(prompt, [each], [None]), each, [0.0]) for prompt, each in pairs]
    versions, after = list[int](), list[bool]()
    for _, each in pairs:
        begun = {turn.start for turn in each.turns} or {0}
        first = -1
        for span in each.spans:
            first = span.version if span.start in begun else first
            versions += [span.version] * (span.end - span.start)
            after += [span.version != first] * (span.end - span.start)
    batch, mask = pack([row.token_ids for row in rows], [row.mask for row in rows]), torch.tensor(versions)
    logprobs = torch.full((len(batch.targets),), torch.nan)
    for version in sorted(set(versions)):
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.copy_(weights[version][name])
            logprobs[mask == version] = decoder(batch)[0][mask == version]
    engine = torch.tensor([value for row in rows for value in row.columns["behaviour"]])
    return Tokens(engine, logprobs, torch.tensor(after))


def test_updates_between_turns_and_within_them_leave_each_token_the_logprob_of_its_own_version(sampled):
    several, alone = (trained(sampled.folder, pairs, sampled.weights) for pairs in (sampled.episodes, sampled.single))
    means = []
    for name, tokens in (("turns", several), ("single", alone)):
        before, within = tokens.gaps()
        print(
            f"{name}: {len(before)} tokens of the version that began the turn, largest difference {before.max():.1e}; "
            f"{len(within)} behind an update within it, mean {within.mean():.3f}, largest {within.max():.3f}"
        )
        assert len(before) > 20 and len(within) > 200 and before.max() < CLOSE
        means.append(within.mean())
    between = sum(
        each.spans[number].end in {turn.end for turn in each.turns} and each.spans[number].version < following.version
        for _, each in sampled.episodes for number, following in enumerate(each.spans[1:])
    )  # fmt: skip
    assert between > EPISODES // 3 and sum(len(each.turns) > 2 for _, each in sampled.episodes) > EPISODES // 2
    assert several.trainer.std() > 0.5, "a distribution without entropy would agree by accident"
    assert means[0] < 1.5 * means[1], "an update within a turn weighs as much as in a single one"


def test_no_turn_computes_again_what_stands_before_it(sampled):
    """Whole blocks of everything before the last token of the turn before are found in the engine's cache."""
    turns = 0
    for prompt, each in sampled.still:
        prefills = [stats for name, stats in sampled.prefills.items() if name.startswith(f"{each.group}.{each.index}.")]
        assert len(prefills) == len(each.turns)
        for before, turn, stats in zip(each.turns, each.turns[1:], prefills[1:], strict=False):
            known = len(prompt.token_ids) + before.end - 1  # the last token of a turn is read by the next one
            assert stats.num_prompt_tokens == len(prompt.token_ids) + turn.start
            assert stats.num_cached_tokens == known // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
            turns += 1
    assert turns > EPISODES
