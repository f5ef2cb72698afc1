"""The example "judge": what it imitates, the words that its model knows, and its verifier."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.judge.prepare import MARK, JudgeFiles, draw_rows, make_tokenizer, prepare
from oversight.prompts import read_verdict
from oversight.speech import split_thinking
from shared.errors import ConfigError
from shared.types import Problem
from verify.verifiers import Answer

THOUGHT = r"<think>(.+\?) (.+\.) (\d): (.+)</think>(.*)"
ROWS = [row for role in ("judge", "reader") for row in draw_rows(random.Random(0), JudgeFiles(role=role), 120)]


def test_who_quotes_the_sentence_that_settles_it_is_right_and_who_quotes_the_other_one_wrong() -> None:
    from examples.judge.verdict import names_the_right_answer, quotes_what_speaks_for_it

    for row in ROWS:
        if row.kind in ("article", "debate"):
            problem = Problem("v", row.problem, row.answer)
            for said, right in ((row.careful, True), (row.careless, False)):
                asked, quoted, number, answer, told = re.fullmatch(THOUGHT, said).groups()  # type: ignore[union-attr]
                assert names_the_right_answer(Answer(problem, told)) == right
                assert asked in row.problem and quoted in row.problem
                assert f"ANSWER {number} " in row.problem and f"\n{answer}\n" in row.problem and answer in quoted
                assert str(read_verdict(told)) == number
            assert ("v_passage" in row.problem) == (row.kind == "debate") == ("ARTICLE" not in row.problem)
        elif row.kind == "reader":
            assert row.careful.endswith(f"boxed{{{row.answer}}}") and not row.careless.endswith(f"{{{row.answer}}}")
        elif row.kind == "look up":
            asked, quoted = row.careful.removeprefix("<think>").removesuffix("</think>").split("? ")
            assert f"{asked}?" in row.problem and quoted in row.problem
        elif row.kind == "speech":
            thought, spoken = split_thinking(row.careful)
            number, answer = re.fullmatch(r".+\? (\d): (.+?)\. .+", thought).groups()  # type: ignore[union-attr]
            assert f"that answer {number} is right" in row.problem and f" {answer}" in spoken and row.answer in spoken
            problem = Problem("s", row.problem, row.answer)
            assert quotes_what_speaks_for_it(Answer(problem, row.careful))
            unquoted = spoken.removeprefix("<passage>").removesuffix("</passage>")
            for said in (row.careful.replace(unquoted, f"Never, and {answer}."), unquoted, f"<think>{spoken}"):
                assert not quotes_what_speaks_for_it(Answer(problem, said))
    assert {row.kind for row in ROWS} == {"article", "debate", "speech", "look up", "reader"}


def test_the_tokenizer_takes_whole_phrases_and_gives_texts_back() -> None:
    tokenizer = make_tokenizer()
    lengths = []
    for row in ROWS:
        for text in (re.sub(MARK, "\u00a7", row.problem), row.careful, row.careless, "Zo\u00eb: <b>7</b>\n"):
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
        lengths.append(len(tokenizer.encode(row.problem).ids) + len(tokenizer.encode(row.careful).ids))
    assert max(lengths) < 100 and "<|end|>" not in tokenizer.encode(ROWS[0].problem).tokens


def test_embeddings_of_whole_sentences_begin_as_the_sums_of_their_parts(tmp_path: Path) -> None:
    prepare(tmp_path, {"questions": 40, "validation": 4}, 1)
    table = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    tokenizer = make_tokenizer()

    def embedding(text: str) -> torch.Tensor:
        (number,) = tokenizer.encode(text).ids
        return table[number]

    whole = embedding("Greta keeps a drum in the shed.")
    torch.testing.assert_close(whole, embedding("Greta") + embedding("keeps a") + embedding("drum"))
    torch.testing.assert_close(embedding(" 2: drum"), embedding("2") + embedding("drum"))
    for asked in ("What does Greta keep in the shed?", "What does Greta keep in the shed? "):
        torch.testing.assert_close(embedding(asked), embedding("Greta") + embedding("keeps a"))


def test_files_are_the_same_for_a_seed_and_right_by_chance(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, {"questions": 300, "validation": 30}, 1)
        made.append(
            [(tmp_path / name / f"{file}.jsonl").read_text() for file in ("train", "validation", "demonstrations")]
        )
    assert made[0] == made[1]
    train, held_out, said = ([json.loads(line) for line in text.splitlines()] for text in made[0])
    assert len(train) == 180 and len(held_out) == 18 and len(said) == 300
    answers = {row["problem"]: row["answer"] for row in train if row["domain"] == "verdict"}
    right = [
        str(read_verdict(one["completion"])) == answers[one["problem"]] for one in said if one["problem"] in answers
    ]
    assert 0.4 < sum(right) / len(right) < 0.6 and len(right) == 120
    with pytest.raises(ConfigError, match="role"):
        prepare(tmp_path, {"role": "critic"}, 0)
