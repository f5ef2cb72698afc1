"""Answers questions about a program in the process that runs it: calls, attributes, operators, with values as data.

An object of the program's own stays here and is referred to by its number, with its class and, where that derives from
a built-in type, its content. A function of the tests arrives as a stand-in that asks them in return (`TestFunction`).
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import io
import itertools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verify.code.sandbox import codec
from verify.code.sandbox.codec import FramePipe, message

if TYPE_CHECKING:
    import asyncio

_SLICE_S = 0.02
"""how long an awaited object works before the tests' event loop has its turn again"""
_MOST_OUTPUT = 1 << 20
NATURES: dict[Any, str] = {
    types.FunctionType: "FunctionType", types.BuiltinFunctionType: "BuiltinFunctionType",
    types.MethodType: "MethodType", types.GeneratorType: "GeneratorType",
    types.AsyncGeneratorType: "AsyncGeneratorType", types.CoroutineType: "CoroutineType",
}  # fmt: skip
"""objects of Python's own types that stay here, by their names in `types`"""


def nearest_builtin(kind: type) -> str:
    """Return the name of the built-in exception that an exception class is or derives from."""
    return next((base.__name__ for base in kind.__mro__ if codec.ERRORS.get(base.__name__) is base), "Exception")


class CallServer:
    """Answers questions about the names of a program, until the pipe closes."""

    def __init__(self, line: FramePipe, names: dict[str, Any], rebound: list[str]) -> None:
        """`rebound`: the names that functions of the program rebind."""
        self.line, self.names, self.rebound = line, names, rebound
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.late: dict[int, BaseException] = {}
        """id of an iterator -> what it raised after the items that were sent"""
        self.functions: dict[int, int] = {}
        """id of a stand-in of a function of the tests -> its number there; `kept_functions` keeps the ids valid"""
        self.kept_functions: list[Any] = []
        self.mocks: dict[int, TestMock] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def keep(self, value: Any) -> int:
        """Keep an object and return its number, the same for the same object."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return number

    def refer(self, value: Any) -> codec.Tree:
        """Return the tree of an object that has no plain value."""
        kind: Any = type(value)
        if issubclass(kind, type):
            return self._describe(value)
        if issubclass(kind, BaseException):
            return self._exception(value)
        if id(value) in self.functions:
            return ["callback", self.functions[id(value)]]
        content = codec.content(value)
        tree = None if content is None else codec.encode(content, self.refer)
        return ["reference", self.keep(value), tree, NATURES.get(kind) or self._describe(kind)]

    def _describe(self, kind: type) -> codec.Tree:
        """Return the tree of a class: number, name, nearest built-in exception ("" for none), bases but `object`."""
        error = nearest_builtin(kind) if issubclass(kind, BaseException) else ""
        plain = (object, *codec.ERRORS.values(), BaseException)
        bases = [self._describe(base) for base in kind.__bases__ if base not in plain]
        return ["class", self.keep(kind), str(kind.__name__)[:100], error, bases]

    def _exception(self, error: BaseException) -> codec.Tree:
        """Return the tree of an exception: built-in name, message, arguments; number and class if its class is new."""
        kind = type(error)
        try:
            arguments = codec.encode(list(error.args))
        except (codec.Unencodable, RecursionError):
            arguments = None
        head = ["exception", nearest_builtin(kind), message(error), arguments]
        if codec.ERRORS.get(kind.__name__) is kind:
            return head
        return [*head, self.keep(error), self._describe(kind)]

    def resolve(self, tag: str, parts: list[Any]) -> Any:
        """Return what a tree of the tests stands for: a kept object, one of their functions, an exception."""
        if tag in ("reference", "class"):
            return self.kept[parts[0]]
        if tag == "exception":
            return codec.ERRORS[parts[0]](parts[1])
        if parts[0] in self.mocks:
            return self.mocks[parts[0]]
        function = TestFunction(self, parts[0]).as_function(*parts[1:])
        if parts[-1] == "mock":
            self.mocks[parts[0]] = function
        self.functions[id(function)] = parts[0]
        self.kept_functions.append(function)
        return function

    def serve(self) -> int:
        """Answer until the pipe closes."""
        while True:
            try:
                question = self.line.receive()
            except EOFError:
                return 0
            self.answer(question)

    def answer(self, question: Any) -> None:
        """Do what one question asks for, and send the reply."""
        target, arguments, named, *streams = question
        streamed: dict[str, Any] = {}
        try:
            positional = codec.decode(arguments, self.resolve)
            values = codec.decode(named, self.resolve)
            with self._streams(streams[0], streamed) if streams else contextlib.nullcontext():
                result = self._find(target)(*positional, **values)
            reply = ["value", codec.encode(result, self.refer)]
            if result is None:  # works on its arguments in place, perhaps; else f(x) == sorted(x) is won by x.clear()
                reply.append(codec.encode(positional, self.refer))
        except BaseException as error:  # noqa: BLE001 - an exit inside a call is an error of the call
            raised = getattr(error, "_raised_by_tests", None)
            tree = ["raised", raised] if type(raised) is int else self._exception(error)
            reply = ["error", nearest_builtin(type(error)), message(error), tree]
        if streamed:
            reply = [*reply, *[None] * (4 - len(reply)), streamed]
        self.line.send(b"A", reply)

    @contextlib.contextmanager
    def _streams(self, given: dict[str, Any], streamed: dict[str, Any]) -> Iterator[None]:
        """Replace the streams and built-in functions that the tests replaced, and tell what was printed and read."""
        standard = (sys.stdin, sys.stdout, sys.stderr)
        plain = {name: getattr(builtins, name) for name in given["functions"]}
        for name, tree in given["functions"].items():
            setattr(builtins, name, codec.decode(tree, self.resolve))
        for name in given["outputs"]:
            setattr(
                sys, name, io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace", newline="", write_through=True)
            )
        if given["input"] is not None:
            sys.stdin = io.StringIO(given["input"])
        try:
            yield
        finally:
            for name in given["outputs"]:
                with contextlib.suppress(Exception):
                    streamed[name] = getattr(sys, name).buffer.getvalue().decode("utf-8", "replace")[:_MOST_OUTPUT]
            if given["input"] is not None and isinstance(sys.stdin, io.StringIO):
                streamed["read"] = hex(sys.stdin.tell())
            sys.stdin, sys.stdout, sys.stderr = standard
            for name, function in plain.items():
                setattr(builtins, name, function)

    def _find(self, target: str | list[Any]) -> Callable[..., Any]:
        """Return the object of a name ("f", "Solution.f": of a fresh Solution) or what is asked of a kept object."""
        if isinstance(target, list):
            return self._find_kept(*target)
        owner, _, method = target.partition(".")
        if owner not in self.names and not method and "Solution" in self.names:  # a method is asked for by its name
            owner, method = "Solution", owner
        if owner not in self.names:
            raise NameError(f"name {owner!r} is not defined")
        value: Any = self.names[owner]
        return getattr(value(), method) if method else value  # type: ignore[no-any-return]

    def _find_kept(self, owner: Any, question: str) -> Callable[..., Any]:
        if question == "read":
            return lambda: self.names[owner]
        if question in ("seed", "rebound"):
            return random.seed if question == "seed" else lambda: self.rebound
        value = self.kept[owner]
        if question in _ANSWERS:
            return lambda *others: _ANSWERS[question](value, *others)
        if question in ("start", "finish", "cancel", "next"):
            return functools.partial(getattr(self, f"_{question}"), value)
        return value if question == "__call__" else getattr(value, question)  # type: ignore[no-any-return]

    def _next(self, value: Any, most: int) -> list[Any]:
        """Return the next items; an error after some of them is raised when more are asked for."""
        items: list[Any] = []
        if error := self.late.pop(id(value), None):
            raise error
        try:
            items.extend(itertools.islice(value, most))
        except BaseException as error:
            if not items:
                raise
            self.late[id(value)] = error
        return items

    def _start(self, value: Any) -> Any:
        """Begin to run an awaitable object; return its task."""
        import asyncio  # most programs have no use for it, and every test would pay for it

        self.loop = self.loop or asyncio.new_event_loop()

        async def wait() -> Any:
            return await value

        return self.loop.create_task(wait())

    def _finish(self, task: asyncio.Task[Any]) -> list[Any]:
        """Run all that was begun for a moment; return the task's result in a list, or [] while there is none."""
        self._work(task)
        return [task.result()] if task.done() else []

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._work(task)

    def _work(self, task: asyncio.Task[Any]) -> None:
        import asyncio

        assert self.loop is not None
        self.loop.run_until_complete(asyncio.wait({task}, timeout=_SLICE_S))


