r"""Compiles C++ programs, and keeps assertions out of the program's reach.

C++20 at -O2, `bits/stdc++.h` precompiled once per compiler and kept in the user's cache folder (about 120 MB; taken
only with the very same flags, so all flags stand here); for root, whose sandboxes are other users, in one open to all.

Assertion programs are two translation units. The candidate's is compiled alone and first, then everything in it but a
bridge to the function asked for is made local; the tests' unit (prefix, declaration of that function, test code with an
own `assert`) likewise, so neither macros, overloaded operators, specialised templates, nor a `memcmp` of the
candidate's can reach the comparisons. The bridge has the types of the prefix and an unpredictable name; it calls
the function by the rules of the language, so that `const vector<int>&` for `vector<int>`, `static`, `inline` and
templates will do. Where the prefix declares no function, or one without types, the compiler is asked for them first
(`untyped.py`). Only when the tests' `main` comes to its end is a nonce of this run written; `exit(0)` writes none.
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
from verify.code import untyped
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
_ONLY_COMMENTS = re.compile(r"(?:\s|/\*(?:[^*]|\*(?!/))*\*/|//[^\n]*)*")
_LINKAGE = re.compile(r"^((static|inline|constexpr)\s+)+")
_NAME = re.compile(r"([A-Za-z_]\w*)\s*\($")


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
        found = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
        if not os.path.isabs(found.stdout.strip()):  # g++ answers with the bare name
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

    The lock lies beside the folder that sandboxes may read: no program in a sandbox can hold it.
    """
    if not cache_folder():
        return False
    folder = Path(cache_folder()) / "bits"
    header, named = folder / "stdc++.h.gch", folder / "stdc++.h"
    try:
        folder.mkdir(0o755, exist_ok=True)
        with open(f"{cache_folder()}.lock", "w") as lock:
            _lock(lock.fileno(), LOCK_S)
            if not named.exists():  # for a program that includes it once more, behind others
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


def _link() -> CompilerStep:
    """Return the step that makes `program` of the tests and the candidate."""
    return CompilerStep([compiler(), *_LINK, "tests_flat.o", CANDIDATE, *_THREADS, "-o", "program"])


def split_prefix(prefix: str) -> tuple[str, str, str]:
    """Split "includes, helpers, head of a function {" into what stands before, the head, and the function's name.

    Comments behind the brace are left out. The head is "" when the prefix does not end in one.
    """
    opened = [found.end() for found in re.finditer(r"\{", prefix)]
    text = next((prefix[:end] for end in reversed(opened) if _ONLY_COMMENTS.fullmatch(prefix, end)), None)
    if text is None:
        return prefix, "", ""
    head = text[:-1].rstrip()
    starts = [head.rfind(mark) + len(mark) for mark in (";", "}", "*/") if mark in head]
    for match in re.finditer(r"^[ \t]*(#|//).*$", head, re.MULTILINE):
        starts.append(match.end())
    start = max(starts, default=0)
    signature = _LINKAGE.sub("", head[start:].strip())
    opening = _NAME.search(signature[: signature.find("(") + 1])
    return (head[:start], signature, opening.group(1)) if opening else (prefix, "", "")


def _complete(code: str, before: str, heads: list[untyped.Head], mark: str, optional: int, told: bool) -> str:
    """Return the candidate's unit: includes and helpers of the prefix before its code, in one of its `readings`.

    `_shape` stands before the candidate's code, out of reach of its macros, the bridges (see `_crossing`) behind it;
    where the types were `told`, behind its code, whose includes they need. The last `optional` heads are only there if
    the language allows that call.
    """
    marks = [f"{mark}_{number}" for number in range(len(heads))]
    shapes = "".join(_shape(head.signature, head.name, one) for head, one in zip(heads, marks, strict=True))
    bridges = "".join(
        _bridge(head, one, number >= len(heads) - optional)
        for number, (head, one) in enumerate(zip(heads, marks, strict=True))
    )
    ordered = f"{code}\n{shapes}" if told else f"{shapes}\n{code}\n"
    return f"{_CLONES}{before}\n{ordered}{bridges}"


def _bridge(head: untyped.Head, mark: str, optional: bool) -> str:
    call = f"return {head.name}(a...);"
    if optional:
        call = f"if constexpr (requires {{ {head.name}(a...); }}) {call} else __builtin_trap();"
    return f"""template<class R, class... A> struct bridge_{mark}<R(A...)> {{ static R call(A... a) {{ {call} }} }};
template struct bridge_{mark}<decltype(shape_{mark})>;
"""


def _shape(signature: str, name: str, mark: str) -> str:
    """Return the declarations in both units: a function of the types asked for, to be named only, and the bridge."""
    shape = re.sub(rf"\b{name}(?=\s*\()", f"shape_{mark}", signature, count=1)
    return f"{shape};\ntemplate<class S> struct bridge_{mark};\n"


