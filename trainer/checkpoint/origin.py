"""What a run was made from: settings, data, model, prompts and reward files; kept in every checkpoint, so that a launch
that goes on from it with anything else reports it.

A setting changes the meaning of a step unless it is in FREE; a new setting is taken to do so. A file counts by its
content, not by its path. Of weights, which a checkpoint replaces, the headers and pieces spread over the file are
compared: that detects another model, not a flipped bit. The policy that the run started with (`reference/`) is what the
objective goes on comparing with, and is compared whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shared.config import Config
from shared.model import hf
from shared.record_file import content_of, sha256_of
from shared.settings_file import SECTIONS, literal
from trainer.checkpoint.safetensors_file import REFERENCE
from trainer.data.data_source import PromptFormat
from trainer.objectives.objective import Need
from trainer.objectives.registry import needs, objective_of

if TYPE_CHECKING:
    from trainer.data.sources import Sources
from verify.verifiers import known_domains

FREE = (
    "name", "runs_dir", "steps", "trackers", "placement", "checkpoint", "evaluate", "sync", "deadlines",
    # how the machine is used
    "rollout.max_sequences", "rollout.cache_bytes", "rollout.tensor_parallel", "rollout.transport",
    "rollout.max_restarts", "optimiser.activation_bytes", "optimiser.micro_batch_tokens",
    "reward.workers", "reward.sandbox.max_concurrency",
    # further deadlines and limits, addresses and keys
    "reward.deadline_s", "reward.max_failure_share", "reward.judge.url", "reward.judge.key_variable",
    "reward.judge.deadline_s", "reward.judge.least_accuracy", "reward.judge.most_bias", "reward.judge.critic.url",
    "reward.judge.critic.key_variable",
    "objective.teacher.key_variable", "environment.step_s", "environment.episode_s", "environment.processes",
)  # fmt: skip
"""settings and sections that do not change what a step means"""
FREE_AFTER_SFT = ("optimiser", "model.dtype", "model.implementation", "model.router_replay")
"""beside FREE those that may change before the first step of RL: how it computes. What was imitated is as it was"""
PATHS = (
    "prepare.script", "model.path", "data.train", "data.validation", "data.offline", "sft.demonstrations",
    "sft.general", "objective.teacher.path", "objective.teacher.url", "reward.plugins", "environment.plugins",
)  # fmt: skip
"""settings that say where something is: its content is compared instead"""
PIECES, PIECE_BYTES = 64, 1 << 16
"""number and size of the pieces of a weight file that are hashed, spread over it"""

Parts = dict[str, str]
"""part of what a setting names -> what it holds, in a few words"""


class Origin(msgspec.Struct):
    """The file origin.json of a checkpoint: the settings and contents that its run was made from."""

    settings: dict[str, Any]
    """dotted name -> value, those of the objective filled in"""
    contents: dict[str, Parts]
    """keys: a setting of PATHS, "prompts", or "reference\""""


class RunChange(NamedTuple):
    """One difference between the origin of a checkpoint and that of this launch."""

    text: str
    """e.g. "optimiser.learning_rate: 1e-06 -> 1e-05\""""
    counts: bool
    """whether it changes the meaning of a step"""


# ---- now -------------------------------------------------------------------------------------------------------


def origin_of(config: Config, sources: Sources, prompts: PromptFormat) -> Origin:
    """The origin that this launch would have. Reads the data files; raises DataError where one cannot be read."""
    contents = {
        "model.path": model_parts(sources.model_dir),
        "data.train": {"content": content_of(sources.train, "data.train")},
        "prompts": {"token ids of a problem": _hash(msgspec.json.encode(probes(config, prompts)))},
    }
    for setting, path in (
        ("data.validation", sources.validation),
        ("sft.demonstrations", sources.demonstrations),
        ("sft.general", sources.general),
    ):
        if path is not None:
            contents[setting] = {"content": content_of(path, setting)}
    if sources.offline:
        contents["data.offline"] = {path.name: content_of(path, "data.offline") for path in sources.offline}
    if config.prepare.script:
        contents["prepare.script"] = {"content": content_of(Path(config.prepare.script), "prepare.script")}
    if sources.teacher_dir is not None:
        contents["objective.teacher.path"] = model_parts(sources.teacher_dir)
    elif model := objective_of(config).served_teacher:
        contents["objective.teacher.url"] = {"model behind the address": model}
    names = [objective_of(one).name for one in (config, *config.every_stage)]
    if files := sorted({name.rpartition(":")[0] for name in names} - {""}):
        contents["objective.name"] = {Path(file).name: content_of(Path(file), "objective.name") for file in files}
    for setting, plugins in (
        ("reward.plugins", config.reward.plugins),
        ("environment.plugins", config.environment.plugins),
    ):
        if plugins:
            contents[setting] = {Path(path).name: content_of(Path(path), setting) for path in plugins}
    if Need.REFERENCE in needs(config) and (config.run_dir / REFERENCE).is_dir():
        contents[REFERENCE] = reference_parts(config.run_dir)
    return Origin(flat(config), contents)


