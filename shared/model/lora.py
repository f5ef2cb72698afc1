"""Low-rank adapters (LoRA, Hu et al. 2021): a linear layer W stays as it is, and W + alpha / rank B A is trained.

Any `nn.Linear` of a model is adapted in place: it keeps its weight and its name, and gains A and B as the weights of
two small linears, `lora_A` and `lora_B`, so that names are PEFT's. Everything but the adapters is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import ConfigError

ALL = "all-linear"
"""setting of the targets that stands for every linear layer but the head"""
A, B = ".lora_A.weight", ".lora_B.weight"
"""endings of the names of an adapter's two matrices, behind the layer's name"""


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter: x W^T + b + scale (x A^T) B^T, A [rank, in], B [out, rank]."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's type whatever the parameters'."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias) + self.low_rank(x)

    def low_rank(self, x: Tensor) -> Tensor:
        """The adapter's part: [..., in] -> [..., out]. B is scaled before it is rounded, as an engine holds it."""
        return F.linear(F.linear(x, self.lora_A.weight.to(x.dtype)), (self.lora_B.weight * self.scale).to(x.dtype))


def attach(model: nn.Module, rank: int, alpha: float, targets: str | Iterable[str] = ALL) -> list[str]:
    """Give linear layers adapters of this rank, whose values are not set yet, and freeze everything else.

    targets: "all-linear", or names: the last parts of layers' names, such as "q_proj" or "mlp.down_proj". Returns the
    names of the adapted layers. Raises ConfigError for a target that names no linear layer.
    """
    head = getattr(model, "head", None)
    linears = {name: one for name, one in model.named_modules() if type(one) is nn.Linear and one.weight is not head}
    if targets == ALL:
        chosen = set(linears)
    else:
        chosen = set()
        for target in [targets] if isinstance(targets, str) else targets:
            found = {name for name in linears if f".{name}".endswith(f".{target}")}
            if not found:
                known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
                raise ConfigError(f'lora.targets: "{target}" names no linear layer of the model (there are {known})')
            chosen |= found
    model.requires_grad_(False)
    for name in linears:
        if name not in chosen:
            continue
        layer = linears[name]
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        device = layer.weight.device
        layer.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=device, dtype=torch.float32)
        layer.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=device, dtype=torch.float32)
        layer.scale = alpha / rank
    return [name for name in linears if name in chosen]


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield (name, layer) of every adapted layer."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLinear))


def first_values(shapes: Mapping[str, torch.Size], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, float32 value) of adapters' matrices as training begins with them: A uniform within 1 / sqrt(in)
    (what PEFT draws by its Kaiming initialisation with a = sqrt 5), B zero, so that the model is the frozen one. The
    same for the same seed, on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        bound = 1 / math.sqrt(shape[1])
        yield (
            name,
            torch.zeros(shape) if name.endswith(B) else torch.empty(shape).uniform_(-bound, bound, generator=generator),
        )


def merge(name: str, weight: Tensor, matrices: Mapping[str, Tensor], scale: float) -> Tensor:
    """The weight of this name with its adapter added, float32; as it is where the layer has none. matrices: name ->
    float32 A or B of all adapters."""
    layer = name.removesuffix(".weight")
    if layer + A not in matrices:
        return weight
    return weight.float().addmm(matrices[layer + B].float(), matrices[layer + A].float(), alpha=scale)
