"""The head of a function at the end of the prefix of C++ test code: it gives the types for the tests' calls."""

from __future__ import annotations

import re

from shared.errors import DataError

_ONLY_COMMENTS = re.compile(r"(?:\s|/\*(?:[^*]|\*(?!/))*\*/|//[^\n]*)*")
_LINKAGE = re.compile(r"^((static|inline|constexpr)\s+)+")
_NAME = re.compile(r"([A-Za-z_]\w*)\s*\($")
_OPEN_TYPE = re.compile(r"\b(?:template|auto)\b")
_TRAILING_TYPE = re.compile(r"auto\b(?=[^>]*\(.*\)\s*->)", re.DOTALL)


def split_prefix(prefix: str) -> tuple[str, str, str]:
    """Split "includes, helpers, head of a function {" into what stands before, the head, and the function's name.

    Comments after the brace are left out. Raises DataError where the prefix does not end in a head with all types.
    """
    opened = [match.end() for match in re.finditer(r"\{", prefix)]
    text = next((prefix[:end] for end in reversed(opened) if _ONLY_COMMENTS.fullmatch(prefix, end)), "")
    head = text[:-1].rstrip()
    starts = [head.rfind(mark) + len(mark) for mark in (";", "}", "*/") if mark in head]
    starts += [match.end() for match in re.finditer(r"^[ \t]*(#|//).*$", head, re.MULTILINE)]
    start = max(starts, default=0)
    signature = _LINKAGE.sub("", head[start:].strip())
    opening = _NAME.search(signature[: signature.find("(") + 1])
    if opening is None or _OPEN_TYPE.search(_TRAILING_TYPE.sub("", signature, count=1)):
        given = f"ends in {signature[:60]!r}" if opening else "has none"
        raise DataError(
            "C++ test code needs the head of the function that it calls, with its types, at the end of `prefix`, "
            f"such as 'int twice(int n) {{'; this one {given}: add it, or leave such rows out"
        )
    return head[:start], signature, opening.group(1)
