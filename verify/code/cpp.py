r"""Compiles C++ programs, and keeps assertions out of the program's reach.

C++20 at -O2, `bits/stdc++.h` precompiled once per compiler and kept in the user's cache folder (about 120 MB; taken
only with the very same flags, so all flags stand here); for root, whose sandboxes are other users, in one open to all.

Assertion programs are two translation units. The candidate's is compiled alone and first, then everything in it but a
bridge to the function asked for is made local; the tests' unit (prefix, declaration of that function, test code with an
own `assert`) likewise, so neither macros, overloaded operators, specialised templates, nor a `memcmp` of the
candidate's can reach the comparisons. The bridge has the types of the prefix and an unpredictable name; it calls
the function by the rules of the language, so that `const vector<int>&` for `vector<int>`, `static`, `inline` and
templates will do. Only when the tests' `main` comes to its end is a nonce of this run written; `exit(0)` writes none.
Both units share one process. It is linked statically, at fixed addresses below 4 GiB, with all relocations done and
read-only before the first line of the candidate runs: the sandbox checks the candidate's object file
(`sandbox/object_file.py`) and lets nobody write to that code and those tables (`sandbox/seccomp.py`). What remains
possible: a program that searches the memory of the tests, finds the nonce and writes it to the right descriptor, or
changes the values that they compare, would pass.
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
import time
from pathlib import Path

import msgspec

from shared.atomic_write import beside
from shared.errors import DataError
from shared.launch.launch_folder import made_by_others
from verify.code.cpp_head import split_prefix
from verify.code.sandbox.isolation import is_open
from verify.code.tests import Assertions

FLAGS = ("-std=c++20", "-O2", "-pipe", "-fdiagnostics-color=never", "-w")
RESULT = 3
PROBE = ("int twice(int n) { return 2 * n; }", "int main() { assert(twice(21) == 42); }", "int twice(int n) {")
"""a program that is right, its tests and their prefix: to see whether a host compiles and runs C++ at all"""
BUILD_S, LOCK_S = 120.0, 150.0
_CLONES = "#define target_clones(...) unused\n"
"""before a candidate's code: one function for all processors, since indirect ones are refused (`object_file.py`)"""
CANDIDATE = "candidate_flat.o"
_LINK = ("-static", "-no-pie", "-Wl,-z,relro,-z,now", "-fno-use-linker-plugin")
_THREADS = ("-Wl,--whole-archive", "-lpthread", "-Wl,--no-whole-archive")
"""a C library before glibc 2.34 has threads in an archive of their own, and a static program takes them whole or not"""
_INCLUDE_ASSERT = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(assert\.h|cassert)>.*$", re.MULTILINE)
_END_OF_MAIN = re.compile(r"(\breturn\s+(0|EXIT_SUCCESS)\s*;\s*)?\}\s*$")


class CompilerStep(msgspec.Struct, frozen=True):
    """One command in the sandbox; `text` is its standard input."""

    argv: list[str]
    text: str = ""
    otherwise: str | None = None
    """text to try when the first does not compile"""


def _find(name: str) -> str:
    """Return the path of a tool, "" for none; one of the system's first, since a sandbox has no folder but /usr."""
    return shutil.which(name, path=os.pathsep.join(["/usr/local/bin", "/usr/bin", os.environ.get("PATH", "")])) or ""


@functools.cache
def compiler() -> str:
    """Return the path of g++, "" where there is none."""
    return _find("g++")


def missing_tool() -> str:
    """Return the name of a tool that C++ programs need and this host lacks, "" when it has all."""
    return next((name for name in ("g++", "ld", "objcopy") if not _find(name)), "")


@functools.cache
def missing_library() -> str:
    """Return the name of a static library that assertion programs need and this host lacks, "" when it has all."""
    for name in ("libstdc++.a", "libc.a"):
        answer = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
        if not os.path.isabs(answer.stdout.strip()):  # g++ answers with the bare name
            return name
    return ""


@functools.cache
def cache_folder() -> str:
    """Return the folder of the precompiled header for this compiler and flags, made when missing; "" if impossible."""
    if not compiler():
        return ""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=60).stdout
    key = hashlib.blake2b("\0".join([version, *FLAGS]).encode(), digest_size=8).hexdigest()
    bases = [Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute(), Path("/var/cache")]
    for base in bases[: 2 if os.geteuid() == 0 else 1]:
        folder = base / "maestrale" / f"header-{key}"
        try:
            if is_open(str(base)):
                folder.mkdir(0o755, parents=True, exist_ok=True)
                if is_open(str(folder)) and not made_by_others(folder):
                    return str(folder)
        except OSError:
            continue  # read-only, full, or not there: the next place, or no precompiled header
    return ""


