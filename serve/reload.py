"""Follows a run: when the served path leads to a newer export, its weights are loaded into the running engine.

    --model runs/quickstart/latest --follow

Requests wait while weights change; none is dropped. Completions under way first have `drain_s` seconds to end under the
old weights; those that still run then continue under the new ones, as in training, and so does a response that is
sampled in parts (a thinking budget, a constrained answer, a second try) with its next part.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from serve.response.prompt import Prompts
from serve.server import Server
from shared.errors import ModelError

LOOK_EVERY_S = 1.0
AGAIN_S = 5.0
"""seconds from a failure to the next try"""
SAME = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""files that are equal in two exports of one run"""
log = logging.getLogger("serve")


async def follow(server: Server, path: Path, loaded: Path) -> None:
    """Reload the weights whenever `path` leads to a new folder, until cancelled. loaded: the folder served now."""
    refused = None
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            found = path.resolve()
            if found in (loaded, refused) or not found.is_dir() or not server.ready or server.draining:
                continue
            try:
                check_same_model(loaded, found)
            except ModelError:
                refused = found
                raise
            prompts = await asyncio.to_thread(Prompts.of_model, found, server.settings.system_prompt)
            await server.engine.reload(str(found), server.settings.drain_s)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the new export, the old one is still there
            log.error("%s is not taken, %s goes on (%s)", path, loaded, error)
            await asyncio.sleep(AGAIN_S)
            continue
        server.prompts, loaded = prompts, found
        server.reloads += 1
        log.info("took the weights of %s", found)


def check_same_model(old: Path, new: Path) -> None:
    """Raises ModelError if the two folders are not exports of the same model."""
    for name in SAME:
        contents = [path.read_bytes() if (path := folder / name).is_file() else b"" for folder in (old, new)]
        if contents[0] != contents[1]:
            raise ModelError(f"{name} differs, this is another model: start the server again")
