"""Rows as the field's sets publish them: columns, types and wrappings are theirs (of the data cards on the Hub), texts
and numbers are ours. Eight rows a set or more, each with a right and a wrong response, in published.jsonl.

Licences of the sets, of which nothing is copied: GSM8K, MATH, DeepMath, KodCode's code, APPS, HumanEval MIT; DAPO,
NuminaMath, Big-Math, OpenR1-Math, TACO Apache-2.0; Eurus-2-RL MIT; LiveCodeBench, MBPP CC-BY-4.0; AIME (c) MAA.
"""

from typing import Any, NamedTuple

from tests.tables import read_table


class Published(NamedTuple):
    """A row of a set and two responses to it."""

    row: dict[str, Any]
    right: str
    wrong: str


SETS: dict[str, list[Published]] = {}
"""name of a set -> its rows"""
READ_AS: dict[str, str] = {}
"""name of a set -> that of its reader; AIME has several"""
for _line in read_table("published"):
    SETS.setdefault(_line["set"], []).append(Published(_line["row"], _line["right"], _line["wrong"]))
    if "read_as" in _line:
        READ_AS[_line["set"]] = _line["read_as"]
