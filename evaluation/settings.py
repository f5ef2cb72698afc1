"""Settings of an evaluation, from the environment (MAESTRALE_EVALUATE_...) and the command line, which wins."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from serve.reasoning_language import Enforcement, OptionalLanguageTag
from serve.settings import mistakes
from shared.chat_endpoint import api_address
from shared.command_line import read_settings
from shared.errors import ConfigError

PREFIX = "MAESTRALE_EVALUATE_"
KEY_VARIABLE = f"{PREFIX}KEY"
Preset = Literal["magistral", "paper", "quick"]


class EvaluationSettings(BaseSettings):
    """Evaluate a served model through its API (any OpenAI-compatible server), or compare two evaluations.

    python -m evaluation runs/quickstart/made/validation.jsonl --no-ask-form --max-tokens 64

    python -m evaluation.download aime24 mgsm
    python -m evaluation aime24 mgsm --url http://127.0.0.1:8000/v1

    python -m evaluation --compare runs/evaluations/NAME_step_0 runs/evaluations/NAME_step_100

    Benchmarks: gsm8k math500 aime24 mgsm mbpp humaneval humaneval_cpp ifeval function_call, or a JSONL file of your
    own. Ctrl-C stops; the same command goes on where it was. A key of the server is read from the environment variable
    MAESTRALE_EVALUATE_KEY and written nowhere. Exit codes: 0 done, 1 some samples have no response, 2 a setting or the
    input is wrong, 130 stopped (docs/evaluation.md).
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", use_attribute_docstrings=True, cli_kebab_case=True, cli_implicit_flags=True,
        cli_prog_name="python -m evaluation", cli_hide_none_type=True, cli_exit_on_error=False, cli_avoid_json=True,
    )  # fmt: skip

    benchmarks: CliPositionalArg[list[str]] = []
    """names or JSONL files; with --compare the folders of two evaluations, first the older"""
    compare: bool = False
    """compare two evaluations that are there, ask nothing"""
    url: str = "http://127.0.0.1:8000/v1"
    """address of the API: /chat/completions is below it"""
    model: str = ""
    """name that the server gives it; empty for the only one that it serves"""
    out: str = ""
    """folder of records and results; empty for runs/evaluations/MODEL, of our server MODEL_step_N. Samples that are
    there are not asked again"""
    data: str = "data"
    """folder with the files of the named benchmarks; python -m evaluation.download makes them"""
    preset: Preset = "magistral"
    """magistral: temperature 0.7, top-p 0.95, 40960 tokens, as the models' cards; paper: top-p 1 for answers, 32768
    tokens but for AIME; quick: 20 problems, one sample each, 4096 tokens"""
    limit: int | None = Field(None, ge=1)
    """problems of each benchmark, evenly over its file; empty for the preset's"""
    samples: int | None = Field(None, ge=1, le=1024)
    """completions of each problem; empty for the preset's, which depend on the benchmark (64 for AIME)"""
    temperature: float | None = Field(None, ge=0, le=2)
    """empty for the preset's"""
    top_p: float | None = Field(None, gt=0, le=1)
    """empty for the preset's"""
    max_tokens: int | None = Field(None, ge=1)
    """longest completion, reasoning included; empty for the preset's. The share that is cut stands next to the score"""
    omit: list[Literal["temperature", "top_p", "seed", "max_tokens", "max_completion_tokens"]] = []
    """parameters that are not sent, such as temperature,top_p,seed; max_tokens is then sent as max_completion_tokens.
    What the server refuses by its name is left out without this"""
    seed: int = Field(0, ge=0)
    """decides every sample's own seed, and the intervals"""
    reasoning_language: OptionalLanguageTag = ""
    """sent to the server: auto, off or a code such as de; empty to send nothing"""
    reasoning_language_enforcement: Enforcement | None = None
    """sent to the server: prompt, constrain, prefill, retry or strict; empty to send nothing"""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """sent to the server: arguments of the model's chat template, e.g. {"enable_thinking": false}; empty to send
    nothing"""
    ask_form: bool = True
    """say in the prompt which form the answer must have (a box, a code block); off for a model that was trained on
    problems without such a sentence"""
    function_calls: Literal["prompt", "tools"] = "prompt"
    """prompt: the functions stand in the prompt, calls are JSON in the answer (any server); tools: those of the API"""
    concurrency: int = Field(16, ge=1, le=4096)
    """requests under way at a time"""
    deadline_s: float = Field(3600.0, gt=0)
    """longest time for one response"""
    tries: int = Field(5, ge=1, le=100)
    """requests for one sample, while the server is busy or cannot be reached"""

    @field_validator("url")
    @classmethod
    def read_url(cls, value: str) -> str:
        """Raises ValueError for an invalid URL, or one with credentials or a query."""
        address = urlsplit(value)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError("give an address such as http://127.0.0.1:8000/v1")
        if address.username is not None or address.password is not None or address.query:
            raise ValueError(f"holds a secret or a query: a key belongs into {KEY_VARIABLE}")
        return api_address(value)


def load(arguments: list[str]) -> EvaluationSettings:
    """Load the settings of a command line. Raises ConfigError, one line per mistake."""
    try:
        return read_settings(EvaluationSettings, arguments)
    except ValidationError as error:
        raise mistakes(error, hidden=("url",)) from None


def read_key() -> str:
    """Return the key for the server, "" for none. Raises ConfigError, which does not contain the key."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{KEY_VARIABLE} holds characters that no header can carry")
    return key
