"""Which implementation trains a model: our own decoder where it has the family, else the module of transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.model.config import DecoderConfig, MeasuredConfig, Unsupported

if TYPE_CHECKING:
    from shared.model.language_model import LanguageModel


def read_shape(config: Mapping[str, Any], implementation: str = "auto", max_tokens: int = 0) -> DecoderConfig:
    """The shape of a model from its config.json: a `MeasuredConfig` where transformers is to train it.

    implementation: the setting model.implementation; "auto" takes our own decoder where it has the family, and what it
    lacks (a sliding window shorter than `max_tokens`, say) from transformers. Raises ModelError for what none has.
    """
    if implementation != "transformers":
        try:
            shape = DecoderConfig.from_hf(config)
        except Unsupported:
            if implementation == "native":
                raise
        else:
            if implementation == "native" or shape.window is None or max_tokens <= shape.window:
                return shape
    return _measured(json.dumps(dict(config), sort_keys=True))


@functools.lru_cache(maxsize=8)
def _measured(config: str) -> MeasuredConfig:
    from shared.model.transformers_decoder import measure

    return measure(json.loads(config))


def make_model(shape: DecoderConfig, config: Mapping[str, Any], recompute: int = 0) -> LanguageModel:
    """The module of that shape, on the device of the caller's context, its contents undefined."""
    if isinstance(shape, MeasuredConfig):
        from shared.model.transformers_decoder import TransformersDecoder

        return TransformersDecoder(shape, config, recompute=recompute)
    from shared.model.decoder import Decoder

    return Decoder(shape, recompute=recompute)
