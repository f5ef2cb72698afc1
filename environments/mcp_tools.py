"""The environment "mcp": the tools of any server of the Model Context Protocol, by a command or an HTTP address.

A server that is started by a command ends with its session or this process, whatever ends that, and so does all that
it starts. It gets of its environment what the `mcp` package passes on (PATH, HOME, ...), and the `variables` that are
named. Each episode has a session of its own, which is a process of its own for a command, unless `shared`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import anyio
from pydantic import Field, model_validator

from environments.environment import Observation, environment
from environments.tools import EnvironmentTool, ToolEnvironment, ToolError, ToolOptions
from shared.chat_endpoint import key_headers
from shared.clean_text import clean_errors
from shared.errors import ConfigError
from shared.launch import deaths
from shared.named_secrets import NAME, complain_of_url, secret_in_command, values_of
from shared.settings_file import literal
from shared.supervisor import supervised
from shared.tool_calls import ToolDefinition
from shared.types import Problem, Verdict
from verify.plugins import Failed

START_S = 60.0
"""seconds that a server may take before a run"""
WATCH_S = 5.0
"""seconds between two looks whether a server still answers"""
CLOSE_S = 20.0
"""seconds that a server may take to end its session"""
MARK = "MAESTRALE_MCP_SESSION"
"""environment variable by which the processes of a session's server are known"""
MOST_PAGES = 100
"""Most pages of a server's list of tools."""


class McpOptions(ToolOptions):
    """Options of "mcp"."""

    command: str = ""
    """starts a server that speaks on its standard input and output, e.g. "npx server /data\""""
    variables: list[str] = []
    """names of environment variables that a command gets from the launch, e.g. ["GITHUB_TOKEN"]: never their values"""
    url: str = ""
    """address of a running server (streamable HTTP), e.g. "http://localhost:8000/mcp", in place of a command"""
    key_variable: str = ""
    """environment variable with the key of a url; "" for none"""
    tools: list[str] = []
    """names of the tools that are offered; all of the server by default"""
    shared: bool = False
    """all episodes of a launch use one session: for servers without state, which start slowly"""
    call_s: float = Field(20.0, gt=0)
    """a call that takes longer is a failed one; it should be below environment.step_s"""

    @model_validator(mode="after")
    def one_server(self) -> McpOptions:
        """Raises ValueError for no server, two, a command that cannot be read, or a secret that others could read."""
        if bool(self.command) == bool(self.url):
            raise ValueError("give either a command or a url")
        if wrong := [name for name in self.variables if not NAME.fullmatch(name)]:
            raise ValueError(
                f"variables: {wrong[0].partition('=')[0]!r:.60}...: give names of variables, without values"
            )
        if secret := secret_in_command(self.command):
            raise ValueError(
                f"command holds {secret}, which other users of the machine, the run's files and trackers would show: "
                f'set it in the environment of the launch, and name the variable in variables = ["NAME"]'
            )
        for line in complain_of_url("url", self.url):
            raise ValueError(line)
        if (self.variables and self.url) or (self.key_variable and self.command):
            raise ValueError("variables are for a command, key_variable is for a url")
        return self

    def secrets(self) -> dict[str, str]:
        """The variables of a command, or the header with the key of a url. Raises ConfigError where one is not set."""
        if self.url:
            return key_headers(self.key_variable, "environment.options.mcp.key_variable")
        return values_of(self.variables, "environment.options.mcp.variables")


