"""Verifiers by domain: those of the project, one of the user's own as the manual has it, and its faults."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError, DataError
from shared.types import Problem, Reward, Verdict
from tests.verify.test_plugins import Fast, settings
from verify import verifiers
from verify.chosen_rewards import choose
from verify.reward import CompletionScorer
from verify.verifiers import Answer, Finding, known_domains, read_problem, verifier, verifier_of

THOUGHT = "<think>Tom buys three more apples, so we add them all up: 5+3=8.</think>"
FUNCTION = {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}
CALL = {"functions": [FUNCTION], "ground_truth": [{"f": {"x": [1]}}]}
RIGHT_CALL = '```json\n[{"name": "f", "arguments": {"x": 1}}]\n```'
WRONG_CALL = RIGHT_CALL.replace("1", "2")
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def reward(row: dict[str, Any], response: str, **table: Any) -> Reward:
    problem = read_problem({"problem": "What is it?", **row}, "row 1")
    return asyncio.run(CompletionScorer(settings(**table), Fast()).score(problem, THOUGHT + response, 50))


def test_every_domain_has_one_file() -> None:
    wanted = {"calls": "tests", "code": "tests", "instructions": "tests", "math": "answer", "open": "answer"}
    assert wanted.items() <= {domain: verifier_of(domain).ground_truth for domain in known_domains()}.items()
    homes = [verifier_of(domain).home for domain in wanted]
    assert len(set(homes)) == len(homes) and all(Path(home).parent.name == "verifiers" for home in homes)
    assert verifier_of("anything") is verifier_of("math") and verifier_of(None) is verifier_of("math")


@pytest.mark.parametrize(
    ("row", "response", "verdict", "reason"),
    [
        ({"domain": "calls", "tests": CALL}, RIGHT_CALL, "correct", "as wanted"),
        ({"domain": "calls", "tests": CALL}, WRONG_CALL, "wrong", "f: x = 2 is not accepted"),
        ({"domain": "calls", "tests": CALL}, "None of them.", "no answer", "no JSON list of calls"),
        ({"domain": "instructions", "tests": NO_COMMA}, "No sign here.", "correct", "every instruction is followed"),
        ({"domain": "instructions", "tests": NO_COMMA}, "One, two.", "wrong", "not followed: punctuation:no_comma"),
        ({"domain": "open", "answer": "Any text."}, r"\boxed{8}", "open", "no verifier is asked"),
    ],
)  # fmt: skip
def test_the_verifier_of_the_domain_decides(row: dict[str, Any], response: str, verdict: str, reason: str) -> None:
    found = reward(row, response)
    assert found.verdict == verdict and found.reason.startswith(reason)
    assert found.correctness == (0.9 if verdict == "correct" else 0.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"domain": "calls", "answer": "f(1)"}, "row 1 lacks 'tests': a row with domain \"calls\" needs them"),
        ({"domain": "calls", "tests": {"functions": []}}, "row 1: its tests are not understood: 'ground_truth'"),
        ({"domain": "instructions", "tests": {"instruction_id_list": ["no"], "kwargs": [{}]}}, "is not known"),
        ({"domain": "code", "tests": 5}, "row 1: tests of type int are not understood"),
        ({"domain": "math"}, "row 1 lacks 'answer'"),
    ],
)
def test_the_ground_truth_is_validated_when_data_is_read(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read_problem({"problem": "?", **row}, "row 1")


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    known_domains()
    monkeypatch.setattr(verifiers, "VERIFIERS", dict(verifiers.VERIFIERS))


@pytest.mark.usefixtures("restored")
def test_what_a_function_may_return() -> None:
    """True, a share and a finding; a share is only right when it is 1. Numbers outside of [0, 1] are an error."""
    problem = Problem("1", "?", "8")
    returned: Any = None

    @verifier("mine")
    def mine(answer: Answer) -> Any:
        return returned

    def found() -> Finding:
        return asyncio.run(verifier_of("mine").verify(Answer(problem, "8"), {}))

    for value, verdict, share in ((True, "correct", 1.0), (False, "wrong", 0.0), (0.5, "wrong", 0.5)):
        returned = value
        assert found()[:2] == (verdict, share)
    returned = Finding(Verdict.TIMEOUT, 0.0, "late")
    assert found() == returned
    returned = 2.0
    with pytest.raises(ValueError, match="not a share"):
        found()
    with pytest.raises(ConfigError, match="the domain 'math' has a verifier already"):
        verifier("math")(mine)


def manual(root: Path, folder: Path) -> dict[str, Any]:
    """The verifier of docs/rewards.md in a file, and the settings that name it, as they stand there."""
    text = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    code, toml = re.findall(r"```(?:python|toml) verifier\n(.*?)```", text, re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    (folder / "my_verifiers.py").write_text(code)
    table: dict[str, Any] = tomllib.loads(toml)["reward"]
    return {**table, "plugins": [str(folder / name) for name in table["plugins"]]}


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
def test_example_of_the_manual_runs(tmp_path: Path, root: Path) -> None:
    table = manual(root, tmp_path)
    choose(settings(**table))
    assert "dates" in known_domains()
    row = {"domain": "dates", "answer": "2024-02-29"}
    right, wrong = (reward(row, rf"\boxed{{{day}}}", **table) for day in ("2024-02-29", "2024-03-01"))
    assert (right.verdict, right.correctness, right.share) == ("correct", 0.9, 1.0)
    assert (wrong.verdict, wrong.correctness, wrong.share) == ("wrong", 0.0, 0.0)
    odd = reward(row, r"\boxed{tomorrow}", **table)
    assert odd.verdict == "wrong", odd
    assert reward(row, "I do not know.", **table).verdict == "no answer"


HEAD = "import os\nfrom verify.verifiers import Answer, verifier\n\n"


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("body", "verdict", "reason"),
    [
        ("return 1 / 0", "crash", r"verifier of mine \(.*mine\.py:4\): ZeroDivisionError: .*mine\.py:6 in f"),
        ("return 7", "crash", r"verifier of mine .* returned 7, not a share from 0 to 1"),
        ("return 'yes'", "crash", r"verifier of mine .* returned 'yes', which is no number"),
    ],
)
def test_a_fault_costs_one_completion(tmp_path: Path, body: str, verdict: str, reason: str) -> None:
    """And the next one is graded."""
    path = tmp_path / "mine.py"
    path.write_text(
        f'{HEAD}@verifier("mine")\ndef f(answer: Answer) -> bool:\n    if answer.text == "8": {body}\n    return True\n'
    )
    table = {"plugins": [str(path)], "deadline_s": 0.5}
    choose(settings(**table))
    row = {"domain": "mine", "answer": "8"}
    bad, good = (reward(row, rf"\boxed{{{number}}}", **table) for number in (8, 9))
    assert bad.verdict == verdict and re.search(reason, bad.reason), bad.reason
    assert good.verdict == "correct"


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('@verifier("math")\ndef f(answer: Answer) -> bool: ...', "the domain 'math' has a verifier already"),
        (
            '@verifier("mine", needs="sandbox")\ndef f(answer: Answer) -> bool: ...',
            "'mine' .*gives 'needs' or 'validate'",
        ),
    ],
)
def test_what_a_file_may_not_define(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{HEAD}{body}\n")
    with pytest.raises(ConfigError, match=message):
        choose(settings(plugins=[str(path)]))