def _crossing(signature: str, name: str, mark: str) -> str:
    """Return the tests' side of the bridge: a call of the function jumps to `bridge::call`, arguments untouched."""
    return f"""{_shape(signature, name, mark)}
template<class R, class... A> struct bridge_{mark}<R(A...)> {{ static R call(A...); }};
__attribute__((used)) auto *target_{mark} asm("target_{mark}") = &bridge_{mark}<decltype(shape_{mark})>::call;
asm(".pushsection .text; entry_{mark}: jmp *target_{mark}(%rip); .popsection");
{signature} asm("entry_{mark}");
"""


def _is_whole(source: str, name: str) -> bool:
    """Return whether a reply defines the function itself: up to its name, braces are balanced."""
    found = re.search(rf"\b{name}\s*\([^;{{}}]*\)[^;{{}}]*\{{", source)
    return bool(found) and source[: found.start()].count("{") == source[: found.start()].count("}")  # type: ignore[union-attr]


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
    """Test code behind an `assert` of its own, which writes a nonce at its end, and the parts of its prefix."""

    text: str
    before: str
    signature: str
    name: str


def guarded(tests: Assertions, nonce: str) -> TestCode:
    """Return test code that writes `nonce` when every assertion held.

    Raises DataError when it has no `main` that ends in a brace.
    """
    if "main" not in tests.code or not _END_OF_MAIN.search(tests.code):
        raise DataError("C++ test code needs a `main` function as its last one")
    mark = secrets.token_hex(8)
    code = _INCLUDE_ASSERT.sub("", tests.code)
    code = _END_OF_MAIN.sub(f"finish_{mark}(); return 0; }}\n", code)
    return TestCode(f"\n{_guard(nonce, mark)}\n{code}", *split_prefix(tests.prefix))


def assertion_program(source: str, code: TestCode) -> list[CompilerStep]:
    """Return the steps that make `program` of a candidate and tests with a typed head; it writes the nonce of `guarded`
    if all held."""
    return _two_units(readings(source, code), code, [untyped.Head(code.signature, code.name)])


def readings(source: str, code: TestCode) -> list[str]:
    """Return what a reply may mean, the more likely one first: as it stands, or as the body of a function whose head is
    in the prefix."""
    if not code.signature:
        return [source]
    found = [f"{code.signature} {{\n{source}", source]
    return found[::-1] if _is_whole(source, code.name) else found


def known_heads(reading: str, code: TestCode, heads: list[untyped.Head]) -> list[CompilerStep]:
    """As `assertion_program`, where the compiler reported the types of the functions."""
    fewer = [short for head in heads for short in untyped.shorter(head)]
    return _two_units([reading], code, heads, fewer)


def _two_units(
    readings: list[str], code: TestCode, heads: list[untyped.Head], fewer: list[untyped.Head] | None = None
) -> list[CompilerStep]:
    bridge = secrets.token_hex(8)
    every = [*heads, *(fewer or [])]
    told = fewer is not None
    units = [_complete(reading, code.before, every, bridge, len(fewer or []), told) for reading in readings]
    crossings = [_crossing(head.signature, head.name, f"{bridge}_{number}") for number, head in enumerate(every)]
    test_unit = f"{code.before}\n{''.join(crossings[: len(heads)])}{code.text}"
    otherwise = None
    if fewer is not None:
        otherwise = f"{_EVERYTHING}{code.before}\n{''.join(crossings)}{code.text}"
    kept = [f"_ZN{len(f'bridge_{bridge}_{one}')}bridge_{bridge}_{one}I*E4callE*" for one in range(len(every))]
    return [
        _compile(units[0], "-c", "-o", "candidate.o", otherwise=units[1] if len(units) > 1 else None),
        *_isolate("candidate", *kept),
        _compile(test_unit, "-c", "-o", "tests.o", ours=True, otherwise=otherwise),
        *_isolate("tests", "main"),
        _link(),
    ]


_EVERYTHING = "#include <bits/stdc++.h>\nusing namespace std;\n"


def unknown_in_tests(code: TestCode) -> CompilerStep:
    """Return a command whose messages name what the tests do not declare."""
    return _compile(f"{_EVERYTHING}{code.before}\n{code.text}", "-fsyntax-only")


def types_in(reading: str, code: TestCode, names: list[str], mark: str) -> CompilerStep:
    """Return a command whose messages report the types of the program's functions."""
    return _compile(f"{code.before}\n{reading}\n{untyped.question(names, mark)}", "-fsyntax-only")


def template_tests(code: TestCode) -> tuple[CompilerStep, CompilerStep]:
    """Compile tests that declare the template of the prefix, and link them: the messages name the missing instances."""
    test_unit = f"{code.before}\n{code.signature};\n{code.text}"
    return _compile(test_unit, "-c", "-o", "tests.o", ours=True), CompilerStep(
        [_find("ld"), "tests.o", "-o", "nothing"]
    )


def template_program(reading: str, code: TestCode, instances: list[str]) -> list[CompilerStep]:
    """Return the steps after `template_tests`: the program with the instances that the tests ask for."""
    wanted = "".join(f"template {instance};\n" for instance in instances)
    return [
        _compile(f"{_CLONES}{code.before}\n{reading}\n{wanted}", "-c", "-o", "candidate.o"),
        *_isolate("candidate", f"_Z{len(code.name)}{code.name}I*"),
        *_isolate("tests", "main"),
        _link(),
    ]
