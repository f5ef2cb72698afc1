"""The parameters of a vLLM model: which tensors of the trainers each is made of, and what the model computes with now.

What is read back is compared with the trainers' weights after every update (proof.py). It is taken from the model, not
from the memory that the update came through: the values of a plain parameter, and of a linear that keeps a packed copy
(on a CPU) some columns, as its products with unit vectors, which its next step multiplies together with its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from rollout.weights.checksum import MODULUS, WORDS, add_parts, bits, checksum_rows, random_weights
from rollout.weights.layout import Layout
from shared.errors import ModelError

Linear = Callable[..., torch.Tensor]
"""(x, weight, bias) -> output: the function that vLLM sets on a module as `cpu_linear`"""


@dataclass(frozen=True)
class Target:
    """One parameter of the vLLM model, and the neighbouring tensors of the buffer that it is made of."""

    module: torch.nn.Module
    parameter: str
    sources: list[str]
    bytes: int
    row_bytes: int
    plain: bool
    """the parameter holds its values (embedding, norm, bias, head); a packed linear's plain weight was dropped"""
    packed: bool
    """the module computes with a packed copy"""
    experts: bool = False
    """the experts of a mixture: on a CPU their values are in the order of its kernel (`ExpertOrder`)"""


EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""vLLM's parameter of all experts of a layer -> transformers' tensor of them"""
OTHER_NAMES = ((".block_sparse_moe.", ".mlp."), (".experts.routed_experts.", ".experts."))
"""parts of a path in vLLM -> its counterpart in transformers"""


def name_sources(prefix: str, last: str, name: str, fused: dict[str, list[str]], layout: Layout) -> list[str]:
    """The trainers' names of what a parameter is made of. prefix: path of the module that holds `last`."""
    if name in EXPERTS:
        sources = [f"{prefix}{last}.{EXPERTS[name]}"]
    else:
        whole = f"{prefix}{last}.{name}" in layout.places  # fused in the folder too (GLM-4)
        sources = [f"{prefix}{part}.{name}" for part in ([last] if whole else fused.get(last, [last]))]
    for theirs, ours in OTHER_NAMES:
        sources = [one if one in layout.places else one.replace(theirs, ours) for one in sources]
    return sources


class ExpertOrder:
    """In which order a CPU kernel keeps the values of a tensor of experts: packing only moves them."""

    orders: ClassVar[dict[tuple[tuple[int, ...], torch.dtype, str], ExpertOrder]] = {}

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, isa: str):
        count, word = math.prod(shape), WORDS[dtype.itemsize]
        self.shape, self.isa = shape, isa
        if word.itemsize == 4:
            packed = self.pack(torch.arange(count, dtype=torch.int32).view(dtype).view(shape))
            self.order = packed.view(torch.int32).flatten().long()
        else:  # a place in two halves
            indices = torch.arange(count, dtype=torch.int32).view(torch.int16).view(count, 2)
            halves = [self.pack(half.contiguous().view(dtype).view(shape)) for half in indices.unbind(1)]
            joined = torch.stack([half.view(torch.int16).flatten() for half in halves], 1).contiguous()
            self.order = joined.view(torch.int32).flatten().long()
        if not bool((self.order.sort().values == torch.arange(count)).all()):
            raise ModelError(f"vLLM's {isa} kernel pads or changes experts of shape {shape}: updates would not fit")

    @classmethod
    def of(cls, target: Target, shape: tuple[int, ...]) -> ExpertOrder:
        """That of a target, computed once for each shape. shape: of the trainers' tensor."""
        module: Any = target.module
        weight: torch.Tensor = getattr(module, target.parameter)
        isa = module.quant_method.moe_kernel.fused_experts.isa
        if weight.numel() != math.prod(shape):
            raise ModelError(
                f"the engine keeps {target.parameter} as {tuple(weight.shape)}, the trainers as {shape}: on CPUs vLLM "
                "pads experts whose inner size is no multiple of 32, and takes no updates of them here"
            )
        key = shape, weight.dtype, isa
        if key not in cls.orders:
            cls.orders[key] = cls(*key)
        return cls.orders[key]

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """[experts, out, in] as the kernel keeps it."""
        from vllm import _custom_ops

        packed: torch.Tensor = _custom_ops.cpu_prepack_moe_weight(rows.contiguous(), self.isa)
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[experts, out, in] from what the kernel keeps."""
        rows = torch.empty(len(self.order), dtype=packed.dtype)
        rows[self.order] = packed.flatten()
        return rows.view(self.shape)


def text_model(model: Any) -> Any:
    """The part of vLLM's model that trainers send: the model itself, unless it is a vision-language model."""
    return model.get_language_model() if hasattr(model, "get_language_model") else model


