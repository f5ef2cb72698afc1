r"""Readers of the shapes in which the field publishes its sets of problems: each makes our row of one of theirs.

A row in our own form ({"problem", "answer" or "tests", ...}) stays as it is. A reader reads a row whose columns
belong to its shape alone; where two readers could, the row is refused. docs/data.md has the table. Columns that a
reader does not use stay in the row.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import ConfigError, DataError
from shared.jsonl import FIELDS, Row, meant_by, proposal, read_rows
from verify.code.private_tests import decode_private_tests
from verify.extract import extract_answer

Fields = dict[str, Any]
NATIVE = "our own form"
QUESTIONS = ("problem", "question", "prompt", "Problem", "Question")
ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "reference_answer", "answer_number", "Answer")
BESIDE = re.compile(
    r"[a-e]|starter_code|(choice|option|context|passage|article|document|image|table|body|figure|test|input)(s|_.*)?"
)
"""names of columns, in lower case, without which a question is not whole"""
WORDS = 6
"""most words of a text that is an answer beyond doubt; see also curate/format.py"""
WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\ASolve the following math problem step by step\. The last line of your response should be of the form "
        r"Answer: [^\n]{1,80} is the answer to the problem\.\s+",
        r"\s*Remember to put your answer on its own line after \"Answer:\"[^\n]{0,60}\s*\Z",
        r"\s*Let's think step by step and output the final answer after \"####\"\.\s*\Z",
    )
)
"""instructions of published prompts that ask for another form of answer than this project's: they are taken away"""
_MESSAGES = re.compile(r"\s*\[\s*\{.{0,999}?['\"]role['\"]\s*:", re.DOTALL)
ACTIONS = "When tackling complex reasoning tasks, you have access to the following actions."
"""beginning of Eurus-2-RL's system prompt, which asks for another form of reasoning: it is taken away"""


class Reader(NamedTuple):
    """A published shape."""

    name: str
    columns: tuple[str, ...]
    """its own columns; "a|b" where publications differ"""
    read: Callable[[Fields], Fields]
    """our row of one of theirs; raises DataError without the place"""

    def lacks(self, row: Mapping[str, Any]) -> list[str]:
        """Its columns that a row lacks."""
        return [names for names in self.columns if not any(_given(row, name) for name in names.split("|"))]

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has its columns."""
        return not self.lacks(row)


def _given(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a value there; NAME.INNER: in an object, or in the text of one."""
    if "." in name:
        outer, _, inner = name.partition(".")
        around = parsed(row.get(outer))
        return isinstance(around, dict) and _given(around, inner)
    value = row.get(name)
    return value is not None and not (isinstance(value, str) and not value.strip())


def parsed(value: Any) -> Any:
    """The value that a text of JSON, or of a Python literal as pandas writes it, means; other values as they are."""
    for read in (json.loads, ast.literal_eval):
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                return read(value.strip())
    return value


def _first(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if _given(row, name)), None)


def _made(row: Fields, *used: str, **new: Any) -> Fields:
    """The row without the columns that were read, and with ours."""
    rest = {name: value for name, value in row.items() if name not in used and name not in new}
    return rest | {name: value for name, value in new.items() if value is not None}


def prompt_text(value: Any) -> Any:
    """The text of a prompt: of a list of messages that of the user, after that of the system. Instructions of
    published sets that ask for another form of answer are taken away. Raises DataError for several turns."""
    if isinstance(value, str) and _MESSAGES.match(value) and isinstance(value := parsed(value), str):
        raise DataError("its prompt looks like a list of messages and cannot be read: write it as JSON")
    if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
        roles = [str(turn["role"]) for turn in value]
        if roles.count("user") != 1 or roles[-1] != "user" or {*roles} - {"system", "developer", "user"}:
            raise DataError(f"its prompt has the turns {', '.join(roles)}: a problem is one turn of the user")
        texts = [content_text(turn.get("content")).strip("\n") for turn in value]
        value = "\n\n".join(text for text in texts if text and not text.startswith(ACTIONS))
    if isinstance(value, str):
        for wrapper in WRAPPERS:
            value = wrapper.sub("", value)
    return value


def content_text(content: Any) -> str:
    """The text of a message's content: a text, or a list of parts of type "text". Raises DataError for others."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(each, dict) and isinstance(each.get("text"), str) for each in content
    ):
        return "\n".join(each["text"] for each in content)
    if content is None:
        return ""
    raise DataError("a message has content that is no text")


# ---- one function a shape ------------------------------------------------------------------------------------------


def final_answer(text: str) -> str | None:
    r"""What a worked solution ends in: the text after a last line's ####, or its last \boxed{...}; None if neither."""
    _, mark, last = f"\n{text.strip()}".rpartition("\n####")
    if mark and "\n" not in last.strip():
        return re.sub(r"(?<=\d),(?=\d{3})", "", last.strip().removeprefix("$")) or None
    return extract_answer(re.sub(r"\\boxed\s+(\w+)", r"\\boxed{\1}", text.replace("\\fbox{", "\\boxed{")))


