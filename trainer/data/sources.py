"""Turn the settings into files: the model folder, training and validation problems, demonstrations.

A script of the user's own, prepare.script, may make them first, in the folder made/ of the run. That one is written
next to its place and renamed: it is whole or absent, and a resumed run goes on with exactly the files it started with.
Of the weights only the headers are read, so that a damaged or foreign file is reported at once.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from shared.atomic_write import flush
from shared.config import Config
from shared.errors import ConfigError, DataError, ModelError
from shared.json_reader import parse_json
from shared.lazy_module import LazyModule
from shared.model.config import DecoderConfig
from shared.model.implementation import VISION_LANGUAGE, adapted_names, read_shape
from shared.progress import Progress
from shared.record_file import content_of
from shared.user_file import errors_told, missing, run_file
from trainer.data.data_sets import HUB, PARQUET, fetch
from trainer.data.generated_problems import generate
from trainer.data.problem_file import read_problems
from trainer.objectives.objective import LocalTeacher, Need
from trainer.objectives.registry import needs, objective_of
from verify.verifiers import REASONING_GYM

if TYPE_CHECKING:
    from shared.model import hf
else:
    hf = LazyModule("shared.model.hf")


SMALL = 4 << 20
"""bytes of a file of problems that is read before ranks start, too"""


@dataclass(frozen=True)
class Sources:
    """The files and model folders that a run reads; all exist."""

    model_dir: Path
    train: Path
    validation: Path | None
    demonstrations: Path | None
    general: Path | None
    offline: tuple[Path, ...] = ()
    """files of data.offline: one, or those of a run's rollouts"""
    teacher_dir: Path | None = None
    """model folder of a teacher that runs in the trainers"""


def missing_settings(config: Config) -> Iterator[str]:
    """Yield a line for each setting without which nothing can be trained, with what to set."""
    if not config.model.path:
        yield "model.path is not set: name a folder or a Hugging Face model, e.g. --model.path=Qwen/Qwen3-0.6B"
    if not config.data.train:
        yield "data.train is not set: name a JSONL file of problems, e.g. --data.train=problems.jsonl"


def prepare(config: Config, progress: Progress) -> None:
    """Call prepare(folder, options, seed) of the script, if there is one and the folder is not there yet.

    Raises ConfigError for a script that cannot be used, and for a folder that was made from other settings; DataError
    for files that cannot be written, and whatever error of this project the script raises.
    """
    if not config.prepare.script:
        return
    check_script(config)
    script, folder = Path(config.prepare.script), config.run_dir / "made"
    made_from, origin = folder / "made_from.json", _made_from(config)
    if folder.is_dir():
        _compare(made_from, origin)
        return
    progress.phase(f"running {script}")
    made = getattr(run_file(script, "prepare.script"), "prepare", None)
    if not callable(made):
        raise ConfigError(f"prepare.script = '{script}' has no function prepare(folder, options, seed)")
    partial = folder.with_name(".made")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with errors_told(script, "prepare.script"):
            made(partial, config.prepare.options, config.seed)
        (partial / made_from.name).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        for path in partial.rglob("*"):
            if path.is_file():
                flush(path)
        partial.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error}): free disk space, or set another runs_dir") from error


def check_script(config: Config) -> None:
    """Raise ConfigError where prepare.script names no file."""
    script = config.prepare.script
    if script and not Path(script).is_file():
        raise ConfigError(
            f"prepare.script = '{script}': {missing(Path(script))} (paths start at the working directory)"
        )


def _made_from(config: Config) -> dict[str, Any]:
    """What decides the content of the folder, by setting."""
    options = config.model_dump(mode="json")["prepare"]["options"]
    script = content_of(Path(config.prepare.script), "prepare.script")
    return {"prepare.script": script, "seed": config.seed} | {
        f"prepare.options.{name}": options[name] for name in options
    }


