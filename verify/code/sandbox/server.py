"""The server inside a sandbox: forks one child per test, bound by limits, kills it at its deadline, cleans, reports.

Started by `client.py` as `python -S -P` with a socket: `main` takes namespaces and a user (or, where they are off,
only a user), reports what it has and serves requests. A request comes with the pipes that the child gets; nothing else
is open in the child. After every child all processes of the sandbox are killed and reaped and its files removed. The
sandbox ends when its socket closes, and everything in it ends with it.
"""

from __future__ import annotations

import _thread
import builtins
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from _sitebuiltins import Quitter
from typing import Any

from verify.code.sandbox import isolation, object_file, program_process, seccomp, syscalls
from verify.code.sandbox.codec import HEADER

COMPILER_BYTES = 2 << 30
OPEN_FILES, TASKS = 64, 64
PREFIX_FILE = 199
"""descriptor of the interpreter's folder where its path is closed to other users"""
_READ, _RUN = isolation.READ | isolation.LIST, isolation.READ | isolation.LIST | isolation.EXECUTE
_WRITE = (
    isolation.READ | isolation.LIST | isolation.WRITE | isolation.REMOVE_FILE | isolation.MAKE_FILE | isolation.TRUNCATE
)

# fmt: off
_PRELOADED = (
    "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools",
    "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string",
    "threading", "time", "types", "typing",
)
# fmt: on


