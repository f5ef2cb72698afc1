"""The module of transformers itself as the trained model: every causal family that it has, on packed sequences.

Its layers attend through our packed attention (transformers' AttentionInterface), positions count anew in each
sequence, and the head is ours (logprobs.py). Parameters carry Hugging Face's names. Modules whose state would cross
from one sequence to the next (convolutions, linear attention, state spaces) and those without that interface get one
sequence a row, padded at the end, where causality hides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import ConfigError, ModelError
from shared.model.attention import AttentionPlans
from shared.model.config import FAMILIES, MeasuredConfig, check_sizes
from shared.model.language_model import EVERY, LanguageModel
from shared.model.logprobs import HeadScale
from shared.model.lora import expert_tensors
from shared.model.packing import PackedBatch
from shared.model.parallel import ALONE, Cut, Parallel, split_experts
from shared.model.routing import MISSING, ExpertCounts, Routing, route_layers

ATTENTION = "maestrale"
"""the name under which transformers knows our attention"""
MOST_OF_ANY = 1 << 40
"""larger numbers are no sizes"""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""values of `layer_types` of a config that packed sequences allow"""


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, plans: AttentionPlans | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers: query [1, heads, tokens, head_dim] -> [1, tokens, heads, value_dim].

    plans: of the batch, from `TransformersDecoder`. Raises ModelError where the model's layers do not hand them on.
    """
    if plans is None:
        raise ModelError(f"{type(module).__name__} of transformers does not hand on what packed sequences need")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return plans.attend(q, k, v, scaling, sliding_window, softcap, s_aux)[None], None


def register() -> None:
    """Make our attention known to transformers. It needs no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


