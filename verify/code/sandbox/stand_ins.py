"""What stands for a program's objects and classes in the process of the tests.

A class of the program is a class here, so `isinstance`, `type` and `except` work; an object is a `Remote` of its class.
No value of the tests equals an object but its content: what it holds as a number, text or container, where its class
derives from one. Operators are the program's. One that gives a plain value of two of its objects may decide a test;
with a value of the tests on the other side it may not, for `f(2) - 4` would then be what the program likes.
Where the tests name the class, such a test is unverifiable, else it fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify.code.sandbox.remote import Program

_MUTABLE = (list, dict, set)
_ASKED = ("__name__", "__qualname__", "__annotations__", "__wrapped__", "__defaults__", "__members__")
_INSPECTED = ("__signature__", "__dataclass_fields__", "__code__", "__slots__", "_is_coroutine")
OWNERS: dict[type, tuple[Program, int]] = {}
"""the classes here that stand for a program's, with the number of each there"""


def make(
    kind: Any, program: Program, number: int, content: Any = None, face: type | None = None, mixed: bool = False
) -> Any:
    """Return an object that stands for the program's object of that number."""
    made = object.__new__(kind)
    for name, value in zip(Remote.__slots__, (content, face, mixed, number, program), strict=True):
        object.__setattr__(made, name, value)
    return made


class Remote:
    """Stands for an object that stays in the candidate's process."""

    __slots__ = ("_content_", "_face_", "_mixed_", "_number_", "_program_")
    _program_: Program
    _number_: int
    _content_: Any
    _face_: type | None
    """built-in type that `isinstance` takes it for, as the program's interpreter does"""
    _mixed_: bool
    """it comes of an operator with a value of the tests, which the program's own operators must not decide"""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator: over all items of what has a length, else step by step, for it may have no end."""
        items = _ask(self, "iterate")
        return items if isinstance(items, Remote) else iter(items)

    def __next__(self) -> Any:
        return self._program_.next_item(self._number_)

    def __reversed__(self) -> Iterator[Any]:
        return iter(_ask(self, "__reversed__"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "truth"))

    def __str__(self) -> str:
        return str(_ask(self, "text"))

    def __format__(self, form: str) -> str:
        content = _content(self)
        return str(_ask(self, "format", form)) if content is None else format(content, form)

    def __repr__(self) -> str:
        """Ask the program, where the tests name the class or the text names it: no plain value looks so."""
        text = str(_ask(self, "repr"))
        name = type(self).__name__
        return (
            text if _is_named(self) or text.lstrip("<").startswith((f"{name}(", f"{name} ")) else object.__repr__(self)
        )

    def __eq__(self, other: object) -> bool:
        """Let the program compare two of its objects; anything else is compared with the content, if there is any."""
        if self is other:
            return True
        if isinstance(other, Remote):
            return bool(_ask(self, "equal", other))
        if (content := _content(self)) is not None:
            return bool(content == other)
        if other is None or not _is_named(self) or not _ask(self, "equal", other):
            return False
        self._program_.refuse(f"{type(self).__name__} says itself that it equals a value of the tests")

    def __hash__(self) -> int:
        content = _content(self)
        return int(_ask(self, "hash")) if content is None else hash(content)

    def __lt__(self, other: object) -> Any:
        return _order(self, "less", "lt", other)

    def __le__(self, other: object) -> Any:
        return _order(self, "at most", "le", other)

    def __gt__(self, other: object) -> Any:
        return _order(other, "less", "lt", self) if isinstance(other, Remote) else _order(self, "", "gt", other)

    def __ge__(self, other: object) -> Any:
        return _order(other, "at most", "le", self) if isinstance(other, Remote) else _order(self, "", "ge", other)

    def __len__(self) -> int:
        try:
            return int(_ask(self, "__len__"))
        except AttributeError:  # as Python says it; list() asks before it iterates
            raise TypeError("object has no len()") from None

    def __length_hint__(self) -> Any:
        return NotImplemented

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "__setitem__", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "__delitem__", key)

    def __contains__(self, item: Any) -> bool:
        if (content := _content(self)) is not None:
            return item in content
        if _is_named(self) or isinstance(item, Remote):
            return bool(_ask(self, "contains", item))
        return any(item is mine or item == mine for mine in self)

    def __getattr__(self, name: str) -> Any:
        if name in _INSPECTED:
            self._program_.refuse(f"the tests inspect an object of the program's ({name})")
        if name.startswith("__") and name.endswith("__") and name not in _ASKED:
            raise AttributeError(name)
        return _ask(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "assign", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delete", name)

    def __dir__(self) -> Any:
        return _ask(self, "__dir__")

    def __copy__(self) -> Any:
        return _ask(self, "copy")

    def __deepcopy__(self, _: Any) -> Any:
        return _ask(self, "deep copy")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program_.ask([self._number_, "__call__"], arguments, named)

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """Let the program leave its block. A failed assertion goes on, whatever the program says."""
        stops = bool(_ask(self, "exit", error if isinstance(error, Exception) else None))
        if error is None or isinstance(error, AssertionError) or not isinstance(error, Exception):
            return False
        if stops and getattr(error, "_from_program", False):
            self._program_.refuse("a block of the program's ends its own exception")
        return stops

    def __await__(self) -> Any:
        return awaited(self).__await__()

    def __aiter__(self) -> Any:
        return _ask(self, "__aiter__")

    async def __anext__(self) -> Any:
        if not (item := await _ask(self, "async next")):
            raise StopAsyncIteration
        return item[0]

    async def __aenter__(self) -> Any:
        return await _ask(self, "__aenter__")

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        stops = await self._program_.ask([self._number_, "__aexit__"], (type(error) if error else None, error, None))
        return bool(stops) and not isinstance(error, AssertionError) and not getattr(error, "_from_program", False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class, which also derives from the built-in type of the content: `isinstance(x, tuple)` holds."""
        if self._face_ is None or type(self) is Remote:
            return self._face_ or type(self)
        return _with_content(type(self), self._face_)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return _ask(self, "attribute", "__dict__")

    __doc__ = property(lambda self: _ask(self, "attribute", "__doc__"))


