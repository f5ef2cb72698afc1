r"""C++ programs: how they are compiled, and how assertions are kept out of the program's reach.

C++20 at -O2, `bits/stdc++.h` precompiled once per compiler and kept in the user's cache folder (about 120 MB; taken
only with the very same flags, so all flags stand here).

Assertion programs are two translation units. The candidate's is compiled alone and first, then everything in it but the
function asked for is made local; the tests' unit (prefix, declaration of that function, test code with an own `assert`)
likewise, so neither macros, overloaded operators, specialised templates, nor a `memcmp` of the candidate's can reach
the comparisons. Only when the tests' `main` comes to its end it writes a nonce made for this run; `exit(0)` does not.
What remains possible: both units share one process, so a program that reads its own machine code, finds the nonce in it
and writes it to the right descriptor would pass. Where the prefix declares no function, both are one unit, and macros
and overloads of the candidate's also reach the tests.
What this does not do: start anything but the compiler for the trusted header. Who calls this: `program.py`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

import msgspec

from shared.errors import DataError
from verify.code.exam import Assertions

FLAGS = ("-std=c++20", "-O2", "-pipe", "-fdiagnostics-color=never", "-w")
RESULT = 3
_INCLUDE_ASSERT = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(assert\.h|cassert)>.*$", re.MULTILINE)
_END_OF_MAIN = re.compile(r"(\breturn\s+(0|EXIT_SUCCESS)\s*;\s*)?\}\s*$")
_NAME = re.compile(r"([A-Za-z_]\w*)\s*\($")


class Step(msgspec.Struct, frozen=True):
    """One command in the box; `text` is its standard input."""

    argv: list[str]
    text: str = ""
    otherwise: str | None = None
    """text to try when the first does not compile"""


@functools.cache
def compiler() -> str:
    """Path of g++, "" where there is none."""
    return shutil.which("g++") or ""


@functools.cache
def cache_folder() -> str:
    """Folder of the precompiled header for this compiler and these flags, made when missing; "" if it cannot be."""
    if not compiler():
        return ""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=60).stdout
    key = hashlib.blake2b("\0".join([version, *FLAGS]).encode(), digest_size=8).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base).absolute() / "maestrale" / f"header-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(folder)


@functools.cache
def precompile() -> bool:
    """Build the precompiled header once for all processes of this user; say whether there is one."""
    if not cache_folder():
        return False
    folder = Path(cache_folder()) / "bits"
    header = folder / "stdc++.h.gch"
    try:
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not header.exists():
                fresh = folder / f"building-{os.getpid()}"
                text = folder / "all.h"
                text.write_text("#include <bits/stdc++.h>\n")
                command = [compiler(), *FLAGS, "-x", "c++-header", str(text), "-o", str(fresh)]
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                fresh.chmod(0o644)
                fresh.rename(header)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _compile(text: str, *options: str, ours: bool = False) -> Step:
    """Compile from standard input. `ours`: with all headers precompiled where that works, which is faster."""
    headers = ["-I", cache_folder()] if precompile() else []
    argv = [compiler(), *FLAGS, *headers, "-x", "c++", *options, "-"]
    return Step(argv, f"#include <bits/stdc++.h>\n{text}", text) if ours and headers else Step(argv, text)


def whole_program(source: str) -> list[Step]:
    """Steps that make `program` of a source with its own `main`."""
    return [_compile(source, "-o", "program")]


def _isolate(name: str, *kept: str) -> list[Step]:
    """Steps that leave only the `kept` symbols of an object file visible to others."""
    flat = f"{name}_flat.o"
    symbols = [f"--keep-global-symbol={symbol}" for symbol in kept]
    return [
        Step(["/usr/bin/ld", "-r", "--force-group-allocation", f"{name}.o", "-o", flat]),
        Step(["/usr/bin/objcopy", "--wildcard", *symbols, flat]),
    ]


def split_prefix(prefix: str) -> tuple[str, str, str]:
    """Split "includes, helpers, head of a function {" into what stands before, the head, and the function's name.

    The head is "" when the prefix does not end in one.
    """
    text = prefix.rstrip()
    if not text.endswith("{"):
        return prefix, "", ""
    head = text[:-1].rstrip()
    starts = [head.rfind(mark) + len(mark) for mark in (";", "}", "*/") if mark in head]
    for match in re.finditer(r"^[ \t]*(#|//).*$", head, re.MULTILINE):
        starts.append(match.end())
    start = max(starts, default=0)
    signature = head[start:].strip()
    opening = _NAME.search(signature[: signature.find("(") + 1])
    return (head[:start], signature, opening.group(1)) if opening else (prefix, "", "")


def complete(source: str, prefix: str) -> str:
    """The candidate's unit: its prefix before a bare function body, or only includes and helpers before a whole one."""
    before, signature, name = split_prefix(prefix)
    if not prefix or not signature:
        return prefix + source
    if re.search(rf"\b{name}\s*\([^;{{}}]*\)[^;{{}}]*\{{", source) and _is_whole(source, signature, name):
        return before + "\n" + source
    return prefix.rstrip() + "\n" + source


