"""Environments with tools: the policy calls functions, reads what they return, and ends the episode with an answer.

    @environment("sums")
    class Sums(ToolEnvironment):
        @tool
        def add(self, a: int, b: int) -> int:
            "Add two whole numbers."
            return a + b

Tools, calls and results are written as in serving (`shared/tool_calls.py`), so that a model is served as it was
trained. A turn with calls is answered by their results, in the order of the calls; a turn without a call is the answer.
Calls are looked for after the reasoning. Whatever goes wrong in a call (no such tool, no JSON, arguments that do not
fit, a function that raises) is its result, as a text that begins with "Error:"; only `Failed` costs the episode.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from environments.environment import Action, Environment, EnvironmentMessage, Observation, call
from shared.errors import ConfigError
from shared.section import Section
from shared.tool_calls import CLOSE, OPEN, CallReader, NoCallError, ParsedCall, ToolDefinition, parse_call, tools_prompt
from shared.types import Problem
from verify.plugins import Failed

MOST_CALLS = 16
"""calls of one turn that are run; what follows stays text"""
F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """A call has no result; the policy reads the message, and the call is counted as failed."""


class EnvironmentTool(NamedTuple):
    """A tool that the policy may call."""

    definition: ToolDefinition
    run: Callable[[str], Awaitable[str]]
    """the result of a call, from JSON of its arguments. Raises ToolError"""


class _Untitled(GenerateJsonSchema):
    """JSON schemas without the titles that pydantic makes of names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def tool(function: F) -> F:
    """Decorator: make a method of a ToolEnvironment a tool. Its docstring is the description; the schema of its
    arguments is that of their annotations, as pydantic has it. Raises ConfigError where one is missing."""
    tool_of(function)
    function.__dict__["is_tool"] = True
    return function


def tool_of(function: Callable[..., Any]) -> EnvironmentTool:
    """The tool that calls a function or a method of an instance. Raises ConfigError, see `tool`."""
    name, source = function.__name__, f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    description = inspect.cleandoc(function.__doc__ or "")
    if not description:
        raise ConfigError(f"{source}: the tool {name} has no docstring, which says to the model what it is for")
    try:
        known = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # whatever an annotation raises when it is evaluated
        raise ConfigError(f"{source}: the annotations of the tool {name} are not understood ({error})") from error
    fields: dict[str, Any] = {}
    for argument in inspect.signature(function).parameters.values():
        if argument.name == "self":
            continue
        if argument.name not in known or argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ConfigError(
                f"{source}: the tool {name} needs a type for its argument {argument.name}, and takes no * or **"
            )
        fields[argument.name] = known[argument.name], ... if argument.default is argument.empty else argument.default
    arguments = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    parameters = arguments.model_json_schema(schema_generator=_Untitled)
    parameters.pop("title", None)

    async def run(given: str) -> str:
        try:
            read = arguments.model_validate_json(given)
        except ValidationError as error:
            mistakes = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])
            raise ToolError(f"the arguments of {name} do not fit: {mistakes}") from error
        result = await call(functools.partial(function, **{field: getattr(read, field) for field in fields}))
        return result if isinstance(result, str) else to_json(result).decode()

    return EnvironmentTool(ToolDefinition(name, description, parameters), run)


class ToolOptions(Section):
    """Options of every environment with tools."""

    result_characters: int = Field(2000, ge=100)
    """a longer result of a call is cut in its middle"""