def flat(config: Config) -> dict[str, Any]:
    """Dotted name -> value as JSON has it, for every setting."""
    table = config.model_dump(mode="json")
    if config.mode == "rl":
        table["objective"] = objective_of(config).model_dump(mode="json")

    def walk(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            tables = f"{prefix}{name}.".startswith(("reward.judges.", "objective.")) and isinstance(value, Mapping)
            if f"{prefix}{name}" in SECTIONS or tables:
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(walk(table, ""))


def probes(config: Config, prompts: PromptFormat) -> list[list[int]]:
    """[domains][tokens] one problem as the policy reads it: chat template, system prompt, templates and tokenizer."""
    domains = sorted({*known_domains(), *config.data.templates})
    return [prompts.render("Tom has 3 apples. How many has he?", domain) for domain in domains]


def model_parts(folder: Path) -> Parts:
    """File name -> hash or sample of config.json, tokenizer and weights of a model folder."""
    parts = {
        name: _hash((folder / name).read_bytes())
        for name in ("config.json", *hf.TOKENIZER_FILES)
        if (folder / name).is_file()
    }
    return parts | {path.name: sample_of(path) for path in sorted(hf.weight_files(folder))}


def sample_of(path: Path) -> str:
    """Size of a weight file, and hash of its header and of pieces spread over the rest."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(header))
        for number in range(PIECES):
            stream.seek(8 + header + (size - 8 - header) * number // PIECES)
            digest.update(stream.read(PIECE_BYTES))
    return f"{size} bytes, sample {digest.hexdigest()[:16]}"


def reference_parts(run_dir: Path) -> Parts:
    """File name -> hash of the whole file, for all files of the policy that the run started with."""
    files = sorted(path for path in (run_dir / REFERENCE).iterdir() if path.is_file())
    with ThreadPoolExecutor() as readers:
        return dict(zip((path.name for path in files), readers.map(sha256_of, files), strict=True))


def _hash(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"


# ---- then and now ----------------------------------------------------------------------------------------------


def imitated(origin: Origin) -> bool:
    """Whether a run imitated demonstrations before its first step of RL."""
    made = origin.settings.get("mode") == "rl" and origin.settings.get("sft.steps")
    return bool(made) and "sft.demonstrations" in origin.contents


def differences(then: Origin, now: Origin, version: int = 1) -> list[RunChange]:
    """The differences between two origins, those that count first. version: of the checkpoint that has `then`."""
    changes = [*_settings(then, now), *_contents(then, now)]
    if version == 0 and imitated(then):
        changes = [change._replace(counts=change.counts and not change.text.startswith(FREE_AFTER_SFT))
                   for change in changes]  # fmt: skip
    if any(change.text.startswith(("data.system_prompt", "data.templates", "model.path")) for change in changes):
        changes = [change for change in changes if not change.text.startswith("prompts")]  # they follow
    return sorted(changes, key=lambda change: not change.counts)


def is_free(setting: str, mode: str) -> bool:
    """Whether a run may go on with another value of a setting (or another content of what it names)."""
    if mode == "rl" and setting.startswith("sft.") or setting == "sft.steps":
        return True  # over, before the first checkpoint; in SFT mode the steps of the run
    setting = re.sub(r"^reward\.judges\.[^.]+", "reward.judge", setting)
    return setting == "data.validation" or any(setting == free or setting.startswith(f"{free}.") for free in FREE)


def _settings(then: Origin, now: Origin) -> Iterator[RunChange]:
    mode, defaults = now.settings["mode"], flat(Config())
    gone = [setting for setting in then.settings if setting.startswith("objective.") and setting not in now.settings]
    older = "objective.kl_gradient" in then.settings
    if older and mode == "rl":
        yield RunChange("[objective] had no tables when the checkpoint was written, and cannot be compared", True)
    for setting in [*now.settings, *gone]:
        value = now.settings.get(setting)
        before = then.settings.get(setting, defaults.get(setting))  # it may be newer than the checkpoint
        if before == value or older and setting.startswith("objective."):
            continue
        content = now.contents.get(setting)
        moved = setting in PATHS and content is not None and content == then.contents.get(setting)
        if setting in PATHS and content is not None and not moved and setting in then.contents:
            continue  # compared by its content
        yield RunChange(
            f"{setting}: {_told(before)} -> {_told(value)}" + (" (the same content)" if moved else ""),
            not (moved or is_free(setting, mode)),
        )


def _contents(then: Origin, now: Origin) -> Iterator[RunChange]:
    mode = now.settings["mode"]
    for setting in sorted(then.contents.keys() & now.contents.keys()):
        before, after = then.contents[setting], now.contents[setting]
        changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
        where = _where(then, now, setting)
        for name in changed:
            text = f"{before.get(name, 'not there')} -> {after.get(name, 'not there')}"
            yield RunChange(f"{setting}{where}: {name}: {text}", not is_free(setting, mode))


def _where(then: Origin, now: Origin, setting: str) -> str:
    before, after = then.settings.get(setting), now.settings.get(setting)
    if after is None:
        return ""
    return f" = {_told(after)}" + (f" (was {_told(before)})" if before != after else "")


def _told(value: Any) -> str:
    return "not set" if value is None else literal(value)
