"""Runs a Python program in the child of a sandbox, as a script or as a server of calls.

Script: the program with standard input and output, as `python program.py`. Server: the program's names are called on
request of the grading process or of an assertion runner (`assertion_runner.py`, which `server.py` also finds here) by
`call_server.py`; values travel as data in frames (`codec.py`).
"""

from __future__ import annotations

import ast
import atexit
import builtins
import functools
import gc
import linecache
import os
import random
import re
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from verify.code.sandbox.assertion_runner import run_assertions
from verify.code.sandbox.call_server import CallServer, nearest_builtin
from verify.code.sandbox.codec import FramePipe, fresh_module, message, open_streams

__all__ = [
    "CELL_ENDED",
    "CELL_RAISED",
    "probe",
    "public_names",
    "run_assertions",
    "run_cells",
    "run_script",
    "serve_calls",
]
CELL_ENDED, CELL_RAISED = 70, 71
"""exit statuses of `run_cells`; any other says that the last cell did not come to its end"""

_WORD = re.compile(r"\w+")
_GLOBAL = re.compile(r"^\s*global\s(.+)$", re.MULTILINE)
_CALL_DEPTH = 50_000
"""calls in calls, where a function is called: published graders set as much"""


def probe() -> int:
    """Try what a sandbox must refuse; return 0 when all was refused, else the number of the first attempt that was
    not."""
    attempts = (lambda: os.fork() or os._exit(0), lambda: socket.socket(), lambda: os.open("/etc/passwd", os.O_RDONLY))
    for number, attempt in enumerate(attempts, 1):
        try:
            attempt()
        except OSError:
            continue
        return number
    return 0


def run_script(source: str) -> int:
    """Run a whole program and return its exit status."""
    open_streams()
    status, names = 0, fresh_module("__main__")
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        status = _status(end)
    except BaseException:  # noqa: BLE001 - whatever it is, the interpreter would print it and answer 1
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flushed = _flush()
    names.clear()  # as at the end of an interpreter: files that the program still holds are written
    gc.collect()
    return status or (0 if flushed and _flush() else 120)


def run_cells(cells: list[str], seed: int) -> int:
    """Run programs one after another with the same names, as a notebook does: of the last one the output counts, with
    its traceback and the value of a last expression; that of the others is dropped. Returns CELL_ENDED or CELL_RAISED.

    `random` begins at `seed`, so that running the earlier cells again gives the names that they gave before.
    """
    output = os.dup(1)
    os.dup2(2, 1)  # which is /dev/null
    random.seed(seed)
    names, raised = fresh_module("__main__"), False
    for number, cell in enumerate(cells, 1):
        _flush()
        open_streams()  # an earlier cell may have closed them
        sys.stderr = sys.stdout
        if number == len(cells):
            os.dup2(output, 1)
        raised = _run_cell(cell, f"cell {number}", names)
    return CELL_RAISED if _flush() and raised else CELL_ENDED


def _run_cell(cell: str, filename: str, names: dict[str, Any]) -> bool:
    """Run one cell; say whether it raised."""
    linecache.cache[filename] = len(cell), None, cell.splitlines(keepends=True), filename  # for tracebacks
    try:
        tree = ast.parse(cell, filename)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, filename, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), names)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as end:
        return bool(_status(end))
    except BaseException as error:  # noqa: BLE001 - as `run_script`
        _flush()
        shown = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function
        traceback.print_exception(type(error), error, shown, file=sys.__stdout__)
        return True
    return False


def _flush() -> bool:
    """Write what is buffered; return False when that fails. A stream that the program closed is left out."""
    for stream in (sys.stdout, sys.__stdout__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            return False
    return True


def _status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1


def _with_prefix(source: str, prefix: str) -> str:
    """Return the program after its prefix: a bare body follows the head of its function, a whole function replaces it.

    Imports from __future__ stay at the top.
    """
    if not prefix:
        return source
    prefix = prefix.rstrip("\n") + "\n"
    if _parses(prefix + source):
        return prefix + source
    helpers = _without_head(prefix)
    lines = source.splitlines(keepends=True)
    futures = [line for line in lines if line.startswith("from __future__ ")]
    rest = "".join(line for line in lines if not line.startswith("from __future__ "))
    return "".join(futures) + helpers + rest


def _parses(source: str) -> bool:
    try:
        compile(source, "solution.py", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _without_head(prefix: str) -> str:
    """Return the prefix without the head of a function that has no body yet."""
    if _parses(prefix):
        return prefix
    lines = prefix.splitlines(keepends=True)
    heads = [number for number, line in enumerate(lines) if line.startswith(("def ", "async def ", "class "))]
    while heads:
        start = heads.pop()
        while start and lines[start - 1].startswith("@"):
            start -= 1
        if _parses("".join(lines[:start])):
            return "".join(lines[:start])
    return ""


@functools.cache
def public_names(modules: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """Return where the names that modules give are found: (module, name), or (module, "") for a module itself. Built-in
    names stay Python's. The server asks before it forks, so that its children need not."""
    homes: dict[str, tuple[Any, str]] = {}
    for module in map(__import__, modules):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
        homes |= {name: (module, name) for name in public if not hasattr(builtins, name)}
    return homes | {name: (sys.modules[name], "") for name in modules}


def _imported(modules: tuple[str, ...], source: str) -> dict[str, Any]:
    """Return the words of a source that modules give."""
    known = public_names(modules)
    places = {word: known[word] for word in _WORD.findall(source) if word in known}
    return {word: getattr(module, name) if name else module for word, (module, name) in places.items()}


def serve_calls(source: str, name: str, prefix: str = "", modules: Sequence[str] = ()) -> int:
    """Run the program as module `name`, then answer calls until the pipe closes. Returns the exit status.

    `prefix`: code that stands before the program. `modules`: what it need not import, where its functions are called.
    A program that raises is reported with its exception.
    """
    line = FramePipe(3, 4)
    open_streams()
    names = fresh_module(name)
    if modules:
        sys.setrecursionlimit(_CALL_DEPTH)
        if imported := _imported(tuple(modules), source):  # as built-in names: what the program defines comes first
            names["__builtins__"] = vars(builtins) | imported
    try:
        exec(compile(_with_prefix(source, prefix), "solution.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code:
            raise
    except BaseException as error:  # noqa: BLE001 - as `run_script`
        line.send(b"A", ["error", nearest_builtin(type(error)), message(error)])
        return 1
    line.send(b"R", [key for key in names if type(key) is str and hasattr(builtins, key) and key[:2] != "__"])
    rebound = [name for statement in _GLOBAL.findall(source) for name in _WORD.findall(statement) if name in names]
    return CallServer(line, names, rebound).serve()
