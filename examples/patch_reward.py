"""SWE-RL's reward of a patch (arXiv 2502.18449, section 2.2): -1 for a malformed one, else likeness to the true one.

Name this file in reward.plugins. A row has "domain": "patch" and "tests": {"files": {PATH: TEXT}, "patched": {PATH:
TEXT}}: what the prompt shows, and the files that the true patch changes as they are afterwards. A response edits with

    ### PATH
    <<<<<<< SEARCH
    whole lines as they are in the file
    =======
    the lines that take their place
    >>>>>>> REPLACE

It is malformed if it holds no such edit, or one that is not closed, names an unknown file, searches for nothing or for
what is not there, changes nothing, or is longer than LONGEST. It runs in the process of the user's rewards, with
reward.deadline_s: the comparison of two long patches is quadratic, and responses are hostile.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from shared.chat import AnswerFormat
from verify.plugins import Case, reward
from verify.verifiers import Answer, verifier

LONGEST = 20_000
"""characters of a response"""
SEARCH, MIDDLE, REPLACE = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"
FORM = AnswerFormat("edits of the files", f"edits: ### PATH, {SEARCH}, lines, {MIDDLE}, lines, {REPLACE}")


class MalformedPatch(Exception):
    """A response that is no patch; says why."""


class Edit(NamedTuple):
    """Lines of a file that others replace."""

    path: str
    search: list[str]
    replace: list[str]


def edits_of(response: str) -> list[Edit]:
    """The edits of a response in their order. Raises MalformedPatch for none, or one without its end or path."""
    edits: list[Edit] = []
    path, now, lines = "", "", dict[str, list[str]]()
    for line in response.splitlines():
        if not now and line.startswith("### "):
            path = line.removeprefix("### ").strip()
        elif not now and line.rstrip() == SEARCH:
            if not path:
                raise MalformedPatch("an edit names no file")
            now, lines = SEARCH, {SEARCH: [], MIDDLE: []}
        elif now == SEARCH and line.rstrip() == MIDDLE:
            now = MIDDLE
        elif now == MIDDLE and line.rstrip() == REPLACE:
            edits.append(Edit(path, lines[SEARCH], lines[MIDDLE]))
            now = ""
        elif now:
            lines[now].append(line)
    if now or not edits:
        raise MalformedPatch("an edit is not closed" if now else "there is no edit")
    return edits


def apply(files: Mapping[str, str], edits: list[Edit]) -> dict[str, str]:
    """The files that the edits change, afterwards; each edit finds what those before it left, at its first place.
    Raises MalformedPatch for an edit that cannot be made or changes nothing."""
    changed: dict[str, str] = {}
    for path, search, replace in edits:
        if path not in files:
            raise MalformedPatch(f"there is no file {path!r:.80}")
        if not search or search == replace:
            raise MalformedPatch("an edit searches for nothing" if not search else "an edit changes nothing")
        text = "\n" + changed.get(path, files[path]).rstrip("\n") + "\n"
        searched = "\n".join(["", *search, ""])
        if searched not in text:
            raise MalformedPatch(f"the lines that an edit searches for are not in {path!r:.80}")
        changed[path] = text.replace(searched, "\n".join(["", *replace, ""]), 1).removeprefix("\n")
    return changed


def patch_of(before: str, after: str) -> str:
    """The unified diff without its head; "" where nothing changes."""
    return "\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm=""))[2:])


def likeness(tests: Mapping[str, Any], response: str) -> float:
    """Mean of difflib's ratio of predicted and true patch over the files that either changes, in [0, 1]; a file that
    only one of them changes has 0. Raises MalformedPatch."""
    if len(response) > LONGEST:
        raise MalformedPatch(f"it is longer than {LONGEST:,} characters")
    files, patched = tests["files"], tests["patched"]
    changed = apply(files, edits_of(response))
    ratios = []
    for path in sorted({*changed, *patched}):
        made, true = (patch_of(files[path], after.get(path, files[path])) for after in (changed, patched))
        ratios.append(difflib.SequenceMatcher(None, made, true, autojunk=False).ratio() if made and true else 0.0)
    return sum(ratios) / len(ratios)


@verifier("patch", ground_truth="tests", answer_in="response", form=FORM)
def is_the_patch(answer: Answer) -> float:
    """The likeness, 0 for a malformed patch: only the true patch is right."""
    try:
        return likeness(answer.problem.tests, answer.text)
    except MalformedPatch:
        return 0.0


@reward("patch", lowest=-1.0)
def patch(case: Case) -> float:
    """The likeness, -1 for a malformed patch."""
    try:
        return likeness(case.problem.tests, case.response)
    except MalformedPatch:
        return -1.0