class SandboxServer:
    """The server process of one sandbox: isolates itself, then runs one child per request."""

    def __init__(self, settings: dict[str, Any], control: socket.socket) -> None:
        self.control, self.work = control, settings["work"]
        self.prefix: str = settings["prefix"]
        self.readable: list[str] = settings["readable"]
        self.namespaces: bool = settings["namespaces"]
        most = settings["landlock"]
        self.landlock = isolation.landlock_version() if most and syscalls.SUPPORTED else 0
        if most is not True:
            self.landlock = min(self.landlock, most)
        self.kept: list[int] = []
        self.filtered = syscalls.SUPPORTED
        self.user_namespace = False

    def enter(self, user: int, own: int) -> dict[str, Any]:
        """Isolate this process for good and return what was reached. Raises OSError."""
        if self.namespaces:
            isolation.build_root(self.readable, self.work, user)
            self.user_namespace = isolation.drop_user(user, own)
        elif os.geteuid() == 0:
            self.change_user(user)
        for name in ("build", "run"):
            os.mkdir(f"{self.work}/{name}", 0o700)
        os.chmod(self.work, 0o500)  # nothing is made or renamed next to them: the filter refuses chmod
        os.chdir(f"{self.work}/run")
        syscalls.drop_capabilities()
        syscalls.hide_memory()
        syscalls.adopt_orphans()
        syscalls.die_with_parent()
        return {
            "namespaces": self.namespaces,
            "user_namespace": self.user_namespace,
            "landlock": self.landlock,
            "filtered": self.filtered,
            "user": os.getuid(),
        }

    def change_user(self, user: int) -> None:
        """Change from root to `user`; what that user cannot reach is not readable in the sandbox. Raises OSError.

        The interpreter's folder is an exception where only the way to it is closed (below /root, say): it is kept open,
        and its modules are found through the descriptor.
        """
        syscalls.give(self.work, user)
        folder = os.open(self.prefix, os.O_PATH | os.O_DIRECTORY)
        os.dup2(folder, PREFIX_FILE, inheritable=False)
        os.close(folder)
        syscalls.become(user)
        self.readable = [path for path in self.readable if path == self.prefix or isolation.reaches(path)]
        if isolation.reaches(isolation.module_folder(self.prefix)):
            os.close(PREFIX_FILE)
            return
        way = f"/proc/self/fd/{PREFIX_FILE}"
        if not isolation.reaches(isolation.module_folder(way)):
            raise OSError(f"root's interpreter in {self.prefix} is closed to other users: chmod -R o+rX it")
        self.kept = [PREFIX_FILE]
        self.readable = [way if path == self.prefix else path for path in self.readable]
        for prefix in {self.prefix, sys.base_prefix}:
            isolation.redirect_imports(prefix, way)

    def prove(self) -> None:
        """Run a child that tries what must be refused. Raises OSError when something was allowed."""
        limits = {"wall_s": 20.0, "cpu_s": 4.0, "memory_bytes": 300 << 20}
        ended = self.run({"do": "probe", "arguments": [], "targets": [], **limits}, [])
        if ended["status"]:
            raise OSError(f"a sandbox does not hold here (probe ended with {ended['status']})")

    def serve(self) -> None:
        """Answer requests until the owner closes the socket."""
        gc.collect()
        gc.freeze()
        while True:
            request, files = self.receive()
            if request["do"] == "kill":  # its child had just ended
                continue
            elif request["do"] == "clear":
                self.clear("build")
                self.reply({})
            else:
                self.reply(self.run(request, files))

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next request and its descriptors. Ends the sandbox at end of file."""
        head, files, _, _ = socket.recv_fds(self.control, HEADER.size, 8)
        if len(head) < HEADER.size:
            os._exit(0)
        size, parts = HEADER.unpack(head)[0], bytearray()
        while len(parts) < size:
            chunk = self.control.recv(min(size - len(parts), 1 << 20))
            if not chunk:
                os._exit(0)
            parts += chunk
        return json.loads(parts), files

    def reply(self, answer: dict[str, Any]) -> None:
        """Send an answer as one line of JSON."""
        self.control.sendall(json.dumps(answer).encode() + b"\n")

    def run(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Fork the child, wait for it at most its wall time, kill what is left, and say how it ended."""
        started = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.chmod(f"{self.work}/build", 0o700 if request["do"] == "compile" else 0o500)
        if request["do"] == "serve_calls":
            program_process.public_names(tuple(request["arguments"][3]))
        pid = os.fork()
        if pid == 0:
            self.become(request, files)
        for file in files:
            os.close(file)
        handle = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        left = started + request["wall_s"] - time.monotonic()
        readable = {file for file, _ in poll.poll(max(0.0, left) * 1000)}
        timed_out = handle not in readable
        os.close(handle)
        self.end(pid)
        _, status, usage = os.wait4(pid, 0)
        self.reap()
        self.clear("run")
        if self.control.fileno() in readable:  # the owner wants no answer any more, or is gone
            self.receive()
            timed_out = False
        total = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "timed_out": timed_out,
            "status": os.waitstatus_to_exitcode(status),
            "cpu_s": total.ru_utime + total.ru_stime - before.ru_utime - before.ru_stime,
            "memory_bytes": usage.ru_maxrss << 10,
        }

    def end(self, pid: int) -> None:
        """SIGKILL the child and everything it started."""
        targets = [(os.killpg, pid), (os.kill, pid)]
        if self.namespaces:
            targets.append((os.kill, -1))
        for call, target in targets:
            try:
                call(target, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it ended already, or is none of ours

    def reap(self) -> None:
        """Wait for every process that is left."""
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass  # none is left: done

    def clear(self, name: str) -> None:
        """Remove what is in a work folder; nothing runs any more, links are not followed."""
        os.chmod(f"{self.work}/{name}", 0o700)
        isolation.empty_folder(f"{self.work}/{name}")

    def become(self, request: dict[str, Any], files: list[int]) -> None:
        """Be the child: take the pipes, close the rest, accept the limits, run. Never returns."""
        status = 70
        try:
            os.setpgid(0, 0)
            syscalls.die_with_parent()
            _arrange(files, request["targets"], self.kept)
            os.chdir(f"{self.work}/{'build' if request['do'] == 'compile' else 'run'}")
            compiles, binary = request["do"] == "compile", request["do"] == "binary"
            self.limit(request, compiles)
            if (candidate := request.get("candidate")) and not object_file.is_plain(f"{self.work}/build/{candidate}"):
                os._exit(object_file.REFUSED)
            if self.landlock:
                isolation.restrict_files(self.grants(compiles, binary), self.landlock)
            for number in range(1, 65):
                if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                    signal.signal(number, signal.SIG_DFL)
            if not (compiles or binary):
                signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python's own start does
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.filtered:
                empties = compiles or self.namespaces or not 0 < self.landlock < 3
                rules = seccomp.build(os.getpid(), compiles or binary, compiles, empties, fixed=bool(candidate))
                seccomp.install(rules)
            if compiles or binary:
                variables = {"PATH": "/usr/bin:/bin", "TMPDIR": f"{self.work}/build", "LC_ALL": "C"}
                os.execve(request["argv"][0], request["argv"], variables if compiles else {})
            _bound_stacks(request["memory_bytes"] // 2)
            status = getattr(program_process, request["do"])(*request["arguments"])
        except BaseException:  # noqa: BLE001 - nothing may return into the server
            traceback.print_exc(file=sys.__stderr__)
            status = 1
        finally:
            os._exit(status)

    def limit(self, request: dict[str, Any], compiles: bool) -> None:
        """Set the resource limits; hard ones, so that they only ever fall."""
        memory = COMPILER_BYTES if compiles else request["memory_bytes"]
        cpu = int(request["cpu_s"]) + 1
        limits = {
            resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_FSIZE: (64 if compiles else 16) << 20, resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
        }  # fmt: skip
        if self.user_namespace or os.getuid() >= 61184:  # else it would count the owner's other processes
            limits[resource.RLIMIT_NPROC] = TASKS
        for name, value in limits.items():
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))

    def grants(self, compiles: bool, binary: bool) -> list[tuple[str, int]]:
        """Return (path, rights) of the files that the child may touch."""
        system = ["/usr", "/bin", "/lib", "/lib64", "/lib32"]
        granted = [(path, _RUN if compiles else _READ) for path in system]
        granted += [(path, _READ) for path in self.readable if path not in system]
        if compiles:
            return [*granted, ("/dev/null", isolation.READ | isolation.WRITE), (f"{self.work}/build", _WRITE)]
        if binary:
            granted += [(path, isolation.READ | isolation.EXECUTE) for path in ("/lib64/ld-linux-x86-64.so.2",)]
            granted += [(f"{self.work}/build/program", isolation.READ | isolation.EXECUTE)]
        if self.namespaces:  # memory of limited size, gone with the sandbox; elsewhere nothing may be written
            granted += [(f"{self.work}/run", _WRITE)]
        return granted