def _is_worked(answer: Any) -> bool:
    """Whether an answer is a solution that ends in a line "#### 6", or one with a box."""
    text = answer if isinstance(answer, str) else ""
    return "\n####" in text or ("\\boxed" in text and len(text.split()) > WORDS)


def _worked(row: Fields) -> Fields:
    """A problem whose solution, in its answer or its solution, ends in the final answer."""
    name = "answer" if _given(row, "answer") else "solution"
    text = row[name]
    answer = final_answer(text) if isinstance(text, str) else None
    if answer is None:
        raise DataError(f"its '{name}' ends neither in a line '#### ANSWER' nor in \\boxed{{ANSWER}}")
    question = prompt_text(_first(row, "problem", "question", "prompt"))
    solution = re.sub(r"<<[^<>\n]*>>", "", text.rpartition("\n####")[0]) if "\n####" in text else text
    return _made(row, "question", "prompt", problem=question, answer=answer, solution=solution)


def _big_math(row: Fields) -> Fields:
    rate = row.get("llama8b_solve_rate", row.get("pass_rate"))
    topics = row.get("domain") if isinstance(row.get("domain"), list) else row.get("topics")
    return _made(row, "domain", "llama8b_solve_rate", topics=topics, pass_rate=rate)


def _verl(row: Fields) -> Fields:
    truth = parsed(row["reward_model"])["ground_truth"]
    problem, meant = prompt_text(_first(row, "prompt", "problem")), parsed(truth)
    tests = isinstance(meant, dict) or (isinstance(meant, list) and meant and isinstance(meant[0], dict))
    if tests or str(row.get("ability", "")).casefold().startswith("cod"):
        return _made(row, "prompt", "reward_model", problem=problem, tests=meant, domain="code")
    answer = meant[0] if isinstance(meant, list) and len(meant) == 1 and isinstance(meant[0], str) else truth
    return _made(row, "prompt", "reward_model", "solution", problem=problem, answer=answer)


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _plain(row: Fields) -> Fields:
    """A question with its answer or its tests, under other names."""
    question, answer = (_only(row, names) for names in (QUESTIONS, (*ANSWERS, "label")))
    return _made(row, *QUESTIONS, *ANSWERS, "label", problem=prompt_text(question), answer=_single(answer))


def _only(row: Fields, names: tuple[str, ...]) -> Any:
    """The value of the columns of these that a row has. Raises DataError where they differ."""
    given = [name for name in names if _given(row, name)]
    if any(str(row[name]).strip() != str(row[given[0]]).strip() for name in given):
        raise DataError(f"{' and '.join(map(repr, given))} differ, and either could be meant")
    return row[given[0]] if given else None


def _is_plain(row: Mapping[str, Any]) -> bool:
    """Whether a row is a question with its final answer and nothing that could be more of the question."""
    questions, answers = ([name for name in names if _given(row, name)] for names in (QUESTIONS, ANSWERS))
    beside = {name for name in row if _given(row, name) and BESIDE.fullmatch(name.casefold())}
    if not answers and isinstance(row.get("prompt"), list) and _given(row, "label"):
        answers = ["label"]
    if not questions or beside - {"tests"} or not (answers or beside):
        return False
    answer = _single(row[answers[0]]) if answers else ""
    if answers == ["answer"] and isinstance(answer, str) and questions[0] in ("question", "prompt"):
        return "\n" not in answer.strip() and len(re.findall(r"[^\W\d_]{2,}", answer)) <= WORDS
    return isinstance(answer, str | int | float)


def _program(question: str, starter: Any, name: Any) -> str:
    """The text of a programming problem with what a program must be called by."""
    if isinstance(starter, str) and starter.strip():
        return f"{question.rstrip()}\n\nComplete this code:\n\n```python\n{starter.rstrip()}\n```"
    return f"{question.rstrip()}\n\nName the function `{name}`." if name and str(name) not in question else question


def _apps(row: Fields) -> Fields:
    tests, solutions = parsed(row["input_output"]), parsed(row.get("solutions"))
    if not isinstance(tests, dict):
        raise DataError("its 'input_output' is no JSON object with inputs and outputs")
    problem = _program(_first(row, "problem", "question"), row.get("starter_code"), tests.get("fn_name"))
    solutions = solutions if isinstance(solutions, list) else None
    return _made(row, "question", "input_output", problem=problem, tests=tests, solutions=solutions, domain="code")


