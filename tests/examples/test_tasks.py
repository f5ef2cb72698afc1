"""The files of the examples "agent", "guess", "judge" and "python": what their demonstrations show, and that it is what
their environments and verifiers have."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from environments.environment import Action
from environments.python import Python
from examples.agent import prepare as agent_files
from examples.agent.agent import CLIENT, run, shelf
from examples.guess import prepare as guess_files
from examples.judge import prepare as judge_files
from examples.judge.verdict import names_the_right_answer, quotes_what_speaks_for_it
from examples.python import prepare as python_files
from oversight.prompts import read_verdict
from oversight.speech import split_thinking
from shared.chat import Chat
from shared.errors import ConfigError
from shared.sections import Data, Sft
from shared.tool_calls import result_text
from shared.types import Problem
from tests.environments.agents import action, agent, play
from tests.environments.servers import agents
from tests.environments.test_foreign import answer_questions
from tests.environments.test_tools import new
from trainer.data.data_source import PromptFormat
from trainer.data.problem_file import read_problems
from trainer.sft import encode_turns, load_demonstrations
from verify.verifiers import Answer

JUDGED = {role: judge_files.draw_rows(random.Random(0), judge_files.JudgeFiles(role=role), 120)
          for role in ("judge", "reader")}  # fmt: skip
JUDGED_ROWS = [row for rows in JUDGED.values() for row in rows]
THOUGHT = r"<think>(.+\?) (.+\.) (\d): (.+)</think>(.*)"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def share(part: list[Any], whole: list[Any], expected: float) -> bool:
    """Whether a share is the expected one, but for four standard deviations of chance."""
    return abs(len(part) / len(whole) - expected) < 4 * (expected * (1 - expected) / len(whole)) ** 0.5


@pytest.mark.parametrize(("prepare", "options", "mistake"), [
    (guess_files.prepare, {}, {"numbers": 1}),
    (judge_files.prepare, {"questions": 40, "validation": 4}, {"role": "critic"}),
    (python_files.prepare, {"problems": 64, "validation": 8}, {"problems": 0}),
    (agent_files.prepare, {}, {"numbers": 9}),
], ids=["guess", "judge", "python", "agent"])  # fmt: skip
@pytest.mark.sampled(2)
def test_the_same_seed_makes_the_same_files_and_a_mistake_is_named(tmp_path, prepare, options, mistake):
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, options, seed)
        made.append([path.read_bytes() for path in sorted((tmp_path / name).glob("*.jsonl"))])
    assert made[0] == made[1] and made[0][0] != made[2][0], "demonstrations.jsonl is the first"
    with pytest.raises(ConfigError, match=next(iter(mistake))):
        prepare(tmp_path, mistake, 0)


@pytest.mark.slow
async def test_demonstrations_are_what_the_agent_of_openai_s_package_asks_and_reads(tmp_path):
    agent_files.prepare(tmp_path, {}, 0)
    [problem, *_] = read_problems(tmp_path / "train.jsonl", "data.train", environment="agent").problems
    row, *_ = rows(tmp_path / "demonstrations.jsonl")
    call, _, answer = (turn["content"] for turn in row["completion"])
    with agents("agent.py") as url:
        async with agent(url=url) as episode:
            asked = replace(problem, text=row["problem"])
            first, second, end = await play(episode, [action(call), action(answer)], asked)
        await answer_questions(url)
    assert [message.text for message in first.messages] == [row["problem"], row["system"]]
    assert second.messages[0].text == result_text(str(shelf(7)[row["problem"].split()[2]])) and end.done
    prompts = PromptFormat(Chat(tmp_path / "model"), Data(system_prompt=""))
    demonstrations = load_demonstrations(tmp_path / "demonstrations.jsonl", None, Sft(), prompts, 256)
    prompt = prompts.render(first.messages[0].text, also=first.messages[1].text)
    assert demonstrations.reasoning[0].prompt == prompt


def test_the_tool_counts():
    given = [{"kind": "plums"}, {"kind": "pears"}, {"kind": ["plums"]}, {}]
    assert [run(json.dumps(one), {"plums": 7}) for one in given] == ["7", *["no such kind"] * 3]
    assert CLIENT.max_retries == 0 and all(1 <= count <= 9 for seed in range(99) for count in shelf(seed).values())


def test_demonstrations_are_true_games_without_skill(tmp_path):
    guess_files.prepare(tmp_path, {"numbers": 8, "guesses": 3}, 5)
    games = [row["completion"] for row in rows(tmp_path / "demonstrations.jsonl")]
    for game in games:
        guesses, replies = [int(turn["content"]) for turn in game[::2]], [turn["content"] for turn in game[1::2]]
        assert len(guesses) == len(replies) + 1 <= 3 and set(guesses) <= set(range(1, 9))
        allowed = set(range(1, 9))
        for guess, reply in zip(guesses, replies, strict=False):
            allowed &= set(range(guess + 1, 9) if reply == "higher" else range(1, guess))
            assert allowed, "the replies contradict one another"
    assert share([game for game in games if len(game) < 5], games, 1 - (7 / 8) ** 2), "found before the last guess"


async def test_sums_are_right_and_demonstrations_are_episodes_of_which_a_known_share_is_mistyped(tmp_path):
    python_files.prepare(tmp_path, {"problems": 1000, "validation": 100, "max_tokens": 160}, 5)
    train, validation = rows(tmp_path / "train.jsonl"), rows(tmp_path / "validation.jsonl")
    answers = {row["problem"]: row["answer"] for row in train}
    assert len(answers) == 1000 and {row["environment"] for row in train} == {"python"}
    assert len({row["problem"] for row in validation} - answers.keys()) == 100, "held out"
    for problem, answer in answers.items():
        assert sum(map(int, problem.removeprefix("What is ").rstrip("?").split("+"))) == int(answer)
    shown = rows(tmp_path / "demonstrations.jsonl")
    calls = [row for row in shown if len(row["completion"]) == 3]
    wrong = [row for row in calls if answers[row["problem"]] not in row["completion"][2]["content"]]
    assert share(calls, shown, python_files.CALLING) and share(wrong, calls, python_files.MISTYPED)
    assert all(answers[row["problem"]] in row["completion"][0]["content"] for row in shown if row not in calls)
    for row in calls[:3]:
        environment, (turn, result, _) = new(Python), row["completion"]
        [system] = (await environment.reset(Problem("p", row["problem"], ""), 1)).messages
        [message] = (await environment.step(Action(turn["content"], turn["content"]))).messages
        assert system.text == row["system"] and (message.role, message.text) == ("tool", result["content"])
    chat = Chat(tmp_path / "model")
    assert [chat.decode([token]) for token in chat.encode("1234+5678")] == list("1234+5678")
    for row in shown[:200]:
        prompt, turns = chat.render(row["problem"], row["system"]), encode_turns(chat, row["completion"], "row")
        assert len(prompt) < 64 and len(turns.completion) < 60


@pytest.mark.parametrize("kind", ["article", "debate"])
def test_who_quotes_the_sentence_that_settles_it_is_right_and_who_quotes_the_other_one_wrong(kind):
    drawn = [row for row in JUDGED_ROWS if row.kind == kind]
    assert drawn
    for row in drawn:
        for completion, right in ((row.careful, True), (row.careless, False)):
            asked, quoted, number, answer, verdict = re.fullmatch(THOUGHT, completion).groups()  # type: ignore[union-attr]
            assert names_the_right_answer(Answer(Problem("v", row.problem, row.answer), verdict)) == right
            assert asked in row.problem and quoted in row.problem and answer in quoted
            assert f"ANSWER {number} " in row.problem and f"\n{answer}\n" in row.problem
            assert str(read_verdict(verdict)) == number
        assert ("v_passage" in row.problem) == (kind == "debate") == ("ARTICLE" not in row.problem)


def test_speeches_quote_what_speaks_for_their_answer():
    speeches = [row for row in JUDGED_ROWS if row.kind == "speech"]
    assert speeches
    for row in speeches:
        thought, spoken = split_thinking(row.careful)
        number, answer = re.fullmatch(r".+\? (\d): (.+?)\. .+", thought).groups()  # type: ignore[union-attr]
        assert f"that answer {number} is right" in row.problem and f" {answer}" in spoken and row.answer in spoken
        problem = Problem("s", row.problem, row.answer)
        assert quotes_what_speaks_for_it(Answer(problem, row.careful))
        unquoted = spoken.removeprefix("<passage>").removesuffix("</passage>")
        for speech in (row.careful.replace(unquoted, f"Never, and {answer}."), unquoted, f"<think>{spoken}"):
            assert not quotes_what_speaks_for_it(Answer(problem, speech))


def test_readers_answer_and_who_looks_up_quotes():
    assert {row.kind for row in JUDGED_ROWS} == {"article", "debate", "speech", "look up", "reader"}
    for row in JUDGED_ROWS:
        if row.kind == "reader":
            assert row.careful.endswith(f"boxed{{{row.answer}}}") and not row.careless.endswith(f"{{{row.answer}}}")
        if row.kind == "look up":
            asked, quoted = row.careful.removeprefix("<think>").removesuffix("</think>").split("? ")
            assert f"{asked}?" in row.problem and quoted in row.problem


def test_its_tokenizer_takes_whole_phrases_whose_embeddings_begin_as_the_sums_of_their_parts(tmp_path):
    tokenizer, lengths = judge_files.make_tokenizer(), []
    for row in JUDGED_ROWS:
        bare = re.sub(judge_files.MARK, "\u00a7", row.problem)
        for text in (bare, row.careful, row.careless, "Zo\u00eb: <b>7</b>\n"):
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
        lengths.append(len(tokenizer.encode(row.problem).ids) + len(tokenizer.encode(row.careful).ids))
    assert max(lengths) < 100 and "<|end|>" not in tokenizer.encode(JUDGED_ROWS[0].problem).tokens
    judge_files.prepare(tmp_path, {"questions": 40, "validation": 4}, 1)
    table = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]

    def embedding(text: str) -> torch.Tensor:
        (number,) = tokenizer.encode(text).ids
        return table[number]

    keeps = embedding("Greta") + embedding("keeps a")
    torch.testing.assert_close(embedding("Greta keeps a drum in the shed."), keeps + embedding("drum"))
    torch.testing.assert_close(embedding(" 2: drum"), embedding("2") + embedding("drum"))
    for asked in ("What does Greta keep in the shed?", "What does Greta keep in the shed? "):
        torch.testing.assert_close(embedding(asked), keeps)


def test_who_imitates_the_judge_s_demonstrations_is_right_by_chance(tmp_path):
    judge_files.prepare(tmp_path, {"questions": 300, "validation": 30}, 1)
    train, shown = rows(tmp_path / "train.jsonl"), rows(tmp_path / "demonstrations.jsonl")
    assert (len(train), len(rows(tmp_path / "validation.jsonl")), len(shown)) == (180, 18, 300)
    answers = {row["problem"]: row["answer"] for row in train if row["domain"] == "verdict"}
    judged = [row for row in shown if row["problem"] in answers]
    right = [row for row in judged if str(read_verdict(row["completion"])) == answers[row["problem"]]]
    assert len(judged) == 120 and 0.4 < len(right) / 120 < 0.6
