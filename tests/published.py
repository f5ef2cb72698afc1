r"""Rows as the field's sets publish them: columns, types and wrappings are theirs (of the data cards on the Hub), texts
and numbers are ours. Twenty rows a set, each with a right and a wrong response.

Licences of the sets, of which nothing is copied: GSM8K, MATH, DeepMath, KodCode's code, APPS, HumanEval MIT; DAPO,
NuminaMath, Big-Math, OpenR1-Math, TACO Apache-2.0; Eurus-2-RL MIT; LiveCodeBench, MBPP CC-BY-4.0; AIME (c) MAA.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

Fields = dict[str, Any]
ROWS = 20


class Published(NamedTuple):
    """A row of a set and two responses to it."""

    row: Fields
    right: str
    wrong: str


def boxed(answer: object) -> str:
    return f"<think>Let me add the numbers one after the other.</think>\nThe sum is \\boxed{{{answer}}}."


def fenced(code: str) -> str:
    return f"<think>A few lines will do this.</think>\n```python\n{code}\n```"


def sum_of(number: int) -> tuple[str, int]:
    return f"Mia has {number} shells and finds {number + 3} more. How many shells has she now?", 2 * number + 3


def answered(row: Callable[[int, str, int], Fields]) -> list[Published]:
    """Problems of mathematics. row: of a number, a question and its answer."""
    return [
        Published(row(i, question, answer), boxed(answer), boxed(answer + 1))
        for i in range(ROWS)
        for question, answer in [sum_of(700 * i + 5)]
    ]


def worked(question: str, answer: int) -> str:
    return f"She adds the two numbers.\nThe sum of {question[:9]} is $\\boxed{{{answer}}}$."


def gsm8k(i: int, question: str, answer: int) -> Fields:
    return {
        "question": question,
        "answer": f"She has {answer - 3} + 3 = <<{answer - 3}+3={answer}>>{answer}.\n#### {answer:,}",
    }


def math(i: int, question: str, answer: int) -> Fields:
    return {"problem": question, "level": "Level 2", "type": "Prealgebra", "solution": worked(question, answer)}


DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)


def dapo(i: int, question: str, answer: int) -> Fields:
    return {
        "data_source": "math_dapo", "prompt": [{"content": DAPO.format(question), "role": "user"}], "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{i}"},
    }  # fmt: skip


def dapo_processed(i: int, question: str, answer: int) -> Fields:
    return dapo(i, question, answer) | {
        "prompt": question, "solution": str(answer), "source_prompt": [{"content": question, "role": "user"}],
    }  # fmt: skip


def deepmath(i: int, question: str, answer: int) -> Fields:
    solutions = {f"r1_solution_{k}": f"Okay. {worked(question, answer)}" for k in (1, 2, 3)}
    return {"question": question, "final_answer": str(answer), "difficulty": 4.5, "topic": "Algebra", **solutions}


def numina_cot(i: int, question: str, answer: int) -> Fields:
    solution = worked(question, answer)
    messages = [{"content": question, "role": "user"}, {"content": solution, "role": "assistant"}]
    return {"source": "cn_k12", "problem": question, "solution": solution, "messages": messages}


def numina(i: int, question: str, answer: int) -> Fields:
    return {
        "problem": question, "solution": worked(question, answer), "answer": str(answer), "problem_type": "Algebra",
        "question_type": "math-word-problem", "problem_is_valid": "Yes", "solution_is_valid": "Yes",
        "source": "olympiads", "synthetic": False,
    }  # fmt: skip


def open_r1(i: int, question: str, answer: int) -> Fields:
    trace = f"<think>\nHm.\n</think>\n{worked(question, answer)}"
    return numina(i, question, answer) | {
        "uuid": "n/a", "is_reasoning_complete": [True], "generations": [trace], "correctness_math_verify": [True],
        "correctness_llama": None, "finish_reasons": ["stop"], "correctness_count": 1,
        "messages": [{"content": question, "role": "user"}, {"content": trace, "role": "assistant"}],
    }  # fmt: skip


def aime(i: int, question: str, answer: int) -> Fields:
    """Four publications, in turn."""
    return (
        {"ID": f"2024-I-{i}", "Problem": question, "Solution": "Add.", "Answer": answer},
        {"id": i, "problem": question, "solution": worked(question, answer), "answer": f"{answer:03}", "year": "2024"},
        {"ID": f"1983-{i}", "Problem Number": i, "Question": question, "Answer": str(answer), "Part": None},
        {"question": question, "answer": str(answer)},
    )[i % 4]  # fmt: skip


def big_math(i: int, question: str, answer: int) -> Fields:
    domain = ["Mathematics -> Algebra -> Prealgebra -> Integers"]
    return {
        "problem": question,
        "answer": str(answer),
        "source": "orca_math",
        "domain": domain,
        "llama8b_solve_rate": 0.25,
    }


def prime_math(i: int, question: str, answer: int) -> Fields:
    asked = f"{question}\n\nPresent the answer in LaTex format: \\boxed{{Your answer}}"
    return _prime(i, "numina_cn_k12", asked, "math", str(answer))


def _prime(i: int, source: str, asked: str, ability: str, truth: str) -> Fields:
    actions = (
        "\nWhen tackling complex reasoning tasks, you have access to the following actions. Use them as needed to "
        "progress through your thought process.\n\n[ASSESS]\n\n[ADVANCE]\n"
    )
    return {
        "data_source": source, "ability": ability, "reward_model": {"ground_truth": truth, "style": "rule"},
        "prompt": [{"content": actions, "role": "system"}, {"content": asked, "role": "user"}],
        "extra_info": {"index": i, "split": "dummy"},
    }  # fmt: skip


# ---- programs ------------------------------------------------------------------------------------------------------


def programmed(row: Callable[[int], tuple[Fields, str, str]]) -> list[Published]:
    """Problems of programming. row: of a number, with a right and a wrong program."""
    return [Published(made, fenced(right), fenced(wrong)) for made, right, wrong in map(row, range(ROWS))]


def _stdio(i: int) -> tuple[str, Fields, str, str]:
    text = f"Read a whole number n and print n + {i}.\n\n-----Input-----\nOne number.\n\n-----Output-----\nThe sum."
    tests = {"inputs": [f"{n}\n" for n in (1, 20, -7)], "outputs": [f"{n + i}\n" for n in (1, 20, -7)]}
    return text, tests, f"print(int(input()) + {i})", "print(int(input()) * 2 + 99)"


def _called(i: int) -> tuple[str, Fields, str, str]:
    text = f"Return the numbers of a list that are above {i}, in their order."
    lists = [[1, 50, i, i + 1], [], [i + 9]]
    tests = {
        "fn_name": "above",
        "inputs": [[one] for one in lists],
        "outputs": [[[n for n in one if n > i]] for one in lists],
    }
    right = (
        f"class Solution:\n    def above(self, a: List[int]) -> List[int]:\n        return [n for n in a if n > {i}]"
    )
    return text, tests, right, right.replace("n > ", "n >= ")


def apps(i: int) -> tuple[Fields, str, str]:
    text, tests, right, wrong = _called(i) if i % 2 else _stdio(i)
    starter = "class Solution:\n    def above(self, a: List[int]) -> List[int]:\n        " if i % 2 else ""
    return {
        "problem_id": i, "question": text, "solutions": json.dumps([right]), "input_output": json.dumps(tests),
        "difficulty": "interview", "url": "", "starter_code": starter,
    }, right, wrong  # fmt: skip


def taco(i: int) -> tuple[Fields, str, str]:
    row, right, wrong = apps(i)
    row.pop("problem_id")
    return row | {
        "raw_tags": "[]", "name": None, "source": "geeksforgeeks", "tags": "[]", "skill_types": "[]", "date": None,
        "Expected Auxiliary Space": None, "time_limit": "2.0 seconds", "picture_num": "0", "memory_limit": None,
        "Expected Time Complexity": None,
    }, right, wrong  # fmt: skip


def prime_code(i: int) -> tuple[Fields, str, str]:
    text, tests, right, wrong = _called(i) if i % 2 else _stdio(i)
    end = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
    return _prime(i, "taco", text + end, "code", json.dumps(tests)), right, wrong


def live_code_bench(i: int) -> tuple[Fields, str, str]:
    text, tests, right, wrong = _called(i) if i % 2 else _stdio(i)
    kind = "functional" if i % 2 else "stdin"
    shown = [
        (json.dumps(given[0]), json.dumps(wanted[0])) if i % 2 else (given, wanted)
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)
    ]
    cases = [{"input": given, "output": wanted, "testtype": kind} for given, wanted in shown]
    text_of_cases = json.dumps(cases[1:]).encode()
    pickled = b"\x80\x03X" + len(text_of_cases).to_bytes(4, "little") + text_of_cases + b"."
    private = base64.b64encode(zlib.compress(pickled)).decode()
    return {
        "question_title": "A sum", "question_content": text, "platform": "leetcode" if i % 2 else "atcoder",
        "question_id": f"abc{i}", "contest_id": "abc", "contest_date": "2024-01-01T00:00:00", "difficulty": "easy",
        "starter_code": "class Solution:\n    def above(self, a: List[int]) -> List[int]:\n        " if i % 2 else "",
        "public_test_cases": json.dumps(cases[:1]), "private_test_cases": private,
        "metadata": json.dumps({"func_name": "above"} if i % 2 else {}),
    }, right, wrong  # fmt: skip


def mbpp(i: int) -> tuple[Fields, str, str]:
    """The whole set and the sanitised one, in turn."""
    right, wrong = f"def add(a):\n    return a + {i}", f"def add(a):\n    return a - {i + 1}"
    checks = [f"assert add({n}) == {n + i}" for n in (1, 5, 9)]
    text = f"Write a function add that adds {i} to a number."
    if i % 2:
        row = {"source_file": "b.ipynb", "task_id": i, "prompt": text, "code": right, "test_imports": ["import math"]}
        return row | {"test_list": checks}, right, wrong
    row = {"task_id": i, "text": text, "code": right, "test_list": checks, "test_setup_code": ""}
    return row | {"challenge_test_list": []}, right, wrong


def human_eval(i: int) -> tuple[Fields, str, str]:
    head = f'from typing import List\n\n\ndef above(a: List[int]) -> List[int]:\n    """ Numbers above {i}. """\n'
    body = f"    return [n for n in a if n > {i}]\n"
    checks = [f"assert candidate([{i}, {i + 1}]) == [{i + 1}]", "assert candidate([]) == []"]
    test = "\n    ".join(["\n\nMETADATA = {}\n\n\ndef check(candidate):", *checks])
    row = {"task_id": f"HumanEval/{i}", "prompt": head, "canonical_solution": body, "test": test}
    return row | {"entry_point": "above"}, head + body, head + body.replace("n > ", "n >= ")


def kod_code(i: int) -> tuple[Fields, str, str]:
    right = f"def add(a: int) -> int:\n    return a + {i}"
    cases = {"small": 1, "negative": -4}
    tests = [f"def test_{name}():\n    assert add({n}) == {n + i}" for name, n in cases.items()]
    test = "\n\n".join(["from solution import add", *tests])
    info = {
        "docstring": "",
        "function_declaration": "def add(a: int):",
        "function_name": "add",
        "parameter_list": "(a: int)",
    }
    return {
        "version": "v1.0", "style": "instruct", "subset": "Algorithm", "question_id": f"Algorithm_{i}_I",
        "question": f"Add {i} to a number.", "solution": right, "test": test, "test_info": [info],
        "gpt_pass_sequence": [1], "gpt_pass_trial_num": 1, "gpt_difficulty": "easy", "gpt_pass_percentage": 1.0,
    }, right, right.replace("+", "-") + " - 1"  # fmt: skip


SETS: dict[str, list[Published]] = {
    **{row.__name__: answered(row) for row in (
        gsm8k, math, dapo, dapo_processed, deepmath, numina_cot, numina, open_r1, aime, big_math, prime_math
    )},
    **{row.__name__: programmed(row) for row in (
        apps, taco, prime_code, live_code_bench, mbpp, human_eval, kod_code
    )},
}  # fmt: skip
"""name of a set -> its rows"""
READ_AS = {
    **dict.fromkeys(("gsm8k", "math", "numina_cot"), "worked solutions (GSM8K, MATH)"),
    **dict.fromkeys(("dapo", "dapo_processed", "prime_math", "prime_code"), "DAPO, Eurus-2-RL and other sets of verl"),
    "deepmath": "a question and its answer",
    **dict.fromkeys(("numina", "open_r1"), "our own form"),
    "big_math": "Big-Math",
    **dict.fromkeys(("apps", "taco"), "APPS or TACO"),
    "live_code_bench": "LiveCodeBench",
    "mbpp": "MBPP",
    "human_eval": "HumanEval",
    "kod_code": "KodCode",
}
"""name of a set -> that of its reader; AIME has several"""
