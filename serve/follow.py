"""Newer weights for a running server: with `--follow`, those of a newer export to which a served path leads.

    --model runs/quickstart/latest --follow

Requests wait while weights change; none is dropped. Completions under way first have `drain_s` seconds to end under the
old weights; those that still run then continue under the new ones, as in training, and so does a response that is
sampled in parts (a thinking budget, a constrained answer, a second try) with its next part. With adapters, their
folders are followed instead (runs/NAME/latest-adapter): a completion ends with the version that it began with.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from serve.adapters import read_adapter
from serve.server import Server
from serve.system_prompts import PromptRenderer
from shared.errors import ModelError

FOLLOW_EVERY_S = 1.0
AGAIN_S = 5.0
"""seconds from a failure to take newer weights to the next try"""
SAME = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""files that are equal in two exports of one run"""
log = logging.getLogger("serve")


async def follow(server: Server, path: Path, loaded: Path) -> None:
    """Reload the weights whenever `path` leads to a new folder, until cancelled. loaded: the folder served now."""
    refused = None
    while True:
        await asyncio.sleep(FOLLOW_EVERY_S)
        try:
            newer = path.resolve()
            if newer in (loaded, refused) or not newer.is_dir() or not server.ready or server.draining:
                continue
            try:
                check_same_model(loaded, newer)
            except ModelError:
                refused = newer
                raise
            settings = server.settings
            prompts = await asyncio.to_thread(
                PromptRenderer.of_model, newer, settings.system_prompt, arguments=settings.template
            )
            if not await server.engine.is_alive():
                continue
            try:
                await server.engine.reload(str(newer), server.settings.drain_s)
            except ModelError:
                refused = newer  # trying again would end the engine each time
                raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the new export, the old one is still there
            log.error("%s is not taken, %s goes on (%s)", path, loaded, error)
            await asyncio.sleep(AGAIN_S)
            continue
        server.prompts, loaded = prompts, newer
        server.reloads += 1
        log.info("took the weights of %s", newer)


async def follow_adapters(server: Server, model: Path) -> None:
    """Take up every folder to which an adapter's path leads newly, until cancelled. model: folder of the model."""
    refused: set[Path] = set()
    while True:
        await asyncio.sleep(FOLLOW_EVERY_S)
        for name, served in server.adapters.items():
            try:
                folder = served.path.resolve()
                if folder == served.folder or folder in refused or not folder.is_dir() or not server.ready:
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
                    refused.add(folder)
                continue
            server.adapters[name] = newer
            server.reloads += 1
            log.info("%s took the adapter %s", name, newer.folder)


def check_same_model(old: Path, new: Path) -> None:
    """Raises ModelError if the two folders are not exports of the same model."""
    for name in SAME:
        contents = [path.read_bytes() if (path := folder / name).is_file() else b"" for folder in (old, new)]
        if contents[0] != contents[1]:
            raise ModelError(f"{name} differs, this is another model: start the server again")
