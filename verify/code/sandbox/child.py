"""What the child of a box runs when the program is Python: a script, a server of calls, or an examiner.

Script: the program with standard input and output, as `python program.py`. Server: the program's names are called on
request, values travel as data (`codec.py`). Examiner: trusted test code runs in a box of its own, where the names it
does not define are stand-ins that ask the server in the candidate's box; so `assert f(2) == 4` is decided in a process
in which no line of the candidate ever ran. Frames: 4 bytes little-endian length, then the body.
What this does not do: isolate (`box.py` did). Who calls this: `box.py`, in the child.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import gc
import itertools
import os
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from verify.code.sandbox import codec

HEADER = struct.Struct("<I")
_NO_RAISE = (StopIteration, StopAsyncIteration)


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc] # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.set_int_max_str_digits(0)
    sys.argv = ["solution.py"]


def _fresh_module(name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


def probe() -> int:
    """Try what a box must refuse; 0 when all of it was refused, else which was not."""
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
    _open_streams()
    status, names = 0, _fresh_module("__main__")
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


def _flush() -> bool:
    """Write what is buffered; False when that fails. A stream that the program closed is none of ours."""
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


class _Line:
    """Frames over two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write

    def send(self, kind: bytes, tree: codec.Tree) -> None:
        body = kind + codec.dump(tree)
        data = memoryview(HEADER.pack(len(body)) + body)
        while data:
            data = data[os.write(self.write, data) :]

    def receive(self) -> codec.Tree:
        """Return the next tree. Raises EOFError at the end."""
        size = HEADER.unpack(self._exactly(HEADER.size))[0]
        return codec.load(self._exactly(size)[1:])

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self.read, min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def _with_prefix(source: str, prefix: str) -> str:
    """The program behind the code that stands before it: a bare body behind its head, a whole function without it.

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
    """The prefix without the head of a function that has no body yet."""
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


def serve_calls(source: str, name: str, prefix: str = "") -> int:
    """Run the program as module `name`, then answer calls until the pipe closes. Returns the exit status.

    `prefix`: code that stands before the program.
    """
    line = _Line(3, 4)
    _open_streams()
    names = _fresh_module(name)
    kept: list[Any] = []

    def refer(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    try:
        exec(compile(_with_prefix(source, prefix), "solution.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code:
            raise
    line.send(b"R", [key for key in names if type(key) is str and hasattr(builtins, key) and key[:2] != "__"])
    while True:
        try:
            target, arguments, named = line.receive()
        except EOFError:
            return 0
        try:
            positional = codec.decode(arguments, kept.__getitem__)
            result = _find(names, target, kept)(*positional, **codec.decode(named, kept.__getitem__))
            reply = ["value", codec.encode(result, refer)]
            if result is None:  # works on its arguments in place, perhaps; else f(x) == sorted(x) is won by x.clear()
                reply.append(codec.encode(positional, refer))
        except BaseException as error:  # noqa: BLE001 - an exit inside a call is an error of the call
            builtin = next(
                (kind for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind), Exception
            )
            reply = ["error", builtin.__name__, _message(error)]
        line.send(b"A", reply)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:  # noqa: BLE001 - its own __str__ may raise
        return ""


def _find(names: dict[str, Any], target: str | list[Any], kept: list[Any]) -> Any:
    """The object of a name ("f", "Solution.f": of a fresh Solution) or the method of a kept object."""
    if isinstance(target, list):
        if target[1] == "read":
            return lambda: names[target[0]]
        if target[1] == "iterate":
            return lambda: list(kept[target[0]])
        if target[1] == "next":
            return lambda: list(itertools.islice(kept[target[0]], 1))
        if target[1] in _ANSWERS:
            return lambda *others: _ANSWERS[target[1]](kept[target[0]], *others)
        if target[1] == "attribute":
            return lambda name: getattr(kept[target[0]], name)
        if target[1] == "assign":
            return lambda name, value: setattr(kept[target[0]], name, value)
        return getattr(kept[target[0]], target[1])
    owner, _, method = target.partition(".")
    if owner not in names and not method and "Solution" in names:  # a method is asked for by its name alone
        owner, method = "Solution", owner
    found = names[owner] if owner in names else getattr(builtins, owner)
    return getattr(found(), method) if method else found


_ANSWERS: dict[str, Callable[..., Any]] = {"truth": bool, "text": str, "equal": lambda one, other: bool(one == other)}


class Remote:
    """Stands for an object that stays in the candidate's process. It equals nothing but itself."""

    def __init__(self, line: _Line, number: int) -> None:
        self.__dict__.update(_line=line, _number=number)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return ask(self._line, [self._number, method], arguments, {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iterate"))

    def __next__(self) -> Any:
        found = self._ask("next")
        if not found:
            raise StopIteration
        return found[0]

    def __bool__(self) -> bool:
        return bool(self._ask("truth"))

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __eq__(self, other: object) -> bool:
        """Two objects of the program's are compared by the program; to anything else none is equal."""
        if self is other:
            return True
        return isinstance(other, Remote) and bool(self._ask("equal", other))

    def __hash__(self) -> int:
        return hash(self._number)

    def __len__(self) -> int:
        try:
            return int(self._ask("__len__"))
        except AttributeError:  # as Python says it; list() asks before it iterates
            raise TypeError("object has no len()") from None

    def __getitem__(self, key: Any) -> Any:
        return self._ask("__getitem__", key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("assign", name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask(self._line, [self._number, "__call__"], arguments, named)


def ask(line: _Line, target: str | list[Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call `target` in the candidate's box; its built-in exceptions are raised here."""

    def number(value: Any) -> int:
        if isinstance(value, Remote):
            return int(value.__dict__["_number"])
        raise codec.Unencodable(type(value).__name__)

    line.send(b"C", [target, codec.encode(list(arguments), number), codec.encode(named, number)])
    answer, *parts = line.receive()
    if answer == "value":
        if len(parts) > 1:
            _renew_all(arguments, parts[1])
        return codec.decode(parts[0], lambda reference: Remote(line, reference))
    kind = vars(builtins).get(parts[0])
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in _NO_RAISE:
        kind = RuntimeError
    try:
        error = kind(parts[1])
    except TypeError:  # some built-in exceptions want more arguments
        error = RuntimeError(parts[1])
    raise error


def _outside_names(tree: ast.Module, defined: list[str]) -> set[str]:
    """Names that the test code uses and does not define: the program's.

    A built-in name stays Python's own, or `def abs(x): return 0` would pass every tolerance; only where the tests use
    no other name is it the function under test.
    """
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)} - stored
    plain = {name for name in loaded if not hasattr(builtins, name)}
    return plain or loaded.intersection(defined)


def _imports_program(node: ast.stmt) -> bool:
    """from solution import f: the name is the program's anyway."""
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _used_as_modules(tree: ast.Module) -> set[str]:
    """Names of the standard library that stand before a dot and are never called: math.pi, but not copy([1])."""
    nodes = list(ast.walk(tree))
    dotted = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (dotted - called).intersection(sys.stdlib_module_names)


def _is_call(statement: ast.stmt) -> bool:
    """check(f): a call that may assert; neither a docstring nor print."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and not (isinstance(call.func, ast.Name) and call.func.id == "print")


def _renew_all(arguments: tuple[Any, ...], tree: codec.Tree) -> None:
    """Bring the program's changes to its copies of the arguments back; not where objects of its own are in them."""
    try:
        changed = codec.decode(tree)
    except codec.Malformed:
        return
    for old, new in zip(arguments, changed, strict=False):
        _renew(old, new)


def _renew(old: Any, new: Any) -> None:
    """Change a list, dict or set of the tests as the program changed its copy."""
    if type(old) is not type(new) or old == new:
        return
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


def _parse_prefix(prefix: str) -> ast.Module:
    """Parse what stands before a program; it may end in the head of a function without a body."""
    try:
        return ast.parse(prefix)
    except SyntaxError:
        return ast.parse(prefix.rstrip() + "\n    pass\n")


def examine(source: str, prefix: str, entry: str, defined: list[str]) -> int:
    """Run test code against stand-ins; report each top-level assertion, call or block as passed or not.

    `prefix`: trusted code that stands before the program; all of it but the function `entry` is run here too, so that
    no program replaces a helper of the tests. `defined`: names that the candidate says it defines.
    """
    line = _Line(3, 4)
    _open_streams()
    names = _fresh_module("__main__")
    try:
        before, tree = _parse_prefix(prefix), ast.parse(source)
        before.body = [node for node in before.body if not (isinstance(node, ast.FunctionDef) and node.name == entry)]
        tree.body = [node for node in tree.body if not _imports_program(node)]
        exec(compile(before, "tests.py", "exec", dont_inherit=True), names)
    except Exception as error:  # noqa: BLE001 - the tests are at fault, whatever it is
        line.send(b"U", f"the tests cannot be run: {type(error).__name__}: {_message(error)}"[:300])
        return 0
    modules = _used_as_modules(tree)
    for name in sorted(_outside_names(tree, defined) - names.keys()):
        if name in modules:  # the tests lean on an import of the program's: it is the true module
            names[name] = __import__(name)
            continue
        try:
            names[name] = ask(line, [name, "read"], (), {})
        except KeyError:  # the program does not define it: a NameError where it is used
            pass
    passed: list[bool] = []
    reason = ""
    for statement in tree.body:
        unit = isinstance(statement, (ast.Assert, ast.For, ast.With, ast.Try, ast.If, ast.While)) or _is_call(statement)
        try:
            exec(compile(ast.Module([statement], []), "tests.py", "exec", dont_inherit=True), names)
            passed += [True] * unit
        except codec.Unencodable as error:
            line.send(b"U", f"a value of type {error} cannot be handed to the program")
            return 0
        except Exception as error:  # noqa: BLE001 - a failed assertion, or whatever the program's answer caused
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                line.send(b"U", f"the tests cannot be run: {_message(error)}"[:300])
                return 0
            passed.append(False)
            reason = reason or f"{type(error).__name__}: {_message(error)}"[:300]
            if not isinstance(statement, ast.Assert):
                break
    line.send(b"D", [passed, reason])
    return 0
