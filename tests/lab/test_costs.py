"""docs/costs.md: what it calls computed is what `python -m lab.plan` computes."""

import json
import re
from pathlib import Path

import pytest

from lab.plan.__main__ import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "costs.md").read_text(encoding="utf-8")
CARDS = {"A100, 80 GB": "a100-80", "H100": "h100", "H200": "h200"}
ONE_CARD = re.findall(
    r"^\| (\S+b) \| ([^|]+) \| (\d+) s \| (\d+) s \| (\d+) s \| ([\d.]+) h \| ([\d.]+) P \|$", PAGE, re.MULTILINE
)
EIGHT_CARDS = re.findall(
    r"^\| (\S+b) \| 8 (\w+) \| .* \| (\d+) s \| ([\d.]+) h \| 8 cards: (\d+) P \|$", PAGE, re.MULTILINE
)


def plan(capsys: pytest.CaptureFixture[str], model: str, gpus: int, card: str) -> dict[str, dict[str, float]]:
    main([model, f"--gpus={gpus}", "--card", CARDS[card], "--mean=1000", "--p99=4000", "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "card", "sampling", "training", "step", "hours", "cost"), ONE_CARD)
def test_a_row_of_one_card(capsys, model, card, sampling, training, step, hours, cost):
    planned = plan(capsys, model, 2, card)
    split, seconds = planned["split"], planned["step_s"]["synchronous"]
    assert [round(split["sampling"]["together_s"]), round(split["train_s"])] == [int(sampling), int(training)]  # type: ignore[index]
    assert round(seconds) == int(step) and hours == cost == f"{seconds * 200 / 3600:.1f}"


@pytest.mark.parametrize(("model", "card", "step", "hours", "cost"), EIGHT_CARDS)
def test_a_row_of_eight_cards(capsys, model, card, step, hours, cost):
    seconds = plan(capsys, model, 8, card)["step_s"]["asynchronous"]
    assert round(seconds) == int(step) and hours == f"{seconds * 200 / 3600:.1f}"
    assert int(cost) == round(8 * seconds * 200 / 3600)


def test_the_tables_are_read():
    assert len(ONE_CARD) == 6 and len(EIGHT_CARDS) == 2
