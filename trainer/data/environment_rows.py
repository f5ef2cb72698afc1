"""What `--dry-run`, `check` and the start of a launch say of environments: which the data names, and where one is not
there; the tokens that an episode may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from environments.environment import UnknownEnvironment
from environments.host import EnvironmentHost
from shared.config import Config
from shared.types import Problem, Reward
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import ProblemFile, check_environments
from trainer.episodes import Episodes

LONGEST = 20
"""problems with the longest texts, among which the longest prompt is looked for"""


class EnvironmentRow(NamedTuple):
    """A row of data that has an environment."""

    setting: str
    """the file: "data.train" or "data.validation\""""
    where: str
    environment: str
    domain: str
    text: str
    language: str
    """in which its completions are to be reasoned, "" for no request"""


def environment_rows(files: Iterable[ProblemFile]) -> list[EnvironmentRow]:
    """The rows that have an environment."""
    return [
        EnvironmentRow(
            file.setting, f"{file.setting}: {file.where(one)}", one.environment, one.domain, one.text,
            one.reasoning_language,
        )
        for file in files
        for one in file.problems
        if one.environment
    ]  # fmt: skip


async def start_episodes(episodes: Episodes, files: Sequence[ProblemFile], problems: Sequence[Problem]) -> None:
    """Start what the environments of these problems, which are of `files`, need, and try how they begin. Raises what
    `Episodes.start` and `try_beginnings` raise, and DataError with file and line for an environment that is not there.
    """
    try:
        await episodes.start(problems)
    except UnknownEnvironment:
        rows = [row for file in files for row in file.environments]
        check_environments(rows, episodes.host.others, episodes.settings.name)
        raise
    await episodes.try_beginnings(problems)


async def look_up(config: Config, rows: list[EnvironmentRow]) -> None:
    """Look for the environments of these rows and of the settings, where there are such. Raises DataError; ConfigError
    for an environment whose options are wrong and a plug-in file that cannot be run."""

    async def grade(problem: Problem, text: str) -> Reward:
        raise RuntimeError("no episode begins here")

    default = config.environment.name
    if not rows and not default:
        return
    host = EnvironmentHost(config.environment, config.reward, grade)
    try:
        await host.start(sorted({*(row.environment for row in rows), *([default] if default else [])}))
    except UnknownEnvironment:
        named = [(row.where, row.environment) for row in rows]
        check_environments([*named, ("environment.name", default)], host.others, default)
        raise
    finally:
        await host.end()


def environment_lines(config: Config, rows: list[EnvironmentRow]) -> Iterator[str]:
    """One line an environment, and those of the limits of an episode; none where there are no environments."""
    settings, sampled = config.environment, _most_sampled(config)
    counts = Counter((row.environment, row.setting) for row in rows)
    names = sorted({*(row.environment for row in rows), *([settings.name] if settings.name else [])})
    for name in names:
        files = [f"{count:,} problems of {setting}" for (of, setting), count in counts.items() if of == name]
        yield f"{name:<14} {', '.join(files) or 'environment.name; [data] is not there yet'}"
    if names:
        yield (
            f"an episode     at most {settings.max_turns} turns of {settings.turn_tokens or sampled:,} tokens, "
            f"{sampled:,} sampled in all; {settings.step_s:g} s for an answer, {settings.episode_s:g} s for all"
        )


def room_lines(config: Config, rows: list[EnvironmentRow], added: Mapping[str, int] = {}) -> Iterator[str]:
    """The most tokens of an episode; a second line if model.max_tokens may not hold them. added: `Episodes.added`.
    Raises ModelError for a chat template that rewrites its history, where that is not allowed."""
    settings, sampled, folder = config.environment, _most_sampled(config), Path(config.locate(config.model.path))
    if not rows and not settings.name:
        return
    prompt, around, texts = 0, 0, ""
    if folder.is_dir():
        from shared.chat import Chat

        chat = Chat.of_run(folder, config)
        if settings.history == "template":
            chat.check_history()
        more, prompts = Counter(added), PromptFormat(chat, config.data)
        longest = sorted(rows, key=lambda row: -len(row.text) - more[row.environment])[:LONGEST]
        sizes = [len(prompts.render(row.text, row.domain, language=row.language)) for row in longest]
        prompt = max((size + more[row.environment] for size, row in zip(sizes, longest, strict=True)), default=0)
        around = len(chat.bridge([("user", "")]))
        texts = f"{prompt:,} of the longest prompt + "
    answers, each = settings.max_turns - 1, settings.observation_tokens + around
    most = prompt + sampled + answers * each
    tokens = f"{most:,} = {texts}{sampled:,} sampled + {answers} answers of {each:,}"
    yield f"its tokens     at most {tokens}" + (f", {around} of them the chat template's" if around else "")
    if most > config.model.max_tokens:
        yield (
            f"an episode may have {tokens} tokens, and model.max_tokens = {config.model.max_tokens:,} holds fewer: one "
            "that reaches it ends there. Raise model.max_tokens, or lower environment.observation_tokens (an answer is "
            "cut to it), environment.max_turns or rollout.max_completion_tokens"
        )


def _most_sampled(config: Config) -> int:
    return max(stage.rollout.max_completion_tokens for stage in config.every_stage)
