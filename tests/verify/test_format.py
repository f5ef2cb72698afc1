"""Every format rule alone, and the parts of a well-formed response."""

from __future__ import annotations

import pytest

from verify.format import check_format


def test_well_formed_response_is_cut_in_two() -> None:
    parts = check_format("<think>2+3=5</think>The answer is \\boxed{5}.")
    assert parts.ok
    assert (parts.thoughts, parts.solution, parts.answer) == ("2+3=5", "The answer is \\boxed{5}.", "5")


@pytest.mark.parametrize(
    ("response", "rule"),
    [
        ("", "does not start"),
        ("The answer is \\boxed{5}.", "does not start"),
        (" <think>a</think>\\boxed{5}", "does not start"),
        ("Sure! <think>a</think>\\boxed{5}", "does not start"),
        ("a</think>\\boxed{5}", "does not start"),
        ("<think>a \\boxed{5}", "never closed"),
        ("<think>a</think>b</think>\\boxed{5}", "exactly one"),
        ("<think>a<think>b</think>\\boxed{5}", "exactly one"),
        ("<think>a</think><think>b</think>\\boxed{5}", "exactly one"),
        ("<think>a</think>The answer is 5.", "nowhere"),
        ("<think>\\boxed{5}</think>The answer is 5.", "only inside the thoughts"),
        ("<think>a</think>\\boxed{5", "no balanced"),
        ("<think>a</think>\\boxed 5", "no balanced"),
        ("<think>a</think>\\fbox{5}", "no balanced"),
    ],
)
def test_each_broken_rule_is_named(response: str, rule: str) -> None:
    parts = check_format(response)
    assert not parts.ok and rule in parts.failed
    assert parts.answer is None


def test_template_that_opens_the_thought_counts_as_the_start() -> None:
    assert check_format("a</think>\\boxed{5}", opened=True).ok
    assert not check_format("<think>a</think>\\boxed{5}", opened=True).ok


def test_last_box_of_the_solution_is_the_answer() -> None:
    assert check_format("<think>\\boxed{1}</think>\\boxed{2}, so \\boxed{3}").answer == "3"


def test_empty_box_is_well_formed_but_empty() -> None:
    parts = check_format("<think></think>\\boxed{}")
    assert parts.ok and parts.answer == ""
