"""A process of its own for work that may hang, exit or exhaust memory. Its methods are called from here.

    class Squares:
        @call("start", deadline=60.0)
        def begin(self, limit: int) -> None: ...

        @call("square", deadline=1.0)
        async def square(self, number: int) -> int: ...

    child = Child(Squares, "the process of squares", "another takes its place")
    await child.start(100)
    assert await child.call(Squares.square, 3) == 9

`begin` runs first and alone. Then each call is a task of the process's event loop; where no method is async, calls run
one after the other without one. A call has a deadline: a process that misses it is killed. A process that ends by
itself, or is killed, is reported once (`deaths.helpers`), and every call that it has not answered raises `ChildLost`,
which says whether the call had begun. `start` starts it again.

The process's side, and the frames on its standard input and output, are in served.py.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shared import errors
from shared.launch.calls import CallRequest, encode, request
from shared.launch.messages import RankFailed
from shared.served import HEADER, Served

if TYPE_CHECKING:
    import asyncio

STACK_S = 3.0
"""seconds to wait for the line that runs"""
_AT = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class ChildLost(Exception):
    """The process has ended before it answered; the message says how."""

    def __init__(self, how: str, begun: bool):
        super().__init__(how)
        self.begun = begun
        """whether the call may have begun, and so be the reason"""


class ChildLate(Exception):
    """The process missed a deadline and was killed. `line`: "FILE:LINE in FUNCTION" that ran then, "" if unknown."""

    def __init__(self, deadline_s: float, line: str):
        super().__init__(f"no answer after {deadline_s:g} s: killed")
        self.line = line


class _Pending(NamedTuple):
    request: CallRequest[Any]
    begun: asyncio.Future[None]
    answer: asyncio.Future[Any]


class Child:
    """A process that runs an object of one class. Belongs to one event loop."""

    def __init__(
        self, served: type[Served], who: str, then: str, *, files: Sequence[str] = (), supervise: bool = True,
        environment: dict[str, str] | None = None, on_event: Callable[[Any], None] = lambda event: None,
        on_end: Callable[[], None] = lambda: None, memory_kind: str = "",
    ):  # fmt: skip
        """served: what the process runs. who, then: for the line about its end, e.g. "a verifier process", "another
        takes its place". files: of the user's, among which the line that runs is looked for. supervise: what the
        process starts ends with it. environment: its variables, those of this process by default. on_event, on_end:
        called with what it says, and at its end. memory_kind: which to lower without memory (`deaths.LOWER`)."""
        self.served, self.who, self.then, self.files = served, who, then, list(files)
        self.supervise, self.memory_kind, self.on_event, self.on_end = supervise, memory_kind, on_event, on_end
        self.environment = dict(os.environ if environment is None else environment) | python_path()
        self.process: asyncio.subprocess.Process | None = None
        self.generation = 0
        """how often it was started"""
        self.how = ""
        """how it has ended"""
        self.heard = 0.0
        """when it last sent something (monotonic)"""
        self._alive, self._quiet = False, False
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._reading: asyncio.Task[None] | None = None
        self._stacks: Any = None

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._alive

    @property
    def pid(self) -> int:
        """Its process id, or that of its supervisor; 0 before the first start."""
        return self.process.pid if self.process is not None else 0

    async def start(self, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Start the process and return what its `begin` returns of these arguments. Raises what `call` raises, and then
        the process is dead."""
        import asyncio
        import tempfile

        from shared.supervisor import supervised

        await self.end()
        self.how, self._quiet = "", True  # the caller is told by an error until it has begun
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        stack, name = self._stacks.fileno(), f"{self.served.__module__}:{self.served.__qualname__}"
        parent = 0 if self.supervise else os.getpid()
        command = [sys.executable, "-m", "shared.served", name, str(parent), str(stack)]
        self.process = await asyncio.create_subprocess_exec(
            *(supervised(command) if self.supervise else command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environment,
            pass_fds=[stack],
            start_new_session=True,
        )
        self._alive, self.generation = True, self.generation + 1
        self._reading = asyncio.create_task(self._read(self.process), name=self.who)
        try:
            value = await self.call(self.served.begin, *arguments, deadline_s=deadline_s)
        except BaseException:
            self.kill()
            raise
        self._quiet = False
        return value

    async def call(
        self, method: Callable[..., Any], *arguments: Any, deadline_s: float | None = None, silence_s: float = 0.0
    ) -> Any:
        """Call a method and return its value. deadline_s: instead of the method's own. silence_s: where a call may wait
        for others, its deadline counts from when it begins, and a process that sends nothing for so long is killed.

        Raises ChildLost, ChildLate, and where the method raises one of this project's errors the same, else RunError.
        """
        import asyncio

        if not self._alive:
            raise ChildLost(self.how or "has ended", begun=False)
        asked = request(method, *arguments)
        seconds = asked.call.deadline if deadline_s is None else deadline_s
        assert isinstance(seconds, int | float), "a method of a child has a deadline in seconds"
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        pending = self._pending[number] = _Pending(asked, loop.create_future(), loop.create_future())
        try:
            self._send(number, encode(asked.message))
            if silence_s:
                await self._begun(pending, silence_s)
            async with asyncio.timeout(seconds):
                return await pending.answer
        except TimeoutError as error:
            late = ChildLate(seconds, await self.line())
            self.kill(f"gave no answer for {seconds:g} s: killed")
            raise late from error
        finally:
            self._pending.pop(number, None)

    def post(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Call a method without waiting for its answer, which is dropped."""
        if self._alive:
            self._send(next(self._numbers), encode(request(method, *arguments).message))

    async def _begun(self, pending: _Pending, silence_s: float) -> None:
        """Wait for a call's turn. A process that sends nothing for `silence_s` meanwhile is killed."""
        import asyncio
        import time

        asked = time.monotonic()
        while not (await asyncio.wait([pending.begun, pending.answer], timeout=silence_s / 4,
                                      return_when=asyncio.FIRST_COMPLETED))[0]:  # fmt: skip
            if time.monotonic() - max(self.heard, asked) > silence_s:
                self.kill(f"was silent for {silence_s:g} s: killed")

    def _send(self, number: int, content: bytes) -> None:
        assert self.process and self.process.stdin
        self.process.stdin.write(HEADER.pack(len(content), number) + content)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Take what the process sends until it ends."""
        from shared.launch import deaths

        kills_before = deaths.memory_kills() if self.memory_kind else 0
        assert process.stdout
        try:
            with suppress(EOFError, OSError, msgspec.DecodeError):
                while True:
                    self._take(*await read_frame(process.stdout, self.served.answer_bytes))
        except BaseException:  # the event loop ends
            self._quiet = True
            raise
        finally:
            self._alive = False
            kill_group(process.pid)  # asyncio's own way may take the exit status away from itself
            await process.communicate()  # it would wait for whoever reads what is left in the pipe
            assert process.returncode is not None
            self._ended(process.returncode, kills_before)

    def _ended(self, code: int, kills_before: int) -> None:
        """Report the end, and fail what was not answered."""
        from shared.launch import deaths

        how = deaths.how(code)
        if self.memory_kind:
            how += deaths.advice(code, self.memory_kind, 0, kills_before)
        self.how = self.how or how
        if not self._quiet:
            deaths.helpers.add(self.who, self.how, self.then)
        for pending in self._pending.values():
            lost = ChildLost(self.how, begun=pending.begun.done() or not self.served.says_begun)
            if not pending.answer.done():
                pending.answer.set_exception(lost)
                pending.answer.exception()  # whoever still waits for it is told
        self._stacks.close()
        self.on_end()

    def _take(self, number: int, content: bytes) -> None:
        import time

        self.heard = time.monotonic()
        if number == 0:
            self.on_event(msgspec.msgpack.decode(content, type=self.served.events))
        elif (pending := self._pending.get(number)) is None:
            return  # nobody waits for it any more
        elif not content:
            if not pending.begun.done():
                pending.begun.set_result(None)
        elif not pending.answer.done():
            answer = pending.request.call.decode_answer(content)
            if isinstance(answer, RankFailed):
                pending.answer.set_exception(self._error(answer))
            else:
                pending.answer.set_result(answer.value)

    def _error(self, failed: RankFailed) -> Exception:
        kind = getattr(errors, failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.MaestraleError) and kind is not errors.DeadlineExceeded:
            return kind(failed.message)
        return errors.RunError(f"{self.who} failed: {failed.kind}: {failed.message}\n{failed.traceback}".rstrip())

    async def line(self) -> str:
        """Return "FILE:LINE in FUNCTION" of the innermost running frame that is in one of the files, "" for none."""
        import asyncio
        import time

        if not self.files or not self._alive:
            return ""
        text, until = "", time.monotonic() + STACK_S
        with suppress(ProcessLookupError, ValueError, OSError):  # the process has ended
            before = os.fstat(self._stacks.fileno()).st_size
            os.kill(self.pid, signal.SIGUSR1)
            while not text.endswith("\n") and time.monotonic() < until:
                await asyncio.sleep(0.1)
                text = os.pread(self._stacks.fileno(), 1 << 16, before).decode("utf-8", "replace")
        match = next((match for match in _AT.finditer(text) if match[1] in self.files), None)
        return f"{match[1]}:{match[2]} in {match[3]}" if match else ""

    def kill(self, how: str = "") -> None:
        """SIGKILL the process and what it started. how: for the line about its end; without, it is not reported."""
        if self._alive:
            self._alive, self.how, self._quiet = False, self.how or how, self._quiet or not how
        if self.process is not None and self.process.returncode is None:
            kill_group(self.process.pid)

    async def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        import asyncio

        self.kill()
        if self._reading is not None:
            await asyncio.wait([self._reading])  # a caller that is cancelled leaves it to its end


def python_path() -> dict[str, str]:
    """The variables by which a child process finds this project first, then what is set, then the working folder."""
    folders = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", ""), os.getcwd()]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONSAFEPATH": "1"}


def kill_group(pid: int) -> None:
    """SIGKILL a process that leads a group of its own, and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def read_frame(stream: asyncio.StreamReader, most_bytes: int) -> tuple[int, bytes]:
    """Return number and content of the next frame. Raises EOFError at the end, and for one that is longer."""
    size, number = HEADER.unpack(await stream.readexactly(HEADER.size))
    if size > most_bytes:
        raise EOFError(f"a frame of {size:,} bytes")
    return number, await stream.readexactly(size)