def plan_targets(model: torch.nn.Module, layout: Layout) -> list[Target]:
    """Match every parameter of the model with the buffer's tensors (q, k, v -> qkv_proj, gate, up -> gate_up_proj).

    A tied head is packed from the embedding's tensor. Raises ModelError if a parameter has no source or a tensor no
    destination: then part of the model would stay old.
    """
    model = text_model(model)
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    targets: list[Target] = []
    unused = set(layout.places)
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            prefix = f"{parent}." if parent else ""
            sources = name_sources(prefix, last, name, fused, layout)
            tied = False
            if not all(source in layout.places for source in sources):
                sources = [source for source in layout.places if source.endswith("embed_tokens.weight")]
                tied = isinstance(module, ParallelLMHead) and name == "weight" and len(sources) == 1
                if not tied:
                    missing = f"{prefix}{last}.{name}"
                    raise ModelError(f"the engine's {path}.{name} needs {missing}, which the trainers do not send")
            unused -= set(sources)
            places = [layout.places[source] for source in sources]
            row_bytes = places[0].row_bytes(layout.dtype.itemsize)
            size = sum(place.rows for place in places) * row_bytes
            experts = name in EXPERTS
            packed = name == "weight" and hasattr(module, "cpu_linear")
            if has_head and isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                packed = False  # vLLM packs every embedding, but multiplies with one only where it is the head, too
            plain = parameter.numel() > 0 and not tied
            targets.append(Target(module, name, sources, size, row_bytes, plain, packed, experts))
            if experts and parameter.device.type == "cpu":
                ExpertOrder.of(targets[-1], places[0].shape)  # computed now, not while the engine is paused
    if unused:
        raise ModelError(f"the engine's model has no place for {sorted(unused)[:5]}, which trainers send")
    return targets


