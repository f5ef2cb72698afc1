"""Encodes Python values as data: exact built-in types only, in tagged JSON.

A value of any other type (a subclass of int that equals everything, an object with `__eq__`) never leaves its process:
it is kept there and a reference is sent, with its content where the type derives from a built-in one. Decoding
gives plain values, so comparing them runs no foreign code.
Integers travel as hexadecimal (linear to read), floats by their exact digits, dates in ISO form; Counter, OrderedDict
and defaultdict as the dict they equal, with their kind for whoever resolves references. A frame is 4 bytes
little-endian length, then one letter and a tree.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

Tree = Any
HEADER = struct.Struct("<I")
_SEQUENCES = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_BUILDERS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _SEQUENCES.items()}
_COLLISIONS = 100
_PLAIN = (int, float, str, bool, bytes, complex, list, tuple, dict, set, frozenset)
ERRORS: dict[str, type[Exception]] = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
}
"""the built-in exceptions by name"""
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*_PLAIN, type(None))} | ERRORS
_DATES: dict[Any, str] = {date: "date", datetime: "datetime", time: "time"}
_RESOLVED = ("reference", "class", "exception", "raised", "callback")
_DICTS = (dict, Counter, OrderedDict, defaultdict)


class Unencodable(Exception):
    """The value is of a type that cannot be encoded."""


class Malformed(Exception):
    """The data is not a value that `encode` makes."""


def encode(value: Any, refer: Callable[[Any], Tree] | None = None) -> Tree:
    """Return the JSON tree of a value; `refer` gives the tree of an object of another type.

    Raises Unencodable without `refer`, RecursionError for cyclic values.
    """
    kind: Any = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind is float:
        return ["float", value.hex()]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [encode(item, refer) for item in value]]
    if kind in _DICTS:
        items = [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]
        if kind is defaultdict:
            factory = value.default_factory
            name = factory.__name__ if isinstance(factory, type) else ""
            return ["dict", items, "defaultdict", name if _TYPES.get(name) is factory else ""]
        return ["dict", items] if kind is dict else ["dict", items, kind.__name__]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is range:
        return ["range", hex(value.start), hex(value.stop), hex(value.step)]
    if kind is Decimal or kind is Fraction:
        return [kind.__name__, str(value)]
    if kind is bytearray:
        return ["bytearray", value.hex()]
    if kind in _DATES:
        return [_DATES[kind], value.isoformat()]
    if kind is timedelta:
        return ["timedelta", hex(value.days), hex(value.seconds), hex(value.microseconds)]
    if kind is type and value in _TYPES.values():
        return ["type", value.__name__]
    if refer is None:
        raise Unencodable(kind.__name__)
    return refer(value)


def content(value: Any) -> Any:
    """Return what a value of a subclass of a built-in type holds, as that type; None for other objects."""
    for kind, read in _CONTENTS.items():
        if isinstance(value, kind):
            return read(value)
    return None


_CONTENTS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: int.__add__(value, 0), float: lambda value: float.__mul__(value, 1.0),
    str: lambda value: str.__add__(value, ""), bytes: lambda value: bytes.__add__(value, b""),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    list: lambda value: list.__getitem__(value, slice(None)), set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)), dict: lambda value: dict(dict.items(value)),
}  # fmt: skip


def decode(tree: Tree, resolve: Callable[[str, list[Any]], Any] | None = None) -> Any:
    """Return the value of a tree; `resolve` gives the object of what `refer` wrote, from its tag and the rest.

    Raises Malformed for anything that `encode` does not make; a tree is never deeper than JSON's reader allows.
    """
    if tree is None or type(tree) is bool or type(tree) is str:
        return tree
    try:
        tag, *parts = tree
        if tag in _BUILDERS:
            items = [decode(item, resolve) for item in parts[0]]
            return _BUILDERS[tag](_spread(items) if tag in ("set", "frozenset") else items)
        if tag == "dict":
            keys = _spread([decode(key, resolve) for key, _ in parts[0]])
            read = {key: decode(item, resolve) for key, (_, item) in zip(keys, parts[0], strict=True)}
            return read if len(parts) < 2 or resolve is None else _KINDS[parts[1]](read, *parts[2:])
        if resolve is not None and tag in _RESOLVED:
            return resolve(tag, parts)
        return _SCALARS[tag](*parts)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Malformed(str(error)[:200]) from None


def _default_dict(items: dict[Any, Any], factory: str) -> dict[Any, Any]:
    return defaultdict(_TYPES.get(factory), items)


_KINDS: dict[str, Callable[..., dict[Any, Any]]] = {
    "Counter": Counter, "OrderedDict": OrderedDict, "defaultdict": _default_dict,
}  # fmt: skip


def _spread(keys: list[Any]) -> list[Any]:
    """Return the keys. Raises ValueError when they collide: building the set would then take quadratic time."""
    if len(keys) > _COLLISIONS and max(Counter(map(hash, keys)).values()) > _COLLISIONS:
        raise ValueError("keys with equal hashes")
    return keys


_SCALARS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "bytes": bytes.fromhex,
    "type": _TYPES.__getitem__,
    "range": lambda *ends: range(*(int(end, 16) for end in ends)),
    "bytearray": bytearray.fromhex,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda *parts: timedelta(*(int(part, 16) for part in parts)),
    "Decimal": Decimal,
    "Fraction": lambda text: Fraction(*(int(part) for part in text.split("/"))),
}


def dump(tree: Tree) -> bytes:
    """Serialise a tree."""
    return json.dumps(tree, separators=(",", ":")).encode("ascii")


def load(data: bytes) -> Tree:
    """Read a tree. Raises Malformed."""
    try:
        return json.loads(data.decode("ascii"), parse_int=_refuse, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError, TypeError) as error:
        raise Malformed(str(error)[:200]) from None


def _refuse(text: str) -> Any:
    """Parse a bare number, which can only be a reference id. Raises ValueError when it is too long."""
    if len(text) > 9:
        raise ValueError("a bare number is too long")
    return int(text)


def open_streams() -> None:
    """Open standard streams over the descriptors 0, 1 and 2, as a fresh interpreter has them."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc] # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.set_int_max_str_digits(0)
    sys.argv = ["solution.py"]


def fresh_module(name: str) -> dict[str, Any]:
    """Make a new, empty module and return its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


def frame(kind: bytes, tree: Tree) -> bytes:
    """Encode a frame as `FramePipe` reads it."""
    body = kind + dump(tree)
    return HEADER.pack(len(body)) + body


class FramePipe:
    """Sends and receives frames over two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write

    def send(self, kind: bytes, tree: Tree) -> None:
        """Write one frame."""
        data = memoryview(frame(kind, tree))
        while data:
            data = data[os.write(self.write, data) :]

    def receive(self) -> Tree:
        """Return the next tree. Raises EOFError at the end."""
        size = HEADER.unpack(self._exactly(HEADER.size))[0]
        return load(self._exactly(size)[1:])

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            chunk = os.read(self.read, min(size - len(parts), 1 << 20))
            if not chunk:
                raise EOFError
            parts += chunk
        return bytes(parts)


def message(error: BaseException) -> str:
    """Return the message of an exception, cut to 1,000 characters."""
    try:
        return str(error)[:1000]
    except BaseException:  # noqa: BLE001 - its own __str__ may raise
        return ""
