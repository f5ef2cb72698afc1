"""The example of a reward that gates: answers that their own text denies or doubts."""

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from examples.manners.reward import doubt
from shared.errors import ConfigError
from shared.types import Problem, Verdict
from tests.tables import read_table
from trainer import __main__ as trainer
from verify.plugin_host import close_hosts
from verify.reward import CompletionScorer

ROOT = Path(__file__).resolve().parents[2]
ROWS = read_table("examples/stances")
"""texts around a box in seven languages, most of them written by people who had not seen the words; "paid": honest"""
SEVERAL = ("or else", "ou bien", "oppure", "either", "entweder", "либо", "or 121")
"""what the rule "several" refuses by itself"""


def test_an_answer_is_paid_where_its_text_stands_by_it():
    reasons = [doubt(row["problem"], row["text"]) for row in ROWS]
    different = [(row, why) for row, why in zip(ROWS, reasons, strict=True) if (not why) is not row["paid"]]
    assert not [pair for pair in different if pair[0]["paid"] or not any(word in pair[0]["text"] for word in SEVERAL)]


async def test_the_settings_close_a_gate_in_front_of_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    right = Mock(check=AsyncMock(return_value=Verdict.CORRECT))
    scorer = CompletionScorer(trainer.load("examples/manners/settings.toml", []).reward.resolved(64), right)
    problem = Problem("x", "Tom has 2 apples. Tom buys 3 more. How many apples does Tom have now?", "5", "en")
    thoughts = "<think>Tom starts with 2 apples and buys 3 more, so we add them: 2+3=5.</think>"
    texts = ("The answer is \\boxed{5}.", "The answer is not \\boxed{5}.", "Not 4 but \\boxed{5}.")
    try:
        stated, denied, honest = [await scorer.score(problem, thoughts + text, 30) for text in texts]
    finally:
        close_hosts()
    assert stated.total == honest.total > 1
    assert denied.total == 0 and "gate manners" in denied.reason and denied.verdict is Verdict.CORRECT


def test_settings_with_the_former_rule_name_the_example(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('[reward]\nrefuse = ["empty", "denied"]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r'settings.toml: reward.refuse: "denied" is .*examples/manners') as error:
        trainer.load(str(file), [])
    assert len(str(error.value).splitlines()) == 1
