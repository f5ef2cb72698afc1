"""Adapters that are served with their model: `--adapter NAME=FOLDER`, each called by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.system_prompts import PromptRenderer
from shared.errors import ConfigError, ModelError
from shared.model.adapter_folder import AdapterSettings, check_fits, read_settings


@dataclass
class ServedAdapter:
    """One adapter, by the name that clients call."""

    path: Path
    """The path as given; it may lead to another folder later."""
    folder: Path
    """The folder that is served now."""
    settings: AdapterSettings
    prompts: PromptRenderer
    """The model's prompts, with the system prompt that the adapter was trained with."""


def read_adapters(
    given: Sequence[str], model: Path, name: str, system: str, template: Mapping[str, Any] | None = None
) -> dict[str, ServedAdapter]:
    """Name -> adapter, from NAME=FOLDER each. model: folder of the model with which they are served, `name` its own.
    system, template: the settings system_prompt and template. Raises ConfigError, ModelError for a folder that does not
    fit."""
    adapters: dict[str, ServedAdapter] = {}
    for text in given:
        key, equals, folder = text.partition("=")
        if not (key and equals and folder):
            raise ConfigError(
                f"adapter = {text}: give a name and a folder, e.g. --adapter poems=runs/poems/latest-adapter"
            )
        if key == name or key in adapters:
            raise ConfigError(f"adapter = {text}: another model is called {key} already")
        adapters[key] = read_adapter(Path(folder), model, system, template)
    return adapters


def read_adapter(path: Path, model: Path, system: str, template: Mapping[str, Any] | None = None) -> ServedAdapter:
    """An adapter as its folder has it now. Raises ModelError."""
    folder = path.resolve()
    if (settings := read_settings(folder)).experts:
        raise ModelError(
            f"{folder} has adapters of experts, which are not served with their model: serve the run's merged export "
            "(runs/NAME/latest)"
        )
    check_fits(folder, model)
    return ServedAdapter(path, folder, settings, PromptRenderer.of_model(model, system, folder, template))
