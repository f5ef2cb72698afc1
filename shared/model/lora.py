"""Low-rank adapters (LoRA, Hu et al. 2021): a linear layer W stays as it is, and W + alpha / rank B A is trained.

Any `nn.Linear` of a model is adapted in place: it keeps its weight and its name, and gains A and B as the weights of
two small linears, `lora_A` and `lora_B`, so that names are PEFT's. A mixture's experts, of which a layer holds all in
one tensor, gain an A and a B each. Everything but the adapters is frozen.

Engines multiply with an adapter and W, and so does the trainer, which keeps what is smaller than W's rounding. With
adapters of experts, which vLLM does not have on every device, both compute with the merged weight W + alpha / rank B A.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.errors import ConfigError
from shared.model.config import ALL_LINEAR as ALL
from shared.model.config import EXPERTS as EXPERTS

EXPERT_TENSORS = ("gate_up_proj", "down_proj")
"""the tensors of a layer's experts, in the order of their module"""
A, B = ".lora_A.weight", ".lora_B.weight"
"""endings of the names of an adapter's two matrices, after the layer's name"""
MARK = "lora_"
"""before the name of an expert tensor, in that of the module of its A and B"""


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale b a in float32: [out, in], or of a layer's experts [experts, out, in]."""
    add = torch.addmm if weight.ndim == 2 else torch.baddbmm
    return add(weight.float(), b.float(), a.float(), alpha=scale)


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter: x W^T + b + scale (x A^T) B^T, A [rank, in], B [out, rank]."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float
    merges: bool
    """x merged(W)^T + b instead, as an engine computes it that receives merged weights; merged again to go backward"""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's type whatever the parameters'."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.merges:
            product: Tensor = checkpoint(self.multiply_merged, x, bias, use_reentrant=False)
            return product
        return F.linear(x, self.weight.to(x.dtype), bias) + self.low_rank(x)

    def multiply_merged(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x merged(W)^T + b: [..., in] -> [..., out]."""
        whole = merged(self.weight, self.lora_A.weight, self.lora_B.weight, self.scale)
        return F.linear(x, whole.to(x.dtype), bias)

    def low_rank(self, x: Tensor) -> Tensor:
        """The adapter's part: [..., in] -> [..., out]. B is scaled before it is rounded, as an engine holds it."""
        return F.linear(F.linear(x, self.lora_A.weight.to(x.dtype)), (self.lora_B.weight * self.scale).to(x.dtype))


class Matrices(nn.Module):
    """A, or B, of all experts of a layer: `weight` [experts, rank, in], or [experts, out, rank]."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))


class ExpertsAdapter(nn.Module):
    """The adapter of one tensor of experts, W [experts, out, in]: an A and a B for each of them."""

    def __init__(self, weight: Tensor, rank: int, scale: float):
        super().__init__()
        experts, rows, columns = weight.shape
        self.lora_A = Matrices((experts, rank, columns), weight.device)
        self.lora_B = Matrices((experts, rows, rank), weight.device)
        self.scale = scale


class LoraExperts(nn.Module):
    """Base of a mixture's experts that have adapters, added to the class that they had: its forward meets the merged
    tensors under the names of its own. It runs again to go backward: else each layer would keep its merged tensors."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the experts' own forward gives with merged weights."""
        return checkpoint(self.multiply_merged, *inputs, use_reentrant=False, **named)

    def multiply_merged(self, *inputs: Any, **named: Any) -> Any:
        """The same, keeping what the backward pass needs."""
        names = [name.removeprefix(MARK) for name, one in self.named_children() if isinstance(one, ExpertsAdapter)]
        for name in names:
            weight, lora = self._parameters[name], getattr(self, MARK + name)
            assert weight is not None
            self.__dict__[name] = merged(weight, lora.lora_A.weight, lora.lora_B.weight, lora.scale).to(weight.dtype)
        try:
            return super().forward(*inputs, **named)
        finally:
            for name in names:
                del self.__dict__[name]


def attach(model: nn.Module, rank: int, alpha: float, targets: str | Iterable[str] = ALL) -> list[str]:
    """Give layers adapters of this rank, whose values are not set yet, and freeze everything else.

    targets: "all-linear", "experts", or the last parts of linear layers' names, such as "q_proj" or "mlp.down_proj";
    several in a list. Returns the names of the adapted layers, then of the modules that hold experts' A and B. Raises
    ConfigError for a target that names nothing.
    """
    head, names = getattr(model, "head", None), [targets] if isinstance(targets, str) else list(targets)
    linears = {name: one for name, one in model.named_modules() if type(one) is nn.Linear and one is not head}
    experts = {name: one for name, one in expert_tensors(model) if EXPERTS in names}
    chosen = set()
    for target in names:
        matching = {name for name in linears if target == ALL or f".{name}".endswith(f".{target}")}
        if not matching and not (experts and target == EXPERTS):
            known = sorted({name.rpartition(".")[2] for name in linears}) + [EXPERTS] * any(expert_tensors(model))
            raise ConfigError(
                f'lora.targets: "{target}" names no layer of the model that can have adapters (these can: '
                f"{', '.join(known)})"
            )
        chosen |= matching
    model.requires_grad_(False)
    for name in (adapted := [name for name in linears if name in chosen]):
        layer = linears[name]
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        device = layer.weight.device
        layer.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=device, dtype=torch.float32)
        layer.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=device, dtype=torch.float32)
        layer.scale, layer.merges = alpha / rank, bool(experts)
    for name, weight in experts.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, LoraExperts):
            module.__class__ = type(f"Lora{type(module).__name__}", (LoraExperts, type(module)), {})
        module.add_module(MARK + name.rpartition(".")[2], ExpertsAdapter(weight, rank, alpha / rank))
    return adapted + [layer_of(name) for name in experts]