def _is_whole(source: str, signature: str, name: str) -> bool:
    """Whether a reply defines the function itself: up to its name, braces are balanced."""
    found = re.search(rf"\b{name}\s*\([^;{{}}]*\)[^;{{}}]*\{{", source)
    return bool(found) and source[: found.start()].count("{") == source[: found.start()].count("}")  # type: ignore[union-attr]


def _guard(nonce: str, mark: str) -> str:
    """An `assert` of the tests' own and the note that the end was reached; names that no program can foresee."""
    mask = secrets.token_bytes(len(nonce))
    hidden = ",".join(str(letter ^ key) for letter, key in zip(nonce.encode(), mask, strict=True))
    keys = ",".join(map(str, mask))
    return f"""
#include <unistd.h>
#undef assert
static void check_{mark}(bool held) {{ if (!held) _exit(1); }}
static void finish_{mark}() {{
    static volatile unsigned char hidden[] = {{{hidden}}}, keys[] = {{{keys}}};
    char text[sizeof hidden];
    for (unsigned i = 0; i < sizeof hidden; ++i) text[i] = hidden[i] ^ keys[i];
    if (write({RESULT}, text, sizeof text) != (long)sizeof text) _exit(1);
}}
#define assert(...) check_{mark}(static_cast<bool>(__VA_ARGS__))
"""


def assertion_program(source: str, tests: Assertions, nonce: str) -> list[Step]:
    """Steps that make `program` of a candidate and test code; it writes `nonce` when every assertion held.

    Raises DataError when the test code has no `main` that ends in a brace.
    """
    if "main" not in tests.code or not _END_OF_MAIN.search(tests.code):
        raise DataError("C++ test code needs a `main` function as its last one")
    mark = secrets.token_hex(8)
    code = _INCLUDE_ASSERT.sub("", tests.code)
    code = _END_OF_MAIN.sub(f"finish_{mark}(); return 0; }}\n", code)
    before, signature, name = split_prefix(tests.prefix)
    if not signature:
        unit = f"{complete(source, tests.prefix)}\n{_guard(nonce, mark)}\n{code}"
        return [_compile(unit, "-o", "program")]
    exam = f"{before}\n{signature};\n{_guard(nonce, mark)}\n{code}"
    return [
        _compile(complete(source, tests.prefix), "-c", "-o", "candidate.o"),
        *_isolate("candidate", f"_Z{len(name)}{name}*"),
        _compile(exam, "-c", "-o", "tests.o", ours=True),
        *_isolate("tests", "main"),
        Step([compiler(), "tests_flat.o", "candidate_flat.o", "-o", "program"]),
    ]
