"""Describes what you plan for: a model's shape, a cluster, the work of a step, and what you fix of the split.

Peaks of GPUs come from the vendors' data sheets (dense, without sparsity; bandwidths of one direction). Shapes of
models come from the published config.json files; a test compares the sum of all parameters with the published count.
The shares and delays of a `Machine` are our assumptions: measure and replace them.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import MISSING, dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from shared.errors import ConfigError
from shared.model.config import DecoderConfig
from shared.model.folder import load_config
from trainer.memory import adapter_parameters
from trainer.step.flops import peak_of


def option(meaning: str, default: Any = MISSING, name: str = "", unit: int | Fraction = 1) -> Any:
    """Return a dataclass field that is an option of the command line too: `name`, else the field's own, in `unit`s."""
    return field(default=default, metadata={"meaning": meaning, "name": name, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cluster of equal GPUs on equal nodes, and its assumed efficiency. Bytes, FLOP/s and bytes/s."""

    card: str = ""
    """whose figures are taken where no others are given, a key of `CARDS`"""
    gpus: int = option("GPUs of the whole run", 8)
    node_gpus: int = option("GPUs of a node", 8)
    memory_bytes: float = option("memory of a GPU, GB", name="memory", unit=10**9)
    flops_per_s: float = option("dense bfloat16 peak of a GPU, TFLOP/s", name="tflops", unit=10**12)
    bandwidth: float = option("memory bandwidth of a GPU, GB/s", unit=10**9)
    node_bandwidth: float = option("bandwidth of a GPU to its node, one direction, GB/s", unit=10**9)
    network_bandwidth: float = option("network bandwidth of a GPU, one direction, GB/s", unit=10**9)
    mfu: float = option("share of the peak that training, prefill and large decode batches reach", 0.4)
    bandwidth_share: float = option("share of the memory bandwidth that decoding reaches", 0.8)
    step_overhead_s: float = option(
        "overhead of a decode step, in addition to reading and computing", 0.002, "step_overhead_ms", Fraction(1, 1000)
    )
    reduction_s: float = option(
        "time of a sum over an engine's GPUs, two in each layer", 1e-5, "reduction_us", Fraction(1, 10**6)
    )
    usable: float = option("share of a GPU's memory to plan with; libraries and fragmentation take the rest", 0.9)

    @property
    def usable_bytes(self) -> float:
        """Usable memory of one GPU, bytes."""
        return self.usable * self.memory_bytes

    @property
    def one_node(self) -> bool:
        """Whether all GPUs are in one node."""
        return self.gpus <= self.node_gpus

    def compute_s(self, flops: float, gpus: int) -> float:
        """Return the time of `flops` operations shared by `gpus` GPUs, seconds."""
        return flops / (gpus * self.flops_per_s * self.mfu)

    def ring_bandwidth(self, ranks: int) -> float:
        """Return the bytes/s of an all-gather into each of `ranks` neighbouring GPUs: the node's bandwidth within a
        node; between nodes that of all network cards of a node together, limited by the node's."""
        if ranks <= self.node_gpus:
            return self.node_bandwidth
        return min(self.node_bandwidth, self.node_gpus * self.network_bandwidth)


def _card(name: str, memory: float, bandwidth: float, node: float, network: float) -> Machine:
    peak = peak_of(name)
    return Machine(
        memory_bytes=memory, flops_per_s=peak, bandwidth=bandwidth, node_bandwidth=node, network_bandwidth=network
    )


CARDS = {
    "a100-40": _card("A100", 40e9, 1.555e12, 300e9, 25e9),
    "a100-80": _card("A100", 80e9, 2.039e12, 300e9, 25e9),
    "h100": _card("H100", 80e9, 3.35e12, 450e9, 50e9),
    "h200": _card("H200", 141e9, 4.8e12, 450e9, 50e9),
}
"""one node of SXM cards; each GPU has a network card, of 200 Gb/s with an A100 and 400 Gb/s with the others"""


def _decoder(
    family: str, layers: int, hidden: int, intermediate: int, heads: int, key_heads: int, vocab: int,
    head_dim: int = 128, tied: bool = False,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, layers=layers, heads=heads,
        key_heads=key_heads, head_dim=head_dim, norm_epsilon=1e-5, max_positions=131072, tied=tied,
        qk_norm=family == "qwen3",
    )  # fmt: skip


MODELS = {
    "135m": _decoder("llama", 30, 576, 1536, 9, 3, 49152, head_dim=64, tied=True),
    "0.6b": _decoder("qwen3", 28, 1024, 3072, 16, 8, 151936, tied=True),
    "1.7b": _decoder("qwen3", 28, 2048, 6144, 16, 8, 151936, tied=True),
    "8b": _decoder("llama", 32, 4096, 14336, 32, 8, 128256),
    "24b": _decoder("mistral", 40, 5120, 32768, 32, 8, 131072),
    "32b": _decoder("qwen3", 64, 5120, 25600, 64, 8, 151936),
    "70b": _decoder("llama", 80, 8192, 28672, 64, 8, 128256),
    "405b": _decoder("llama", 126, 16384, 53248, 128, 8, 128256),
}
"""SmolLM2-135M, Qwen3 0.6B and 1.7B, Llama 3.1 8B, Mistral Small 24B, Qwen3 32B, Llama 3.1 70B and 405B"""


def find_decoder(name: str) -> DecoderConfig:
    """Return the shape of a known model, or of a Hugging Face folder. Raises ConfigError, ModelError."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    folder = Path(name).expanduser()
    if folder.name == "config.json":
        folder = folder.parent
    if folder.is_dir():
        return DecoderConfig.from_hf(load_config(folder))
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ConfigError(
        f"model '{name}' is no folder with a config.json, and none of {', '.join(MODELS)}{hint}; a folder with any "
        "model's config.json alone is enough"
    )


NORMAL = NormalDist()
Z99 = NORMAL.inv_cdf(0.99)
POINTS = 400
"""quantiles over which the longest of several completions is averaged"""


@dataclass(frozen=True)
class Lengths:
    """Completion lengths, tokens: lognormal with this mean and 99th percentile, then cut at `limit`.

    ln L ~ N(m, s^2): ln mean = m + s^2/2 and ln p99 = m + z s with z = 2.326, so s = z - sqrt(z^2 - 2 ln(p99 / mean)).
    """

    uncut_mean: float
    p99: float
    limit: float

    def __post_init__(self) -> None:
        """Raise ConfigError where no lognormal has these numbers."""
        mean, p99 = self.uncut_mean, self.p99
        if mean < 1 or p99 < mean:
            raise ConfigError(f"lengths: --mean {mean:g} must be at least 1, and --p99 {p99:g} at least the mean")
        if p99 > (most := mean * math.exp(Z99**2 / 2)):
            raise ConfigError(f"lengths: no lognormal has --p99 {p99:g} at --mean {mean:g}; at most {most:.0f}")

    @cached_property
    def spread(self) -> float:
        """The s above."""
        return Z99 - math.sqrt(max(0.0, Z99**2 - 2 * math.log(self.p99 / self.uncut_mean)))

    def quantile(self, share: float) -> float:
        """Return the length that this share of completions does not exceed."""
        return min(self.uncut_mean * math.exp(self.spread * NORMAL.inv_cdf(share) - self.spread**2 / 2), self.limit)

    def moment(self, power: int) -> float:
        """Return E[min(L, limit)^power]."""
        mean, spread = self.uncut_mean, self.spread
        if spread < 1e-9:
            return min(mean, self.limit) ** power
        cut = (math.log(self.limit / mean) + spread**2 / 2) / spread
        below = mean**power * math.exp(power * (power - 1) / 2 * spread**2) * NORMAL.cdf(cut - power * spread)
        return below + self.limit**power * NORMAL.cdf(-cut)

    @cached_property
    def mean(self) -> float:
        """E[L], tokens."""
        return self.moment(1)

    @cached_property
    def mean_square(self) -> float:
        """E[L^2], tokens^2."""
        return self.moment(2)

    def longest(self, completions: int) -> float:
        """E[max of n completions]: the mean over u of the quantile of u^(1/n)."""
        shares = (((point + 0.5) / POINTS) ** (1 / completions) for point in range(POINTS))
        return max(self.mean, fmean(self.quantile(min(share, 1 - 2**-53)) for share in shares))


@dataclass(frozen=True)
class Workload:
    """The work of one step: prompts, completions, their lengths, and the passes over them."""

    lengths: Lengths
    max_completion_tokens: int = option("limit of a completion, tokens (the p99)", name="max_completion")
    prompts_per_step: int = option("prompts of a step", 64, "prompts")
    group_size: int = option("completions of a prompt", 16, "group")
    prompt_tokens: int = option("tokens of a prompt", 200)
    micro_batch_tokens: int = option("token budget of a micro-batch", 8192, "micro_batch")
    optimiser_steps: int = option("optimiser steps on each batch", 1, "minibatches")
    kept: float = option("share of the sampled groups that have a signal and are trained", 1.0)
    lora_rank: int = option("rank of adapters (LoRA); with one, only they are trained", 0, "lora")
    extra_forwards: int = 0
    """forward passes over the batch without gradient, e.g. of a reference model"""

    @property
    def completions(self) -> int:
        """Completions trained in a step."""
        return self.prompts_per_step * self.group_size

    @property
    def sampled(self) -> float:
        """Completions sampled for a step: more than are trained if groups without signal are left out."""
        return self.completions / self.kept

    @property
    def max_tokens(self) -> int:
        """Longest prompt and completion together, tokens."""
        return self.prompt_tokens + self.max_completion_tokens

    @property
    def micro_batch_most(self) -> int:
        """Tokens of the largest micro-batch: a longer sequence than the budget gets one of its own."""
        return max(self.micro_batch_tokens, self.max_tokens)

    @property
    def tokens(self) -> float:
        """Trained tokens of a step, prompts included."""
        return self.completions * (self.prompt_tokens + self.lengths.mean)

    @property
    def square_tokens(self) -> float:
        """Sum over the sequences of a step of their length squared: E[(p + L)^2] = p^2 + 2 p E[L] + E[L^2]."""
        prompt, lengths = self.prompt_tokens, self.lengths
        return self.completions * (prompt**2 + 2 * prompt * lengths.mean + lengths.mean_square)

    @cached_property
    def longest(self) -> float:
        """Expected longest completion of a step, tokens."""
        return self.lengths.longest(math.ceil(self.sampled))

    @property
    def context(self) -> float:
        """Mean tokens of a running completion, prompt included; of its own it has E[L^2] / (2 E[L])."""
        return self.prompt_tokens + self.lengths.mean_square / (2 * self.lengths.mean)


@dataclass(frozen=True)
class Scenario:
    """Model, cluster and work of a plan, and the fixed parts of its split."""

    decoder: DecoderConfig
    machine: Machine
    work: Workload
    async_level: int | None = option("rollout.max_async_level", None)
    """None for the smallest that is close to the fastest"""
    tensor_parallel: int = option("GPUs of an engine", 0)
    """0 to try every width"""
    engines: int = option("number of engines (with --tensor-parallel)", 0)
    """0 for the best number"""
    tensor: int = option("trainers that split each layer (placement.tensor)", 1)
    context: int = option("trainers that split the tokens of a micro-batch (placement.context)", 1)

    @property
    def adapters(self) -> int:
        """Parameters of the adapters; 0 where all weights are trained."""
        return adapter_parameters(self.decoder, self.work.lora_rank)