class TestFunction:
    """Asks the tests for the value of one of their functions."""

    def __init__(self, server: CallServer, number: int) -> None:
        self.server, self.number = server, number

    def as_function(self, name: str, documentation: str | None, parameters: str | None, given: str) -> Any:
        """Return a function of the same name and parameters, as far as these can be sent; an iterator by its steps."""
        if given == "iterate":
            return itertools.chain.from_iterable(iter(self.ask, []))
        if given == "mock":
            return TestMock(self.ask, TestFunction(self.server, self.number + 1).ask)
        function: Any = self.ask
        if parameters is not None:
            function = eval(f"lambda {parameters}: ask({given})", {"ask": self.ask})
            function.__name__, function.__qualname__, function.__doc__ = name, name, documentation
            return function

        def anything(*arguments: Any, **named: Any) -> Any:
            return self.ask(*arguments, **named)

        anything.__name__, anything.__qualname__, anything.__doc__ = name, name, documentation
        return anything

    def ask(self, *arguments: Any, **named: Any) -> Any:
        """Return what the function returns; raise what it raises."""
        server = self.server
        trees = [codec.encode(list(arguments), server.refer), codec.encode(named, server.refer)]
        server.line.send(b"B", ["callback", self.number, *trees])
        while not isinstance(reply := server.line.receive(), dict):
            server.answer(reply)
        if "value" in reply:
            return codec.decode(reply["value"], server.resolve)
        error = codec.decode(reply["error"], server.resolve)
        error._raised_by_tests = reply["number"]
        raise error