def own_rows(target: Target, layout: Layout, height: int, worker: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (tensor, its first row here, rows, their place in the parameter) of each of the target's tensors.

    height: rows of the parameter. worker: which of the engine's tensor-parallel workers this is.
    """
    module: Any = target.module
    rows = [layout.places[source].rows for source in target.sources]
    whole, start = sum(rows), 0
    for number, (source, count) in enumerate(zip(target.sources, rows, strict=True)):
        first = 0
        if (shard := getattr(module, "shard_indices", None)) is not None:  # rows of a vocabulary, perhaps padded
            first, count = shard.org_vocab_start_index, shard.org_vocab_end_index - shard.org_vocab_start_index
        elif height != whole:
            share, copies = count * height // whole, 1
            if hasattr(module, "num_kv_head_replicas"):  # keys and values may be on several workers
                copies = module.num_kv_head_replicas if number else 1
                share = (module.num_kv_heads if number else module.num_heads) * module.head_size
            first, count = worker // copies * share, share
        yield source, first, count, start
        start += count


@torch.no_grad()
def read_plain(targets: list[Target], layout: Layout, worker: int = 0) -> dict[str, tuple[int, int]]:
    """tensor -> (checksum, number of values) of the plain parameters of a worker's model; safe during generation."""
    checksums: dict[str, tuple[int, int]] = {}
    for target in targets:
        if target.plain:
            weight: torch.Tensor = getattr(target.module, target.parameter).data
            weight = weight if weight.ndim else weight.reshape(1)
            if target.experts and weight.device.type == "cpu":
                weight = ExpertOrder.of(target, layout.places[target.sources[0]].shape).unpack(weight)
            for source, first, count, start in own_rows(target, layout, weight.shape[0], worker):
                rows, of_bytes = weight[start : start + count], layout.places[source].row_bytes(layout.dtype.itemsize)
                checksums[source] = checksum_rows(rows, first, layout.dtype, of_bytes), rows.numel()
    return checksums


@dataclass
class PackedReading:
    """Reads columns of one packed linear: it takes the place of the module's product until it has been called once, and
    multiplies a unit vector for each column next to the model's own rows, so that the weight is read once for both."""

    target: Target
    linear: Linear
    columns: list[int]
    vectors: torch.Tensor
    """[chosen columns, columns] in the model's dtype"""
    product: torch.Tensor | None = None
    """[chosen columns, rows of the weight]"""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The linear's product of `x`."""
        if bias is not None or x.ndim != 2:  # what is read would not be the weight alone
            return self.linear(x, weight, bias)
        product = self.linear(torch.cat([x, self.vectors]), weight, None)
        self.product = product[len(x) :]
        self.end()
        return product[: len(x)]

    @torch.no_grad()
    def read(self) -> None:
        """Read now. Only between two engine steps: vLLM's products on a CPU share caches and scratch memory, and two at
        a time end the process."""
        module: Any = self.target.module
        self.product = self.linear(self.vectors, module.weight, None)
        self.end()

    def end(self) -> None:
        """Give the module its product back."""
        module: Any = self.target.module
        if module.cpu_linear is self:
            module.cpu_linear = self.linear


class PackedReader:
    """Reads columns of a model's packed linears with its next step, during generation."""

    def __init__(
        self,
        targets: list[Target],
        layout: Layout,
        dtype: torch.dtype,
        rows: list[dict[str, tuple[int, int]]],
        chosen: list[dict[str, list[int]]],
    ):
        """dtype: of the model. rows: of each trainer rank, tensor -> its first row and their number. chosen: of each
        trainer rank, tensor -> columns that are read of these rows."""
        self.layout, self.rows, self.chosen = layout, rows, chosen
        self.readings, vectors = list[PackedReading](), dict[tuple[int, tuple[int, ...]], torch.Tensor]()
        for target in targets:
            columns = tuple(sorted({n for part in chosen for name in target.sources for n in part.get(name, ())}))
            if target.packed and columns:
                key = layout.places[target.sources[0]].shape[1], columns
                if key not in vectors:
                    vectors[key] = torch.nn.functional.one_hot(torch.tensor(columns), key[0]).to(dtype)
                module: Any = target.module
                self.readings.append(PackedReading(target, module.cpu_linear, list(columns), vectors[key]))
                module.cpu_linear = self.readings[-1]

    def left(self) -> Iterator[PackedReading]:
        """Those that were not read yet."""
        return (reading for reading in self.readings if reading.product is None)

    def checksums(self) -> dict[str, int]:
        """tensor -> checksum of the chosen columns, added up over the ranks. All must have been read."""
        parts: list[tuple[str, torch.Tensor, int]] = []
        for reading in self.readings:
            assert reading.product is not None
            positions = {column: number for number, column in enumerate(reading.columns)}
            for source, _, _, start in own_rows(reading.target, self.layout, reading.product.shape[1], 0):
                for rows, chosen in zip(self.rows, self.chosen, strict=True):
                    for column in chosen.get(source, ()):
                        first, count = rows[source]
                        parts.append((source, reading.product[positions[column], start + first :][:count], first))
        if not parts:
            return {}
        weights = random_weights(max(first + len(values) for _, values, first in parts), parts[0][1].device)
        products = bits(torch.cat([values for _, values, _ in parts]).to(self.layout.dtype))
        products *= torch.cat([weights[first : first + len(values)] for _, values, first in parts])
        sums = [0, *products.cumsum(0)[torch.tensor([len(values) for _, values, _ in parts]).cumsum(0) - 1].tolist()]
        return add_parts({name: (sums[n + 1] - sums[n]) % MODULUS} for n, (name, _, _) in enumerate(parts))
