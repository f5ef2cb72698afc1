"""Problems that begin with a part of a right response: the prompt holds it, it is judged, nothing of it is trained."""

import asyncio
import json
from pathlib import Path

import pytest

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.chat import Chat
from shared.config import Config
from shared.errors import DataError
from shared.types import CONTEXT, SAMPLED, Completion, Group, Problem, Reward
from trainer.data.data_source import DataSource, PromptFormat
from trainer.data.problem_file import read_problems, refuse_prose
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of
from trainer.stages import Stages
from verify.scorer import RewardScorer

PREFIX, REST = "<think>Five and three more", " are eight, so that is it.</think>\nSo \\boxed{8}."
ROW = {"problem": "How many are 5 and 3?", "answer": "8", "prefix": PREFIX}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(ROW | changes), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build(folder, 0, train_tokenizer([PREFIX + REST] * 9, 280), 64)
    return Chat(folder)


CONFIG = Config.model_validate({"data": {"system_prompt": ""}})


def test_the_policy_goes_on_behind_the_prefix_and_is_judged_with_it(chat, tmp_path):
    stages = Stages(CONFIG)
    [problem] = read_problems(write(tmp_path / "rows.jsonl"), "data.train").problems
    source = DataSource([problem], stages, PromptFormat(chat, CONFIG.data))
    prompt = source.draw(0)
    begun, plain = chat.encode_completion(PREFIX), chat.render(ROW["problem"], "")
    assert prompt.token_ids == plain + begun
    completion = Completion(0, 0, 0, ids := [*chat.encode(REST), chat.eos_id], [-1.0] * len(ids), finish_reason="stop")
    cut = Completion(0, 1, 0, ids[:2], [-1.0] * 2, finish_reason="length")
    [whole] = read_problems(write(tmp_path / "plain.jsonl", prefix=""), "data.train").problems

    async def score() -> list[tuple[Reward, str]]:
        scorer = RewardScorer(stages, chat)
        try:
            return [await scorer.score(*pair)
                    for pair in ((problem, completion), (problem, cut), (whole, completion))]  # fmt: skip
        finally:
            await scorer.close()

    (right, text), (broken, _), (alone, _) = asyncio.run(score())
    assert (right.verdict, right.total, text) == ("correct", pytest.approx(1.1), PREFIX + REST)
    assert alone.verdict == "no answer", "it is no whole response by itself"
    group = Group(prompt, [completion, cut], [right, broken])
    [first, _] = train_sequences([group], objective_of(CONFIG), CONFIG)
    assert first.mask == bytes([CONTEXT]) * (len(plain) + len(begun)) + bytes([SAMPLED]) * len(ids)


def test_a_prefix_opens_the_reasoning_and_ends_no_turn(chat):
    prompts, end = PromptFormat(chat, CONFIG.data), chat.tokenizer.convert_ids_to_tokens(chat.eos_id)
    text = f"<think>Five{end}{end} and {end}"
    ids, usual = (prompts.prompt_of(Problem("p", "?", "8", prefix=prefix)) for prefix in (text, ""))
    assert ids.count(chat.eos_id) == usual.count(chat.eos_id)
    begun = ids[len(usual) :]
    assert chat.tokenizer.decode(begun) == text and begun[0] == chat.encode("<think>")[0]


def test_what_cannot_go_on_behind_a_prefix_is_refused(tmp_path):
    with pytest.raises(DataError, match="the row has an environment"):
        read_problems(write(tmp_path / "rows.jsonl", environment="retry"), "data.train")
    with pytest.raises(DataError, match="1 rows have a prefix"):
        refuse_prose(read_problems(write(tmp_path / "rows.jsonl"), "data.train"))