def _live_code_bench(row: Fields) -> Fields:
    cases = list[Any]()
    for name in ("public_test_cases", "private_test_cases"):
        given = parsed(row.get(name) or [])
        cases += decode_private_tests(given) if isinstance(given, str) else given
    about = parsed(row.get("metadata"))
    function = about.get("func_name") if isinstance(about, dict) else None
    tests = {"tests": cases, "fn_name": function, "starter_code": row.get("starter_code")}
    return _made(
        row, "question_content", "public_test_cases", "private_test_cases", domain="code",
        problem=_program(row["question_content"], row.get("starter_code"), function),
        tests={name: value for name, value in tests.items() if value},
    )  # fmt: skip


def _lines_of(value: Any) -> list[str]:
    value = parsed(value)
    return [str(line) for line in value] if isinstance(value, list) else [str(value)] if value else []


def _mbpp(row: Fields) -> Fields:
    checks, text = _lines_of(row["test_list"]), _first(row, "problem", "text", "prompt")
    before = [*_lines_of(row.get("test_imports")), *_lines_of(row.get("test_setup_code"))]
    if not checks:
        raise DataError("its 'test_list' holds no test")
    problem = f"{text.rstrip()}\n\nYour program must pass this check (others are hidden):\n{checks[0]}"
    tests = {"type": "asserts", "code": "\n".join([*before, *checks])}
    used = ("text", "prompt", "code", "test", "test_list", "test_imports", "test_setup_code")
    return _made(row, *used, problem=problem, tests=tests, solution=_first(row, "code", "solution"), domain="code")


def _human_eval(row: Fields) -> Fields:
    prompt, name = row["prompt"], row["entry_point"]
    if not re.search(rf"\bdef {re.escape(str(name))}\b", str(prompt)):
        raise DataError(f"its 'prompt' does not begin the function '{name}' of 'entry_point'")
    tests = {"type": "asserts", "code": row["test"], "prefix": prompt, "entry_point": name}
    body = row.get("canonical_solution")
    solution = prompt + body if isinstance(body, str) else None
    used = ("prompt", "test", "entry_point", "canonical_solution")
    return _made(row, *used, problem=prompt, tests=tests, solution=solution, domain="code")


def _kod_code(row: Fields) -> Fields:
    tests, question = parsed(row["test"]), _first(row, "problem", "question")
    about = _single(parsed(row.get("test_info")))
    if isinstance(tests, dict):
        given, expected = (_first(tests, *names) for names in (("stdin", "inputs"), ("stdout", "outputs")))
        tests = tests | ({"inputs": given, "outputs": expected} if given and expected else {})
    else:
        tests = {"type": "asserts", "code": row["test"]}
    head = about.get("function_declaration") if isinstance(about, dict) else None
    if isinstance(head, str) and head.strip().rstrip(":") not in question:
        question = f"{question.rstrip()}\n\nDeclare the function as `{head.strip()}`."
    return _made(row, "question", "test", problem=question, tests=tests, domain="code")


READERS = (
    Reader("DAPO, Eurus-2-RL and other sets of verl", ("prompt|problem", "reward_model.ground_truth"), _verl),
    Reader("LiveCodeBench", ("question_content", "public_test_cases|private_test_cases"), _live_code_bench),
    Reader("APPS or TACO", ("question|problem", "input_output"), _apps),
    Reader("KodCode", ("question|problem", "test", "solution|test_info"), _kod_code),
    Reader("MBPP", ("text|prompt|problem", "test_list"), _mbpp),
    Reader("HumanEval", ("prompt", "test", "entry_point"), _human_eval),
)
WORKED = Reader("worked solutions (GSM8K, MATH)", ("problem|question|prompt", "solution"), _worked)
BIG_MATH = Reader("Big-Math", ("problem", "answer", "llama8b_solve_rate"), _big_math)
PLAIN = Reader("a question and its answer", ("|".join(QUESTIONS), "|".join(ANSWERS)), _plain)


