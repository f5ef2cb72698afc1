"""SWE-RL's reward: likeness by hand, each way of being malformed, and the file in the process of the user's rewards."""

import pytest

from examples.patch_reward import LONGEST, MalformedPatch, apply, edits_of, likeness
from shared.sections import RewardWeights
from verify.reward import score

FILES = {"a.py": "a\nb\nc\n", "b.py": "one\ntwo"}
TESTS = {"files": FILES, "patched": {"a.py": "a\nx\nc\n"}}


def edit(path: str, search: str, replace: str) -> str:
    return f"### {path}\n<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n"


def test_the_true_patch_has_one_and_a_near_one_what_difflib_says():
    """The diffs are 27 characters, "@@ -1,3 +1,3 @@", " a", "-b", "+x", " c"; one differs: 2 * 26 / (27 + 27)."""
    assert likeness(TESTS, "Here:\n" + edit("a.py", "b\n", "x\n") + "Done.") == 1.0
    assert likeness(TESTS, edit("a.py", "b\n", "y\n")) == pytest.approx(26 / 27)
    assert likeness(TESTS, edit("a.py", "b\nc\n", "x\nc\n")) == 1.0, "the patch counts, not how it was written"


def test_files_that_only_one_of_the_patches_changes_count_nothing():
    assert likeness(TESTS, edit("a.py", "b\n", "x\n") + edit("b.py", "two\n", "2\n")) == 1 / 2
    assert likeness(TESTS, edit("b.py", "two\n", "2\n")) == 0.0


def test_edits_follow_one_another_and_may_remove_lines():
    response = edit("a.py", "b\n", "x\ny\n") + edit("a.py", "a\nx\n", "x\n") + edit("b.py", "one\n", "")
    assert apply(FILES, edits_of(response)) == {"a.py": "x\ny\nc\n", "b.py": "two\n"}


@pytest.mark.parametrize(("response", "why"), [
    ("I would change b to x.", "no edit"),
    (edit("a.py", "b\n", "x\n").removesuffix(">>>>>>> REPLACE\n"), "not closed"),
    (edit("a.py", "b\n", "x\n").removeprefix("### a.py\n"), "names no file"),
    (edit("c.py", "b\n", "x\n"), "no file 'c.py'"), (edit("a.py", "", "x\n"), "searches for nothing"),
    (edit("a.py", "b\n", "b\n"), "changes nothing"), (edit("a.py", "bc\n", "x\n"), "are not in 'a.py'"),
    (edit("b.py", "ne\n", "x\n"), "are not in 'b.py'"), (edit("a.py", "b\n", "x" * LONGEST), "longer than 20,000"),
])  # fmt: skip
def test_a_malformed_patch_says_why(response, why):
    with pytest.raises(MalformedPatch, match=why):
        likeness(TESTS, response)


def test_rewards_of_patches_in_the_process_of_the_users_rewards():
    """As SWE-RL: nothing but -1 or the likeness, -1 for a broken format, too."""
    table = {"format": 0, "correctness": 0, "length": 0, "language": 0, "extra": {"patch": 1.0}, "length_max": 9999}
    settings = RewardWeights.model_validate({**table, "plugins": ["examples/patch_reward.py"]})
    row = {"problem": "Rename b.", "domain": "patch", "tests": TESTS}
    thought = "<think>The second line holds the name, so that is the one to change.</think>\n"
    answers = [edit("a.py", "b\n", "x\n"), edit("a.py", "b\n", "y\n"), edit("a.py", "bc\n", "x\n"), ""]
    found = [score(row, thought + answer, settings) for answer in answers]
    assert [one.total for one in found] == pytest.approx([1.0, 26 / 27, -1.0, -1.0])
    assert [one.verdict for one in found] == ["correct", "wrong", "wrong", "no answer"]
