"""Words that are left to replace: `python -m tests.words [ROOM ...]` counts them by room; with rooms it lists them.

Variables with a name that says nothing of what they hold, outside comprehensions. Notes of fields that begin with
"that", "of", "by", "what" or "as" and make no sentence without the name before them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import sizes

EMPTY_NAMES = {"found", "one", "told", "said", "held", "wanted", "of", "part", "place"}
FRAGMENT = re.compile(r"(that|of|by|what|as)\b")


def empty_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable or argument with an empty name that a statement binds."""
    inside = {
        id(name) for node in ast.walk(tree) if isinstance(node, ast.comprehension) for name in ast.walk(node.target)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside:
            if node.id in EMPTY_NAMES:
                yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield node.lineno, node.arg


def fragments(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, note) of each note of a field that is no sentence."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
        for before, note in zip(body, body[1:], strict=False):
            if isinstance(before, (ast.AnnAssign, ast.Assign)) and isinstance(note, ast.Expr):
                text = note.value.value if isinstance(note.value, ast.Constant) else None
                if isinstance(text, str) and FRAGMENT.match(text):
                    yield note.lineno, text.split("\n")[0]


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """All of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from empty_names(tree)
    yield from fragments(tree)


def main(rooms: list[str]) -> None:
    """Print counts of all rooms, or lines of some."""
    for room in rooms or sizes.PRODUCT:
        lines = [(path, line, word) for path in sizes.sources(room) for line, word in words_of(path)]
        print(f"{room:12} {len(lines):5} words to replace (python -m tests.words {room} lists them)")
        for path, line, word in lines if rooms else ():
            print(f"  {path.relative_to(sizes.ROOT)}:{line}: {word}")


if __name__ == "__main__":
    main(sys.argv[1:])
