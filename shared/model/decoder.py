"""The decoder (Llama, Mistral, Qwen2, Qwen3) in native PyTorch, over packed sequences, for training.

Parameters carry Hugging Face's names and are in the order in which inference engines fuse them (q k v, gate up).
Works plain and under FSDP2 (`fully_shard` each of `model.layers`, then the root): all use goes through `__call__`, the
tables of a batch travel in a record that mixed precision does not touch, an empty batch still reaches every parameter.
Norms, position tables and everything after the last norm are float32; the rest is in the parameters' type, or in
`compute_dtype` where that is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import ModelError
from shared.model import parallel as split
from shared.model.attention import AttentionPlan, attend, plan_attention
from shared.model.config import DecoderConfig
from shared.model.cpu.fused_layers import adapters_of, gated_down, project, rms_norm
from shared.model.language_model import EVERY, LanguageModel
from shared.model.lora import LoraLinear
from shared.model.packing import PackedBatch, pack
from shared.model.parallel import ALONE, Parallel, add_up, copy_to
from shared.model.rope import inverse_frequencies, rotate, rotation_table

__all__ = ["Decoder", "DecoderConfig", "PackedBatch", "initialise", "pack"]


@dataclass(frozen=True)
class Tables:
    """Values that all layers share in a forward. Not a tensor container to PyTorch, so mixed precision skips it."""

    cos: Tensor
    """[tokens, 1, head_dim / 2] in the compute type"""
    sin: Tensor
    plan: AttentionPlan
    exchange: split.HeadExchange | None


class RMSNorm(nn.Module):
    """Module of `rms_norm` with its weight."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and type."""
        return rms_norm(x, self.weight, self.epsilon)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer in x's type, whatever its parameters'."""
    if isinstance(layer, LoraLinear):
        return layer.forward(x)
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.key_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.widths = [config.heads, config.key_heads, config.key_heads]
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_epsilon)
            self.k_norm = RMSNorm(config.head_dim, config.norm_epsilon)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, norm: RMSNorm, tables: Tables, keep: Tensor | None) -> Tensor:
        """[tokens, hidden], normed by `norm` first -> [tokens, hidden], or [kept, hidden] when only some go on."""
        joined = project(x, norm.weight, norm.epsilon, [self.q_proj, self.k_proj, self.v_proj])
        joined = joined.view(len(x), -1, self.head_dim)
        if self.qk_norm:
            query, key, value = joined.split(self.widths, 1)
            joined = torch.cat([self.q_norm(query), self.k_norm(key), value], 1)
        joined = rotate(joined, tables.cos, tables.sin, self.widths[0] + self.widths[1])
        mixed = attend(joined, tables.plan, tables.exchange).flatten(1)
        return linear(mixed if keep is None else mixed.index_select(0, keep), self.o_proj)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """[tokens, hidden], normed by `norm` first -> [tokens, hidden]."""
        joined = project(x, norm.weight, norm.epsilon, [self.gate_proj, self.up_proj])
        return gated_down(joined, self.down_proj.weight, self.down_proj.bias, adapters_of([self.down_proj]))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, parallel: Parallel = ALONE):
        super().__init__()
        self.tensor = parallel.tensor
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, x: Tensor, tables: Tables, keep: Tensor | None = None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; with `keep` [kept] int64 only those positions leave the layer."""
        mixed = self.self_attn(copy_to(x, self.tensor), self.input_layernorm, tables, keep)
        x = (x if keep is None else x.index_select(0, keep)) + add_up(mixed, self.tensor)
        return x + add_up(self.mlp(copy_to(x, self.tensor), self.post_attention_layernorm), self.tensor)


class DecoderStack(nn.Module):
    """Embedding, layers, last norm: what Hugging Face calls `model`. Only a holder of names; `Decoder` runs it."""

    def __init__(self, config: DecoderConfig, parallel: Parallel = ALONE):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, parallel) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)


class Decoder(LanguageModel):
    """Our own implementation of the families in config.py."""

    def __init__(
        self, config: DecoderConfig, attention: str = "auto", recompute: int = 0, parallel: Parallel = ALONE
    ) -> None:
        super().__init__(config, attention, recompute, parallel)
        self.rounds_weights = True
        self.local = local = split.local_shape(config, parallel.tensor)
        self.model = DecoderStack(local, parallel)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, local.vocab_size, bias=False)
        if parallel.tensor is not None:
            self.words = split.tensor_part("embed_tokens", config, parallel.tensor)[1]
        # plain attributes: buffers would be cast with the parameters, and positions need float32
        self._frequencies, self._rope_factor = inverse_frequencies(config.head_dim, config.rope, config.max_positions)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        return self.model.layers

    @property
    def embedding(self) -> nn.Module:
        """The module of the token embedding."""
        return self.model.embed_tokens

    @property
    def head(self) -> nn.Module:
        """The module whose weight is the head's."""
        return self.model.embed_tokens if self.config.tied else self.lm_head

    def forward(self, batch: PackedBatch, temperature: float = 1.0, output: str = "logprobs") -> Any:
        """Score a packed batch: see LanguageModel. Raises ModelError for a sequence beyond a sliding window."""
        self._check_window(batch)
        return super().forward(batch, temperature, output)

    def cut(self, name: str) -> split.Cut | None:
        """How the parameter of this name is cut."""
        tensor = self.parallel.tensor
        return None if tensor is None else split.tensor_cut(name, self.config, tensor)

    def _check_window(self, batch: PackedBatch) -> None:
        if self.config.window is not None and batch.longest > self.config.window:
            raise ModelError(
                f"a sequence of {batch.longest} tokens is longer than the model's sliding window of "
                f"{self.config.window}, which the native implementation does not have: set model.max_tokens to at most "
                f"{self.config.window}, or model.implementation to 'transformers'"
            )

    def states(self, batch: PackedBatch, keep: Tensor | None, span: slice = EVERY) -> Tensor:
        """The last norm's output at the kept positions; the last layer's feed-forward runs on those alone."""
        tensor = self.parallel.tensor
        table, ids = self.model.embed_tokens, batch.token_ids[span]
        x = table(ids) if tensor is None else split.look_up(table, ids, self.words, tensor)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        self._frequencies = self._frequencies.to(x.device)
        cos, sin = rotation_table(batch.positions[span], self._frequencies, self._rope_factor)
        heads, key_heads, exchange = self.local.heads, self.local.key_heads, None
        if self.parallel.context is not None:
            exchange = split.HeadExchange(heads, key_heads, x.device, self.parallel.context)
            heads, key_heads = exchange.heads, exchange.key_heads
        plan = plan_attention(batch.lengths, batch.prefixes, heads, key_heads, x.device, x.dtype, self.attention)
        tables = Tables(cos.to(x.dtype), sin.to(x.dtype), plan, exchange)
        for number, layer in enumerate(self.model.layers):
            kept = keep if layer is self.model.layers[-1] else None
            x = self.run_layer(number, layer, x, tables, kept)
        normed: Tensor = self.model.norm(copy_to(x, tensor))
        return normed


@torch.no_grad()
def initialise(decoder: Decoder, seed: int) -> None:
    """Fresh weights, the same for the same seed: matrices normal(0, initializer_range), those that write into the
    residual stream smaller by sqrt(2 layers) (GPT-2), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    spread = decoder.config.initializer_range
    for name, parameter in decoder.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = spread / (2 * decoder.config.layers) ** 0.5 if residual else spread
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
