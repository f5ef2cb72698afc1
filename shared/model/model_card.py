"""The model card of an export: a small file next to the weights that says to those who serve it how it was trained."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.errors import ModelError
from shared.json_reader import decode_json
from shared.model.folder import check_regular

CARD = "maestrale.json"
USUAL_BLANKS = ("\n", "\n", "\n\n")
"""around the tags of reasoning, as most families write them"""


class ModelCard(msgspec.Struct, frozen=True):
    """Describes how one exported model was trained."""

    run: str
    version: int
    """optimiser steps of reinforcement learning, or sft ones"""
    system_prompt: str
    """the setting data.system_prompt: "magistral", a text, or "\""""
    checkpoint: str = ""
    """sha256 of the manifest of the checkpoint with these weights; "" where there was none"""
    history: str = ""
    """"whole" after training on episodes, in which the model saw its earlier turns as it had sampled them, reasoning
    included; "" where it was trained on single completions"""
    chat_template: str = ""
    """the text that took the place of the model's own in training, "" for none"""
    template: dict[str, bool | int | float | str] = {}
    """arguments of the chat template in training"""
    language_requests: bool = False
    """whether rows of the training, or of that of the model it began with, asked for a language to reason in"""
    tag_blanks: tuple[str, str, str] = USUAL_BLANKS
    """blanks after the opening tag of reasoning, before the closing one and after that, in its demonstrations"""


def read_card(folder: Path) -> ModelCard | None:
    """Return the card of a model folder, None if it has none. Raises ModelError if it is damaged."""
    path = folder / CARD
    try:
        return decode_json(check_regular(path).read_bytes(), ModelCard)
    except FileNotFoundError:
        return None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ModelError(f"{path} is damaged ({error}): export the model again, or remove it") from error
