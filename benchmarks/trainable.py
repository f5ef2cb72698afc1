"""The table "what it can train": the fewest cards that hold each model, by the arithmetic that refuses a launch.

On one node trainers and engines share the cards (trainer/colocate.py), beyond it they are apart (lab/plan/split.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.report import table
from lab.plan import split
from lab.plan.scenario import CARDS, MODELS, Lengths, Machine, Scenario, Workload
from shared.config import Config
from shared.errors import ConfigError
from shared.model.config import DecoderConfig
from trainer.colocate import share

SHOWN_CARDS, TOKENS, PROMPT_TOKENS = ("a100-40", "h100", "h200"), (4096, 32768), 512
HOST_BYTES = 128 << 30
"""assumed memory of the host for each card of its node"""
MOST_NODES = 64


def shared_settings(decoder: DecoderConfig, gpus: int, tokens: int) -> Iterator[Config]:
    """Yield the settings of launches that share `gpus` cards of one node, narrow engines first."""
    widths = [width for width in (1, 2, 4, 8) if width <= gpus and decoder.heads % width == 0]
    for width in widths:
        yield Config.model_validate({
            "model": {"max_tokens": tokens}, "optimiser": {"activation_bytes": 0},
            "placement": {"trainers": gpus, "engines": gpus // width},
            "rollout": {
                "max_async_level": 0, "tensor_parallel": width, "max_completion_tokens": tokens - PROMPT_TOKENS
            },
        })  # fmt: skip


def on_one_node(decoder: DecoderConfig, machine: Machine, tokens: int) -> str:
    """Say how `machine.gpus` cards of one node hold the model; "" if they do not."""
    for config in shared_settings(decoder, machine.gpus, tokens):
        try:
            return share(config, decoder, machine.memory_bytes, HOST_BYTES * machine.gpus).placement.colocate
        except ConfigError:
            continue
    return ""


def fewest(decoder: DecoderConfig, card: Machine, tokens: int) -> str:
    """Return the cell of the table: the fewest cards, and how they are used."""
    for gpus in (1, 2, 4, 8):
        if way := on_one_node(decoder, replace(card, gpus=gpus), tokens):
            return f"{gpus}, {'in turns' if way == 'turns' else way}"
    sampled = tokens - PROMPT_TOKENS
    work = Workload(Lengths(sampled / 4, sampled, sampled), sampled, prompt_tokens=PROMPT_TOKENS)
    nodes = 1
    while nodes <= MOST_NODES:
        try:
            best = split.best(Scenario(decoder, replace(card, gpus=8 * nodes), work, async_level=1))
        except ConfigError:
            nodes *= 2
            continue
        return f"{8 * nodes}: {best.trainers} train, {best.engines} x {best.tensor_parallel} sample"
    return "-"


def trainable_section() -> str:
    """Return the table in Markdown."""
    columns = [(name, tokens) for name in SHOWN_CARDS for tokens in TOKENS]
    rows = [["model", *(f"{name.upper()}, {tokens:,} tokens" for name, tokens in columns)]]
    for model, decoder in MODELS.items():
        rows.append([model, *(fewest(decoder, CARDS[name], tokens) for name, tokens in columns)])
    return table(*rows)