def _compare(path: Path, now: dict[str, Any]) -> None:
    """Raise ConfigError where the folder was made from something else than is wanted now."""
    before = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    changed = [key for key in before | now if before.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"{path.parent} was made with other settings ({', '.join(changed)} changed): give this run another name "
            f"(--name=...), or delete {path.parent.parent}"
        )


def data_settings(config: Config) -> dict[str, str]:
    """Setting -> its value, of the files that a run may name, "" for none."""
    return {
        "data.train": config.data.train,
        "data.validation": config.data.validation,
        "sft.demonstrations": config.sft.demonstrations,
        "sft.general": config.sft.general,
    }


def data_file(config: Config, setting: str, value: str) -> Path | None:
    """The file of a setting, generated or fetched where it is not there; None for "". Raises DataError, ConfigError."""
    if value.startswith(REASONING_GYM) and setting in ("data.train", "data.validation"):
        return generate(config, setting, value)
    if value.startswith(HUB) or value.endswith(PARQUET):
        return fetch(config, setting, value)
    path = Path(config.locate(value))
    if value and not path.is_file():
        raise DataError(f"{setting} = '{path}': {missing(path)}")
    return path if value else None


def gather_sources(config: Config) -> Sources:
    """Resolve every path. Raises ModelError, DataError, and ConfigError for adapters that the model cannot have."""
    values = data_settings(config)
    train = data_file(config, "data.train", values.pop("data.train"))
    assert train is not None, "a launch without it was refused"
    model_dir = hf.resolve(config.locate(config.model.path))
    check_model(config, model_dir)
    teacher, teacher_dir = objective_of(config).teacher, None
    if Need.TEACHER in needs(config) and isinstance(teacher, LocalTeacher):
        teacher_dir = hf.resolve(teacher.path, "objective.teacher.path")
        hf.check_trainable(teacher_dir, config.model.implementation, config.model.max_tokens)
        check_tokenizers(model_dir, teacher_dir)
    others = {setting: data_file(config, setting, value) for setting, value in values.items()}
    return Sources(
        model_dir=model_dir, train=train, validation=others["data.validation"],
        demonstrations=others["sft.demonstrations"], general=others["sft.general"], offline=offline_files(config),
        teacher_dir=teacher_dir,
    )  # fmt: skip


def check_sources(config: Config) -> None:
    """Raise what a launch would, of files and folders that are there before its ranks start: neither made by
    prepare.script, nor generated, nor fetched. Large files of problems are read by rank 0 alone."""
    check_script(config)
    made = "made/" if config.prepare.script else "\0"
    for setting, value in data_settings(config).items():
        if value.startswith((made, HUB, REASONING_GYM)) or value.endswith(PARQUET) and Path(value).is_file():
            continue
        path = data_file(config, setting, value)
        if path is not None and setting.startswith("data.") and path.stat().st_size <= SMALL:
            read_problems(path, setting, config.data, config.environment.name)
    if not config.data.offline.startswith(made):
        offline_files(config)
    if not config.model.path.startswith(made):
        check_model(config, hf.resolve(config.locate(config.model.path)))


def check_model(config: Config, model_dir: Path) -> None:
    """Raise ModelError if the model cannot be trained as the settings say, ConfigError for adapters that it cannot
    have, and for types in which trainers and engines cannot agree."""
    dtypes = config.model.dtype, config.optimiser.compute_dtype
    if config.mode == "rl" and config.sync.verify and dtypes == ("float32", "bfloat16"):
        raise ConfigError(
            'model.dtype = "float32" and optimiser.compute_dtype = "bfloat16": engines and trainers would differ by '
            "more than the proof of an update allows: give both the same type"
        )
    hf.check_trainable(model_dir, config.model.implementation, config.model.max_tokens)
    check_vocabulary(model_dir)
    described = hf.load_config(model_dir)
    shape = read_shape(described, config.model.implementation, config.model.max_tokens)
    check_reach(shape, config.model.max_tokens, model_dir)
    from shared.model.parallel import check_split  # torch: not before a model is looked at

    check_split(shape, config.placement.tensor, config.placement.context, config.placement.experts)
    if config.lora.rank and described.get("model_type") in VISION_LANGUAGE:
        raise ConfigError(
            f"lora.rank = {config.lora.rank}: adapters of vision-language models were not tried: set lora.rank to 0, "
            "or model.path to the folder of a text model"
        )
    if config.lora.rank:
        adapted_names(shape, described, config.lora.rank, config.lora.targets)
    if shape.family == "gpt_oss" and config.mode != "sft":
        raise ConfigError(
            'mode = "rl": vLLM keeps the experts of gpt-oss in another layout than its checkpoints, so new weights '
            'cannot be written into its engines: set mode = "sft", or take another model (docs/models.md)'
        )


