"""Every format rule alone, the parts of a well-formed response, and the programs in its fences."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processor_time import at_most
from tests.tables import read_table
from verify.code_block import first_program
from verify.format import Parts, check_format, check_tokens

SPELLED = {1: "[THINK]", 2: "[/THINK]", 3: "so 2+3=5", 4: "\\boxed{5}", 5: "[THINK]", 6: "[/THINK]", 7: "<think>",
           8: "</think>"}  # fmt: skip
"""1 and 2 are control tokens; 5 and 6 stand for the same letters in ordinary tokens"""


def test_well_formed_response_is_cut_in_two() -> None:
    found = check_format("<think>2+3=5</think>The answer is \\boxed{5}.")
    assert found == Parts("2+3=5", "The answer is \\boxed{5}.", "5", "") and found.ok
    assert check_format("<think>\\boxed{1}</think>\\boxed{2}, so \\boxed{3}").answer == "3", "the last of the solution"
    empty = check_format("<think></think>\\boxed{}")
    assert empty.ok and empty.answer == "", "well-formed, but empty"
    assert check_format("a</think>\\boxed{5}", opened=True).ok, "opened by the template"
    assert not check_format("<think>a</think>\\boxed{5}", opened=True).ok


@pytest.mark.parametrize("row", read_table("verify/formats", kind="broken"), ids=lambda row: row["text"])
def test_each_broken_rule_is_named(row: dict[str, str]) -> None:
    found = check_format(row["text"])
    assert not found.ok and row["rule"] in found.failed and found.answer is None


@pytest.mark.parametrize(
    ("ids", "opened", "rule"),
    [
        ((1, 3, 2, 4), False, ""),
        ((1, 3, 6, 2, 4), False, ""),  # letters close nothing
        ((1, 5, 3, 2, 4), False, ""),
        ((3, 2, 4), True, ""),
        ((7, 3, 8, 4), False, ""),  # a model with control tokens may still write the tags as text
        ((7, 3, 2, 4), False, "never closed"),
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
def test_control_tokens_are_counted_as_tokens(ids: tuple[int, ...], opened: bool, rule: str) -> None:
    found = check_tokens(ids, (1, 2), lambda some: "".join(SPELLED[i] for i in some), opened=opened)
    assert found.ok is not bool(rule) and rule in found.failed
    if found.ok:
        reasoning = "".join(SPELLED[i] for i in ids if i in (3, 5, 6))
        assert found == Parts(reasoning, "\\boxed{5}", "5", "")


@pytest.mark.parametrize("row", read_table("verify/code_blocks"), ids=lambda row: row["solution"])
def test_first_fenced_block_that_names_a_language(row: dict[str, Any]) -> None:
    """In lists, quotations and other fences, too."""
    assert first_program(row["solution"]) == (tuple(row["block"]) if row["block"] else None)


def test_fences_are_found_in_linear_time() -> None:
    for text in ("```" + "a" * 200_000 + "`", "`" * 200_000 + "a`", "```py\n" * 50_000, "```" + " " * 200_000 + "`"):
        with at_most(1):
            first_program(text)
