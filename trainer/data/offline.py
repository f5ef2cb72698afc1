"""Offline rows: completions that this run did not sample, which become groups next to sampled ones (data.offline).

    a run's folder                                             the groups of its rollouts/step_N.jsonl, as they are:
    or JSONL of such groups                                    token ids, log-probs and rewards
    {"problem", "completion", "reward"}                        anybody's: people, other models, one piece of feedback
    {"problem", "completion", "answer" or "tests", ...}        scored by the verifier of the row before the first step
    {"problem", "chosen", "rejected"}                          a pair, with rewards 1 and 0

Text becomes tokens once, as the run's own prompts do ("system", "domain", "source", "id" may be there, too); rows
with equal prompts are one group, of at most rollout.group_size. The ledger knows nothing of them: an offline group has
no policy version (no spans), takes no slot, is no rollout of this run, and is in no mean of ages, ratios or rewards of
the sampled ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.chat import Chat
from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.jsonl import all_faults, read_rows, text_of
from shared.progress import Progress
from shared.types import Completion, Group, Problem, Prompt, Reward, Verdict
from trainer.data.data_source import PromptFormat, permutation
from trainer.data.demonstration_rows import completion_of
from trainer.data.written_text import WrittenTexts
from trainer.objectives.advantage import diverse, graded
from trainer.objectives.objective import Objective
from trainer.objectives.registry import objective_of
from verify.scorer import RewardScorer
from verify.verifiers import read_problem

SETTING = "data.offline"
COMPARED_TEXTS = 64
"""recorded completions, spread over all, whose text must be what their ids are in this run's tokenizer"""
GIVEN = "offline row"
"""the source of a row that names none"""


@dataclass
class OfflineGroups:
    """Groups of completions that this run did not sample, and what was left out of them."""

    groups: list[Group]
    left_out: list[str] = field(default_factory=list)
    """one line for each reason"""

    def batch(self, version: int, count: int, seed: int) -> list[Group]:
        """The `count` groups that are trained with the batch after `version`: a pure function of these numbers. Each
        epoch has an order of its own; indices are below 0, where no sampled group has them."""
        groups = []
        for number in range(count):
            epoch, position = divmod(version * count + number, len(self.groups))
            group = self.groups[permutation(seed, epoch, len(self.groups))[position]]
            groups.append(replace(group, prompt=replace(group.prompt, index=-1 - number)))
        return groups

    def keep(self, usable: Callable[[Group], bool], why: str) -> None:
        """Leave out the other groups, with a line that says why. Raises ConfigError if none is left."""
        kept = [group for group in self.groups if usable(group)]
        if not kept:
            raise ConfigError(f"{SETTING}: none of its {len(self.groups):,} groups can be learned from: {why}")
        if len(kept) < len(self.groups):
            left = len(self.groups) - len(kept)
            self.left_out.append(f"{SETTING}: {left:,} of {len(self.groups):,} groups are left out: {why}")
        self.groups = kept

    def keep_valued(self, values: Mapping[str, float]) -> None:
        """Leave out the groups of problems without a soft value. Raises ConfigError if none is left."""
        why = "their problems (by id) are not among those of data.train that have a soft value"
        self.keep(lambda group: group.prompt.problem.id in values, why)

    async def score(self, scorer: RewardScorer) -> None:
        """Give rewards to the completions that have none, by the verifiers of their rows."""

        async def one(group: Group, completion: Completion) -> None:
            index = completion.index
            group.rewards[index], group.texts[index] = await scorer.score(group.prompt.problem, completion)

        async with asyncio.TaskGroup() as scoring:
            for group in self.groups:
                for completion, reward in zip(group.completions, group.rewards, strict=True):
                    if reward is None:
                        scoring.create_task(one(group, completion))

    def settle(self, objective: Objective) -> None:
        """Leave out, once all is scored, what has no signal for the objective. Raises ConfigError if nothing has."""
        least = objective.least_completions
        self.keep(lambda group: any(map(graded, group.rewards)), "the verifier could grade no completion of them")
        self.keep(
            lambda group: sum(map(graded, group.rewards)) >= least,
            f'objective.name = "{objective.name}" compares completions of one prompt, and they have fewer than {least} '
            "(dro and some of examples/objectives learn from single ones)",
        )
        self.keep(
            lambda group: diverse(group.rewards, objective.filter_groups_by),
            f"all their rewards are equal (objective.filter_groups_by = {objective.filter_groups_by})",
        )


