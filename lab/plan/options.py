"""The command line of the planner: its options, their ranges, and the objects they describe."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lab.plan import models
from lab.plan.lengths import Lengths, lognormal, measured
from lab.plan.machine import CARDS, Machine
from lab.plan.step import Workload
from shared.errors import ConfigError, DataError
from shared.model.config import DecoderConfig

LAST_STEPS = 20
"""number of newest steps of a run from which lengths are taken"""

DESCRIPTION = """Scale on paper: what a run would need and take, before a GPU is rented.

From a model's shape, the lengths of completions and a cluster: memory of every rank, the time of a step (sampling,
training, weight update; synchronous and asynchronous), the age of the tokens, and the split of the GPUs between
trainers and engines that gives the shortest step, as settings to copy. Nothing is loaded or measured: docs/plan.md has
the formulas, and how far they are from published step times.
"""
EXAMPLES = """
examples
  an 8B model on one node, completions of 2,000 tokens on average and 8,000 at the 99th percentile:
      python -m lab.plan 8b --gpus 8 --mean 2000 --p99 8000
  a folder's model on 4 nodes of H200, 64 prompts of 16 completions, up to 32k tokens:
      python -m lab.plan models/my-model --gpus 32 --card h200 --prompts 64 --mean 6000 --p99 30000 \\
          --max-completion 32768
  lengths as they were in a run, and the cost of a reference model:
      python -m lab.plan 24b --gpus 64 --run runs/my-run --reference
  what a given split would do, as JSON:
      python -m lab.plan 70b --gpus 256 --engines 16 --tensor-parallel 8 --lead 2 --json
  a shape by numbers, on cards that have no name here:
      python -m lab.plan --layers 36 --hidden 4096 --intermediate 12288 --heads 32 --key-heads 8 --vocab 151936 \\
          --gpus 16 --memory 96 --tflops 500 --bandwidth 4000

exit codes: 0 done, 2 an option is wrong or nothing fits (one line says what)
"""
SHAPE = ("layers", "hidden", "intermediate", "heads", "key_heads", "vocab")


@dataclass(frozen=True)
class Question:
    """The parsed options: model, cluster and workload, and any fixed part of the plan."""

    decoder: DecoderConfig
    machine: Machine
    work: Workload
    lead: int | None
    """None for the smallest that is close to the fastest"""
    tensor_parallel: int
    """GPUs per engine; 0 to try every width"""
    engines: int
    """0 for the best number"""
    as_json: bool


class Parser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message} (--help lists the options)")


def parser() -> argparse.ArgumentParser:
    """Return the parser with all options."""
    whole = Parser(
        prog="python -m lab.plan", description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("model", nargs="?", help=f"{', '.join(models.MODELS)}, or a folder with a config.json")
    _numbers(whole, "model by its shape", int, [
        ("--layers", None, "decoder layers"), ("--hidden", None, "hidden size"),
        ("--intermediate", None, "width of the feed-forward"), ("--heads", None, "query heads"),
        ("--key-heads", None, "key and value heads"), ("--vocab", None, "rows of the embedding"),
        ("--head-dim", None, "channels of a head; hidden / heads"),
    ]).add_argument("--tied", action="store_true", help="the head is the embedding")  # fmt: skip
    cluster = _numbers(whole, "cluster", int, [
        ("--gpus", 8, "of the whole run"), ("--node-gpus", 8, "of a node"),
    ])  # fmt: skip
    cluster.add_argument("--card", default="h100", metavar="NAME", help=f"{', '.join(CARDS)} (%(default)s)")
    _numbers(cluster, "", float, [
        ("--memory", None, "GB of a GPU"), ("--tflops", None, "dense bfloat16 peak of a GPU, TFLOP/s"),
        ("--bandwidth", None, "of a GPU's memory, GB/s"),
        ("--node-bandwidth", None, "of a GPU to its node, one direction, GB/s"),
        ("--network-bandwidth", None, "of a GPU's part of the network, one direction, GB/s"),
        ("--mfu", 0.4, "share of the peak that training reaches"),
        ("--bandwidth-share", 0.8, "share of the memory bandwidth that decoding reaches"),
        ("--step-overhead-ms", 2.0, "of a decode step, beside reading and computing"),
        ("--reduction-us", 10.0, "of a sum over the GPUs of an engine, two in each layer"),
        ("--usable", 0.9, "share of a GPU's memory to plan with"),
    ])  # fmt: skip
    work = _numbers(whole, "work of a step", int, [
        ("--prompts", 64, "prompts"), ("--group", 16, "completions of a prompt"),
        ("--prompt-tokens", 200, "tokens of a prompt"), ("--max-completion", None, "tokens; longer are cut (the p99)"),
        ("--micro-batch", 8192, "token budget of a micro-batch"),
        ("--minibatches", 1, "optimiser steps on each batch"),
    ])  # fmt: skip
    _numbers(work, "", float, [
        ("--mean", 2000, "mean completion, tokens"), ("--p99", None, "99th percentile, tokens (4 times the mean)"),
    ])  # fmt: skip
    work.add_argument("--kept", type=float, default=1.0, metavar="N",
                      help="share of the sampled groups with a signal, which are trained (%(default)s)")  # fmt: skip
    work.add_argument("--run", type=Path, metavar="FOLDER", help="take lengths from the newest rollouts of this run")
    work.add_argument("--reference", action="store_true", help="a reference model scores the batch too")
    choice = _numbers(whole, "instead of the best", int, [
        ("--lead", None, "rollout.lead"), ("--tensor-parallel", None, "GPUs of an engine"),
        ("--engines", None, "number of engines (with --tensor-parallel)"),
    ])  # fmt: skip
    choice.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return whole


def _numbers(
    parent: Any, title: str, kind: type[int] | type[float], options: list[tuple[str, float | None, str]]
) -> Any:
    group = parent.add_argument_group(title) if title else parent
    for name, default, meaning in options:
        shown = "" if default is None else f" ({default:g})"
        group.add_argument(name, type=kind, default=default, metavar="N", help=meaning + shown)
    return group


def read(arguments: list[str]) -> Question:
    """Parse and check options. Raises ConfigError, ModelError, DataError, each one line; SystemExit after --help."""
    given = parser().parse_args(arguments)
    for name, value in vars(given).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not (0 < value < math.inf):
            raise ConfigError(f"{option(name)} {value:g} must be above 0")
    for name in ("mfu", "bandwidth_share", "usable", "kept"):
        if getattr(given, name) > 1:
            raise ConfigError(f"{option(name)} {getattr(given, name):g} is a share: at most 1")
    if given.engines and not given.tensor_parallel:
        raise ConfigError("--engines needs --tensor-parallel, the GPUs of each")
    machine, decoder = cluster_of(given), decoder_of(given)
    if given.gpus < 2:
        raise ConfigError("--gpus 1 is too few: at least one GPU trains and one samples")
    width = given.tensor_parallel or 0
    if width > given.node_gpus or (width and decoder.heads % width):
        raise ConfigError(
            f"--tensor-parallel {width} must divide the {decoder.heads} heads and be at most --node-gpus "
            f"{given.node_gpus}"
        )
    work = work_of(given)
    return Question(decoder, machine, work, given.lead, width, given.engines or 0, given.json)


def option(name: str) -> str:
    """Return the option of an attribute: the_name -> --the-name."""
    return "--" + name.replace("_", "-")


def cluster_of(given: argparse.Namespace) -> Machine:
    """Return the cluster: the card's numbers, each overridden by its option. Raises ConfigError."""
    card = CARDS.get(given.card.lower())
    if card is None:
        raise ConfigError(f"--card {given.card} is none of {', '.join(CARDS)}; give --memory, --tflops, --bandwidth")

    def chosen(value: float | None, unit: float, known: float) -> float:
        return known if value is None else value * unit

    return Machine(
        gpus=given.gpus, node_gpus=given.node_gpus,
        memory_bytes=chosen(given.memory, 1e9, card.memory_bytes),
        flops_per_s=chosen(given.tflops, 1e12, card.flops_per_s),
        bandwidth=chosen(given.bandwidth, 1e9, card.bandwidth),
        node_bandwidth=chosen(given.node_bandwidth, 1e9, card.node_bandwidth),
        network_bandwidth=chosen(given.network_bandwidth, 1e9, card.network_bandwidth),
        mfu=given.mfu, bandwidth_share=given.bandwidth_share, step_overhead_s=given.step_overhead_ms / 1000,
        reduction_s=given.reduction_us / 1e6, usable=given.usable,
    )  # fmt: skip


