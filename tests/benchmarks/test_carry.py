"""GPU code of other architectures is zeroed where it lies in a library, and what was packed is an environment again."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check import carry
from benchmarks.gpu_check.carry import CONTAINER, ENTRY, MACHINE_CODE, MAGIC, PTX, VERSION, divide, keep_one

HEADER = 64
KEPT = b"sm_90 code" * 10


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    return ENTRY.pack(kind, 1, HEADER, len(code), architecture).ljust(HEADER, b"h") + code


def container(*pieces: bytes) -> bytes:
    whole = b"".join(pieces)
    return CONTAINER.pack(MAGIC, VERSION, CONTAINER.size, len(whole)) + whole


def test_only_the_code_of_one_architecture_stays(tmp_path):
    one = container(entry(MACHINE_CODE, 80, b"old" * 40), entry(MACHINE_CODE, 90, KEPT), entry(PTX, 90, b"text" * 9))
    other = container(entry(MACHINE_CODE, 100, b"new" * 50))
    stray = CONTAINER.pack(MAGIC, VERSION, CONTAINER.size, 1 << 40)  # the magic number, but no container
    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF" + one + b"between" + stray + b"after" * 30 + other + b"end")
    before = library.read_bytes()
    assert keep_one(library, 90) == 120 + 36 + 150
    after = library.read_bytes()
    assert len(after) == len(before) and KEPT in after and after.endswith(b"end") and b"after" * 30 in after
    assert after.count(b"old") == after.count(b"text") == after.count(b"new") == 0
    assert keep_one(library, 90) == 120 + 36 + 150 and library.read_bytes() == after


def test_parts_become_an_environment_that_finds_the_other_packages_too(tmp_path, monkeypatch):
    monkeypatch.setattr(carry, "PART_BYTES", 1 << 20)
    out, environment = tmp_path / "out", tmp_path / "environment"
    (out / "site" / "carried").mkdir(parents=True)
    (out / "site" / "nvidia" / "nccl").mkdir(parents=True)
    (out / "site" / "carried" / "__init__.py").write_text("")
    (out / "site" / "carried" / "data").write_bytes(os.urandom(3 << 20))
    data = (out / "site" / "carried" / "data").read_bytes()
    assert len(divide(out / "site", out)) == 4 and not (out / "site").exists()
    subprocess.run([sys.executable, out / "unpack.py", environment], check=True, timeout=300)
    script = "import carried, msgspec, sys; print(carried.__path__[0], sys.prefix)"
    told = subprocess.run([environment / "bin" / "python", "-c", script], check=True, capture_output=True, text=True)
    folder, prefix = told.stdout.split()
    assert Path(prefix) == environment and Path(folder).is_relative_to(environment)
    assert (Path(folder) / "data").read_bytes() == data
