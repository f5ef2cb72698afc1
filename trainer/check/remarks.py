"""Settings that are allowed and probably not intended, one line for each; objectives' also where a run begins."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.vllm_config import CPU_CACHE_BYTES
from shared.config import Config
from shared.launch.ranks import count_gpus
from shared.model.config import DecoderConfig
from trainer.colocate import held_tokens
from trainer.objectives.objective import Need
from trainer.objectives.registry import needs, objective_of
from verify.chosen_rewards import endpoints

LORA_RATE = 5e-6
"""learning rates below this are those of full training: 1e-6 is the default, and adapters want ten times it"""


def remark_lines(config: Config, shape: DecoderConfig | None) -> Iterator[str]:
    """One line for each combination of settings that is allowed and probably not intended."""
    rollout = config.rollout
    open_completions = (rollout.max_async_level + 1) * rollout.prompts_per_step * rollout.group_size
    if 0 < config.steps <= config.optimiser.warmup_steps:
        yield (
            f"optimiser.warmup_steps = {config.optimiser.warmup_steps} is not below steps = {config.steps}: the peak "
            "learning rate is never reached"
        )
    if rollout.max_sequences * config.placement.engines > 2 * open_completions:
        yield (
            f"rollout.max_sequences = {rollout.max_sequences} on {config.placement.engines} engine(s) is more than "
            f"twice the {open_completions} completions that can be open"
        )
    yield from objective_lines(config)
    yield from group_lines(config)
    cache = rollout.cache_bytes or (0 if count_gpus(config.placement.device) else CPU_CACHE_BYTES)
    if shape is not None and cache:
        fitting = held_tokens(config, shape) // config.model.max_tokens
        if fitting < 1:
            yield f"rollout.cache_bytes = {cache} does not hold one sequence of model.max_tokens"
        elif fitting < min(rollout.max_sequences, open_completions) // 4:
            yield (
                f"rollout.cache_bytes = {cache} holds {fitting} full sequences, far fewer than "
                f"rollout.max_sequences = {rollout.max_sequences}: engines may preempt"
            )


def objective_lines(config: Config) -> Iterator[str]:
    """One line for each choice that learns, but probably not what is intended; also shown when a run begins."""
    yield from rate_lines(config)
    yield from judge_lines(config)
    objective, ahead = objective_of(config), [stage.rollout.max_async_level for stage in config.every_stage]
    if config.mode == "sft":
        return
    several = config.optimiser.minibatches > 1
    moved = several and Need.OLD_LOGPROBS not in objective.needs  # a ratio to the start of the batch follows the steps
    if objective.unweighted and (max(ahead) > 0 or moved):
        yield (
            f'objective.name = "{objective.name}" takes tokens of older policies for the policy\'s own '
            f"(rollout.max_async_level = {max(ahead)}, optimiser.minibatches = {config.optimiser.minibatches}): set "
            f'{objective.unweighted}.kind = "token_truncated"'
        )


def judge_lines(config: Config) -> Iterator[str]:
    """One line for each judge whose questions about a step are many: the price of a judge of debates or pairs."""
    if config.mode == "sft":
        return
    for name, judge in endpoints(config.reward).items():
        calls = judge.calls(config.rollout.group_size)
        if judge.judge.asks != "score":
            yield (
                f'reward.judges.{name}.asks = "{judge.judge.asks}" takes up to {calls} requests for a group of '
                f"{config.rollout.group_size}, {calls * config.rollout.prompts_per_step:,} for a step"
            )


def rate_lines(config: Config) -> Iterator[str]:
    """One line if adapters are to be trained at a rate that is usual for all weights."""
    rate = config.optimiser.learning_rate
    if config.lora.rank and rate < LORA_RATE:
        yield (
            f"optimiser.learning_rate = {rate:g} is usual where all weights are trained; adapters want about ten times "
            f"as much (lora.rank = {config.lora.rank}, docs/lora.md)"
        )


def group_lines(config: Config) -> Iterator[str]:
    """One line if the objective needs whole groups in a micro-batch and they may be longer than its budget."""
    objective, budget = objective_of(config), config.optimiser.micro_batch_tokens
    if Need.GROUPS not in needs(config):
        return
    longest = 0
    for stage in config.every_stage:
        sampled = stage.rollout.max_completion_tokens
        longest = max(longest, config.model.max_tokens - sampled + stage.rollout.group_size * sampled)
    if longest > budget:
        yield (
            f'objective.name = "{objective.name}" keeps groups whole: one has up to {longest:,} tokens, above '
            f"optimiser.micro_batch_tokens = {budget:,}, and takes the memory of its length; lower rollout.group_size "
            "or rollout.max_completion_tokens, or have memory for it"
        )