class ToolEnvironment(Environment):
    """Base class of environments with tools; the verifier of the problem's domain grades the last turn."""

    verified = True
    Options: ClassVar[type[Section]] = ToolOptions
    problem: Problem
    seed: int

    def tools(self) -> Sequence[EnvironmentTool | Callable[..., Any]]:
        """What may be called, functions with annotations among it: here the methods that are marked `@tool`, in the
        order in which the class has them."""
        names = dict.fromkeys(name for kind in reversed(type(self).__mro__) for name in vars(kind))
        return [getattr(self, name) for name in names if getattr(getattr(type(self), name), "is_tool", False)]

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin an episode: the tools are added to the system prompt, in the words of serving."""
        self.problem, self.seed = problem, seed
        tools = [one if isinstance(one, EnvironmentTool) else tool_of(one) for one in self.tools()]
        self._tools = {one.definition.name: one for one in tools}
        return Observation([EnvironmentMessage("system", tools_prompt(self.definitions))])

    @property
    def definitions(self) -> list[ToolDefinition]:
        """The tools of the episode, after `reset`."""
        return [one.definition for one in self._tools.values()]

    async def step(self, action: Action) -> Observation:
        """Run the calls of the turn; one without is the answer. info: calls of the turn, and those without a result."""
        results, failed = [], 0
        for parsed in calls_in(action.response, self._tools.keys()):
            text, right = await self.answer(parsed)
            results.append(EnvironmentMessage("tool", text))
            failed += not right
        info = {"tool_calls": float(len(results)), "failed_calls": float(failed)}
        return Observation(results, done=not results, info=info)

    async def answer(self, part: ParsedCall | str) -> tuple[str, bool]:
        """What the policy reads about a call, and whether that is its result. Raises Failed."""
        text, right = await self._answer(part)
        return cut(text, self.options.result_characters), right

    async def _answer(self, parsed: ParsedCall | str) -> tuple[str, bool]:
        """The result of a call, and whether it is one."""
        try:
            if isinstance(parsed, str):
                body, closed, _ = parsed.lstrip().removeprefix(OPEN).partition(CLOSE)
                if not closed:
                    raise NoCallError(f"the call has no {CLOSE}")
                parse_call(body, self._tools.keys())  # says what is wrong
                raise NoCallError(f"a turn has at most {MOST_CALLS} calls")
            return await self._tools[parsed.name].run(parsed.arguments), True
        except (NoCallError, ToolError) as error:
            return f"Error: {error}", False
        except Failed:
            raise
        except Exception as error:  # noqa: BLE001 - the policy may have caused whatever a tool raises
            return f"Error: {type(error).__name__}: {error}", False


class JoinedTools(ToolEnvironment):
    """The tools of several environments in one, for an episode that may call all of them."""

    def __init__(self, parts: Sequence[ToolEnvironment]):
        self.parts = parts
        self.options = ToolOptions(result_characters=max([100, *(part.options.result_characters for part in parts)]))

    def tools(self) -> Sequence[EnvironmentTool | Callable[..., Any]]:
        """The tools of all. Raises ConfigError where two have one name."""
        owners = [(name, part) for part in self.parts for name in part._tools]
        self._owners = dict(owners)
        if twice := [name for name, part in owners if self._owners[name] is not part]:
            raise ConfigError(f"two environments have a tool {twice[0]}")
        return [one for part in self.parts for one in part._tools.values()]

    async def answer(self, part: ParsedCall | str) -> tuple[str, bool]:
        """Delegate to the environment that owns the tool."""
        owner = self._owners.get(part.name) if isinstance(part, ParsedCall) else None
        return await (super().answer(part) if owner is None else owner.answer(part))

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin the episode in each of them."""
        for environment in self.parts:
            await environment.reset(problem, seed)
        return await super().reset(problem, seed)

    async def close(self) -> None:
        """Close each of them."""
        for environment in self.parts:
            await environment.close()


def calls_in(response: str, names: Collection[str]) -> list[ParsedCall | str]:
    """What must be answered in a turn, in order: its calls, and texts where a call should be."""
    parts = CallReader(names, MOST_CALLS).feed(response, last=True)
    return [part for part in parts if isinstance(part, ParsedCall) or part.lstrip().startswith(OPEN)]


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters and a remark: its middle is left out where it is longer."""
    if len(text) <= most:
        return text
    left = len(text) - 2 * (most // 2)
    return f"{text[: most // 2]}\n[... {left} characters left out ...]\n{text[len(text) - most // 2 :]}"