@functools.cache
def precompile() -> bool:
    """Build the precompiled header once for all processes of this user; return whether there is one.

    The lock is next to the folder that sandboxes may read: no program in a sandbox can hold it.
    """
    if not cache_folder():
        return False
    folder = Path(cache_folder()) / "bits"
    header, named = folder / "stdc++.h.gch", folder / "stdc++.h"
    try:
        folder.mkdir(0o755, exist_ok=True)
        with open(f"{cache_folder()}.lock", "w") as lock:
            _lock(lock.fileno(), LOCK_S)
            if not named.exists():  # for a program that includes it once more, after others
                with beside(named) as fresh:
                    fresh.write_text("#include_next <bits/stdc++.h>\n")
            if not header.exists():
                fresh = folder / f"building-{os.getpid()}"
                text = folder / "all.h"
                text.write_text("#include <bits/stdc++.h>\n")
                command = [compiler(), *FLAGS, "-x", "c++-header", str(text), "-o", str(fresh)]
                subprocess.run(command, check=True, capture_output=True, timeout=BUILD_S)
                fresh.chmod(0o644)
                fresh.rename(header)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _lock(file: int, deadline_s: float) -> None:
    """Take a lock. Raises BlockingIOError when another process has it until the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _compile(text: str, *options: str, otherwise: str | None = None, ours: bool = False) -> CompilerStep:
    """Return the step to compile standard input. `ours`: with all headers precompiled where that works: faster."""
    headers = ["-I", cache_folder()] if precompile() else []
    argv = [compiler(), *FLAGS, *headers, "-x", "c++", *options, "-"]
    if ours and headers:
        return CompilerStep(argv, f"#include <bits/stdc++.h>\n{text}", otherwise or text)
    return CompilerStep(argv, text, otherwise)


def whole_program(source: str) -> list[CompilerStep]:
    """Return the steps that make `program` of a source with its own `main`."""
    return [_compile(source, "-o", "program")]


def _isolate(name: str, *kept: str) -> list[CompilerStep]:
    """Return the steps that leave only the `kept` symbols of an object file visible to others."""
    flat = f"{name}_flat.o"
    symbols = [f"--keep-global-symbol={symbol}" for symbol in kept]
    return [
        CompilerStep([_find("ld"), "-r", "--force-group-allocation", f"{name}.o", "-o", flat]),
        CompilerStep([_find("objcopy"), "--wildcard", *symbols, flat]),
    ]


def _candidate_unit(reading: str, code: TestCode, mark: str) -> str:
    """Return the candidate's unit: includes and helpers of the prefix before its code, in one of its `readings`.

    `_shape` stands before the candidate's code, out of reach of its macros, the bridge (see `_crossing`) after it.
    """
    return f"""{_CLONES}{code.before}
{_shape(code, mark)}
{reading}
template<class R, class... A> struct bridge_{mark}<R(A...)> {{ static R call(A... a) {{ return {code.name}(a...); }} }};
template struct bridge_{mark}<decltype(shape_{mark})>;
"""


def _shape(code: TestCode, mark: str) -> str:
    """Return the declarations in both units: a function of the types asked for, to be named only, and the bridge."""
    shape = re.sub(rf"\b{code.name}(?=\s*\()", f"shape_{mark}", code.signature, count=1)
    return f"{shape};\ntemplate<class S> struct bridge_{mark};\n"


def _crossing(code: TestCode, mark: str) -> str:
    """Return the tests' side of the bridge: a call of the function jumps to `bridge::call`, arguments untouched."""
    return f"""{_shape(code, mark)}
template<class R, class... A> struct bridge_{mark}<R(A...)> {{ static R call(A...); }};
__attribute__((used)) auto *target_{mark} asm("target_{mark}") = &bridge_{mark}<decltype(shape_{mark})>::call;
asm(".pushsection .text; entry_{mark}: jmp *target_{mark}(%rip); .popsection");
{code.signature} asm("entry_{mark}");
"""


def _is_whole(source: str, name: str) -> bool:
    """Return whether a reply defines the function itself: up to its name, braces are balanced."""
    head = re.search(rf"\b{name}\s*\([^;{{}}]*\)[^;{{}}]*\{{", source)
    return bool(head) and source[: head.start()].count("{") == source[: head.start()].count("}")  # type: ignore[union-attr]


def _guard(nonce: str, mark: str) -> str:
    """Return an `assert` for the tests and the note that the end was reached, under unpredictable names."""
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


class TestCode(msgspec.Struct, frozen=True):
    """Test code after an `assert` of its own, which writes a nonce at its end, and the parts of its prefix."""

    text: str
    before: str
    signature: str
    name: str


def guarded(tests: Assertions, nonce: str) -> TestCode:
    """Return test code that writes `nonce` when every assertion held.

    Raises DataError when it has no `main` that ends in a brace, or no typed head in its prefix.
    """
    if "main" not in tests.code or not _END_OF_MAIN.search(tests.code):
        raise DataError("C++ test code needs a `main` function as its last one")
    mark = secrets.token_hex(8)
    code = _INCLUDE_ASSERT.sub("", tests.code)
    code = _END_OF_MAIN.sub(f"finish_{mark}(); return 0; }}\n", code)
    return TestCode(f"\n{_guard(nonce, mark)}\n{code}", *split_prefix(tests.prefix))


def assertion_program(source: str, code: TestCode) -> list[CompilerStep]:
    """Return the steps that make `program` of a candidate and tests; it writes the nonce of `guarded` if all held."""
    mark = secrets.token_hex(8)
    likely, *others = [_candidate_unit(reading, code, mark) for reading in readings(source, code)]
    bridge = f"bridge_{mark}"
    return [
        _compile(likely, "-c", "-o", "candidate.o", otherwise=others[0]),
        *_isolate("candidate", f"_ZN{len(bridge)}{bridge}I*E4callE*"),
        _compile(f"{code.before}\n{_crossing(code, mark)}{code.text}", "-c", "-o", "tests.o", ours=True),
        *_isolate("tests", "main"),
        CompilerStep([compiler(), *_LINK, "tests_flat.o", CANDIDATE, *_THREADS, "-o", "program"]),
    ]


def readings(source: str, code: TestCode) -> list[str]:
    """Return the two things that a reply may mean, the more likely one first: all of it, or the body of the function
    whose head is in the prefix."""
    body_first = [f"{code.signature} {{\n{source}", source]
    return body_first[::-1] if _is_whole(source, code.name) else body_first
