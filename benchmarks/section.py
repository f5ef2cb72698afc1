"""Where a benchmark's results go: a section of a document, with the machine that they were measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from shared.atomic_write import beside

ROOT = Path(__file__).resolve().parents[1]


def describe_machine() -> str:
    """Processor, cores in use, memory, GPU."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model.group(1).strip() if model else platform.machine()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{len(os.sched_getaffinity(0))} cores of {name}, {memory:.0f} GiB, {gpu}"


def write(section: str, document: Path, name: str = "results") -> None:
    """Put the section between the marks <!-- name --> and <!-- end of name -->. Raises ValueError without them."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{document} has no {begin} ... {end} to write between")
    with beside(document) as partial:
        partial.write_text(f"{head}{begin}\n{section}{end}{tail}", encoding="utf-8")
