r"""Finds the functions that C++ assertions ask for, and their types, where the prefix gives no types.

The program and the tests are two units all the same (`cpp.py`), so the types must be known first. The compiler says:
the tests alone name what they do not declare, and a template without a definition names the type that it was asked for.
A type of the program's own is refused, for its comparisons would be the program's. A template in the prefix is declared
in the tests' unit, and the linker tells which of its instances are missing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_UNKNOWN = re.compile(r"error: ['‘](\w+)['’] was not declared in this scope")
_UNDEFINED = re.compile(r"undefined reference to [`'‘](.+)['’]$", re.MULTILINE)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
_INT = re.compile(r"\b(long|short|unsigned) int\b")
"""`int` is left out, since a program may have redefined it"""
_PLAIN = frozenset(
    ("void", "bool", "char", "int", "long", "short", "unsigned", "signed", "float", "double", "const", "wchar_t")
    + ("char8_t", "char16_t", "char32_t", "__int128")
)


class Head(NamedTuple):
    """A function with its types, as the tests declare it."""

    signature: str
    name: str
    parameters: tuple[str, ...] = ()


def is_untyped(signature: str) -> bool:
    """Return whether the head in a prefix leaves its types open."""
    return not signature or bool(re.match(r"(template|auto)\b", signature))


def unknown_names(messages: str) -> list[str]:
    """Return the names that test code uses without a declaration, from the compiler's messages."""
    return list(dict.fromkeys(_UNKNOWN.findall(messages)))


def question(names: list[str], mark: str) -> str:
    """Return code to put behind the program that makes the compiler report the types of its functions."""
    asked = "".join(f"shown_{mark}<decltype(&{name})> told_{mark}_{name};\n" for name in names)
    return f"\ntemplate<class> struct shown_{mark};\n{asked}"


def read_heads(messages: str, names: list[str], mark: str) -> tuple[list[Head], str]:
    """Return the functions with types from the compiler's messages, and why one cannot be tested, "" for none."""
    heads = []
    for name in names:
        found = re.search(rf"shown_{mark}<(.+)> told_{mark}_{name}['’]", messages)
        if found is None:
            continue
        result, pointer, rest = _INT.sub(r"\1", found.group(1)).partition(" (*)(")
        given, closed, behind = rest.rpartition(")")
        if not (pointer and closed) or behind.strip() not in ("", "noexcept") or "(" in result + given:
            return [], f"the type of {name} is not a plain one: {found.group(1)[:100]}"
        for word in _IDENTIFIER.findall(f"{result} {given}"):
            if word not in _PLAIN and not word.startswith("std::"):
                return [], f"{name} takes or returns a type of the program's own ({word[:40]})"
        heads.append(Head(f"{result} {name}({given})", name, tuple(_cut(given))))
    return heads, ""


def shorter(head: Head) -> list[Head]:
    """Return the heads of the same function with fewer arguments, as default arguments allow."""
    result = head.signature[: head.signature.index(f" {head.name}(")]
    fewer = range(len(head.parameters))
    return [Head(f"{result} {head.name}({', '.join(head.parameters[:count])})", head.name) for count in fewer]


def instances(messages: str, name: str) -> list[str]:
    """Return the declarations of the instances of a template that the linker misses."""
    found = dict.fromkeys(_UNDEFINED.findall(messages))
    return [one for one in found if re.match(rf"[^()]*\b{name}<", one)]


def defines_type(source: str, name: str) -> bool:
    """Return whether a program defines `name` as a class or another type."""
    return bool(re.search(rf"\b(?:struct|class|union|enum|typedef|using)\b[^;{{}}()]*\b{name}\b", source))


def _cut(parameters: str) -> list[str]:
    """Split the types at the commas outside of angle brackets."""
    found, level, start = [], 0, 0
    for index, sign in enumerate(parameters):
        level += {"<": 1, ">": -1}.get(sign, 0)
        if sign == "," and level == 0:
            found.append(parameters[start:index].strip())
            start = index + 1
    last = parameters[start:].strip()
    return [*found, last] if last and last != "void" else found