def reader_of(row: Mapping[str, Any]) -> Reader | None:
    """The reader of a row; None for one in our own form, and for one that no reader knows. Raises DataError where two
    could read it."""
    answer = row.get("answer")
    if isinstance(row.get("problem"), dict):
        return None
    if _given(row, "problem") and any(_given(row, name) for name in ("answer", "tests", "environment")):
        if isinstance(row.get("domain"), list) or "llama8b_solve_rate" in row:
            return BIG_MATH
        if not _is_worked(answer) or row.get("domain") not in (None, "", "math"):
            return None
        bare = not any(_given(row, name) for name in ("tests", "checker", "answer_form", "environment"))
        return WORKED if bare else None
    question, solution = _first(row, *QUESTIONS), row.get("solution")
    fitting = [reader for reader in READERS if reader.fits(row)]
    if len(fitting) > 1:
        raise DataError(f"it can be read as {' and as '.join(reader.name for reader in fitting)}")
    if fitting:
        return fitting[0]
    if question and (_is_worked(answer) or str(answer).startswith("####")):
        return WORKED
    if _is_plain(row):
        return PLAIN
    if not question or not isinstance(solution, str) or any(_given(row, name) for name in ANSWERS):
        return None
    return None if final_answer(solution) is None else WORKED


def to_native(row: Mapping[str, Any], where: str) -> tuple[Fields, str]:
    """Our row of a published one, and the name of its reader; a row that no reader knows stays as it is. Raises
    DataError with `where`."""
    fields = row if isinstance(row, dict) else dict(row)
    try:
        reader = reader_of(fields)
        return (fields, NATIVE) if reader is None else (reader.read(fields), reader.name)
    except DataError as error:
        raise DataError(f"{where}: {error}. {proposal(fields)}") from error
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{where} is no row of {reader.name if reader else NATIVE} ({error}). {proposal(fields)}"
        ) from error


def as_native(row: Fields) -> Fields:
    """The same for one that has to be looked at in any case: a row with a fault stays as it is."""
    try:
        return to_native(row, "the row")[0]
    except DataError:
        return row


def columns_of(text: str) -> dict[str, str]:
    """The columns that a command's option names, "problem=question,answer=final_answer". Raises ConfigError."""
    columns = dict(pair.strip().split("=", 1) for pair in text.split(",") if "=" in pair)
    if text and (text.count(",") + 1 > len(columns) or not {*columns} <= {*FIELDS, "response", "tokens"}):
        raise ConfigError(f"--columns = {text}: write FIELD=COLUMN,... with fields of a row: {', '.join(FIELDS)}")
    return columns


def renamed(row: Fields, columns: Mapping[str, str], where: str) -> Fields:
    """The row with our fields taken from the columns that data.columns names ("a.b": b of an object a). Raises
    DataError where it has neither the problem's column nor a problem."""
    new, used = Fields(), set[str]()
    for ours, theirs in columns.items():
        outer, _, inner = theirs.partition(".")
        around = parsed(row.get(outer))
        value = row.get(theirs, around.get(inner) if inner and isinstance(around, dict) else None)
        if value is not None:
            try:
                new[ours] = prompt_text(value) if ours == "problem" else value
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
            used.add(theirs)
        elif ours == "problem" and not _given(row, ours):
            near = difflib.get_close_matches(theirs, row, n=1)
            meant = f"is '{near[0]}' meant?" if near else f"it has {', '.join(map(repr, list(row)[:8])) or 'nothing'}"
            raise DataError(f"{where}: data.columns.problem = '{theirs}', and the row has no such column: {meant}")
    return {name: value for name, value in row.items() if name not in used} | new if new else row


def problem_rows(
    path: Path, setting: str = "", faults: list[str] | None = None, columns: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yield the rows of a file of problems in our own form; see `shared.jsonl.read_rows`, `renamed`, `as_native`."""
    for row in read_rows(path, setting, faults):
        try:
            fields = renamed(row.fields, columns, row.where) if columns else row.fields
        except DataError as error:
            if faults is None:
                raise
            faults.append(str(error))
        else:
            yield row._replace(fields=as_native(fields))


# ---- what an error proposes ----------------------------------------------------------------------------------------


def lacking(row: Mapping[str, Any]) -> str:
    """What to report of a row without a problem: its columns, the nearest shape with what the row lacks of it, and the
    setting that names columns. "" for a row with a key that is spelt almost like it."""
    if any(meant_by(name, row) == "problem" for name in row):
        return ""
    readers = (*READERS, BIG_MATH, WORKED, PLAIN)
    nearest = max(readers, key=lambda reader: 1 - len(reader.lacks(row)) / len(reader.columns))
    missing = [" or ".join(f"'{name}'" for name in names.split("|")[:3]) for names in nearest.lacks(row)]
    beside = [f"'{name}'" for name in row if BESIDE.fullmatch(name.casefold()) and _given(row, name)]
    near = f"; the nearest shape that is read is {nearest.name}" if len(missing) < len(nearest.columns) else ""
    if near and missing:
        near += f", which needs {' and '.join(missing)}"
    elif near and beside:
        near += f", and its {' and '.join(beside)} may belong to the question"
    return f": it has {', '.join(map(repr, list(row)[:8])) or 'nothing'}{near}. {proposal(row)}"
