"""Adapters that are served beside their model: `--adapter NAME=FOLDER`, each called by its name.

A folder that leads elsewhere later (runs/NAME/latest-adapter, with `--follow`) is taken up in flight:
requests that run end with the version they began with, new ones get the new version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.system_prompts import PromptRenderer
from shared.errors import ConfigError, ModelError
from shared.model.adapter_folder import AdapterSettings, check_fits, read_settings

if TYPE_CHECKING:
    from serve.server import Server

FOLLOW_EVERY_S = 1.0
AGAIN_S = 5.0
"""seconds from a failure to take newer weights to the next try"""
log = logging.getLogger("serve")


@dataclass
class ServedAdapter:
    """One adapter, by the name that clients call."""

    path: Path
    """as given; it may lead to another folder later"""
    folder: Path
    """that is served now"""
    settings: AdapterSettings
    prompts: PromptRenderer
    """of the model, with the system prompt that the adapter was trained with"""


def read_adapters(
    given: Sequence[str], model: Path, name: str, system: str, template: Mapping[str, Any] | None = None
) -> dict[str, ServedAdapter]:
    """Name -> adapter, from NAME=FOLDER each. model: folder of the model beside which they are served, `name` its own.
    system, template: the settings system_prompt and template. Raises ConfigError, ModelError for a folder that does not
    fit."""
    found: dict[str, ServedAdapter] = {}
    for text in given:
        key, equals, folder = text.partition("=")
        if not (key and equals and folder):
            raise ConfigError(
                f"adapter = {text}: give a name and a folder, e.g. --adapter poems=runs/poems/latest-adapter"
            )
        if key == name or key in found:
            raise ConfigError(f"adapter = {text}: another model is called {key} already")
        found[key] = read_adapter(Path(folder), model, system, template)
    return found


def read_adapter(path: Path, model: Path, system: str, template: Mapping[str, Any] | None = None) -> ServedAdapter:
    """An adapter as its folder has it now. Raises ModelError."""
    folder = path.resolve()
    if (settings := read_settings(folder)).experts:
        raise ModelError(
            f"{folder} has adapters of experts, which are not served beside their model: serve the run's merged export "
            "(runs/NAME/latest)"
        )
    check_fits(folder, model)
    return ServedAdapter(path, folder, settings, PromptRenderer.of_model(model, system, folder, template))


async def follow_adapters(server: Server, model: Path) -> None:
    """Take up every folder to which an adapter's path leads newly, until cancelled. model: folder of the model."""
    refused: set[Path] = set()
    while True:
        await asyncio.sleep(FOLLOW_EVERY_S)
        for name, served in server.adapters.items():
            try:
                found = served.path.resolve()
                if found == served.folder or found in refused or not found.is_dir() or not server.ready:
                    continue
                system, template = server.settings.system_prompt, server.settings.template
                newer = await asyncio.to_thread(read_adapter, served.path, model, system, template)
                if newer.settings.rank > served.settings.rank:
                    raise ModelError(
                        f"rank {newer.settings.rank} is above {served.settings.rank}: start the server again"
                    )
                await server.engine.load_adapter(name, newer.folder)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the new one, the old one is still there
                log.error("%s is not taken for %s, %s goes on (%s)", served.path, name, served.folder, error)
                if isinstance(error, (OSError, RuntimeError)) or not await server.engine.is_alive():
                    await asyncio.sleep(AGAIN_S)  # it may pass
                else:
                    refused.add(found)
                continue
            server.adapters[name] = newer
            server.reloads += 1
            log.info("%s took the adapter %s", name, newer.folder)
