"""reasoning-gym's own `score_answer` functions, as a plug-in file that `verifiers/reasoning_gym.py` runs in a process.

Several of them give the answer to Python's `eval` or SymPy's `parse_expr`, which evaluates it too: an answer could name
the checker's own variables, the true answer among them, or any module. Here `eval` takes literals and sums of them from
reasoning-gym, and from SymPy's parser calls of the functions in CALLED and names that it defines itself; anything
else raises, which the checkers take for a wrong answer. Where the kernel can, the process is confined as well: it reads
installed packages and nothing else, writes and starts nothing, and has no network.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from reasoning_gym.factory import DATASETS, get_score_answer_fn

from verify.code.sandbox import codec, isolation, seccomp, syscalls
from verify.verifiers import REASONING_GYM, Answer, verifier

MOST_CHARACTERS = 20_000
"""a longer answer is wrong: the checkers may take the square of its length"""
MOST_BYTES = 4 << 30
"""address space of the process"""
MOST_EXPONENT = 10_000
PLAIN = (
    ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.List, ast.Set,
    ast.Dict, ast.Load,
)  # fmt: skip
CALLED = frozenset({
    "Integer", "Float", "Rational", "Symbol", "Add", "Mul", "Pow", "sqrt", "cbrt", "exp", "log", "ln", "sin", "cos",
    "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "Abs", "erf",
})  # fmt: skip
CONSTANTS = frozenset(("pi", "E", "I", "oo"))
_evaluate = builtins.eval


def guarded(source: Any, names: Any = None, local: Any = None) -> Any:
    """Evaluate as `eval` does; a source from reasoning-gym or SymPy's parser only where `check` allows it."""
    frame = sys._getframe(1)
    names, local = (frame.f_globals, frame.f_locals) if names is None else (names, names if local is None else local)
    caller = frame.f_globals.get("__name__", "")
    if caller.startswith("reasoning_gym.") and isinstance(source, str):
        check(source.strip(), {}, frozenset())
    elif caller.startswith("sympy.parsing.") and isinstance(source, str):
        check(source, local or {}, CALLED)
    return _evaluate(source, names, local)


def check(source: str, local: Mapping[str, Any], called: frozenset[str]) -> None:
    """Raise ValueError unless an expression consists of literals, operators, calls of `called` and names in `local`.

    A power's exponent must have no power in it, nor a number above MOST_EXPONENT.
    """
    tree = ast.parse(source, mode="eval")
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            known = called if id(node) in functions else {*local, *(CONSTANTS if called else ())}
            allowed = node.id in known
        elif isinstance(node, ast.Call):
            named = all(one.arg == "evaluate" for one in node.keywords)
            allowed = bool(called) and isinstance(node.func, ast.Name) and named
        else:
            allowed = isinstance(node, PLAIN) or (bool(called) and isinstance(node, ast.keyword))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
            allowed = all(map(_is_small, ast.walk(node.right)))
        if not allowed:
            raise ValueError(f"an answer may not hold {type(node).__name__}")


def _is_small(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        digits = str(node.value)
        return len(digits) < 20 and not (digits.isdecimal() and int(digits) > MOST_EXPONENT)
    return not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift))


def confine() -> None:
    """Leave this process the reading of installed packages, as far as the kernel can hold it to that."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    if not syscalls.SUPPORTED:
        return
    with contextlib.suppress(OSError):
        syscalls.drop_capabilities()
        if abi := isolation.landlock_version():
            places = {"/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix, *filter(os.path.isabs, sys.path)}
            isolation.restrict_files([(place, isolation.READ | isolation.LIST) for place in sorted(places)], abi)
        seccomp.install(seccomp.build(os.getpid(), execute=False, processes=False))


def metadata_of(tests: Any) -> Any:
    """Return the metadata of a problem from its row, where it is tagged if plain JSON would change it."""
    return codec.decode(tests) if isinstance(tests, list) else tests


def _checker(kind: str) -> Callable[[Answer], float]:
    own = functools.cache(lambda: get_score_answer_fn(kind))

    def score(answer: Answer) -> float:
        if len(answer.text) > MOST_CHARACTERS:
            return 0.0
        problem = answer.problem
        entry = {"question": problem.text, "answer": problem.answer or None, "metadata": metadata_of(problem.tests)}
        return float(own()(answer.text, entry))

    return score


for _kind in sorted(DATASETS.keys() - {"composite"}):
    verifier(f"{REASONING_GYM}{_kind}", ground_truth="tests")(_checker(_kind))
builtins.eval = guarded
confine()
