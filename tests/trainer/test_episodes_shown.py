"""Episodes as people see them: turns by role in rollout files, evaluations and the report; what is not measured."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.chat import Chat
from shared.config import Config
from shared.progress import Progress, plain
from shared.sections import Data
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, TurnText, Verdict, VersionSpan
from tests.shared.test_turns import ENDS, chat_of
from trainer.data.data_source import PromptFormat
from trainer.episodes import turns_of
from trainer.evaluation import EvaluationRecord, Sampled, summarise
from trainer.ledger import Ledger
from trainer.report import before_after_table, sample_panels
from trainer.run_log import RunLogger
from trainer.stages import Stages
from trainer.step_metrics import rollout_metrics
from trainer.timing import PhaseTimer
from verify.scorer import reward_of

PROBLEM = Problem("p", "Find the number.", "", environment="guess")


def prompts_of(folder: Path, name: str = "ours") -> PromptFormat:
    return PromptFormat(chat_of(folder, name), Data(system_prompt=""))


def episode(chat: Chat, *turns: str, said: str = "higher <|end|>", role: str = "user") -> Completion:
    """An episode whose turns end with the end token, and have `said` between them; the last one has reward 1."""
    completion = Completion(0, 0, 0, finish_reason="stop")
    for number, text in enumerate(turns):
        ids = chat.bridge([(role, said)]) if number else []
        start = len(completion.token_ids) + len(ids)
        ids += [*chat.encode(text), chat.eos_id]
        completion.token_ids = [*completion.token_ids, *ids]
        end = len(completion.token_ids)
        completion.spans = [*completion.spans, VersionSpan(0, start, end)]
        turn = Turn(start, end, reward=float(number == len(turns) - 1), seconds=0.5)
        completion.turns = [*completion.turns, turn]
    completion.logprobs = [-1.0] * len(completion.token_ids)
    return completion


@pytest.mark.parametrize("name", ENDS)
def test_an_episode_is_split_by_its_turns_whatever_their_texts_spell(tmp_path: Path, name: str) -> None:
    prompts = prompts_of(tmp_path, name)
    prompt = Prompt(0, PROBLEM, prompts.render(PROBLEM.text))
    found = turns_of(prompts, prompt, episode(prompts.chat, "8", "12 <|user|> <|im_start|>"))
    assert [(part.role, part.reward) for part in found] == [("policy", 0.0), ("environment", None), ("policy", 1.0)]
    think = prompts.chat.think_prefix
    assert [part.text for part in found] == [think + "8", "higher <|end|>", think + "12 <|user|> <|im_start|>"]


def test_tokens_that_no_bridge_of_one_message_made_are_shown_as_they_are(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path)
    prompt = Prompt(0, PROBLEM, prompts.render(PROBLEM.text))
    several = prompts.chat.bridge([("user", "a"), ("user", "b")])
    completion = Completion(0, 0, 0, [5, *several, 6], turns=[Turn(0, 1), Turn(1 + len(several), 2 + len(several))])
    assert turns_of(prompts, prompt, completion)[1].text == "<|user|>a<|user|>b<|assistant|>"


def test_a_beginning_that_the_environment_wrote_is_shown_and_so_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(tmp_path)
    completion = Completion(0, 0, 0, [5], turns=[Turn(0, 1, failure="environment guess: hung")])
    opened = turns_of(prompts, Prompt(0, PROBLEM, prompts.render("Another text.")), completion)
    assert opened[0] == TurnText("environment", "<|user|>Another text.<|assistant|>")
    assert (opened[1].role, opened[1].failure) == ("policy", "environment guess: hung")
    prompt = Prompt(0, PROBLEM, prompts.render(PROBLEM.text))
    monkeypatch.setattr(prompts.chat, "think_prefix", "<think>")
    for turn, text in ((Turn(0, 0), ""), (Turn(0, 1), "<think>" + prompts.chat.decode([5]))):
        completion = Completion(0, 0, 0, [5][: turn.end], turns=[turn])
        assert turns_of(prompts, prompt, completion) == [TurnText("policy", text, turn.reward)], (
            "a turn that never began"
        )


def group_of(problem: Problem, prompts: PromptFormat, *completions: Completion) -> Group:
    rewards: list[Reward | None] = [reward_of(one) for one in completions]
    prompt = Prompt(0, problem, prompts.render(problem.text))
    return Group(prompt, list(completions), rewards, ["text"] * len(completions))


def test_rollout_files_have_the_turns_of_episodes_and_nothing_new_of_others(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path)
    config = Config(name="seen", runs_dir=str(tmp_path))
    logger = RunLogger(
        PhaseTimer(), Progress(io.StringIO()), None, None, Ledger(Stages(config)), list,  # type: ignore[arg-type]
        prompts=prompts,
    )  # fmt: skip
    single = group_of(Problem("q", "1 + 1?", "2"), prompts, Completion(0, 0, 0, [5], [-1.0], finish_reason="stop"))
    asyncio.run(logger.keep([group_of(PROBLEM, prompts, episode(prompts.chat, "8", "12")), single], 1))
    first, second = map(json.loads, (config.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines())
    assert first["turns"] == [[
        {"role": "policy", "text": "8", "reward": 0.0}, {"role": "environment", "text": "higher <|end|>"},
        {"role": "policy", "text": "12", "reward": 1.0},
    ]]  # fmt: skip
    assert list(second) == ["prompt", "completions", "rewards", "texts"]
    assert msgspec.convert(first, Group).completions[0].turns[1].end == len(first["completions"][0]["token_ids"])


def test_what_an_environment_grades_has_neither_format_nor_language(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path)
    group = group_of(PROBLEM, prompts, episode(prompts.chat, "8"), episode(prompts.chat, "8", "12"))
    row = rollout_metrics([group], [0], [])
    assert row["accuracy"] == 1.0 and row["reward/mean"] == 1.0
    assert not {"format", "consistency", "reward/format", "reward/language"} & set(row)
    well = Reward(1.1, 0.1, 0.9, 0.0, 0.1, Verdict.CORRECT, consistent=True)
    single = Group(Prompt(1, Problem("q", "?", "1"), [1]), [episode(prompts.chat, "8")], [well])
    mixed = rollout_metrics([group, single], [0, 0], [])
    assert (mixed["format"], mixed["consistency"], mixed["reward/format"]) == (1.0, 1.0, 0.1)


def sampled(chat: Chat, prompts: PromptFormat, *turns: str) -> Sampled:
    completion, prompt = episode(chat, *turns), Prompt(0, PROBLEM, prompts.render(PROBLEM.text))
    texts = turns_of(prompts, prompt, completion)
    return Sampled(PROBLEM, chat.decode(completion.token_ids), reward_of(completion), completion.sampled_tokens, texts)


def test_an_evaluation_and_its_report_show_turns_and_leave_out_what_is_not_measured(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path)
    found = summarise(
        1.0, [[sampled(prompts.chat, prompts, "8", "[bold]12\x1b[2J")], [sampled(prompts.chat, prompts, "3")]]
    )
    assert (found.consistency, found.format, found.accuracy) == (None, None, 1.0)
    records = [EvaluationRecord(0, 1.0, msgspec.json.decode(msgspec.json.encode(found), type=type(found)))]
    table = plain(before_after_table(records, 1.0))
    assert "reward" in table and "language consistency" not in table and "format" not in table
    text = plain(sample_panels(records, 1.0)[0])
    lines = [line.strip("│ ") for line in text.splitlines()]
    assert (
        lines[2:6]
        == ["", "policy (reward 0): 8", "environment: higher <|end|>", "policy (reward 1): [bold]12·[2J"][-4:]
    )
    assert "environment guess" in text and "ground truth" not in text
    assert b'"turns"' not in msgspec.json.encode(Sampled(PROBLEM, "", reward_of(episode(prompts.chat, "1")), 1))


def test_the_line_of_an_evaluation_says_what_was_measured(tmp_path: Path) -> None:
    prompts, stream = prompts_of(tmp_path), io.StringIO()
    config = Config(name="line", runs_dir=str(tmp_path))
    arguments: Any = (PhaseTimer(), Progress(stream), None, None, Ledger(Stages(config)), list)
    RunLogger(*arguments).evaluation(0, summarise(1.0, [[sampled(prompts.chat, prompts, "8")]]))
    assert "accuracy 1.000" in stream.getvalue() and "tokens" in stream.getvalue()
    assert "consistency" not in stream.getvalue() and "format" not in stream.getvalue()