def _arrange(files: list[int], targets: list[int], others: list[int]) -> None:
    """Put descriptors at their numbers, /dev/null at the other standard ones, and close all but `others`."""
    null = os.open("/dev/null", os.O_RDWR)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 200) for file in files]
    for number in (0, 1, 2):
        os.dup2(null, number)
    for file, target in zip(high, targets, strict=True):
        os.dup2(file, target)
    kept = sorted({0, 1, 2, *targets, *others})
    for low, up in zip(kept, [*kept[1:], 1 << 16], strict=True):
        os.closerange(low + 1, up)


def _bound_stacks(most: int) -> None:
    """Let `threading.stack_size` accept and cap large sizes: programs ask for 512 MB where 300 MB is all there is."""

    def stack_size(size: int = 0) -> int:
        return _thread.stack_size(min(size, most) & -4096)

    threading.stack_size = stack_size


def _preload() -> None:
    """Import what programs usually import, so that a child starts with it."""
    for name in _PRELOADED:
        __import__(name)
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")


def main(control_number: int, settings: dict[str, Any]) -> None:
    """Entry point of the process: the supervisor, which becomes the parent of the sandbox proper."""
    control = socket.socket(fileno=control_number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    sandbox = SandboxServer(settings, control)
    try:
        if not settings["unsafe"]:
            if not sandbox.filtered:
                raise OSError("only Linux on x86-64 has a filter of system calls here")
            if not (sandbox.namespaces or sandbox.landlock):
                raise OSError("neither namespaces nor Landlock")
        _preload()
        if sandbox.namespaces:
            isolation.leave_namespaces()
        server = os.fork()
        if server == 0:
            syscalls.die_with_parent()
            own = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            reached = sandbox.enter(settings["user"], own)
            os.close(own)
            if not settings["unsafe"]:
                sandbox.prove()
            sandbox.reply(reached)
    except OSError as error:
        sandbox.reply({"refused": str(error)})
        os._exit(0)
    except BaseException:  # noqa: BLE001 - say why; the owner reads it on the error stream
        traceback.print_exc()
        os._exit(1)
    if server == 0:
        sandbox.serve()
    control.close()
    supervise(server, parent, settings["folder"])


def supervise(server: int, parent: int, folder: str) -> None:
    """Wait for the sandbox to end; kill it when told to (SIGTERM) or when the owner died. Reaps all, removes its
    folder."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(server, signal.SIGKILL))
    syscalls.adopt_orphans()
    handle = os.pidfd_open(server)
    while not select.select([handle], [], [], 1.0)[0]:
        if os.getppid() != parent:
            os.kill(server, signal.SIGKILL)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        if folder:
            isolation.remove_folder(folder)
        os._exit(0)
