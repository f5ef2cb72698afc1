"""A checkpoint as a Hugging Face folder, without any rank: `python -m trainer.export runs/NAME [STEP]`.
One tensor is in memory at a time."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from shared import settings_file
from shared.atomic_write import write_whole
from shared.chat import Chat
from shared.config import Config
from shared.errors import CheckpointError, ConfigError, MaestraleError, ModelError, run_command
from shared.model import hf
from shared.model.adapter_folder import merged_weights, save_adapter
from shared.model.model_card import CARD, USUAL_BLANKS, ModelCard, read_card
from shared.progress import Progress
from trainer.checkpoint import reader, writer
from trainer.checkpoint.shard_files import iterate_weights
from trainer.client import TrainerClient
from trainer.evaluation import best_version
from trainer.step.rank import TrainerRank
from verify.published import problem_rows

REASONED = re.compile(
    r"\s*(?:<think>|\[THINK\])(?P<before>\s*)\S.*?(?P<end>\s*)(?:</think>|\[/THINK\])(?P<behind>\s*)\S", re.DOTALL
)
"""a completion with reasoning, and the blanks around its tags"""
USAGE = """usage: python -m trainer.export RUN_FOLDER [STEP]

Write the checkpoint of a step (the newest without STEP) as a Hugging Face folder: RUN_FOLDER/hf/step_STEP,
which vLLM and transformers load. The tokenizer and config.json come from the model the run started with.
Of a run with adapters (lora.rank) they are merged into it, and written for PEFT into RUN_FOLDER/adapters/step_STEP.
"""


def note_training(config: Config, folder: Path, version: int) -> None:
    """Write the model card of an export: the system prompt and the history of its training, which serving must know,
    and the seal of the checkpoint that has these weights."""
    model, seal = config.with_template().model, seal_of(config, version)
    text, learned = model.chat_template, learned_forms(config)
    card = ModelCard(
        config.name, version, config.data.system_prompt, seal, chat_template=text, template=model.template, **learned
    )
    write_whole(folder / CARD, msgspec.json.encode(card) + b"\n")
    if (folder / "config.json").is_file():
        with contextlib.suppress(ModelError):  # no launch begins with such a tokenizer; its weights are there
            Chat(folder, text, model.template).complete(folder)


def learned_forms(config: Config) -> dict[str, Any]:
    """Return what the data of a run taught of the form of prompts and completions, as fields of its card: `history`,
    `language_requests` and `tag_blanks`; the last two are of the model that it began with where the data has none."""
    settings, requests, blanks = config.environment, False, USUAL_BLANKS
    whole, shown = bool(settings.name) or settings.history == "whole", False
    with contextlib.suppress(ModelError):  # a damaged card of the model that the run began with says nothing
        if base := read_card(Path(config.locate(config.model.path))):
            requests, blanks = base.language_requests, base.tag_blanks
    for setting, name in (("data.train", config.data.train), ("sft.demonstrations", config.sft.demonstrations)):
        path = Path(config.locate(name))
        for row in problem_rows(path, setting, [], config.data.columns) if name and path.is_file() else ():
            requests = requests or bool(row.fields.get("reasoning_language"))
            if setting == "data.train":
                whole = whole or bool(row.fields.get("environment"))
            elif not shown and (tags := REASONED.match(str(row.fields.get("completion", "")))):
                blanks, shown = (tags["before"], tags["end"], tags["behind"]), True
    return {"history": "whole" if whole else "", "language_requests": requests, "tag_blanks": blanks}


def seal_of(config: Config, version: int) -> str:
    """sha256 of the manifest of a version's checkpoint, "" where there is none to be read."""
    try:
        return reader.read_manifest(writer.folder_of(config.run_dir, version)).sha256
    except (CheckpointError, OSError):
        return ""


async def export_last(config: Config, trainers: TrainerClient, version: int) -> None:
    """Let the trainers export the policy that they have now, and link run_dir/latest (and latest-adapter) to it."""
    for name, export in (("latest", TrainerRank.export), ("latest-adapter", TrainerRank.export_adapter)):
        if name == "latest" or config.lora.rank:
            folder = export_folder(config, version, adapter=name != "latest")
            await trainers.call(export, str(folder))
            note_training(config, folder, version)
            writer.link(config.run_dir, name, folder)


