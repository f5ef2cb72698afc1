"""The NVIDIA cards of this machine, as its driver and a product in another process show them: for `trainer check`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import torch

from shared.config import Config
from shared.errors import ConfigError, command_of
from shared.launch.ranks import shares_gpus
from shared.model.config import DecoderConfig
from trainer.check.finding import CheckFinding, Status
from trainer.colocate import check_own_gpus, share
from trainer.memory import size

QUERY = "index,name,memory.total,memory.used,driver_version,compute_cap"
SMI_S, TRIAL_S = 20.0, 180.0
TRIAL = """
import torch
for card in range(torch.cuda.device_count()):
    side = torch.ones(256, 256, device=f"cuda:{card}", dtype=torch.bfloat16)
    assert float((side @ side).sum()) == 256**3, f"card {card} multiplies wrong"
print(torch.cuda.device_count(), ".".join(map(str, torch.cuda.nccl.version())))
"""
"""a product on every visible card, in a process of its own; prints their number and NCCL's version"""
LEAST_CAPABILITY = 8.0
"""compute capability that has bfloat16"""


class NvidiaCard(NamedTuple):
    """A GPU as nvidia-smi describes it."""

    number: int
    name: str
    total_bytes: int
    used_bytes: int
    driver: str
    capability: float


def driver() -> tuple[list[NvidiaCard], CheckFinding]:
    """Return the cards that the driver shows and torch can use, and what is to say of the driver."""

    def answer(status: Status, text: str, step: str = "") -> tuple[list[NvidiaCard], CheckFinding]:
        return (cards if status == "OK" else []), CheckFinding("driver", status, text, step)

    ours, cards = torch.version.cuda, list[NvidiaCard]()
    if shutil.which("nvidia-smi") is None:
        if not ours:
            return answer("OK", "no NVIDIA driver: all runs on the CPU")
        step = "install NVIDIA's driver, start the container with --gpus all, or make install EXTRA=cpu"
        return answer("WARN", f"no nvidia-smi, but torch is built for CUDA {ours}, whose vLLM has no CPU engine", step)
    try:
        listed = ask_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
        newest = re.search(r"CUDA Version:\s*(\d+)([.\d]*)", ask_smi())
        cards = [read_card(line) for line in listed.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = (getattr(error, "stdout", "") or str(error)).strip().splitlines()[0]
        step = "modprobe nvidia, or restart the machine after an update of the driver; in a container: --gpus all"
        return answer("FAIL", f"nvidia-smi fails: {reason}", step)
    if not cards:
        return answer("WARN", "the driver shows no card", "look whether it is seated and powered (lspci, dmesg)")
    text = f"{cards[0].driver}, for CUDA up to {newest[1] + newest[2] if newest else 'an unknown version'}"
    if not ours:
        text += f", but torch {torch.__version__} is built for CPUs: the cards idle"
        return answer("WARN", text, "make install EXTRA=cuda")
    if newest and int(newest[1]) < int(ours.split(".")[0]):
        return answer("FAIL", f"{text}, but torch is built for CUDA {ours}", "install a newer driver of NVIDIA's")
    return answer("OK", f"{text}; torch is built for CUDA {ours}")


def ask_smi(*options: str) -> str:
    """Return what nvidia-smi prints. Raises subprocess.SubprocessError, OSError."""
    done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=SMI_S, check=True)
    return done.stdout


def read_card(line: str) -> NvidiaCard:
    """Read a line of QUERY. Raises ValueError."""
    number, name, total, used, own_driver, capability = (part.strip() for part in line.split(","))
    return NvidiaCard(int(number), name, int(total) << 20, int(used) << 20, own_driver, float(capability))


def use_of_cards(cards: list[NvidiaCard], config: Config | None, shape: DecoderConfig | None) -> Iterator[CheckFinding]:
    """Yield what the cards are, whether they compute, and whether they are enough."""
    visible, computed = computing()
    text, needed = ", ".join(f"{card.number}: {card.name} {size(card.total_bytes)}" for card in cards), 0
    refusal = ""
    if config is not None:
        needed = config.placement.trainers + config.engine_gpus
        try:
            if visible and shares_gpus(config, visible):
                needed = visible
                text += shared(cards, config, shape)
            elif shape is not None:
                check_own_gpus(config, shape, min(card.total_bytes for card in cards), visible)
        except ConfigError as error:
            refusal = f"; {error}"
    old = [card for card in cards if card.capability < LEAST_CAPABILITY]
    busy = [card for card in cards if card.used_bytes > card.total_bytes // 10]
    status: Status = "OK"
    step = ""
    if old:
        status, step = "FAIL", "hide it (CUDA_VISIBLE_DEVICES), or use cards from Ampere on"
        text += f"; {old[0].name} has compute capability {old[0].capability}, bfloat16 needs {LEAST_CAPABILITY}"
    elif refusal:
        status, step = "FAIL", f"change what it names; {command_of('trainer')} SETTINGS --dry-run shows the arithmetic"
        text += refusal
    elif visible and needed > visible:
        status, step = "WARN", "lower placement.trainers, placement.engines or rollout.tensor_parallel, or add nodes"
        text += f"; the settings place ranks on {needed} GPUs, {visible} are visible here (--dry-run shows them)"
    elif busy:
        status, step = "WARN", "end what runs there (nvidia-smi), or hide the card with CUDA_VISIBLE_DEVICES"
        text += f"; {size(busy[0].used_bytes)} of card {busy[0].number} are taken"
    yield CheckFinding("cards", status, text, step)
    yield computed


def shared(cards: list[NvidiaCard], config: Config, shape: DecoderConfig | None) -> str:
    """Say how trainers and engines share the cards. Raises ConfigError if they do not fit."""
    way = config.placement.colocate
    if shape is not None:
        least = min(card.total_bytes for card in cards)
        way = share(config, shape, least, psutil.virtual_memory().total).placement.colocate
    return f"; trainers and engines share them ({way})"


def computing() -> tuple[int, CheckFinding]:
    """Multiply on every visible card in another process, which says NCCL's version too; returns their number or 0."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL], capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        step = "look for errors of the cards (nvidia-smi -q, dmesg), restart the machine"
        return 0, CheckFinding("CUDA", "FAIL", f"a product on each card was not done within {TRIAL_S:.0f} s", step)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        step = "check CUDA_VISIBLE_DEVICES, and that driver and torch fit (make install EXTRA=cuda)"
        return 0, CheckFinding("CUDA", "FAIL", f"a product on the cards fails: {last}", step)
    count, nccl = done.stdout.split()
    if count == "0":
        return 0, CheckFinding("CUDA", "FAIL", "torch sees no card", "unset CUDA_VISIBLE_DEVICES, or name cards in it")
    return int(count), CheckFinding("CUDA", "OK", f"{count} card(s) compute; NCCL {nccl}")
