"""The assertion runner: runs trusted test code, and requests whatever it does not define from the candidate's sandbox.

Names of the program become what the candidate answers: plain values as they are, objects of its own as `Remote`s. So
`assert f(2) == 4` is decided in a process in which no line of the candidate ever ran.
"""

from __future__ import annotations

import ast
import builtins
import operator
import sys
from collections.abc import Iterator
from typing import Any

from verify.code.sandbox import codec
from verify.code.sandbox.codec import FramePipe, fresh_module, message, open_streams

_NO_RAISE = (StopIteration, StopAsyncIteration)


class Remote:
    """Stands for an object that stays in the candidate's process. No value of the tests equals it but its content.

    Its content is what it holds as a number, text or container, where its class derives from one. Its operators are the
    program's, and give objects of the program again: a number or a text would decide a test for the program.
    """

    def __init__(self, line: FramePipe, number: int, content: Any = None) -> None:
        self.__dict__.update(_line=line, _number=number, _content=content)

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
        """Let the program compare two of its objects; anything else is compared with the content, if there is any."""
        if self is other:
            return True
        if isinstance(other, Remote):
            return bool(self._ask("equal", other))
        return self._content is not None and bool(self._content == other)

    def __hash__(self) -> int:
        return hash(self._number if self._content is None else self._content)

    def _order(self, question: str, name: str, other: object) -> Any:
        if isinstance(other, Remote):
            return bool(self._ask(question, other))
        return NotImplemented if self._content is None else getattr(operator, name)(self._content, other)

    def __lt__(self, other: object) -> Any:
        return self._order("less", "lt", other)

    def __le__(self, other: object) -> Any:
        return self._order("at most", "le", other)

    def __gt__(self, other: object) -> Any:
        return other._order("less", "lt", self) if isinstance(other, Remote) else self._order("", "gt", other)

    def __ge__(self, other: object) -> Any:
        return other._order("at most", "le", self) if isinstance(other, Remote) else self._order("", "ge", other)

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


def _convert(kind: Any) -> Any:
    """Return a method of `Remote` that makes a plain value of its content, and raises TypeError without one."""

    def convert(self: Remote, *options: Any) -> Any:
        if self._content is None:
            raise TypeError(f"{kind.__name__}() of an object of the program's")
        return kind(self._content, *options)

    return convert


for _name, _kind in {"round": round, "int": int, "float": float, "index": operator.index, "complex": complex}.items():
    setattr(Remote, f"__{_name}__", _convert(_kind))


def _operator(name: str, question: str) -> Any:
    """Return an operator of `Remote`: on its content where the other side is the tests', else the program's."""

    def operate(self: Remote, *others: Any) -> Any:
        if self._content is not None and not any(isinstance(other, Remote) for other in others):
            own = (*others, self._content) if question != "operate" else (self._content, *others)
            return getattr(operator, name)(*own)
        found = self._ask(question, name, *others)
        if not isinstance(found, Remote):
            raise TypeError(f"{name} of the program's objects gives {type(found).__name__}: nobody can check that")
        return Remote(self._line, found.__dict__["_number"])  # without a content, which would be compared here

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    _spelled = f"{_name}_" if _name in ("and", "or") else _name
    setattr(Remote, f"__{_name}__", _operator(_spelled, "operate"))
    setattr(Remote, f"__r{_name}__", _operator(_spelled, "operate from the right"))
for _name in ("neg", "abs", "invert"):
    setattr(Remote, f"__{_name}__", _operator(_name, "operate"))


def ask(line: FramePipe, target: str | list[Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call `target` in the candidate's sandbox; its built-in exceptions are raised here."""

    def number(value: Any) -> int:
        if isinstance(value, Remote):
            return int(value.__dict__["_number"])
        raise codec.Unencodable(type(value).__name__)

    line.send(b"C", [target, codec.encode(list(arguments), number), codec.encode(named, number)])
    answer, *parts = line.receive()
    if answer == "value":
        if len(parts) > 1:
            _renew_all(arguments, parts[1])
        return codec.decode(parts[0], lambda reference, content: Remote(line, reference, content))
    kind = vars(builtins).get(parts[0])
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in _NO_RAISE:
        kind = RuntimeError
    try:
        error = kind(parts[1])
    except TypeError:  # some built-in exceptions want more arguments
        error = RuntimeError(parts[1])
    raise error


def _outside_names(tree: ast.Module, defined: list[str]) -> set[str]:
    """Return the names that the test code uses and does not define: the program's.

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
    """Return whether a statement is `from solution import f`: the name is the program's anyway."""
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _used_as_modules(tree: ast.Module) -> set[str]:
    """Return names of the standard library before a dot that are never called: math.pi, but not copy([1])."""
    nodes = list(ast.walk(tree))
    dotted = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (dotted - called).intersection(sys.stdlib_module_names)


def decides(statement: ast.stmt) -> bool:
    """Return whether a top-level statement of test code counts as a test: it asserts, or may (a block, a call like
    check(f)); neither a docstring nor print does."""
    if isinstance(statement, (ast.Assert, ast.For, ast.With, ast.Try, ast.If, ast.While)):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and not (isinstance(call.func, ast.Name) and call.func.id == "print")


def _renew_all(arguments: tuple[Any, ...], tree: codec.Tree) -> None:
    """Copy the program's changes to its arguments back to ours, except where objects of its own are in them."""
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


def run_assertions(source: str, prefix: str, entry: str, defined: list[str]) -> int:
    """Run test code against stand-ins; report each top-level assertion, call or block as passed or not.

    `prefix`: trusted code that stands before the program; all of it but the function `entry` is run here too, so that
    no program replaces a helper of the tests. `defined`: names that the candidate says it defines.
    """
    line = FramePipe(3, 4)
    open_streams()
    names = fresh_module("__main__")
    try:
        before, tree = _parse_prefix(prefix), ast.parse(source)
        before.body = [node for node in before.body if not (isinstance(node, ast.FunctionDef) and node.name == entry)]
        tree.body = [node for node in tree.body if not _imports_program(node)]
        exec(compile(before, "tests.py", "exec", dont_inherit=True), names)
    except Exception as error:  # noqa: BLE001 - the tests are at fault, whatever it is
        line.send(b"U", f"the tests cannot be run: {type(error).__name__}: {message(error)}"[:300])
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
        unit = decides(statement)
        try:
            exec(compile(ast.Module([statement], []), "tests.py", "exec", dont_inherit=True), names)
            passed += [True] * unit
        except codec.Unencodable as error:
            line.send(b"U", f"a value of type {error} cannot be handed to the program")
            return 0
        except Exception as error:  # noqa: BLE001 - a failed assertion, or whatever the program's answer caused
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                line.send(b"U", f"the tests cannot be run: {message(error)}"[:300])
                return 0
            passed.append(False)
            reason = reason or f"{type(error).__name__}: {message(error)}"[:300]
            if not isinstance(statement, ast.Assert):
                break
    line.send(b"D", [passed, reason])
    return 0
