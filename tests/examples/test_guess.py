"""The files of the example "guess": games that are answered truly and guessed at random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.guess.prepare import prepare
from shared.errors import ConfigError


def test_demonstrations_are_true_games_without_skill(tmp_path: Path) -> None:
    prepare(tmp_path, {"numbers": 8, "guesses": 3}, 5)
    games = [json.loads(line)["completion"] for line in (tmp_path / "demonstrations.jsonl").open()]
    found = 0
    for game in games:
        guesses, replies = [int(one["content"]) for one in game[::2]], [one["content"] for one in game[1::2]]
        assert len(guesses) == len(replies) + 1 <= 3 and set(guesses) <= set(range(1, 9))
        allowed = set(range(1, 9))
        for guess, reply in zip(guesses, replies, strict=False):
            allowed &= set(range(guess + 1, 9) if reply == "higher" else range(1, guess))
            assert allowed, "the replies contradict one another"
        found += len(guesses) < 3
    chance = 1 - (7 / 8) ** 2  # of being found before the last guess
    assert abs(found / len(games) - chance) < 4 * (chance * (1 - chance) / len(games)) ** 0.5


def test_the_same_seed_makes_the_same_files_and_a_mistake_is_named(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, {}, seed)
    first, second, other = ((tmp_path / name / "demonstrations.jsonl").read_bytes() for name in "abc")
    assert first == second != other
    with pytest.raises(ConfigError, match="numbers"):
        prepare(tmp_path, {"numbers": 1}, 0)