def check_reach(shape: DecoderConfig, max_tokens: int, model_dir: Path) -> None:
    """Raise ConfigError for more tokens than the model has positions: vLLM would, when engines start."""
    if max_tokens > shape.reach:
        raise ConfigError(
            f"model.max_tokens = {max_tokens}, but {model_dir} has {shape.reach} positions (max_position_embeddings): "
            f"set model.max_tokens to at most {shape.reach}, and rollout.max_completion_tokens well below it"
        )


def offline_files(config: Config) -> tuple[Path, ...]:
    """The files of data.offline: the one that it names, or all rollouts of the run whose folder it names, in order of
    their steps. Raises DataError for a folder without any, and for recorded log-probs at another temperature."""
    if not config.data.offline or config.mode != "rl":
        return ()
    path = Path(config.locate(config.data.offline, "data.offline"))
    if path.is_file():
        return (path,)
    files = sorted((path / "rollouts").glob("step_*.jsonl"), key=lambda it: int("0" + it.stem.removeprefix("step_")))
    if not files:
        raise DataError(f"data.offline = '{path}': {missing(path)}, and no run's folder with rollouts/step_N.jsonl")
    settings = path / "config.toml"
    recorded = tomllib.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    then = recorded.get("rollout", {}).get("temperature", config.rollout.temperature)
    if then != config.rollout.temperature:
        raise DataError(
            f"data.offline = '{path}': its log-probs are at rollout.temperature = {then}, and this run has "
            f"{config.rollout.temperature}: set the same"
        )
    return tuple(files)


def check_vocabulary(model_dir: Path) -> None:
    """Raise ModelError if the tokenizer has tokens that the embedding has no row for."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return  # other forms of tokenizers are read, and their absence reported, by shared.chat.Chat
    try:
        most = max(Tokenizer.from_file(str(path)).get_vocab().values(), default=-1)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} cannot be read ({error}): fetch the file again") from error
    rows = read_shape(hf.load_config(model_dir)).vocab_size
    if most >= rows:
        raise ModelError(
            f"{path} has tokens up to id {most}, config.json has vocab_size = {rows}: the model has no row for the "
            "last ones. Take the tokenizer that came with the model, or resize the model's embedding"
        )


def check_tokenizers(model_dir: Path, teacher_dir: Path) -> None:
    """Raise ModelError if the teacher has another tokenizer or fewer rows of token ids than the model: its log-probs
    would be of other texts, or missing."""
    folders = (model_dir, teacher_dir)
    for folder in folders:
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"objective.teacher: {folder} has no tokenizer.json to compare with the other model's")
    own, other = (Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab() for folder in folders)
    if different := [token for token in own.keys() | other.keys() if own.get(token) != other.get(token)]:
        raise ModelError(
            f"objective.teacher: {teacher_dir} has another tokenizer than {model_dir} ({len(different)} tokens differ, "
            f"for example {min(different)!r}): a teacher must read the same token ids"
        )
    rows, known = (read_shape(hf.load_config(folder)).vocab_size for folder in folders)
    if known < rows:
        raise ModelError(
            f"objective.teacher: {teacher_dir} has {known} rows of token ids, {model_dir} has {rows}: it says nothing "
            "of the last ones, which the policy may sample; take a teacher with as many"
        )