def _ask(remote: Remote, question: str, *arguments: Any) -> Any:
    return remote._program_.ask([remote._number_, question], arguments)


def _content(remote: Remote) -> Any:
    """Return what an object holds as a built-in type, None for nothing; what can change is asked again."""
    return _ask(remote, "content") if isinstance(remote._content_, _MUTABLE) else remote._content_


def _is_named(remote: Remote) -> bool:
    """Return whether the tests name the object's class, or one that it derives from."""
    return not remote._program_.named.isdisjoint(type(remote).__mro__)


_FACES: dict[tuple[type, type], type] = {}


def _with_content(kind: type, content: type) -> type:
    if (kind, content) not in _FACES:
        _FACES[kind, content] = type(kind.__name__, (content,), {"__module__": "solution"})
    return _FACES[kind, content]


def _order(remote: Remote, question: str, name: str, other: object) -> Any:
    if isinstance(other, Remote):
        return bool(_ask(remote, question, other))
    if (content := _content(remote)) is not None:
        return getattr(operator, name)(content, other)
    if _is_named(remote):
        remote._program_.refuse(f"{type(remote).__name__} says itself how it compares with a value of the tests")
    return NotImplemented


async def awaited(remote: Remote) -> Any:
    """Return what an awaitable object of the program gives, with the tests' event loop running on meanwhile."""
    import asyncio

    task = _ask(remote, "start")
    try:
        await asyncio.sleep(0)  # others begin, too
        while not (result := _ask(task, "finish")):
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        _ask(task, "cancel")
        raise
    return result[0]


def _operator(name: str, question: str) -> Callable[..., Any]:
    """Return an operator of `Remote`: on its content where the other side is the tests', else the program's."""

    def operate(self: Remote, *others: Any) -> Any:
        mixed = self._mixed_ or not all(isinstance(other, Remote) for other in others)
        if self._content_ is not None and not any(isinstance(other, Remote) for other in others):
            content = _content(self)
            both = (*others, content) if question != "operate" else (content, *others)
            return (_PLAIN.get(name) or getattr(operator, name))(*both)
        result = _ask(self, question, name, *others)
        if isinstance(result, Remote):
            if result._number_ == self._number_ and not mixed:
                return self
            return make(type(result), self._program_, result._number_, mixed=mixed)  # a content would be compared here
        if _is_named(self):
            if not mixed or (name == "round" and not self._mixed_):
                return result
            self._program_.refuse(f"{name} of {type(self).__name__} and a value of the tests gives a plain value")
        raise TypeError(f"{name} of the program's objects gives {type(result).__name__}: nobody can check that")

    return operate


_PLAIN: dict[str, Any] = {"int": int, "float": float, "complex": complex, "round": round, "divmod": divmod}
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
for _name in (*_BINARY, "divmod"):
    setattr(Remote, f"__{_name.strip('_')}__", _operator(_name, "operate"))
    setattr(Remote, f"__r{_name.strip('_')}__", _operator(_name, "operate from the right"))
for _name in _BINARY:
    setattr(Remote, f"__i{_name.strip('_')}__", _operator(f"i{_name.strip('_')}", "operate"))
for _name in ("neg", "pos", "abs", "invert", "int", "float", "complex", "round", "index"):
    setattr(Remote, f"__{_name}__", _operator(_name, "operate"))


class RemoteClass(type):
    """The type of classes that stand for the program's: what they are asked for is asked of the program."""

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], **named: Any) -> Any:
        """Refuse a class of the tests that derives from the program's."""
        next(OWNERS[base][0] for base in bases if base in OWNERS).refuse("the tests derive a class from the program's")

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        program, number = OWNERS[cls]
        return program.ask([number, "__call__"], arguments, named)

    def _ask_(cls, question: str, *arguments: Any) -> Any:
        program, number = OWNERS[cls]
        return program.ask([number, question], arguments)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name not in _ASKED:
            if name in _INSPECTED:
                OWNERS[cls][0].refuse(f"the tests inspect a class of the program's ({name})")
            raise AttributeError(name)
        return cls._ask_("attribute", name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._ask_("assign", name, value)

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._ask_("iterate"))

    def __len__(cls) -> int:
        return int(cls._ask_("__len__"))

    def __getitem__(cls, key: Any) -> Any:
        return cls._ask_("__getitem__", key)

    def __contains__(cls, item: Any) -> bool:
        return bool(cls._ask_("contains", item))

    __doc__ = property(lambda cls: cls._ask_("attribute", "__doc__"))


class RemoteError(RemoteClass):
    """The type of classes that stand for the program's exceptions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls._ask_("attribute", name)

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(cls, name, value)


def text_of(error: Any) -> str:
    """Return the text of an exception of the program's, which the program made."""
    return str(vars(error).get("_text_", ""))
