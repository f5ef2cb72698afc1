"""Environments: tasks in which the policy acts in several turns. What one is, and how it is found by its name.

    @environment("guess")
    class Guess(Environment):
        async def reset(self, problem, seed):
            self.number = random.Random(seed).randrange(16)
            return Observation()

        async def step(self, action):
            if action.response.strip() == str(self.number):
                return Observation(reward=1.0, done=True)
            return Observation([user("No. Guess again.")], reward=0.0)

There is one instance for each episode. Those of this project are modules of this folder, which are loaded when their
name is first looked up, and run in the event loop of the caller; those of `environment.plugins` run in processes of
their own (host.py). A method may be `async` or not. docs/environments.md shows how to write one.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from shared.chat import Chat
from shared.errors import ConfigError
from shared.section import Section
from shared.sections import RewardWeights
from shared.types import Problem, Reward
from verify.format import after_reasoning
from verify.plugins import checked_options

OPTIONS = "environment.options"
"""the table of the settings that holds the options of each environment"""


class EnvironmentMessage(msgspec.Struct, frozen=True):
    """One message of a conversation that the policy did not write."""

    role: Literal["system", "user", "tool"]
    text: str


def user(text: str) -> EnvironmentMessage:
    """A message of the user."""
    return EnvironmentMessage("user", text)


class Action(msgspec.Struct, frozen=True):
    """One turn of the policy, decoded."""

    text: str
    """the whole turn, reasoning included, without the end token"""
    response: str
    """The text after the reasoning; the whole turn where there is none."""
    token_ids: list[int] = []
    """[tokens] as sampled, the end token included"""
    logprobs: list[float] = []
    """[tokens] log-probability of each under the sampling distribution"""


class Observation(msgspec.Struct):
    """What an environment answers to a turn, or begins an episode with."""

    messages: list[EnvironmentMessage] = []
    """Messages for the policy. Of `reset`: a "user" message replaces the problem's text, a "system" message is added
    to the system prompt; none leaves the problem as it is"""
    token_ids: list[int] | None = None
    """[tokens] in place of `messages`, for an environment that speaks tokens: of `reset` the whole prompt, of `step`
    everything between the turn and the next one"""
    reward: float | None = None
    """for the turn; an episode's reward is the sum over its turns. Ignored where a verifier grades"""
    done: bool = False
    """the episode is over"""
    solved: bool | None = None
    """whether the task is solved, for the accuracy; not given: an episode is solved when its reward is at least 1"""
    info: dict[str, float] = {}
    """numbers that become metrics: environment/info/NAME is their mean over turns"""


class Environment:
    """Base class of environments. Instances are made without arguments; `options`, `grade` and `rewards` are there in
    `reset`."""

    verified: ClassVar[bool] = False
    """True: the verifier of the problem's domain grades the last turn, with the usual rewards. False: the reward is
    what the environment gives"""
    Options: ClassVar[type[Section]] = Section
    """class of the options that `environment.options.NAME` may set"""
    options: Any
    """an instance of `Options`"""
    grade: Grade
    """scores a text as the completion of a problem, with the rewards of the run"""
    rewards: RewardWeights
    """the settings `reward` of the run, those of its sandboxes among them"""

    @classmethod
    async def check(cls, options: Any) -> None:
        """Called before a run for an environment of this project: raises ConfigError or DataError where what all its
        episodes need is not there. options: an instance of `Options`."""

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin an episode. All episodes of a group have the same seed and must begin alike."""
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answer a turn. Episodes are replayed after a restart: the same actions must get the same answers."""
        raise TypeError(f"{type(self).__name__} defines no step")

    async def close(self) -> None:
        """The episode is over, or given up."""


Grade = Callable[[Problem, str], Awaitable[Reward]]
E = TypeVar("E", bound=type[Environment])
Result = TypeVar("Result")


class UnknownEnvironment(ConfigError):
    """There is no environment of a name."""


class KnownEnvironment(NamedTuple):
    """An environment that problems may name."""

    name: str
    make: type[Environment]
    home: str
    """file that defines it"""


ENVIRONMENTS: dict[str, KnownEnvironment] = {}
"""name -> environment, of the modules loaded so far"""


def environment(name: str) -> Callable[[E], E]:
    """Decorator: register a class as the environment `name`. Raises ConfigError when another file has the name."""

    def known(kind: E) -> E:
        home = inspect.getsourcefile(kind) or "?"
        if (before := ENVIRONMENTS.get(name)) is not None and before.home != home:
            raise ConfigError(f"{home}: an environment '{name}' exists already ({before.home}): choose another name")
        ENVIRONMENTS[name] = KnownEnvironment(name, kind, home)
        return kind

    return known


def load_ready() -> None:
    """Load the environments of this project."""
    import environments

    for module in pkgutil.iter_modules(environments.__path__):
        if module.name not in ("__main__", "environment", "host", "process"):
            importlib.import_module(f"environments.{module.name}")


def find(name: str, others: Mapping[str, object] = {}) -> KnownEnvironment | None:
    """The environment of this project with this name, None for one of `others`. Raises UnknownEnvironment."""
    load_ready()
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if name in others:
        return None
    known = sorted({*ENVIRONMENTS, *others})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "environment.plugins names the files that define more."
    raise UnknownEnvironment(f"there is no environment '{name}'; {hint} Known: {', '.join(known)}")


def made(
    kind: type[Environment], name: str, options: Mapping[str, Any], grade: Grade, rewards: RewardWeights
) -> Environment:
    """A new instance of an environment, whose `reset` has not been called. Raises ConfigError for wrong options."""
    environment = kind()
    environment.options = checked_options(OPTIONS, name, kind.Options, options)
    environment.grade, environment.rewards = grade, rewards
    return environment


def action_of(chat: Chat, ids: list[int], logprobs: list[float]) -> Action:
    """A turn from its sampled tokens, [tokens]."""
    text = chat.think_prefix + chat.decode(ids)
    response = after_reasoning(text)
    return Action(text, text if response is None else response.strip(), ids, logprobs)


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a method that is `async` or not; one that is not runs in a thread, since it may block."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.to_thread(method, *arguments)
