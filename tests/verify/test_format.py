"""Every format rule alone, and the parts of a well-formed response."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processor_time import at_most
from tests.tables import read_table
from verify.code_block import first_program
from verify.format import Parts, check_format, check_tokens


def test_well_formed_response_is_cut_in_two() -> None:
    parts = check_format("<think>2+3=5</think>The answer is \\boxed{5}.")
    assert parts.ok
    assert (parts.reasoning, parts.response, parts.answer) == ("2+3=5", "The answer is \\boxed{5}.", "5")


@pytest.mark.parametrize("row", read_table("verify/formats", kind="broken"), ids=lambda row: row["text"])
def test_each_broken_rule_is_named(row: dict[str, str]) -> None:
    parts = check_format(row["text"])
    assert not parts.ok and row["rule"] in parts.failed
    assert parts.answer is None


def test_template_that_opens_the_thought_counts_as_the_start() -> None:
    assert check_format("a</think>\\boxed{5}", opened=True).ok
    assert not check_format("<think>a</think>\\boxed{5}", opened=True).ok


def test_last_box_of_the_solution_is_the_answer() -> None:
    assert check_format("<think>\\boxed{1}</think>\\boxed{2}, so \\boxed{3}").answer == "3"


def test_empty_box_is_well_formed_but_empty() -> None:
    parts = check_format("<think></think>\\boxed{}")
    assert parts.ok and parts.answer == ""


SPELLED = {1: "[THINK]", 2: "[/THINK]", 3: "so 2+3=5", 4: "\\boxed{5}", 5: "[THINK]", 6: "[/THINK]", 7: "<think>",
           8: "</think>"}  # fmt: skip
"""1 and 2 are control tokens; 5 and 6 stand for the same letters in ordinary tokens"""


def tokens(*ids: int, opened: bool = False) -> Parts:
    return check_tokens(ids, (1, 2), lambda some: "".join(SPELLED[i] for i in some), opened=opened)


def test_control_tokens_are_counted_as_tokens() -> None:
    assert tokens(1, 3, 2, 4) == Parts("so 2+3=5", "\\boxed{5}", "5", "")
    assert tokens(1, 3, 6, 2, 4).reasoning == "so 2+3=5[/THINK]"  # letters close nothing
    assert tokens(1, 5, 3, 2, 4).ok
    assert tokens(3, 2, 4, opened=True).ok


@pytest.mark.parametrize(
    ("ids", "opened", "rule"),
    [
        ((5, 3, 2, 4), False, "does not start"),
        ((1, 3, 6, 4), False, "never closed"),
        ((1, 3, 4), False, "never closed"),
        ((1, 1, 3, 2, 4), False, "found 2 and 1"),
        ((1, 3, 2, 2, 4), False, "found 1 and 2"),
        ((1, 3, 2, 1, 4), False, "found 2 and 1"),
        ((1, 3, 2), False, "no balanced"),
        ((1, 4, 2, 3), False, "only inside the reasoning"),
        ((1, 3, 2, 4), True, "found 2 and 1"),
        ((), False, "does not start"),
        ((3, 1, 2, 4), False, "does not start"),
    ],
)
def test_each_rule_on_control_tokens(ids: tuple[int, ...], opened: bool, rule: str) -> None:
    assert rule in tokens(*ids, opened=opened).failed


def test_model_with_control_tokens_may_still_write_the_tags_as_text() -> None:
    assert tokens(7, 3, 8, 4).ok
    assert not tokens(7, 3, 2, 4).ok


@pytest.mark.parametrize("row", read_table("verify/code_blocks"), ids=lambda row: row["solution"])
def test_first_fenced_block_that_names_a_language(row: dict[str, Any]) -> None:
    """In lists, quotations and other fences, too."""
    assert first_program(row["solution"]) == (tuple(row["block"]) if row["block"] else None)


def test_fences_are_found_in_linear_time() -> None:
    for text in ("```" + "a" * 200_000 + "`", "`" * 200_000 + "a`", "```py\n" * 50_000, "```" + " " * 200_000 + "`"):
        with at_most(1):
            first_program(text)
