"""The shape of a model: read from a Hugging Face config.json for our own decoder (Llama, Mistral, Qwen2, Qwen3), and
measured for others (transformers_decoder.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ModelError

ALL_LINEAR, EXPERTS = "all-linear", "experts"
"""values of lora.targets: every linear layer but the head; all experts of a mixture"""

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""supported architectures -> model_type"""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""supported rotary embeddings (rope.py)"""
QUANTISED = "config.json has a quantization_config: training needs the unquantised checkpoint"
MOST = {
    "vocab_size": 10_000_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 23,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30,
}
"""largest values accepted: a config.json that asks for more is damaged, and would take all memory"""


class Unsupported(ModelError):
    """Our own decoder does not have this; the module of transformers may."""


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides a decoder's tensors and its function."""

    experts = 0
    """experts of a mixture; in `MeasuredConfig`"""

    family: str
    """llama, mistral, qwen2, qwen3"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_heads: int
    """key and value heads (grouped queries)"""
    head_dim: int
    norm_epsilon: float
    max_positions: int
    tied: bool = False
    """the head is the embedding"""
    qkv_bias: bool = False
    output_bias: bool = False
    """bias of the attention's output projection"""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim of queries and keys (Qwen3)"""
    window: int | None = None
    """tokens of a sliding window, None for full attention; longer sequences are refused"""
    initializer_range: float = 0.02
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """rope_type, rope_theta and the numbers of that type"""

    @property
    def layer_linears(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of the linear layers of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        return [
            ("self_attn.q_proj", hidden, queries), ("self_attn.k_proj", hidden, keys),
            ("self_attn.v_proj", hidden, keys), ("self_attn.o_proj", queries, hidden),
            ("mlp.gate_proj", hidden, inner), ("mlp.up_proj", hidden, inner), ("mlp.down_proj", inner, hidden),
        ]  # fmt: skip

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of all linear layers but the head: what adapters can be given to."""
        return self.layer_linears * self.layers

    @property
    def expert_linears(self) -> list[tuple[str, int, int]]:
        """The same for the tensors of a mixture's experts: inputs and outputs of all experts of a layer together."""
        return []

    @property
    def layer_products(self) -> int:
        """Weights of the matrices of one layer: q, k, v, o, gate, up, down."""
        return sum(inputs * outputs for _, inputs, outputs in self.layer_linears)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer: its matrices, biases and norms."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return self.layer_products + biases + 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim

    @property
    def parameters(self) -> int:
        """All parameters: embedding, layers, last norm, and the head unless it is the embedding."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return tables + self.layers * self.layer_parameters + self.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor: a table, or a matrix of a layer."""
        return max(self.hidden_size * self.vocab_size, *(inputs * outputs for _, inputs, outputs in self.layer_linears))

    @property
    def reach(self) -> int:
        """Tokens of the longest sequence: its positions, times the factor where that is not in them already."""
        stretched = self.rope.get("rope_type") in ("linear", "dynamic")
        return int(self.max_positions * float(self.rope.get("factor") or 1.0)) if stretched else self.max_positions

    @property
    def products(self) -> int:
        """Weights that multiply every token: the matrices of all layers and the head. A forward costs 2 FLOPs each."""
        return self.layers * self.layer_products + self.vocab_size * self.hidden_size

    @property
    def cached_values(self) -> int:
        """Numbers that the KV cache holds for one token: keys and values of all layers."""
        return 2 * self.layers * self.key_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the content of config.json, old or new style. Raises ModelError for what is not supported or missing."""
        family = _family(config)
        _refuse_what_we_lack(config)
        try:
            heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
            attention_bias = bool(config.get("attention_bias", False))
            shape = cls(
                family=family, vocab_size=_whole(config, "vocab_size"), hidden_size=hidden,
                intermediate_size=_whole(config, "intermediate_size"), layers=_whole(config, "num_hidden_layers"),
                heads=heads, key_heads=_whole(config, "num_key_value_heads", heads),
                head_dim=_whole(config, "head_dim", 128 if family == "qwen3" else hidden // heads),
                norm_epsilon=_number(config, "rms_norm_eps", 1e-6),
                max_positions=_whole(config, "max_position_embeddings", 2048),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
                output_bias=family in ("llama", "qwen3") and attention_bias,
                mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)), qk_norm=family == "qwen3",
                window=_window(family, config), initializer_range=_number(config, "initializer_range", 0.02),
                rope=_rope(config),
            )  # fmt: skip
        except KeyError as error:
            raise ModelError(f"config.json lacks {error}: the folder is incomplete, fetch it again") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"config.json holds a value that is no number where one is needed: {error}") from error
        if shape.heads % shape.key_heads or shape.head_dim % 2:
            raise ModelError(
                f"config.json: {shape.heads} heads, {shape.key_heads} key heads, head_dim {shape.head_dim}: "
                "heads must be a multiple of key heads, and head_dim even"
            )
        return shape


@dataclass(frozen=True)
class MeasuredConfig(DecoderConfig):
    """The shape of a model that the module of transformers trains: its parameters were counted there."""

    counted: int = 0
    """all parameters"""
    counted_layer: int = 0
    """parameters of one layer, on average"""
    counted_largest: int = 0
    """parameters of the largest tensor: of a mixture, mostly that of all experts of a layer"""
    counted_products: int = 0
    """weights of one layer that multiply a token: of a mixture, those of the experts that a token meets"""
    counted_linears: list[tuple[str, int, int]] = field(default_factory=list)
    counted_experts: list[tuple[str, int, int]] = field(default_factory=list)
    experts: int = 0
    """experts in each layer of a mixture; 0 for other models"""
    chosen: int = 0
    """how many of them a token meets"""

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of all linear layers but the head. A mixture's experts are none."""
        return self.counted_linears

    @property
    def expert_linears(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of the tensors of experts, those of all experts of a layer together."""
        return self.counted_experts

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor."""
        return self.counted_largest

    @property
    def layer_products(self) -> int:
        """Weights of the matrices of one layer that multiply each token."""
        return self.counted_products

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return self.counted_layer

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.counted


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size: a whole number from 1 to what any model has. Raises KeyError, ModelError."""
    value = config.get(name) if default is not None else config[name]
    number = default if value is None and default is not None else value
    if isinstance(number, bool) or not isinstance(number, int | float | str) or not float(number).is_integer():
        raise ModelError(f"config.json: {name} = {value!r} is not a whole number: fetch the file again")
    if not 1 <= int(number) <= MOST[name]:
        raise ModelError(
            f"config.json: {name} = {number} must be at least 1 and at most {MOST[name]:,}: fetch the file again"
        )
    return int(number)


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    number = float(config.get(name, default))
    if not 0 <= number <= 10:
        raise ModelError(f"config.json: {name} = {number:g} must be between 0 and 10: fetch the file again")
    return number


def _family(config: Mapping[str, Any]) -> str:
    named = list(config.get("architectures") or [])
    family = FAMILIES.get(named[0]) if named else config.get("model_type")
    if family not in FAMILIES.values():
        raise Unsupported(
            f"config.json names architecture {named or config.get('model_type')}, which is not supported "
            f"(supported: {', '.join(FAMILIES)})"
        )
    return str(family)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a quantised model, and for sizes that no model has."""
    if config.get("quantization_config"):
        raise ModelError(QUANTISED)
    for name in MOST:
        value = config.get(name)
        if value is not None and not isinstance(value, list):  # Gemma 3n has one for each layer
            try:
                _whole(config, name)
            except (ValueError, OverflowError) as error:
                raise ModelError(
                    f"config.json: {name} = {str(value)[:60]!r} is not a whole number: fetch the file again"
                ) from error


def _refuse_what_we_lack(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise ModelError(QUANTISED)
    if config.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"config.json: hidden_act '{config['hidden_act']}' is not supported (supported: silu)")


def _window(family: str, config: Mapping[str, Any]) -> int | None:
    used = family == "mistral" or (family in ("qwen2", "qwen3") and config.get("use_sliding_window", False))
    window = config.get("sliding_window", 4096) if used else None
    return None if window is None else int(window)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dictionary from either style: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope["rope_type"] not in ROPE_TYPES:
        raise Unsupported(
            f"config.json: rope_type '{rope['rope_type']}' is not supported (supported: {', '.join(ROPE_TYPES)})"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if float(partial or 1.0) != 1.0:
        raise Unsupported(f"config.json: partial_rotary_factor {partial} is not supported (supported: 1.0)")
    return rope