def expert_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, [experts, out, in]) of the tensors that hold all experts of a layer."""
    for name, module in model.named_modules():
        params = dict(module.named_parameters(recurse=False))
        if name.rpartition(".")[2] == EXPERTS and not getattr(module, "is_transposed", False):
            yield from ((f"{name}.{key}", params[key]) for key in EXPERT_TENSORS if {*EXPERT_TENSORS} <= params.keys())


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear | ExpertsAdapter]]:
    """Yield (name, layer) of every adapted layer, and (name, module) of those that hold experts' A and B."""
    return ((name, one) for name, one in model.named_modules() if isinstance(one, LoraLinear | ExpertsAdapter))


def split_name(matrix: str) -> tuple[str, str]:
    """(layer, A or B) of the name of an adapter's matrix."""
    return (matrix.removesuffix(A), A) if matrix.endswith(A) else (matrix.removesuffix(B), B)


def layer_of(weight: str) -> str:
    """What comes before A and B in the names of a weight's adapter."""
    parent, _, last = weight.rpartition(".")
    return parent if last == "weight" else f"{parent}.{MARK}{last}"


def weight_of(layer: str) -> str:
    """The name of the weight that an adapter adds to: the other way round."""
    parent, _, last = layer.rpartition(".")
    return f"{parent}.{last.removeprefix(MARK)}" if last.startswith(MARK) else f"{layer}.weight"


def first_values(shapes: Mapping[str, torch.Size], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, float32 value) of adapters' matrices as training begins with them: A uniform within 1 / sqrt(in)
    (what PEFT draws by its Kaiming initialisation with a = sqrt 5), B zero, so that the model is the frozen one. The
    same for the same seed, on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        bound = 1 / math.sqrt(shape[-1])
        yield (
            name,
            torch.zeros(shape) if name.endswith(B) else torch.empty(shape).uniform_(-bound, bound, generator=generator),
        )


def merge(name: str, weight: Tensor, matrices: Mapping[str, Tensor], scale: float) -> Tensor:
    """The weight of this name with its adapter added, float32; as it is where the layer has none. matrices: name ->
    float32 A or B of all adapters."""
    layer = layer_of(name)
    return merged(weight, matrices[layer + A], matrices[layer + B], scale) if layer + A in matrices else weight