async def load_offline(
    paths: Sequence[Path], prompts: PromptFormat, scorer: RewardScorer, config: Config, progress: Progress
) -> OfflineGroups | None:
    """The groups of data.offline, scored, without those that have no signal, which warnings count; None without such
    files. Raises what `read_offline` and `OfflineGroups.settle` raise."""
    if not paths:
        return None
    offline = await asyncio.to_thread(read_offline, paths, prompts, config)
    await offline.score(scorer)
    offline.settle(objective_of(config))
    for line in offline.left_out:
        progress.warning(line)
    progress.note(f"{SETTING}: {len(offline.groups):,} groups")
    return offline


def offline_count(config: Config) -> int:
    """Offline groups of a batch: data.offline_share of it, in whole minibatches and at least one of each."""
    share, parts = config.data.offline_share, config.optimiser.minibatches
    if not share:
        return 0
    return max(1, round(config.rollout.prompts_per_step * share / (1 - share) / parts)) * parts


def read_offline(paths: Sequence[Path], prompts: PromptFormat, config: Config) -> OfflineGroups:
    """The groups of all files, those without rewards still to be scored. Slow.

    Raises DataError naming the lines that cannot be used, ConfigError where the objective cannot learn from them.
    """
    groups, faults, long = list[Group](), list[str](), 0
    single: dict[tuple[int, ...], Group] = {}
    texts, rows = WrittenTexts(prompts.chat), 0
    for path in paths:
        for where, _, row in read_rows(path, SETTING, faults):
            rows += 1
            try:
                has_ids = "completions" in row
                group = recorded(row, where, prompts.chat) if has_ids else written(row, where, prompts, texts)
            except DataError as error:
                faults.append(str(error))
                continue
            most = max(len(one.token_ids) for one in group.completions)
            if len(group.prompt.token_ids) + most > config.model.max_tokens:
                long += 1
            elif "completions" in row:
                groups.append(group)
            else:
                _join(group, single, groups, config.rollout.group_size)
    if faults:
        raise DataError(all_faults(faults, f"{SETTING}: {len(faults):,} rows cannot be used:"))
    if not groups:
        raise DataError(f"{SETTING}: there is no row that fits model.max_tokens = {config.model.max_tokens}")
    _compare_texts(groups, prompts.chat)
    _check_logprobs(groups, objective_of(config))
    too_long = f"{SETTING}: {long:,} rows are longer than model.max_tokens = {config.model.max_tokens}: left out"
    return OfflineGroups(groups, texts.warnings(SETTING, rows) + ([too_long] if long else []))


def recorded(row: dict[str, Any], where: str, chat: Chat) -> Group:
    """A group of a rollout file: its ids, log-probs and rewards as they are, without the versions of that run's policy.

    Raises DataError for what is no such group, was not ended, or has ids that this run's tokenizer lacks."""
    try:
        group = msgspec.convert(row, Group)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: a row with completions must be a group of a rollout file ({error})") from error
    known = len(chat.tokenizer)
    if not len(group.completions) == len(group.rewards) == len(group.texts) or not group.prompt.token_ids:
        raise DataError(f"{where}: it has no prompt, or not a reward and a text for each completion")
    kept = [place for place, one in enumerate(group.completions) if one.finish_reason in ("stop", "length")]
    for index in kept:
        completion, reward = group.completions[index], group.rewards[index]
        tokens, logprobs = completion.token_ids, completion.logprobs
        ids = (*group.prompt.token_ids, *tokens)
        if not tokens or len(logprobs) not in (0, len(tokens)) or min(ids) < 0 or max(ids) >= known:
            raise DataError(f"{where}: completion {index} has no tokens, not one log-prob a token, or unknown tokens")
        numbers = (*logprobs, *((reward.total, reward.correctness) if reward else ()))
        if not all(map(math.isfinite, numbers)):
            raise DataError(f"{where}: a log-prob or reward of completion {index} is no finite number")
    if not kept:
        raise DataError(f"{where}: no completion has an end")
    completions = [replace(group.completions[at], index=place, spans=[], teacher=[]) for place, at in enumerate(kept)]
    rewards, texts = [group.rewards[at] for at in kept], [group.texts[at] for at in kept]
    return Group(group.prompt, completions, rewards, texts, source=group.source or where)


