"""Episodes as people see them: turns by role in rollout files, evaluations and the report; what is not measured."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import msgspec
import pytest

from shared.chat import Chat
from shared.progress import plain
from shared.sections import Data
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, TurnText, Verdict, VersionSpan
from tests.shared.test_turns import ENDS, chat_of
from tests.trainer.test_evaluation import logger_of
from trainer.data.data_source import PromptFormat
from trainer.episodes import turns_of
from trainer.evaluation import EvaluationRecord, Sampled, summarise
from trainer.report import before_after_table, sample_panels
from trainer.step_metrics import rollout_metrics
from verify.scorer import reward_of

PROBLEM = Problem("p", "Find the number.", "", environment="guess")


def prompts_of(folder: Path, name: str = "ours") -> PromptFormat:
    return PromptFormat(chat_of(folder, name), Data(system_prompt=""))


@pytest.fixture
def prompts(tmp_path: Path) -> PromptFormat:
    return prompts_of(tmp_path)


def prompt_of(prompts: PromptFormat) -> Prompt:
    return Prompt(0, PROBLEM, prompts.render(PROBLEM.text))


def episode(chat: Chat, *turns: str) -> Completion:
    """An episode whose turns end with the end token, between which a user says a text; the last one has reward 1."""
    completion = Completion(0, 0, 0, finish_reason="stop")
    for number, text in enumerate(turns):
        ids = chat.bridge([("user", "higher <|end|>")]) if number else []
        start = len(completion.token_ids) + len(ids)
        completion.token_ids = [*completion.token_ids, *ids, *chat.encode(text), chat.eos_id]
        end = len(completion.token_ids)
        completion.spans = [*completion.spans, VersionSpan(0, start, end)]
        turn = Turn(start, end, reward=float(number == len(turns) - 1), seconds=0.5)
        completion.turns = [*completion.turns, turn]
    completion.logprobs = [-1.0] * len(completion.token_ids)
    return completion


@pytest.mark.parametrize("name", ENDS)
def test_an_episode_is_split_by_its_turns_whatever_their_texts_spell(tmp_path: Path, name: str) -> None:
    prompts = prompts_of(tmp_path, name)
    parts = turns_of(prompts, prompt_of(prompts), episode(prompts.chat, "8", "12 <|user|> <|im_start|>"))
    think = prompts.chat.think_prefix
    assert [(part.role, part.reward, part.text) for part in parts] == [
        ("policy", 0.0, f"{think}8"), ("environment", None, "higher <|end|>"),
        ("policy", 1.0, f"{think}12 <|user|> <|im_start|>"),
    ]  # fmt: skip


def test_tokens_that_no_bridge_of_one_message_made_are_shown_as_they_are(prompts: PromptFormat) -> None:
    several = prompts.chat.bridge([("user", "a"), ("user", "b")])
    completion = Completion(0, 0, 0, [5, *several, 6], turns=[Turn(0, 1), Turn(1 + len(several), 2 + len(several))])
    assert turns_of(prompts, prompt_of(prompts), completion)[1].text == "<|user|>a<|user|>b<|assistant|>"


def test_a_beginning_that_the_environment_wrote_is_shown_and_so_is_a_failure(
    prompts: PromptFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = Completion(0, 0, 0, [5], turns=[Turn(0, 1, failure="environment guess: hung")])
    opened = turns_of(prompts, Prompt(0, PROBLEM, prompts.render("Another text.")), completion)
    assert opened[0] == TurnText("environment", "<|user|>Another text.<|assistant|>")
    assert (opened[1].role, opened[1].failure) == ("policy", "environment guess: hung")
    monkeypatch.setattr(prompts.chat, "think_prefix", "<think>")
    for turn, text in ((Turn(0, 0), ""), (Turn(0, 1), "<think>" + prompts.chat.decode([5]))):
        completion = Completion(0, 0, 0, [5][: turn.end], turns=[turn])
        shown = turns_of(prompts, prompt_of(prompts), completion)
        assert shown == [TurnText("policy", text, turn.reward)], "also a turn that never began"


def group_of(problem: Problem, prompts: PromptFormat, *completions: Completion) -> Group:
    rewards: list[Reward | None] = [reward_of(each) for each in completions]
    prompt = Prompt(0, problem, prompts.render(problem.text))
    return Group(prompt, list(completions), rewards, ["text"] * len(completions))


def test_rollout_files_have_the_turns_of_episodes_and_nothing_new_of_others(
    tmp_path: Path, prompts: PromptFormat
) -> None:
    logger = logger_of(tmp_path, io.StringIO(), prompts=prompts)
    single = group_of(Problem("q", "1 + 1?", "2"), prompts, Completion(0, 0, 0, [5], [-1.0], finish_reason="stop"))
    asyncio.run(logger.keep([group_of(PROBLEM, prompts, episode(prompts.chat, "8", "12")), single], 1))
    first, second = map(json.loads, (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines())
    assert first["turns"] == [[
        {"role": "policy", "text": "8", "reward": 0.0}, {"role": "environment", "text": "higher <|end|>"},
        {"role": "policy", "text": "12", "reward": 1.0},
    ]]  # fmt: skip
    assert list(second) == ["prompt", "completions", "rewards", "texts"]
    assert msgspec.convert(first, Group).completions[0].turns[1].end == len(first["completions"][0]["token_ids"])


def test_what_an_environment_grades_has_neither_format_nor_language(prompts: PromptFormat) -> None:
    group = group_of(PROBLEM, prompts, episode(prompts.chat, "8"), episode(prompts.chat, "8", "12"))
    row = rollout_metrics([group], [0], [])
    assert row["accuracy"] == 1.0 and row["reward/mean"] == 1.0
    assert not {"format", "consistency", "reward/format", "reward/language"} & set(row)
    well = Reward(1.1, 0.1, 0.9, 0.0, 0.1, Verdict.CORRECT, consistent=True)
    single = Group(Prompt(1, Problem("q", "?", "1"), [1]), [episode(prompts.chat, "8")], [well])
    mixed = rollout_metrics([group, single], [0, 0], [])
    assert (mixed["format"], mixed["consistency"], mixed["reward/format"]) == (1.0, 1.0, 0.1)


def test_an_evaluation_and_its_report_show_turns_and_leave_out_what_is_not_measured(
    tmp_path: Path, prompts: PromptFormat
) -> None:
    def sampled(*turns: str) -> Sampled:
        completion = episode(prompts.chat, *turns)
        text, texts = prompts.chat.decode(completion.token_ids), turns_of(prompts, prompt_of(prompts), completion)
        return Sampled(PROBLEM, text, reward_of(completion), completion.sampled_tokens, texts)

    score = summarise(1.0, [[sampled("8", "[bold]12\x1b[2J")], [sampled("3")]])
    assert (score.consistency, score.format, score.accuracy) == (None, None, 1.0)
    records = [EvaluationRecord(0, 1.0, msgspec.json.decode(msgspec.json.encode(score), type=type(score)))]
    table = plain(before_after_table(records, 1.0))
    assert "reward" in table and "language consistency" not in table and "format" not in table
    text = plain(sample_panels(records, 1.0)[0])
    lines = [line.strip("│ ") for line in text.splitlines()]
    shown = ["", "policy (reward 0): 8", "environment: higher <|end|>", "policy (reward 1): [bold]12·[2J"]
    assert lines[2:6] == shown and "environment guess" in text and "ground truth" not in text
    assert b'"turns"' not in msgspec.json.encode(Sampled(PROBLEM, "", reward_of(episode(prompts.chat, "1")), 1))
    logger_of(tmp_path, stream := io.StringIO()).evaluation(0, score)
    assert "accuracy 1.000" in stream.getvalue() and "tokens" in stream.getvalue()
    assert "consistency" not in stream.getvalue() and "format" not in stream.getvalue()
