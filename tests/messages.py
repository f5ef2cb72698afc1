"""Every message of an error that the product raises. `python -m tests.messages` prints them.

tests/messages.txt holds them, and a test compares: a changed message is a changed line in a diff. Other tests ask only
for the word that tells one error from another.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sizes import PRODUCT, ROOT, sources, text

FILE = Path(__file__).with_suffix(".txt")
VARIES = "…"
"""stands for what is filled in"""


def listing() -> list[str]:
    """One line for each message: file, class of the error, text."""
    return [line for room in PRODUCT for path in sources(room) for line in messages(path)]


def messages(path: Path, root: Path = ROOT) -> Iterator[str]:
    """The messages of one file, in its order."""
    raised = [node.exc for node in ast.walk(ast.parse(text(path))) if isinstance(node, ast.Raise)]
    calls = [call for call in raised if isinstance(call, ast.Call)]
    for call in sorted(calls, key=lambda call: call.lineno):
        texts = [template(argument) for argument in call.args]
        if message := next((each for each in texts if any(map(str.isalpha, each))), ""):
            yield f"{path.relative_to(root)} {ast.unparse(call.func)}: {message}".replace("\n", "\\n")


def template(node: ast.expr) -> str:
    """The text of an expression, with VARIES in the place of what is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return VARIES


if __name__ == "__main__":
    print("\n".join(listing()))