def read_config(config: Mapping[str, Any]) -> Any:
    """The transformers config of a config.json. Raises ModelError for what cannot be trained here, in one line."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    check_sizes(config)
    kind, named = config.get("model_type"), list(config.get("architectures") or [])
    if any(isinstance(config.get(key), Mapping) for key in ("text_config", "vision_config", "audio_config")):
        raise ModelError(
            f"config.json: {kind!r} has parts for images or sound, and its text part is not trained here: take the "
            "folder of its text model (docs/models.md: what works)"
        )
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known or (named and named[0] != MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]].__name__):
        raise ModelError(
            f"config.json names architecture {named or kind}, which is not supported: transformers has no such causal "
            f"language model of that model_type, and a folder's own code is not run (supported: {', '.join(FAMILIES)}, "
            "and the others in docs/models.md)"
        )
    try:
        made = CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ModelError(f"config.json does not fit {kind}: {why}") from error
    return made


def build(config: Any) -> Any:
    """The module of transformers, on the device of the caller's context, in float32 and in evaluation mode."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    register()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    packs = kind._supports_attention_backend and set(getattr(config, "layer_types", None) or []) <= PACKED_LAYERS
    way = ATTENTION if packs else "sdpa" if kind._supports_sdpa else "eager"
    try:
        causal = AutoModelForCausalLM.from_config(
            config, attn_implementation=way, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # whatever the family's code raises for a config.json that does not fit it
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelError(f"transformers cannot build {kind.__name__} ({why}): fetch config.json again") from error
    if packs and any(isinstance(module, nn.Conv1d) for module in causal.modules()):
        causal.set_attn_implementation("sdpa" if kind._supports_sdpa else "eager")
    return causal.eval()


def find_layers(causal: Any) -> nn.ModuleList:
    """The decoder layers of a module of transformers. Raises ModelError where there is no one list of them."""
    base = causal.base_model
    lists = [module for module in base.children() if isinstance(module, nn.ModuleList)]
    count = causal.config.get_text_config().num_hidden_layers
    for layers in lists:
        if len(layers) == count:
            return layers
    raise ModelError(f"{type(causal).__name__} of transformers has no one list of {count} decoder layers")


def measure(config: Mapping[str, Any]) -> MeasuredConfig:
    """The shape of any family that transformers has. Raises ModelError."""
    made = read_config(config)
    with torch.device("meta"):
        causal = build(made)
    layers, known, tied = find_layers(causal), made.get_text_config().to_dict(), is_tied(causal)

    def size(*names: str, default: int) -> int:
        """The first of these that the config has; the largest where layers differ."""
        setting = next((known[name] for name in names if known.get(name)), default)
        value = max(setting) if isinstance(setting, list | tuple) else setting
        if not isinstance(value, int | float) or not 0 <= value <= MOST_OF_ANY:
            raise ModelError(f"config.json: {names[0]} = {str(value)[:60]} is no size: fetch the file again")
        return int(value)

    hidden, heads = size("hidden_size", default=1), size("num_attention_heads", default=1)
    experts = size("num_local_experts", "num_experts", "n_routed_experts", default=0)
    chosen = min(size("num_experts_per_tok", "top_k_experts", default=experts), experts)
    share = chosen / experts if experts else 1.0
    matrices = [(p.dim(), p.numel()) for p in layers.parameters() if p.dim() > 1]
    products = sum(count * share if dimensions == 3 else count for dimensions, count in matrices)
    parameters = dict(causal.named_parameters())
    output, table = causal.get_output_embeddings().weight, causal.get_input_embeddings().weight
    linears = [(name, one) for name, one in causal.base_model.named_modules() if type(one) is nn.Linear]
    dropped = output.numel() if tied and output is not table else 0
    return MeasuredConfig(
        family=str(config["model_type"]),
        vocab_size=size("vocab_size", default=1),
        hidden_size=hidden,
        intermediate_size=size("moe_intermediate_size", "intermediate_size", default=4 * hidden),
        layers=len(layers),
        heads=heads,
        key_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        norm_epsilon=0.0,
        max_positions=size("max_position_embeddings", default=1 << 30),
        tied=tied,
        counted=sum(parameter.numel() for parameter in parameters.values()) - dropped,
        counted_layer=sum(parameter.numel() for parameter in layers.parameters()) // len(layers),
        counted_largest=max(parameter.numel() for parameter in parameters.values()),
        counted_products=int(products) // len(layers),
        counted_linears=[(name, one.in_features, one.out_features) for name, one in linears],
        counted_experts=[
            (name, one.shape[0] * one.shape[2], one.shape[0] * one.shape[1])
            for name, one in expert_tensors(causal.base_model)
        ],
        experts=experts,
        chosen=chosen,
    )


def is_tied(causal: Any) -> bool:
    """Whether the head is the embedding."""
    return bool(getattr(causal.config.get_text_config(), "tie_word_embeddings", False))


def head_scale(text: Any) -> HeadScale:
    """What the family does to the head's products, from its config."""
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    scale *= float(getattr(text, "lm_head_multiplier", None) or 1.0)
    return HeadScale(scale, float(getattr(text, "final_logit_softcapping", None) or 0.0))


class TransformersDecoder(LanguageModel):
    """A causal model of transformers under the names of its own parts."""

    def __init__(
        self, shape: MeasuredConfig, config: Mapping[str, Any], attention: str = "auto", recompute: int = 0,
        parallel: Parallel = ALONE,
    ) -> None:  # fmt: skip
        super().__init__(shape, attention, recompute, parallel)
        causal = build(read_config(config))
        output = causal.get_output_embeddings()
        if output is None or getattr(output, "bias", None) is not None:
            raise ModelError(f"{type(causal).__name__} has a head with a bias, or none, which is not trained here")
        self.packs = causal.config._attn_implementation == ATTENTION
        """whether sequences are end to end; else one a row"""
        if parallel.context is not None and not self.packs:
            raise ConfigError(
                f"placement.context = {parallel.context.size}: layers of {shape.family} carry more from token to "
                "token than keys and values, so that its sequences cannot be split; set placement.context = 1"
            )
        self.head_scale = head_scale(causal.config.get_text_config())
        tied = is_tied(causal)
        for name, child in causal.named_children():
            if child is not output or not tied:
                self.add_module(name, child)
        # held past torch, which would count its parameters twice
        self.__dict__["causal"], self.__dict__["base"] = causal, causal.base_model
        self.__dict__["head_of"] = causal.get_input_embeddings() if tied else output
        self.__dict__["found_layers"] = find_layers(causal)
        if parallel.experts is not None:
            holders = {name.rpartition(".")[0] for name, _ in expert_tensors(self)}
            split_experts(map(self.get_submodule, sorted(holders)), parallel.experts)
        if shape.experts:
            self.expert_counts = ExpertCounts(len(self.layers), shape.experts, shape.chosen)
            route_layers(self.layers)
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self.run_layer, number, layer.forward)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        layers: nn.ModuleList = self.__dict__["found_layers"]
        return layers

    @property
    def embedding(self) -> nn.Module:
        """The module of the token embedding."""
        module: nn.Module = self.__dict__["causal"].get_input_embeddings()
        return module

    @property
    def head(self) -> nn.Module:
        """The module whose weight is the head's."""
        module: nn.Module = self.__dict__["head_of"]
        return module

    def cut(self, name: str) -> Cut | None:
        """How the parameter of this name is cut: those of experts, their adapters' too."""
        peers, experts = self.parallel.experts, self.config.experts
        if peers is None or ".experts." not in name:
            return None
        return Cut(peers, 0, experts * peers.rank // peers.size, experts)

    @torch.no_grad()
    def settle_buffers(self) -> None:
        """Compute what modules keep in addition to parameters (rotary frequencies, scales of embeddings)."""
        for module in self.modules():
            if module._non_persistent_buffers_set:
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is
                self.__dict__["causal"]._init_weights(module)

    def states(self, batch: PackedBatch, keep: Tensor | None, span: slice = EVERY) -> Tensor:
        """See LanguageModel. Raises ConfigError for context peers where sequences are not end to end."""
        base, more = self.__dict__["base"], dict[str, Any]()
        rows = None if self.packs else lay_out_rows(batch)
        if self.expert_counts is not None:
            self.expert_counts.to(batch.token_ids.device)
            routes = batch.routes if rows is None else rows.routes
            more["routing"] = Routing(self.expert_counts, None if routes is None else routes[span])
        if rows is None:
            plans = AttentionPlans(batch.lengths, batch.prefixes, self.attention, self.parallel.context)
            ids, positions = batch.token_ids[None, span], batch.positions[None, span]
            states: Tensor = base(input_ids=ids, position_ids=positions, use_cache=False, plans=plans, **more)[0][0]
        else:
            places = torch.arange(rows.token_ids.shape[1], device=batch.token_ids.device).expand_as(rows.token_ids)
            hidden = base(input_ids=rows.token_ids, position_ids=places, use_cache=False, **more)[0]
            states = hidden.flatten(0, 1).index_select(0, rows.places)
        return states if keep is None else states.index_select(0, keep)


@dataclass(frozen=True)
class PaddedRows:
    """A packed batch as one segment a row, its prefix before it."""

    token_ids: Tensor
    """[segments, longest] int64, 0 after the end"""
    places: Tensor
    """[tokens] int64 where each token of the stream is in the rows, flattened"""
    routes: Tensor | None
    """[segments * longest, bytes] uint8, missing after the end; None without any"""


def lay_out_rows(batch: PackedBatch) -> PaddedRows:
    """Give each segment a row. What is stored once for several is computed with each."""
    parts = torch.arange(batch.tokens, device=batch.token_ids.device).split(list(batch.lengths))
    rows = [
        part if prefix < 0 else torch.cat([parts[prefix], part])
        for part, prefix in zip(parts, batch.prefixes, strict=True)
    ]
    width = max(map(len, rows))
    starts = [width * number + len(row) - len(part) for number, (row, part) in enumerate(zip(rows, parts, strict=True))]
    places = [torch.arange(start, start + len(part)) for start, part in zip(starts, parts, strict=True)]
    index = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    ids, routes = batch.token_ids[index].masked_fill(index < 0, 0), None
    if batch.routes is not None:
        routes = batch.routes[index.flatten()].masked_fill((index < 0).view(-1, 1), MISSING)
    return PaddedRows(ids, torch.cat(places).to(batch.token_ids.device), routes)
