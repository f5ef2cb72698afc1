"""Settings of an evaluation of oversight, from the environment (MAESTRALE_OVERSIGHT_...) and the command line."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from oversight.players import ModelPlayer
from oversight.protocol import Rules
from serve.settings import mistakes
from shared.chat_endpoint import api_address, key_headers
from shared.command_line import read_settings
from shared.errors import ConfigError

ProtocolName = Literal["qa", "qa_article", "votes", "consultancy", "debate"]


class OversightSettings(BaseSettings):
    """Measure how well judges find the right of two answers: by themselves, after a consultancy, after a debate.

    python -m oversight stories logic --agents big@http://127.0.0.1:8001/v1 --judges small@http://127.0.0.1:8000/v1

    Tasks: stories (generated articles that the judge does not see), logic (generated chains of rules), programs (a
    program against a mutant that fails its tests; needs data/mbpp.jsonl), EVALUATION_FOLDER:ROWS.jsonl (a right and a
    wrong response to the same problem), or a JSONL file: {"question", "answers": [...], "right": 1, "article"?}.
    Several agents and judges may be given, each as MODEL@URL or MODEL@URL@VARIABLE, where the environment variable
    VARIABLE holds the endpoint's key. Ctrl-C stops; the same command goes on where it was. Exit codes: 0 done, 1 some
    games failed, 2 a setting or the input is wrong, 130 stopped (docs/oversight.md).
    """

    model_config = SettingsConfigDict(
        env_prefix="MAESTRALE_OVERSIGHT_", extra="forbid", use_attribute_docstrings=True, cli_kebab_case=True,
        cli_implicit_flags=True, cli_prog_name="python -m oversight", cli_hide_none_type=True, cli_exit_on_error=False,
        cli_avoid_json=True,
    )  # fmt: skip

    tasks: CliPositionalArg[list[str]] = []
    """stories, logic, programs, FOLDER:ROWS.jsonl, JSONL files"""
    agents: list[str] = []
    """who debates and consults: MODEL@URL, one or more"""
    judges: list[str] = []
    """who decides: MODEL@URL, one or more, weaker than the agents"""
    protocols: list[ProtocolName] = ["qa", "qa_article", "consultancy", "debate", "votes"]
    """votes: the judge by itself, again and again until it has sampled as many tokens as the debate took"""
    out: str = "runs/oversight"
    """folder of records and results. Games that are there are not played again"""
    data: str = "data"
    """folder with mbpp.jsonl, for programs"""
    questions: int = Field(128, ge=1)
    """number of each task, each in both orders of its answers"""
    facts: int = Field(40, ge=2, le=400)
    """sentences of an article of the task stories"""
    rounds: int = Field(3, ge=1, le=10)
    """number of rounds of debates and consultancies"""
    simultaneous: bool = True
    """debaters hear earlier rounds only; off: the second also hears the first one's speech of the round"""
    best_of: int = Field(1, ge=1, le=16)
    """drafts of each speech, of which the agent chooses one (the paper: 4)"""
    words: int = Field(150, ge=10, le=5000)
    """limit of a speech"""
    thinking: bool = True
    """agents may think where nobody reads it"""
    elo_games: int = Field(0, ge=0)
    """debates of one round between two agents, drawn at random, to rate them (the paper: 512); 0: the other debates"""
    temperature: float = Field(0.7, ge=0, le=2)
    """for speeches, drafts, questions and votes; verdicts and choices are greedy"""
    max_tokens: int = Field(1024, ge=1)
    """longest reply of an agent, thinking included"""
    judge_tokens: int = Field(256, ge=1)
    """longest reply of a judge; one that reasons needs more"""
    seed: int = Field(0, ge=0)
    """decides the questions, every request's own seed, and the intervals"""
    concurrency: int = Field(16, ge=1, le=4096)
    """games under way at a time"""
    deadline_s: float = Field(600.0, gt=0)
    """longest time for one reply"""
    tries: int = Field(5, ge=1, le=100)
    """requests for one reply, while a server is busy or cannot be reached"""

    @field_validator("agents", "judges")
    @classmethod
    def read_players(cls, value: list[str]) -> list[str]:
        """Raises ValueError for a player that cannot be read, and for one that is there twice."""
        names = [parse_player(one)[0] for one in value]
        if len(set(names)) < len(names):
            raise ValueError("a model is named twice: records are kept by name")
        return value

    def rules(self) -> Rules:
        """Return how debates and consultancies are held."""
        return Rules(self.rounds, self.simultaneous, self.best_of, self.words, self.thinking)

    def player(self, text: str, max_tokens: int) -> ModelPlayer:
        """Return a player of these settings. Raises ConfigError if its key is not set."""
        model, url, variable = parse_player(text)
        headers = key_headers(variable, "agents or judges: the variable of the key")
        return ModelPlayer(
            url, model, headers, self.deadline_s, concurrent=self.concurrency, tries=self.tries,
            temperature=self.temperature, max_tokens=max_tokens,
        )  # fmt: skip


def parse_player(text: str) -> tuple[str, str, str]:
    """Return model, address and variable of the key of "MODEL@URL@VARIABLE". Raises ValueError."""
    model, _, rest = text.partition("@http")
    url, _, variable = f"http{rest}".partition("@")
    address = urlsplit(url)
    if not model or not rest or not address.hostname or address.query or not (variable or "_").isidentifier():
        raise ValueError("give MODEL@URL, such as small@http://127.0.0.1:8000/v1, or MODEL@URL@VARIABLE_OF_THE_KEY")
    if variable and variable not in os.environ:
        raise ValueError(f"the environment variable {variable} is not set: it should hold the key of {model}")
    return model, api_address(url), variable


def load(arguments: list[str]) -> OversightSettings:
    """Load the settings of a command line. Raises ConfigError, one line per mistake."""
    try:
        settings = read_settings(OversightSettings, arguments)
    except ValidationError as error:
        raise mistakes(error, hidden=("agents", "judges")) from None
    for name in ("tasks", "agents", "judges"):
        if not getattr(settings, name):
            raise ConfigError(f"no {name}: see python -m oversight --help")
    if "votes" in settings.protocols and "debate" not in settings.protocols:
        raise ConfigError("protocols: votes takes as many tokens as a debate: it needs debate beside it")
    return settings
