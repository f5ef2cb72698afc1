"""Settings of the server, from a TOML file, the environment (MAESTRALE_...) and the command line; the last one wins."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from serve.keys import KEY_VARIABLE
from serve.reasoning import ReasoningFormat
from serve.reasoning_language import Enforcement, LanguageTag
from shared.command_line import read_settings
from shared.errors import ConfigError
from shared.model.folder import ModelPath

PREFIX = "MAESTRALE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
SERVER_TOOLS = ("tools", "tool_turns", "tool_result_tokens")
"""settings that no longer exist: clients run tools"""
ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


class ServerSettings(BaseSettings):
    """Serve a trained model over HTTP, for every client of OpenAI's chat completions (docs/serving.md)."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", use_attribute_docstrings=True, cli_kebab_case=True, cli_implicit_flags=True,
        cli_prog_name="python -m serve", cli_hide_none_type=True, cli_exit_on_error=False, cli_avoid_json=True,
    )  # fmt: skip

    model: ModelPath = ""
    """folder of the model (safetensors), or of a run, whose newest export is taken, e.g. runs/quickstart; `--model` may
    be left out where it is the first word"""
    name: str = ""
    """how clients call it; empty for the name of the run or folder"""
    adapter: list[str] = []
    """NAME=FOLDER of a LoRA adapter of the model, which clients call by this name; may be given several times"""
    host: str = "127.0.0.1"
    """address to listen on; without keys a loopback address"""
    port: int = Field(8000, ge=0, le=65535)
    keys: str = ""
    """file of API keys (python -m serve.keys makes them); a single key may be in MAESTRALE_API_KEY"""
    anybody: bool = False
    """serve on an address that others can reach without any key"""
    origins: str = ""
    """origins of web pages that may use the server from a browser (CORS), with commas between them, e.g.
    https://chat.example; empty for none but its own page"""
    access_log: bool = True
    """one line a request in the log: method, path, status, time, tokens, request id"""
    follow: bool = False
    """when `model` leads to a newer export (runs/NAME/latest, which each launch moves at its end), take its weights;
    with adapters, when one of their folders does (runs/NAME/latest-adapter)"""
    max_tokens: int = Field(0, ge=0)
    """context, prompt and completion together; 0 for the model's own"""
    max_sequences: int = Field(64, ge=1)
    """completions that the engine decodes at a time"""
    queue: int = Field(256, ge=0)
    """completions that wait beyond these; more get status 503"""
    cache_bytes: int = Field(0, ge=0)
    """memory for keys and values, on each GPU; 0: 1 GiB on a CPU, on a GPU what is free of gpu_memory_utilization"""
    gpu_memory_utilization: float = Field(0.92, gt=0, le=1)
    """share of each GPU for weights, keys and values, and work, where cache_bytes is 0; as much must be free at the
    start. Beside another program on the GPU: a smaller share, or cache_bytes"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that hold the model together; CUDA_VISIBLE_DEVICES says which"""
    dtype: str = "auto"
    """bfloat16, float16, float32, or auto for the model's own"""
    quantization: str = ""
    """a method of vLLM to quantise weights while they are loaded, e.g. fp8; empty: as the checkpoint is, which says
    itself how it was quantised"""
    system_prompt: str = "trained"
    """trained: as in the training of the model, or policy where that is not known; policy: the server's own, in the
    language of the reasoning; empty for none; anything else as it is. Put before what the client says, which cannot
    replace it"""
    template: dict[str, bool | int | float | str] = {}
    """arguments of the chat template, e.g. {"enable_thinking": false}, over those of the training; a request may give
    others (chat_template_kwargs)"""
    reasoning_language: LanguageTag = "auto"
    """language of reasoning and answers: auto (that of the question), off, or a BCP 47 code"""
    reasoning_language_enforcement: Enforcement = "prompt"
    """prompt, constrain, prefill, retry or strict"""
    reasoning_format: ReasoningFormat = "both"
    """where reasoning is in a response: both, openai, deepseek, mistral, inline or hidden"""
    fallback_language: LanguageTag = "en"
    """where auto cannot decide"""
    temperature: float = Field(0.7, ge=0, le=2)
    """where a request names none"""
    top_p: float = Field(0.95, gt=0, le=1)
    """where a request names none"""
    body_bytes: int = Field(4 << 20, ge=1024)
    """largest body of a request"""
    body_s: float = Field(20.0, gt=0)
    """time in which a body must have arrived"""
    ping_s: float = Field(15.0, gt=0)
    """a stream without tokens for so long gets a comment, so that proxies keep it open"""
    drain_s: float = Field(60.0, ge=0)
    """after SIGTERM, time for the responses under way"""

    @model_validator(mode="before")
    @classmethod
    def refuse_server_tools(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Raises ConfigError for a setting of tools that the server would run."""
        refuse_server_tools(values)
        return values

    @field_validator("origins")
    @classmethod
    def read_origins(cls, value: str) -> str:
        """Raises ValueError if one of the origins is malformed."""
        for origin in split(value):
            if ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"{origin[:100]} is no origin: give scheme, host and port, e.g. https://chat.example")
        return value

    @property
    def allowed_origins(self) -> list[str]:
        """Origins whose pages may use the server."""
        return split(self.origins)

    @property
    def at_home(self) -> bool:
        """Whether only processes of this machine can reach the address."""
        return self.host == "localhost" or is_loopback(self.host)

    @model_validator(mode="after")
    def stay_at_home(self) -> ServerSettings:
        """Raises ValueError for an address that others can reach, unless there are keys or `anybody` is set."""
        if not (self.at_home or self.anybody or self.keys or os.environ.get(KEY_VARIABLE)):
            raise ValueError(
                f"host = {self.host}: anybody who reaches it could use it; make keys (python -m serve.keys keys.json "
                "--name NAME, then --keys keys.json), or say --anybody"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        """Return the sources of settings, in order of precedence."""
        path = os.environ.get(FILE_VARIABLE)
        file = [TomlConfigSettingsSource(settings_cls, Path(path))] if path else []
        return init_settings, env_settings, *file


def load(arguments: list[str] | None = None, **values: Any) -> ServerSettings:
    """Load the settings of this process; arguments: of the command line. Raises ConfigError, one line per mistake."""
    path = os.environ.get(FILE_VARIABLE)
    if path and not Path(path).is_file():
        raise ConfigError(f"{FILE_VARIABLE} = {path}: there is no such file")
    refuse_server_tools(name[len(PREFIX) :] for name in os.environ if name.upper().startswith(PREFIX))
    refuse_server_tools(text[2:].partition("=")[0] for text in arguments or [] if text.startswith("--"))
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    try:
        return read_settings(ServerSettings, arguments, **values)
    except ValidationError as error:
        raise mistakes(error) from error


def refuse_server_tools(names: Iterable[str]) -> None:
    """Raises ConfigError if one of these names of settings is among `SERVER_TOOLS`."""
    for name in names:
        if name.lower().replace("-", "_") in SERVER_TOOLS:
            raise ConfigError(f"{name}: the server runs no tools; your client can: examples/server_tools/README.md")


def split(value: str) -> list[str]:
    """Split a value at commas, without blanks and empty parts."""
    return [part.strip() for part in value.split(",") if part.strip()]


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback IP address; False for anything that is not an IP address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def mistakes(error: ValidationError, hidden: Collection[str] = ()) -> ConfigError:
    """Return the errors of settings, one line each; hidden: names of settings whose values may hold a secret."""
    lines = []
    for mistake in error.errors():
        name = ".".join(map(str, mistake["loc"]))
        text = mistake["msg"].removeprefix("Value error, ")
        value = "..." if name in hidden else repr(mistake["input"])
        lines.append(f"{name} = {value}: {text}" if name else text)
    return ConfigError("\n".join(lines))
