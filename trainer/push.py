"""An export and its card to the Hugging Face Hub: `python -m trainer.push runs/NAME/best OWNER/NAME`."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from huggingface_hub import ModelCardData, metadata_load, snapshot_download

from shared import settings_file
from shared.atomic_write import write_whole
from shared.command_line import CommandParser
from shared.config import Config
from shared.errors import ConfigError, MaestraleError, RunError, run_command
from shared.model.adapter_folder import CONFIG
from shared.model.model_card import ModelCard, read_card
from shared.progress import Progress
from trainer.evaluation import at_temperature, read_evaluations

ABOUT = """An export and its card to the Hugging Face Hub.

The card, README.md, is written into the folder where it has none. With OWNER/NAME the folder is uploaded there.
Who you are is what `hf auth login` or HF_TOKEN says.
"""
README = "README.md"
FILES = [README, "LICENSE*"]
TITLES = {"apache license version 2.0": "apache-2.0", "mit license": "mit"}
"""how a LICENSE begins -> its name in a card"""
NO_LICENSE = "license: fill it in; neither a card nor a LICENSE of the model that it was trained from names it"


def push(folder: Path, name: str, public: bool) -> str:
    """Upload a folder as one commit, its repository made where it is not there; returns its address. Raises
    RunError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="An export of Maestrale")
    except Exception as error:  # the hub's client raises errors of several libraries
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise RunError(f"the Hub did not take {folder} as {name} ({type(error).__name__}: {reason})") from error
    return str(commit.repo_url)


def write_card(folder: Path, name: str = "") -> str:
    """Return the README.md of an export, written where it has none. name: on the Hub, where it is known. Raises
    ConfigError for another folder."""
    path = folder / README
    if (card := read_card(folder)) is None:
        raise ConfigError(f"{folder} is no export of a run: give runs/NAME/best, latest, latest-adapter or hf/step_N")
    if not path.is_file():
        config = settings_file.load_run(folder.parent.parent)
        config = config.model_copy(update={"name": card.run, "runs_dir": str(folder.parent.parent.parent)})
        write_whole(path, card_text(config, card, (folder / CONFIG).is_file(), name or "OWNER/NAME"))
    return path.read_text(encoding="utf-8")


def licence_of(model: str) -> dict[str, Any]:
    """The fields of the licence in a card, from the card of the model that it was trained from, a folder or one of the
    Hub, else from its LICENSE where its title is known; {} where neither says it or can be fetched."""
    licence: dict[str, Any] = {}
    with suppress(Exception):  # the hub's client raises errors of several libraries; a damaged card says nothing
        folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, allow_patterns=FILES))
        for path in sorted(folder.glob("LICENSE*")):
            begin = " ".join(path.read_text(encoding="utf-8", errors="replace")[:1000].split()).lower()
            licence.update([("license", short) for title, short in TITLES.items() if begin.startswith(title)])
        card = metadata_load(folder / README) or {}
        licence = card if "license" in card else licence
    fields: dict[str, Any] = {
        key: str(licence[key]) for key in ("license", "license_name", "license_link") if key in licence
    }
    if "license_link" in fields and not Path(model).exists():  # of a file beside that card
        fields["license_link"] = urljoin(f"https://huggingface.co/{model}/blob/main/", fields["license_link"])
    return fields


def data_sets_of(config: Config) -> list[str] | None:
    """The data sets on the Hub that the run was trained on; None for a card without any."""
    names = (config.sft.demonstrations, *(stage.data.train for stage in config.every_stage))
    hub = ("/".join(name[4:].partition(":")[0].split("/")[:2]) for name in names if name.startswith("hub:"))
    return list(dict.fromkeys(hub)) or None


def usage(name: str, adapter: bool) -> str:
    """How the model is used, in Markdown. name: on the Hub."""
    folder = name.rpartition("/")[2]
    serve = f"python -m serve BASE --adapter {folder}={folder}" if adapter else f"python -m serve {folder}"
    model = f'pipeline("text-generation", "{name}")'
    python = f"""
Or in Python:

```python
from transformers import pipeline

model = {model}
print(model([{{"role": "user", "content": "What is 3 + 4?"}}], max_new_tokens=512)[0]["generated_text"][-1]["content"])
```
"""
    return (
        f"With Maestrale, for OpenAI's clients and with a chat page:\n\n```\nhf download {name} --local-dir {folder}\n"
        f"{serve}\n```\n{'' if adapter else python}\nSend the system prompt above, if there is one, first.\n"
    )


def card_text(config: Config, card: ModelCard, adapter: bool, name: str = "OWNER/NAME") -> str:
    """The card in Markdown: the model and data that it was trained from, how, its evaluation, its system prompt. Paths
    of this machine are left out."""
    base = config.locate(config.model.path)
    known = not Path(base).exists() and config.model.path.count("/") == 1
    data = (
        config.data.train if config.data.train.startswith(("hub:", "reasoning_gym:")) else Path(config.data.train).name
    )
    taught = "supervised" if config.mode == "sft" else "reinforcement-learning"
    licence = licence_of(base)
    head = ModelCardData(
        base_model=config.model.path if known else None,
        base_model_relation=("adapter" if adapter else "finetune") if known else None,
        datasets=data_sets_of(config), library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation", tags=["maestrale", taught], **licence,
    ).to_yaml()  # fmt: skip
    head += "" if licence else f"\n# {NO_LICENSE}"
    objective = config.objective.get("name", "magistral")
    rows = {
        "trained from": config.model.path if known else Path(config.model.path).name,
        "steps": str(card.version),
        "how": "imitation of demonstrations" if config.mode == "sft" else f"reinforcement learning, {objective}",
        "problems": data,
        "weights": f"adapters of rank {config.lora.rank}" if config.lora.rank else "all",
        "precision": config.model.dtype,
    }
    for record in at_temperature(read_evaluations(config.run_dir), config.rollout.temperature):
        if record.version == card.version and (accuracy := record.evaluation.accuracy) is not None:
            half = record.evaluation.accuracy_half_width
            rows["accuracy, validation of the run"] = f"{accuracy:.3f} ± {half:.3f} (95 %)"
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    prompt = {"": "None.", "magistral": "Maestrale's own: a draft in `<think>`, then a summary."}
    shown = prompt.get(card.system_prompt, "\n".join(f"    {line}" for line in card.system_prompt.splitlines()))
    return (
        f"---\n{head}\n---\n\n# {card.run}\n\n| | |\n|---|---|\n{table}\n## System prompt\n\n{shown}\n\n"
        f"## How to use it\n\n{usage(name, adapter)}\n"
        "The licence of the model that it was trained from holds for this one.\n"
    )


def main(arguments: list[str]) -> int:
    """Write the card and push; returns the exit code."""
    parser = CommandParser("python -m trainer.push", description=ABOUT, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="runs/NAME/best, latest, latest-adapter or hf/step_N")
    parser.add_argument("name", nargs="?", default="", metavar="OWNER/NAME", help="where to upload it")
    parser.add_argument("--public", action="store_true", help="a new repository is for everybody, not private")
    given, progress = parser.parse_args(arguments), Progress()
    try:
        folder = given.folder.resolve()
        text = write_card(folder, given.name)
        progress.note(f"card: {folder / README}")
        if NO_LICENSE in text:
            progress.warning(f"{folder / README}: {NO_LICENSE}")
        if given.name:
            progress.note(f"pushed: {push(folder, given.name, given.public)}")
    except MaestraleError as error:
        progress.error(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
