"""Pack the environment of the launch part for a machine with a card, but no network: torch, vLLM and what they need.

    python -m benchmarks.gpu_check.carry --python 3.12 --arch 90          here; parts into build/gpu-environment
    python3 unpack.py /tmp/environment                                    there, beside the parts: makes bin/python
    /tmp/environment/bin/python -m benchmarks.gpu_check --part launch     there, in the checkout

The interpreter there must have torch with the same major version of CUDA: its NVIDIA libraries are used, all but NCCL,
and every package that is not carried (--borrow leaves out more). Of the GPU code in the libraries only the machine code
of one architecture is carried (90: H100 and H200). The rest is zeroed where it lies, and compresses to nothing; kernels
that exist as PTX alone (FlashAttention 2 and Marlin on a Hopper card) do not run there. FlashInfer, TileLang and others
that vLLM can do without are left out: set VLLM_USE_FLASHINFER_SAMPLER=0 there.
"""

from __future__ import annotations

import argparse
import lzma
import mmap
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.figures import ROOT

OUT = ROOT / "build" / "gpu-environment"
PLATFORM = "x86_64-manylinux_2_35"
PART_BYTES = 100 << 20
"""of the archive in one part; two to five times less when compressed"""
CONTAINER = struct.Struct("<IHHQ")
"""of GPU code in a library: magic number, version, bytes of this header, bytes of its entries"""
MAGIC, VERSION = 0xBA55ED50, 1
ENTRY = struct.Struct("<HHIQ12xI")
"""kind, version, bytes of the header, bytes of the code, architecture"""
PTX, MACHINE_CODE = 1, 2
LEFT_OUT = (
    "bin", "cuda", "cudnn", "tilelang", "flashinfer", "tokenspeed_triton", "tokenspeed_mla",
    "nvidia_cutlass_dsl", "humming", "quack", "PyNvVideoCodec", "torchcodec", "torchcodec.libs", "torchaudio",
    "instanttensor", "fastsafetensors", "z3", "pycountry", "grpc", "hf_xet", "samples", "external",
)  # fmt: skip
"""folders of site-packages that vLLM does without"""
LEFT_OUT_BELOW = (
    "vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "triton/_C/libproton.so",
    "triton/backends/nvidia/bin/ptxas-blackwell", "mistral_common/data",
)  # fmt: skip
UNPACK = '''\
"""python3 unpack.py FOLDER: a virtual environment of the parts beside this file, by the interpreter that has torch."""
import io, lzma, pathlib, subprocess, sys, tarfile
from concurrent.futures import ThreadPoolExecutor

here, folder = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1])
import torch
theirs = pathlib.Path(torch.__file__).parents[1]
with ThreadPoolExecutor() as pool:
    whole = b"".join(pool.map(lambda part: lzma.decompress(part.read_bytes()), sorted(here.glob("part-*.xz"))))
subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
site = next(folder.glob("lib/python*/site-packages"))
tarfile.open(fileobj=io.BytesIO(whole)).extractall(site, filter="fully_trusted")
(site / "theirs.pth").write_text(f"{theirs}\\n")
for library in (theirs / "nvidia").glob("*"):
    if not (site / "nvidia" / library.name).exists():
        (site / "nvidia" / library.name).symlink_to(library)
'''


def entries(code: mmap.mmap) -> Iterator[tuple[int, int, int, int]]:
    """Yield (kind, architecture, start, bytes) of each piece of GPU code in a library."""
    magic, at = struct.pack("<IHH", MAGIC, VERSION, CONTAINER.size), 0
    while (at := code.find(magic, at)) >= 0:
        place = at + CONTAINER.size
        end = place + CONTAINER.unpack_from(code, at)[3]
        at = place
        while place < end <= len(code):
            kind, _, header, size, architecture = ENTRY.unpack_from(code, place)
            if kind not in (PTX, MACHINE_CODE) or header < ENTRY.size or place + header + size > end:
                break  # the magic number was part of something else
            yield kind, architecture, place + header, size
            place += header + size
            at = place


def keep_one(library: Path, architecture: int) -> int:
    """Zero the GPU code of all other architectures, and all PTX, in the library's file. Returns the zeroed bytes."""
    zeroed = 0
    if not library.stat().st_size:
        return 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as code:
        for kind, found, start, size in list(entries(code)):
            if (kind, found) != (MACHINE_CODE, architecture):
                code[start : start + size] = bytes(size)
                zeroed += size
    return zeroed


def install(site: Path, python: str) -> None:
    """Install what the project needs on CUDA, and the project, for that version of Python."""
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--target", str(site)]
    where = ["--python-version", python, "--python-platform", PLATFORM]
    subprocess.run([*uv, *where, "-r", "pyproject.toml", "--extra", "cuda"], cwd=ROOT, check=True)
    subprocess.run([*uv, "--no-deps", "."], cwd=ROOT, check=True)


def remove(site: Path, borrowed: Iterable[str]) -> None:
    """Remove from site-packages what is not carried: of NVIDIA's libraries all but NCCL."""
    nvidia = (f"nvidia/{path.name}" for path in (site / "nvidia").iterdir() if path.name != "nccl")
    for name in (*nvidia, *LEFT_OUT, *LEFT_OUT_BELOW, *borrowed, *(f"{name}.libs" for name in borrowed)):
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in list(site.rglob("__pycache__")):
        shutil.rmtree(path, ignore_errors=True)


def compress(part: Path) -> int:
    """Replace a part by its .xz; returns the bytes."""
    packed = part.with_suffix(".xz")
    packed.write_bytes(lzma.compress(part.read_bytes(), preset=5))
    part.unlink()
    return packed.stat().st_size


def divide(site: Path, out: Path) -> list[int]:
    """Turn site-packages into compressed parts in `out`, beside unpack.py. Returns their bytes; `site` is gone."""
    archive, parts = out / "whole.tar", list[Path]()
    with tarfile.open(archive, "w") as tar:
        tar.add(site, ".")
    shutil.rmtree(site)
    with archive.open("rb") as file:
        while chunk := file.read(PART_BYTES):
            parts.append(out / f"part-{len(parts):02d}")
            parts[-1].write_bytes(chunk)
    archive.unlink()
    (out / "unpack.py").write_text(UNPACK, encoding="utf-8")
    with ProcessPoolExecutor() as pool:
        return list(pool.map(compress, parts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check.carry", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--python", default="3.12", help="version of the interpreter there (default 3.12)")
    parser.add_argument("--arch", type=int, default=90, help="architecture of the card there (default 90)")
    parser.add_argument("--borrow", nargs="*", default=[], metavar="NAME", help="folders of packages that are there")
    given = parser.parse_args(arguments)
    shutil.rmtree(OUT, ignore_errors=True)
    site = OUT / "site"
    print(f"installing into {site}", flush=True)
    install(site, given.python)
    remove(site, given.borrow)
    zeroed = sum(keep_one(path, given.arch) for path in site.rglob("*.so*") if path.is_file())
    print(f"zeroed {zeroed / 2**20:,.0f} MiB of code for other architectures; compressing, some minutes", flush=True)
    sizes = divide(site, OUT)
    print(f"{OUT}: {len(sizes)} parts, {sum(sizes) / 2**20:,.0f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