def export_best(config: Config, model_dir: Path, last: int, progress: Progress) -> None:
    """Export the best evaluated version, and link run_dir/best (best-adapter) to it; warn of a missing checkpoint."""
    if (best := best_version(config)) is None:
        return
    try:
        folder = export_checkpoint(config, model_dir, best)
    except CheckpointError as error:
        progress.warning(f"version {best} was best by {config.evaluate.best}, but is not exported: {error}")
        return
    writer.link(config.run_dir, "best", folder)
    if config.lora.rank:
        writer.link(config.run_dir, "best-adapter", export_folder(config, best, adapter=True))
    progress.note(f"best by {config.evaluate.best}: version {best}" + (", the last" if best == last else ""))


def export_folder(config: Config, version: int, adapter: bool = False) -> Path:
    """Where a version is exported: run_dir/hf/step_VERSION, its adapter alone in run_dir/adapters/step_VERSION."""
    return config.run_dir / ("adapters" if adapter else "hf") / f"step_{version}"


def export_checkpoint(config: Config, model_dir: Path, version: int) -> Path:
    """Write run_dir/hf/step_VERSION from the checkpoint of that version, in model.dtype; returns the folder. With
    adapters, these are merged into it, and written alone into run_dir/adapters/step_VERSION.

    An export that is there is left as it is, unless the run has gone back and made this version again since. Raises
    CheckpointError when there is no such checkpoint, it is damaged, or the disk fails.
    """
    folder = export_folder(config, version)
    source = writer.folder_of(config.run_dir, version)
    card = read_card(folder)
    seal = seal_of(config, version)
    stale = bool(seal) and card is not None and card.checkpoint != seal
    if stale or not (folder / "config.json").is_file():
        reader.read(source)
        folder.parent.mkdir(parents=True, exist_ok=True)
        dtype, weights = getattr(torch, config.model.dtype), iterate_weights(source)
        if rank := config.lora.rank:
            matrices, alone = dict(weights), export_folder(config, version, adapter=True)
            alone.parent.mkdir(parents=True, exist_ok=True)
            save_adapter(alone, matrices, rank, config.lora.alpha, str(model_dir))
            note_training(config, alone, version)
            weights = merged_weights(model_dir, matrices, config.lora.alpha / rank)
        hf.save_trained(folder, model_dir, weights, dtype)
    note_training(config, folder, version)
    return folder


def main(arguments: list[str]) -> int:
    """Export one checkpoint; returns the exit code."""
    progress = Progress()
    if not 1 <= len(arguments) <= 2 or "--help" in arguments:
        progress.note(USAGE)
        return 0 if "--help" in arguments else 2
    run_dir = Path(arguments[0])
    try:
        config = settings_file.load_run(run_dir)
        config = config.model_copy(update={"name": run_dir.name, "runs_dir": str(run_dir.parent)})
        version = _version(run_dir, arguments[1:], progress)
        model_dir = hf.resolve(config.locate(config.model.path))
        progress.note(f"written: {export_checkpoint(config, model_dir, version)}")
    except MaestraleError as error:
        progress.error(str(error))
        return error.exit_code
    return 0


def _version(run_dir: Path, given: list[str], progress: Progress) -> int:
    there = list(writer.folders(run_dir))
    if not there:
        raise CheckpointError(f"{run_dir} has no checkpoint")
    if not given:
        search = reader.newest(run_dir)
        for line in search.skipped.values():
            progress.warning(f"{line}: skipped")
        if search.newest is None:
            raise CheckpointError(f"{run_dir} has no checkpoint that can be read: restore one from a copy")
        return search.newest.manifest.version
    if not given[0].isdigit() or int(given[0]) not in there:
        raise ConfigError(f"{run_dir} has no checkpoint of step {given[0]}: there are {', '.join(map(str, there))}")
    return int(given[0])


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