class TestMock:
    """Stands for a mock of the tests: what the program does with it is done there, or refused."""

    def __init__(self, call: Callable[..., Any], read: Callable[[str], Any]) -> None:
        vars(self).update(_call=call, _read=read)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._read(name)


for _name in ("enter", "exit", "len", "iter", "next", "getitem", "setitem", "delitem", "contains", "setattr", "delattr",
              "str", "repr", "format", "lt", "le", "gt", "ge", "int", "float", "add", "radd", "sub", "mul", "await",
              "aenter", "aexit", "aiter", "anext", "instancecheck", "index"):  # fmt: skip
    setattr(TestMock, f"__{_name}__", lambda self, *_, name=f"__{_name}__": self._read(name))


def _exit(value: Any, error: Any) -> bool:
    return bool(value.__exit__(type(error) if error is not None else None, error, None))


def _enter(value: Any) -> Any:
    if not hasattr(type(value), "__exit__"):
        raise TypeError(f"{type(value).__name__!r} object does not support the context manager protocol")
    return value.__enter__()


async def _async_next(value: Any) -> list[Any]:
    try:
        return [await anext(value)]
    except StopAsyncIteration:
        return []


_ANSWERS: dict[str, Callable[..., Any]] = {
    "iterate": lambda value: list(value) if hasattr(type(value), "__len__") else iter(value),
    "async next": _async_next, "truth": bool, "text": str, "repr": repr, "format": format, "hash": hash,
    "content": codec.content, "copy": copy.copy, "deep copy": copy.deepcopy,
    "contains": lambda value, item: item in value, "attribute": getattr, "assign": setattr, "delete": delattr,
    "enter": _enter, "exit": _exit, "equal": lambda value, other: bool(value == other),
    "less": lambda value, other: bool(value < other), "at most": lambda value, other: bool(value <= other),
    "operate": lambda value, name, *others: (_OPERATORS.get(name) or getattr(operator, name))(value, *others),
    "operate from the right": lambda value, name, other: getattr(operator, name)(other, value),
}  # fmt: skip
_OPERATORS: dict[str, Any] = {"int": int, "float": float, "complex": complex, "round": round, "divmod": divmod}
