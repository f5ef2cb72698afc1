r"""Expression trees: nested tuples whose first item is the kind, and queries on any of them.

    ("num", Fraction) ("sym", name) ("const", name) ("+", a, b) ("-", a) ("*", a, b) ("/", a, b) ("^", a, b)
    ("call", function, argument, ...)

A function whose name begins with "?" is unknown: only equal arguments make it equal.
"""

from __future__ import annotations

from typing import Any

Node = tuple[Any, ...]


def symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables in a tree."""
    if node[0] == "sym":
        return frozenset((node[1],))
    return frozenset().union(*(symbols(part) for part in node[1:] if isinstance(part, tuple)))


def mentions(node: Node, kind: str, name: str) -> bool:
    """Return whether a tree holds a node that begins with (kind, name), such as ("const", "i")."""
    if node[:2] == (kind, name):
        return True
    return any(mentions(part, kind, name) for part in node[1:] if isinstance(part, tuple))