def written(row: dict[str, Any], where: str, prompts: PromptFormat, spelled: WrittenTexts) -> Group:
    """The group of a row of text: one completion, or the two of a pair. Raises DataError."""
    pair = "chosen" in row or "rejected" in row
    texts = [text_of(row, name, where) for name in ("chosen", "rejected")] if pair else [completion_of(row, where)]
    rewards: list[Reward | None] = [_given(1.0), _given(0.0)] if pair else [_reward(row, where)]
    text, domain = text_of(row, "problem", where), text_of(row, "domain", where, "math")
    if None in rewards:
        problem = read_problem(row, where)
    else:
        problem = Problem(text_of(row, "id", where, where), text, "", domain=domain, hidden=True)
    ids = prompts.prompt_of(problem, also=text_of(row, "system", where, ""))
    chat, completions = prompts.chat, []
    for index, completion in enumerate(texts):
        tokens = [*spelled.tokens(completion, where), chat.eos_id]
        completions.append(Completion(0, index, 0, tokens, finish_reason="stop"))
    source = text_of(row, "source", where, GIVEN) or GIVEN
    return Group(Prompt(0, problem, ids), completions, rewards, texts, source=source)


def _reward(row: dict[str, Any], where: str) -> Reward | None:
    value = row.get("reward")
    if value is None:
        if "answer" in row or "tests" in row or "checker" in row:
            return None
        raise DataError(f'{where}: give a "reward", or an "answer", "tests" or a "checker" to score the completion by')
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: reward = {value!r} must be a finite number")
    return _given(float(value))


def _given(value: float) -> Reward:
    return Reward(value, None, value, 0.0, 0.0, Verdict.OPEN, reason="given by the row")


def _join(group: Group, single: dict[tuple[int, ...], Group], groups: list[Group], most: int) -> None:
    """Put a row's completions into the group of its prompt, or begin one."""
    key = tuple(group.prompt.token_ids)
    known = single.get(key)
    if known is None or len(known.completions) + len(group.completions) > most:
        single[key] = group
        groups.append(group)
        return
    first = len(known.completions)
    known.completions += [replace(one, index=first + one.index) for one in group.completions]
    known.rewards += group.rewards
    known.texts += group.texts


def _compare_texts(groups: Sequence[Group], chat: Chat) -> None:
    """Raise ConfigError where recorded ids are not, in this run's tokenizer, the text that was recorded with them."""
    texts = [(group, place) for group in groups if not group.turns for place, text in enumerate(group.texts) if text]
    for group, index in texts[:: max(len(texts) // COMPARED_TEXTS, 1)]:
        text, ids = group.texts[index], group.completions[index].token_ids
        if chat.decode(ids) not in text:
            raise ConfigError(
                f"{SETTING}: {group.source}: the tokens of completion {index} are another text with this model's "
                "tokenizer: such rows can only be learned from with the model that they were recorded with, or one of "
                'its tokenizer; give other models\' traces as {"problem", "completion", "reward"}'
            )


def _check_logprobs(groups: Sequence[Group], objective: Objective) -> None:
    """Raise ConfigError where the objective divides by log-probs that the rows do not have."""
    dark = [group for group in groups if not all(one.logprobs for one in group.completions)]
    regularised = objective.kl is not None and objective.kl.weight > 0
    divides = "objective.kl" if regularised else f'objective.name = "{objective.name}"'
    if dark and (regularised or objective.learns_from == "log-probs"):
        raise ConfigError(
            f"{SETTING}: {len(dark):,} of {len(groups):,} groups have no log-probs of who sampled them (first: "
            f"{dark[0].source}), and {divides} weighs by them: use agro, spo, dro or one of "
            "examples/objectives without kl, or rollouts of a run"
        )
