"""The settings of the model that is trained, and of the form of its prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.model.folder import ModelPath
from shared.section import Section


class Model(Section):
    path: ModelPath = ""
    """Hugging Face model folder, folder of a run, or Hub id to start from; a run needs one"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """type of the weights on the wire and in the engines; float16 rounds to 11 bits instead of 8, so that engines and
    trainers agree better (Qi et al. 2025), but a model whose activations exceed 65,504 stops with NonFinite"""
    max_tokens: int = Field(512, gt=0)
    """longest prompt + completion, tokens"""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """code of the trained model: "native", our own decoder (Llama, Mistral, Qwen2, Qwen3), "transformers", the module
    of that library (docs/models.md), or "auto", our own where it has the family"""
    router_replay: bool = True
    """train each token of a mixture of experts with the experts that the engine chose for it (docs/models.md)"""
    chat_template: str = ""
    """a file with the chat template to use in place of the model's own, or the text itself, or "plain" (lines User:
    and Assistant:) for a base model without one; exports keep it. "" for the model's own"""
    template: dict[str, bool | int | float | str] = {}
    """arguments of the chat template, e.g. { enable_thinking = true }; serving has them too, and requests may change
    them (chat_template_kwargs)"""
