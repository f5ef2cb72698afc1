"""Tiny random models of the families that transformers has: their configs, and the modules themselves as references."""

from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "ministral3": {"model_type": "ministral3", "sliding_window": None},
    "mistral window": {"model_type": "mistral", "sliding_window": 16},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": False, "tie_word_embeddings": True, "num_attention_heads": 2,
    },
    "qwen3": {"model_type": "qwen3", "use_sliding_window": False},
    "qwen3.5": {"model_type": "qwen3_5_text", **LINEAR},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": WINDOWS, "query_pre_attn_scalar": 24},
    "gemma4": {
        "model_type": "gemma4_text", "sliding_window": 16, "layer_types": [*WINDOWS, "full_attention"],
        "num_hidden_layers": 4, "global_head_dim": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 256, "initializer_range": 0.08,
    },
    "olmo3": {"model_type": "olmo3", "sliding_window": 16, "layer_types": WINDOWS},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "phi4": {"model_type": "phi3", "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "granite": {
        "model_type": "granite", "logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    },
    "mixtral": {"model_type": "mixtral", "sliding_window": None, **EXPERTS},
    "qwen3 moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, **EXPERTS},
    "gpt-oss": {"model_type": "gpt_oss", "sliding_window": 16, "layer_types": WINDOWS, **EXPERTS},
}  # fmt: skip


TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "mistral3", "tie_word_embeddings": False,
        "text_config": {**COMMON, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16},
    },
    "mistral3 of ministral3": {
        "model_type": "mistral3", "tie_word_embeddings": False, "text_config": {**COMMON, **FAMILIES["ministral3"]},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16},
    },
    "gemma3 vision": {
        "model_type": "gemma3", "text_config": {**COMMON, **FAMILIES["gemma3"]}, "mm_tokens_per_image": 4,
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
    },
    "gemma4 vision": {
        "model_type": "gemma4", "text_config": {**COMMON, **FAMILIES["gemma4"]}, "audio_config": None,
        "vision_config": {**TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
    },
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl", "text_config": {**COMMON, **SECTIONS, "num_attention_heads": 2},
        "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0]},
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl", "text_config": {**COMMON, **SECTIONS},
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}  # fmt: skip
"""vision-language models, whose text part is trained"""
SENT = [family for family in FAMILIES if family not in ("qwen3.5", "gpt-oss")]
"""those whose weights can be sent to vLLM's CPU build (docs/models.md)"""


def config_of(family: str, **more: Any) -> dict[str, Any]:
    """The config.json of a tiny model."""
    import transformers

    config = (
        {**VISION_LANGUAGE[family], **more} if family in VISION_LANGUAGE else {**COMMON, **FAMILIES[family], **more}
    )
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    model = classes_of(config)._model_mapping[kind]
    return kind(**config).to_dict() | {"architectures": [model.__name__]}


def classes_of(config: dict[str, Any]) -> Any:
    """transformers' class that makes the module of a config."""
    import transformers

    return transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM


def reference(config: dict[str, Any], seed: int = 3) -> Any:
    """transformers' own module with random weights, attention by its plain formulas."""
    import transformers

    torch.manual_seed(seed)
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model = classes_of(config).from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
