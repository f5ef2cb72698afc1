"""Which implementation trains a model: our own decoder where it has the family, else the module of transformers.

Of a vision-language model, its text part is trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.errors import ModelError
from shared.model.config import DecoderConfig, MeasuredConfig, Unsupported, check_sizes

if TYPE_CHECKING:
    from shared.model.language_model import LanguageModel
    from shared.model.parallel import Parallel


VISION_LANGUAGE = {"mistral3": "", "gemma3": "", "gemma4": "", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""vision-language model_type -> that of its text part, which computes the same without images; "": its own"""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model in a config.json: of a vision-language model a part of it. Raises ModelError."""
    if (kind := config.get("model_type")) not in VISION_LANGUAGE:
        return config
    from transformers import CONFIG_MAPPING

    check_sizes(config)
    try:
        whole = CONFIG_MAPPING[kind].from_dict(dict(config))
        text: dict[str, Any] = json.loads(whole.text_config.to_json_string(use_diff=False))
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ModelError(f"config.json does not fit {kind}: {why}") from error
    text["model_type"] = VISION_LANGUAGE[kind] or text["model_type"]
    text.get("rope_parameters", {}).pop("mrope_section", None)  # of images; a text's three positions are equal
    return text | {"architectures": None, "tie_word_embeddings": whole.tie_word_embeddings}


def read_shape(config: Mapping[str, Any], implementation: str = "auto", max_tokens: int = 0) -> DecoderConfig:
    """The shape of a model from its config.json: a `MeasuredConfig` where transformers is to train it.

    implementation: the setting model.implementation; "auto" takes our own decoder where it has the family, and what it
    lacks (a sliding window shorter than `max_tokens`, say) from transformers. Raises ModelError for what none has.
    """
    config = text_part(config)
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


def make_model(
    shape: DecoderConfig, config: Mapping[str, Any], recompute: int = 0, parallel: Parallel | None = None
) -> LanguageModel:
    """The module of that shape, on the device of the caller's context, its contents undefined. Raises ConfigError where
    it cannot be split as `parallel` says."""
    from shared.model.parallel import ALONE, check_split

    parallel = parallel or ALONE
    peers = parallel.tensor, parallel.context, parallel.experts
    check_split(shape, *(1 if one is None else one.size for one in peers))
    if isinstance(shape, MeasuredConfig):
        from shared.model.transformers_decoder import TransformersDecoder

        return TransformersDecoder(shape, text_part(config), recompute=recompute, parallel=parallel)
    from shared.model.decoder import Decoder

    return Decoder(shape, recompute=recompute, parallel=parallel)


def adapted_names(shape: DecoderConfig, config: Mapping[str, Any], rank: int, targets: str | list[str]) -> list[str]:
    """Names of the layers that lora.targets chooses in a model of that shape. Raises ConfigError for a target that
    chooses none."""
    import torch

    from shared.model.lora import attach

    with torch.device("meta"):
        return attach(make_model(shape, config), rank, 1.0, targets)