def decoder_of(given: argparse.Namespace) -> DecoderConfig:
    """Return the decoder, by name or folder, or by numbers. Raises ConfigError, ModelError."""
    numbers = [getattr(given, name) for name in SHAPE]
    if given.model is not None:
        if any(number is not None for number in [*numbers, given.head_dim]) or given.tied:
            raise ConfigError(f"model '{given.model}' has its shape: leave out --layers, --hidden and the like")
        return models.find(given.model)
    missing = [option(name) for name, number in zip(SHAPE, numbers, strict=True) if number is None]
    if missing:
        raise ConfigError(f"no model: name one ({', '.join(models.MODELS)}, a folder), or add {', '.join(missing)}")
    if given.heads % given.key_heads:
        raise ConfigError(f"--heads {given.heads} must be a multiple of --key-heads {given.key_heads}")
    return DecoderConfig(
        family="llama", vocab_size=given.vocab, hidden_size=given.hidden, intermediate_size=given.intermediate,
        layers=given.layers, heads=given.heads, key_heads=given.key_heads,
        head_dim=given.head_dim or max(1, given.hidden // given.heads), norm_epsilon=1e-5, max_positions=131072,
        tied=given.tied,
    )  # fmt: skip


def work_of(given: argparse.Namespace) -> Workload:
    """Return the workload, with lengths by option or of a run. Raises ConfigError, DataError."""
    if given.run is not None:
        lengths, prompt_tokens = of_run(given.run)
        limit = given.max_completion or int(lengths.tokens[-1])
        if given.max_completion and given.max_completion < lengths.tokens[-1]:
            tokens = tuple(min(length, float(limit)) for length in lengths.tokens)
            lengths = Lengths(tokens, lengths.weights)
    else:
        p99 = given.p99 or 4 * given.mean
        limit, prompt_tokens = given.max_completion or math.ceil(p99), given.prompt_tokens
        lengths = lognormal(given.mean, p99, limit)
    return Workload(
        given.prompts, given.group, prompt_tokens, lengths, limit, given.micro_batch, given.minibatches,
        int(given.reference), given.kept,
    )  # fmt: skip


def of_run(folder: Path) -> tuple[Lengths, int]:
    """Return completion lengths and mean prompt length (tokens, rounded up) of a run's newest rollouts. Raises
    DataError."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
    if not files:
        raise DataError(f"--run {folder} is no folder of a run: there is no rollouts/step_1.jsonl in it")
    completions: list[int] = []
    prompts: list[int] = []
    for file in files[-LAST_STEPS:]:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                completions += [len(completion["token_ids"]) for completion in row["completions"]]
                prompts.append(len(row["prompt"]["token_ids"]))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}, line {number} is no group of completions ({error!r})") from error
    if not prompts:
        raise DataError(f"--run {folder}: its newest rollouts are empty")
    return measured(completions), math.ceil(sum(prompts) / len(prompts))
