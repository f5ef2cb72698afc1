"""Asks a program in another sandbox, for tests that run here.

`Program` asks the candidate's sandbox and makes what stands for its answers (`stand_ins.py`). What nobody can carry out
or check is no failure: `Program.refuse`.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import io
import itertools
import operator
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from verify.code.sandbox import codec
from verify.code.sandbox.codec import FramePipe
from verify.code.sandbox.stand_ins import OWNERS, Remote, RemoteClass, RemoteError, awaited, make, text_of

_NO_RAISE = (StopIteration, StopAsyncIteration)
_REPLACED = {name: getattr(builtins, name) for name in ("input", "print")}
_NATURES = ("FunctionType", "BuiltinFunctionType", "MethodType", "GeneratorType", "AsyncGeneratorType")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, list, dict, set)
_MOST_SHARED = 1000
"""items of a global container of the program's that is read again after each call"""
_ALONE = 64
"""items of an iterator that are asked for one by one"""
_CALLABLE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType,
    functools.partial, operator.itemgetter, operator.attrgetter, operator.methodcaller,
)  # fmt: skip


class Unverifiable(BaseException):
    """The tests ask for what cannot be carried out between two processes."""


class Program:
    """Asks the program in the candidate's sandbox, and keeps what stands for its objects here."""

    def __init__(self, line: FramePipe, swallowed: Callable[[BaseException], None] = lambda _: None) -> None:
        """`swallowed` takes the exception of a function of the tests that the program may catch."""
        self.line, self.swallowed, self.turn = line, swallowed, threading.RLock()
        self.objects: dict[int, Any] = {}
        self.classes: dict[int, type] = {}
        self.named: set[type] = set()
        """classes that the tests name, with a capital letter: what their objects do is asked of the program"""
        self.items: dict[int, tuple[int, deque[Any]]] = {}
        """number of an iterator of the program's -> how many items were taken of it, and those that wait here"""
        self.functions: list[Any] = []
        self.raised: list[BaseException] = []
        self.names: dict[str, Any] = {}
        self.live: set[str] = set()
        """names of the tests, and which of these are the program's and change with its own"""
        self.shared: dict[str, tuple[Any, codec.Tree]] = {}
        """its global values that may change, and their trees when they were read"""
        self.refused = ""

    def refuse(self, reason: str) -> NoReturn:
        """End the tests: nobody can say whether the program is right."""
        self.refused = self.refused or reason
        raise Unverifiable(reason)

    def read(self, name: str) -> Any:
        """Return what the program has under a name. Raises KeyError without one."""
        value = self.ask([name, "read"])
        if name in self.shared:
            return self.shared[name][0]
        if type(value) in _PLAIN and not (isinstance(value, (list, dict, set)) and len(value) > _MOST_SHARED):
            self.shared[name] = value, codec.encode(value, self.refer)
        return value

    def _renew_shared(self) -> None:
        """Read the globals that the program may have changed."""
        for name, (old, tree) in self.shared.items():
            value = self._ask([name, "read"], (), {})
            if codec.encode(value, self.refer) == tree:
                continue
            if type(old) is type(value) and isinstance(old, (list, dict, set)):
                _renew(old, value)
                value = old
            elif name in self.live:
                self.names[name] = value
            self.shared[name] = value, codec.encode(value, self.refer)

    def ask(self, target: str | list[Any], arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """Call `target` in the candidate's sandbox; its exceptions are raised here."""
        with self.turn:
            for name, (value, tree) in self.shared.items():
                if isinstance(value, (list, dict, set)) and codec.encode(value, self.refer) != tree:
                    self.refuse(f"the tests change {name}, a global of the program")
            try:
                return self._ask(target, arguments, named or {})
            finally:
                if not self.refused:
                    self._renew_shared()

    def _ask(self, target: str | list[Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        question = [target, codec.encode(list(arguments), self.refer), codec.encode(named, self.refer)]
        streams = self._streams()
        self.line.send(b"C", question if streams is None else [*question, streams])
        try:
            while (reply := self.line.receive())[0] == "callback":
                self._answer(*reply[1:])
            if len(reply) > 3 and isinstance(reply[-1], dict):
                self._take_streams(reply.pop())
            if reply[0] == "value":
                if len(reply) > 1 and reply[2:3] not in ([], [None]):
                    _renew_all(arguments, reply[2])
                return self.decode(reply[1])
            error = self.decode(reply[3])
        except (codec.Malformed, LookupError, TypeError, ValueError) as broken:
            raise from_program(RuntimeError("the program's answer is no value")) from broken
        raise error if isinstance(error, BaseException) else RuntimeError("the program raised no exception")

    def next_item(self, number: int) -> Any:
        """Return the next item of an iterator of the program's: first one at a time, and then some more at once."""
        taken, ahead = self.items.setdefault(number, (0, deque()))
        if not ahead:
            items = self.ask([number, "next"], (1 + taken // _ALONE,))
            ahead.extend(items if type(items) is list else [])
        if not ahead:
            raise StopIteration
        self.items[number] = taken + 1, ahead
        return ahead.popleft()

    def refer(self, value: Any) -> codec.Tree:
        """Return the tree of an object that is no plain value."""
        if isinstance(value, Remote):
            return ["reference", value._number_]
        if isinstance(value, type) and value in OWNERS:
            return ["reference", OWNERS[value][1]]
        if isinstance(value, Exception):
            if isinstance(number := getattr(value, "_number_", None), int):
                return ["reference", number]
            if type(value) in codec.ERRORS.values():
                return ["exception", type(value).__name__, str(value)]
        if isinstance(value, _CALLABLE):
            return self._function(value)
        if _is_mock(value) and getattr(value, "_spec_class", None) is None:
            return ["callback", self._mock(value), "mock", None, None, "mock"]
        if hasattr(type(value), "__next__"):
            self.functions.append(lambda: list(itertools.islice(value, 1)))
            return ["callback", len(self.functions) - 1, "iterator", None, None, "iterate"]
        self.refuse(f"a value of type {type(value).__name__} cannot be handed to the program")

    def _mock(self, mock: Any) -> int:
        """Return the number of a mock of the tests; the next number is that of the function that reads it."""
        for number, function in enumerate(self.functions):
            if function is mock:
                return number

        def read(name: str) -> Any:
            if name.startswith("_") or hasattr(type(mock), name):
                self.refuse(f"the program uses {name[:60]} of a mock of the tests")
            return getattr(mock, name)

        self.functions += [mock, read]
        return len(self.functions) - 2

    def _function(self, function: Any) -> codec.Tree:
        """Return the tree of a function of the tests: number, name, documentation, and its parameters where plain."""
        self.functions.append(function)
        head = ["callback", len(self.functions) - 1, getattr(function, "__name__", "function"), function.__doc__]
        code = getattr(function, "__code__", None)
        plain = isinstance(function, types.FunctionType) and not function.__defaults__ and not function.__kwdefaults__
        if code is None or not plain or code.co_flags & 0x0C or code.co_kwonlyargcount:  # *arguments, **named
            return [*head, None, ""]
        names = ", ".join(code.co_varnames[: code.co_argcount])
        return [*head, names, names]

    def decode(self, tree: codec.Tree) -> Any:
        """Return the value of a tree of the program's."""
        value = codec.decode(tree, self._resolve)
        if isinstance(value, type) and value in OWNERS and value.__name__[:1].isupper():
            self.named.add(value)
        return value

    def _resolve(self, tag: str, parts: list[Any]) -> Any:
        if tag == "class":
            return self._class(*parts)
        if tag == "exception":
            return self._exception(*parts)
        if tag == "callback":
            return self.functions[parts[0]]
        if tag == "raised":
            return self.raised[parts[0]]
        number, content, kind = parts
        if number not in self.objects:
            if isinstance(kind, str):
                made = make(Remote, self, number, None, getattr(types, kind) if kind in _NATURES else None)
            else:
                value = codec.decode(content, self._resolve)
                made = make(self._class(*kind[1:]), self, number, value, None if value is None else type(value))
            self.objects[number] = awaited(made) if kind == "CoroutineType" else made
        return self.objects[number]

    def _class(self, number: int, name: str, error: str, bases: list[Any]) -> type:
        """Return the class that stands for one of the program's."""
        if number not in self.classes:
            above = [self._class(*base[1:]) for base in bases]
            root: type = codec.ERRORS.get(error, Exception) if error else Remote
            names: dict[str, Any] = {"__module__": "solution"}
            names |= {"__getattr__": _attribute, "__str__": text_of} if error else {"__slots__": ()}
            usable = tuple(base for base in above if issubclass(base, Exception) is bool(error))
            if not (usable and (not error or any(issubclass(base, root) for base in usable))):
                usable = (*usable, root)
            kind = RemoteError if error else RemoteClass
            try:
                made = type.__new__(kind, str(name), usable, names)
            except (TypeError, ValueError):  # no order of the bases, or no name
                made = type.__new__(kind, "Class", (root,), names)
            self.classes[number] = made
            OWNERS[made] = (self, number)
        return self.classes[number]

    def _exception(self, builtin: str, text: str, arguments: Any, number: int = -1, kind: Any = None) -> Any:
        """Return an exception that stands for one of the program's."""
        if number in self.objects:
            return self.objects[number]
        base: Any = codec.ERRORS.get(builtin, RuntimeError)
        base = RuntimeError if issubclass(base, _NO_RAISE) else base
        given = [text] if arguments is None else codec.decode(arguments)
        if kind is None:
            try:
                return from_program(base(*given))
            except (TypeError, ValueError):  # some built-in exceptions want other arguments
                return from_program(RuntimeError(text))
        made: Any = self._class(*kind[1:])
        if issubclass(made, _NO_RAISE):
            return from_program(RuntimeError(text))
        error = made.__new__(made, *given)
        error.args, error._text_, error._number_ = tuple(given), text, number
        self.objects[number] = error
        return from_program(error)

    def _answer(self, number: int, arguments: codec.Tree, named: codec.Tree) -> None:
        """Call a function of the tests for the program, and send what it returns or raises."""
        self._renew_shared()
        try:
            positional, values = codec.decode(arguments, self._resolve), codec.decode(named, self._resolve)
            reply = {"value": codec.encode(self.functions[number](*positional, **values), self.refer)}
        except Exception as error:  # noqa: BLE001 - the program gets it
            self.swallowed(error)
            self.raised.append(error)
            builtin = next(
                (base.__name__ for base in type(error).__mro__ if base in codec.ERRORS.values()), "Exception"
            )
            reply = {"error": ["exception", builtin, codec.message(error)], "number": len(self.raised) - 1}
        self.line.send(b"K", reply)

    def _streams(self) -> dict[str, Any] | None:
        """Return what the tests replaced of the standard streams and of `input` and `print`; None for nothing."""
        outputs = [name for name in ("stdout", "stderr") if getattr(sys, name) is not getattr(sys, f"__{name}__")]
        replaced = {name: getattr(builtins, name) for name, plain in _REPLACED.items()
                    if getattr(builtins, name) is not plain}  # fmt: skip
        given = sys.stdin is not sys.__stdin__
        if not (outputs or replaced or given):
            return None
        text = None
        if given:
            if not isinstance(sys.stdin, io.StringIO):
                self.refuse("the tests replace sys.stdin with something else than io.StringIO")
            position = sys.stdin.tell()
            text = sys.stdin.read()
            sys.stdin.seek(position)
        functions = {name: self._function(_Replaced(function).call) for name, function in replaced.items()}
        return {"outputs": outputs, "input": text, "functions": functions}

    def _take_streams(self, streamed: dict[str, Any]) -> None:
        """Write what the program printed where the tests catch it; go on in their input after what it read."""
        for name in ("stdout", "stderr"):
            if streamed.get(name) and getattr(sys, name) is not None:
                getattr(sys, name).write(str(streamed[name]))
        if "read" in streamed and isinstance(sys.stdin, io.StringIO):
            sys.stdin.seek(sys.stdin.tell() + int(streamed["read"], 16))


class _Replaced:
    """Calls what the tests put in the place of a built-in function: a function, or a mock of unittest."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def call(self, *arguments: Any, **named: Any) -> Any:
        result = self.function(*arguments, **named)
        return None if _is_mock(result) else result


def _is_mock(value: Any) -> bool:
    return type(value).__module__ == "unittest.mock" and hasattr(value, "_mock_children")


def _attribute(error: Any, name: str) -> Any:
    """Ask the program for an attribute of its exception."""
    program, _ = OWNERS[type(error)]
    if name.startswith("_") or not isinstance(number := vars(error).get("_number_"), int):
        raise AttributeError(name)
    return program.ask([number, "attribute"], (name,))


def from_program(error: Any) -> Any:
    """Mark an exception as raised by the program, not by the tests."""
    error._from_program = True
    return error


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
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


class ProgramFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that can only be the program: their names are read from it."""

    def __init__(self, program: Program, modules: set[str]) -> None:
        self.program, self.modules = program, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a module of the program's for the names that are known to be one."""
        known = name in self.modules or any(module.startswith(f"{name}.") for module in self.modules)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return a module that asks the program for its names."""
        return _ProgramModule(spec.name, self.program)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the program has run."""


class _ProgramModule(types.ModuleType):
    def __init__(self, name: str, program: Program) -> None:
        super().__init__(name)
        self.__dict__["_program_"] = program

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_program_"].read(name)
        except KeyError:
            raise AttributeError(name) from None