class McpSession:
    """A session with a server. The package wants it opened and closed by one task: `_hold`."""

    def __init__(self, options: McpOptions):
        self.options, self.users, self._gone, self._heard = options, 0, False, 0.0
        self.definitions: list[ToolDefinition] = []
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._closing = asyncio.Event()
        self._mark = secrets.token_hex(16)
        self._limit = anyio.CancelScope()  # the package ends well by anyio's cancellation, and may hang by asyncio's
        self._late = loop.call_later(START_S, self._give_up)
        self._task = asyncio.create_task(self._hold())

    @property
    def ended(self) -> bool:
        """Whether the server is gone."""
        return self._gone or self._task.done()

    async def _server(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        from environments import mcp_http

        values = self.options.secrets()
        if self.options.url:
            client = await stack.enter_async_context(mcp_http.client(values))
            return streamable_http_client(self.options.url, http_client=client)
        program, *arguments = supervised(shlex.split(self.options.command))
        server = StdioServerParameters(command=program, args=arguments, env={**values, MARK: self._mark})
        return stdio_client(server, errlog=clean_errors())

    async def _hold(self) -> None:
        from mcp import Client

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # else a traceback for each line that is no message
        try:
            with self._limit:
                async with AsyncExitStack() as stack:
                    self._client = await stack.enter_async_context(Client(await self._server(stack)))
                    cursor = None
                    for _ in range(MOST_PAGES):
                        page = await self._client.list_tools(cursor=cursor)
                        self.definitions += [
                            ToolDefinition(one.name, one.description or "", one.input_schema) for one in page.tools
                        ]
                        if (cursor := page.next_cursor) is None:
                            break
                    if not self._opened.done():
                        self._opened.set_result(None)
                    await self._watch()
        except Exception as error:  # noqa: BLE001 - whatever a server or its transport raises ends the session
            self._fail(f"cannot be used: {_cause(error)}")

    def _give_up(self) -> None:
        """End a session whose server has not answered since it was started."""
        if not self._opened.done():
            self._fail(f"gave no answer for {START_S:g} s: given up")
            self._cut()

    def _cut(self) -> None:
        """Kill what the command has started, and cancel whatever waits for it."""
        for pid in deaths.children(os.getpid()):
            with suppress(OSError):
                if self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._limit.cancel()

    def _fail(self, how: str) -> None:
        """Report once that the server is gone, also to episodes that wait for its start; nothing where the session is
        closed."""
        if not self._gone and not self._closing.is_set():
            where = "command" if self.options.command else "url"
            then = "its calls fail, and the next episode begins another session"
            deaths.helpers.add(f"the MCP server of environment.options.mcp.{where}", how, then)
        self._gone = True
        if not self._opened.done():
            self._opened.set_exception(Failed(Verdict.CRASH, f"the MCP server {how}"))
            self._opened.exception()  # perhaps no episode waits any more

    async def _watch(self) -> None:
        """Ask the server for its tools every WATCH_S, until the session is closed or it can be used no more."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        while not self._gone:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), WATCH_S)
                return
            began = time.monotonic()
            try:
                async with asyncio.timeout(self.options.call_s):
                    await self._client.list_tools(cache_mode="bypass")
            except TimeoutError:
                if self._heard < began:  # else it is busy with the calls of others
                    self._fail(f"gave no answer for {self.options.call_s:g} s: given up")
            except MCPError as error:
                if error.error.code == CONNECTION_CLOSED:
                    self._fail("has ended")

    async def open(self) -> None:
        """Wait until the tools are known. Raises Failed."""
        await asyncio.shield(self._opened)
        known = {one.name for one in self.definitions}
        if missing := set(self.options.tools) - known:
            raise Failed(
                Verdict.CRASH,
                f"environment.options.mcp.tools names {min(missing)!r}; the server has {', '.join(sorted(known))}",
            )

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The result of a call as text. Raises ToolError for what the server refuses, Failed when it is gone."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            async with asyncio.timeout(self.options.call_s):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError as error:
            raise ToolError(f"no result after {self.options.call_s:g} s") from error
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                self._fail("has ended")
                raise Failed(Verdict.CRASH, "the MCP server has ended") from error
            raise ToolError(str(error)) from error
        self._heard = time.monotonic()
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the session, and the server that a command started. Takes at most CLOSE_S twice."""
        self._closing.set()
        self._late.cancel()
        if not self._opened.done():
            self._cut()
        for _ in range(2):
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if self._task.done():
                return
            self._cut()


def _text(content: Any) -> str:
    """One content of a result as text; another kind of content becomes `[type]`."""
    if content.type == "text":
        return str(content.text)
    text = getattr(getattr(content, "resource", None), "text", None)
    return f"[{content.type}]" if text is None else str(text)


def _cause(error: BaseException) -> str:
    """The first cause in a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpSession]] = WeakKeyDictionary()
"""event loop -> options as JSON -> the session that its episodes share, which ends with the loop"""


@environment("mcp")
class Mcp(ToolEnvironment):
    """Offers the tools of a server; the verifier of the problem's domain grades the answer."""

    Options = McpOptions
    options: McpOptions
    session: McpSession | None = None

    @classmethod
    async def check(cls, options: McpOptions) -> None:
        """Open a session and end it. Raises ConfigError."""
        options.secrets()
        session, option = McpSession(options), "command" if options.command else "url"
        try:
            await session.open()
        except Failed as error:
            setting = f"environment.options.mcp.{option} = {literal(getattr(options, option))}"
            raise ConfigError(f"{setting}: {error}; start it by hand to see what is wrong") from error
        finally:
            await session.close()

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Open a session, or take the shared one. Raises Failed."""
        sessions = _shared.setdefault(asyncio.get_running_loop(), {})
        key = self.options.model_dump_json()
        session = sessions.get(key) if self.options.shared else None
        if session is None or session.ended:
            session = McpSession(self.options)
            if self.options.shared:
                sessions[key] = session
        self.session = session
        session.users += 1
        await session.open()
        return await super().reset(problem, seed)

    def tools(self) -> Sequence[EnvironmentTool | Callable[..., Any]]:
        """The tools of the server, or those of them that `options.tools` names."""
        names = self.options.tools
        known = self.session.definitions if self.session is not None else []
        return [EnvironmentTool(one, self._caller(one.name)) for one in known if not names or one.name in names]

    def _caller(self, name: str) -> Callable[[str], Coroutine[Any, Any, str]]:
        async def run(arguments: str) -> str:
            assert self.session is not None
            return await self.session.call(name, json.loads(arguments))

        return run

    async def close(self) -> None:
        """End the session, unless other episodes use it, now or later."""
        session, self.session = self.session, None
        if session is None:
            return
        session.users -= 1
        if session.users == 0 and (session.ended or not self.options.shared):
            await session.close()
