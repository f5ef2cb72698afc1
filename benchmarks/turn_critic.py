"""Whether self-prediction makes a critic of turns better: its error after equal data, with and without.

The policy is a tiny model that guesses numbers (configs/guess.toml, with 16 numbers and 4 guesses). An episode's states
are the model's hidden states where a guess begins, after the environment's answer. Every history that can happen is
enumerated with the policy's probabilities, so that the true value of each is known: a critic's error is against that,
over the histories that the policy meets, and not against noisy returns.

A critic is phi, a layer with a projection to 32 numbers, and a linear value on it; the policy's trunk has no gradient.
Self-prediction adds |P(phi, a) - sg(phi')|^2 of normalised representations to its loss, with a predictor P that sees no
guess (Pi), or the hidden state of the guess's last token (AC), or with the difference of both errors (VAR): Khetarpal
et al. 2024 (2406.02035), as losses of networks. The critic of turns is ArCHer's (2402.19446).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.figures import ROOT, Section, benchmark, measured_with
from benchmarks.guessing import GUESSES, NUMBERS, World, explore, grow
from benchmarks.report import table
from benchmarks.runs import launch, trained_on

HIDDEN, SIZE = 64, 32
SEEDS, STEPS, EVERY, RATE, FASTER = 10, 300, 30, 3e-3, 3.0
"""critics of a row, steps of Adam on all of their episodes, steps between validations, learning rate, and by how much
that of predictors is larger"""
EPISODES = (16, 64, 256)
WEIGHTS = (0.1, 1.0)
LABELS = {"pi": "BYOL-Pi", "ac": "BYOL-AC", "var": "BYOL-VAR"}
TARGETS = {"return": "returns", "td": "temporal differences"}
POLICIES = {1: "after SFT and one step, which guesses about at random", 200: "after reinforcement learning"}
"""steps of the run -> what its policy is called"""
T_95 = 2.262
"""of Student's distribution with nine degrees of freedom"""


class Episodes(NamedTuple):
    """Turns of several sets of episodes, padded: all [sets, turns], and `actions` [sets, turns, hidden]."""

    at: Tensor
    """the history"""
    then: Tensor
    """the history after it; -1 at an episode's end"""
    reward: Tensor
    returned: Tensor
    """what the episode returned from this turn on"""
    actions: Tensor
    """the hidden state of the guess's last token"""
    trains: Tensor
    """True for turns to learn from, a fifth of the episodes validates"""
    there: Tensor
    """False for padding"""


def play(world: World, episodes: int, seed: int) -> Episodes:
    """Sample `SEEDS` sets of episodes of the policy."""
    generator = torch.Generator().manual_seed(seed)
    sets: list[list[tuple[int, int, int, float, float, bool]]] = []
    for _ in range(SEEDS):
        turns: list[tuple[int, int, int, float, float, bool]] = []
        for episode in range(episodes):
            at, steps = 0, list[tuple[int, int, int, float]]()
            while at >= 0:
                guess = int(torch.multinomial(world.policy[at], 1, generator=generator))
                way = int(torch.multinomial(world.tree.shares[at, guess], 1, generator=generator))
                then = int(world.tree.children[at, guess, way]) if way < 2 else -1
                steps.append((at, guess, then, float(way == 2)))
                at = then
            turns += [(*step, steps[-1][3], episode % 5 > 0) for step in steps]
        sets.append(turns)
    longest = max(map(len, sets))
    padded = [turns + [(0, 0, -1, 0.0, 0.0, False)] * (longest - len(turns)) for turns in sets]
    at, guess, then, reward, returned, trains = (torch.tensor(column) for column in _columns(padded))
    there = torch.arange(longest) < torch.tensor([[len(turns)] for turns in sets])
    pairs = sorted({(one, two) for one, two in zip(at.flatten().tolist(), guess.flatten().tolist(), strict=True)})
    asked = [[*world.model.ids(world.tree.histories[one]), *world.model.guesses[two]] for one, two in pairs]
    states, _ = world.model.read(asked)
    place = {pair: number for number, pair in enumerate(pairs)}
    places = torch.tensor([
        [place[one, two] for one, two in zip(*row, strict=True)]
        for row in zip(at.tolist(), guess.tolist(), strict=True)
    ])  # fmt: skip
    scaled = (states - states.mean(0)) / states.std(0).clamp_min(1e-6)
    return Episodes(at, then, reward, returned, scaled[places], trains, there)


def _columns(rows: list[list[tuple[int, int, int, float, float, bool]]]) -> list[list[list[Any]]]:
    return [[[turn[column] for turn in row] for row in rows] for column in range(6)]


def layers(inputs: int, outputs: int, generator: torch.Generator) -> list[Tensor]:
    """Return weight [SEEDS, inputs, outputs] and bias of a linear layer for each critic."""
    weight = torch.randn(SEEDS, inputs, outputs, generator=generator) / math.sqrt(inputs)
    return [weight.requires_grad_(), torch.zeros(SEEDS, 1, outputs, requires_grad=True)]


def two_layers(inputs: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return [SEEDS, n, outputs] of a network with one hidden layer."""
    first, one, second, two = parameters
    return torch.baddbmm(two, torch.nn.functional.silu(torch.baddbmm(one, inputs, first)), second)


def prediction_errors(
    phi: Tensor, then: Tensor, actions: Tensor, predictors: Sequence[Sequence[Tensor]], where: Tensor
) -> list[Tensor]:
    """Return [SEEDS] the mean squared error of each predictor, with and without actions, where there is a next state.

    phi: [SEEDS, turns, SIZE]; then: of the next states, a constant; both are normalised.
    """
    norm = torch.nn.functional.normalize
    found = []
    for sees, parameters in zip((False, True), predictors, strict=True):
        inputs = torch.cat([norm(phi, dim=-1), actions], -1) if sees else norm(phi, dim=-1)
        errors = (norm(two_layers(inputs, parameters), dim=-1) - norm(then.detach(), dim=-1)).square().sum(-1)
        found.append((errors * where).sum(-1) / where.sum(-1))
    return found


def self_prediction(errors: Sequence[Tensor], variant: str) -> Tensor:
    """Return what phi minimises: errors without and with actions of a variant."""
    without, with_actions = errors
    return {"pi": without, "ac": with_actions, "var": with_actions - without}[variant]


def errors_of(world: World, data: Episodes, target: str, variant: str, weight: float) -> Tensor:
    """Train `SEEDS` critics, each with a set of episodes, and return [SEEDS] their root mean squared errors against the
    true values, where their error of the validation's returns was least."""
    generator = torch.Generator().manual_seed(0)  # the same critics in every row
    hidden = world.states.shape[1]
    critic = [*layers(hidden, HIDDEN, generator), *layers(HIDDEN, SIZE, generator)]
    trains, validates = data.trains.float(), (data.there & ~data.trains).float()
    usual = (data.returned * trains).sum(-1) / trains.sum(-1)
    head = [torch.zeros(SEEDS, SIZE, 1, requires_grad=True), usual.view(-1, 1, 1).requires_grad_()]
    predictors = [[*layers(inputs, HIDDEN, generator), *layers(HIDDEN, SIZE, generator)]
                  for inputs in (SIZE, SIZE + hidden)]  # fmt: skip
    optimiser = torch.optim.Adam([
        {"params": [*critic, *head], "lr": RATE},
        {"params": [one for each in predictors for one in each], "lr": FASTER * RATE},
    ])  # fmt: skip

    def value(phi: Tensor) -> Tensor:
        return torch.baddbmm(head[1], phi, head[0]).squeeze(-1)

    now, later = world.states[data.at], world.states[data.then.clamp_min(0)]
    goes_on = (data.then >= 0).float()
    everywhere = world.states.expand(SEEDS, -1, -1)
    least, kept = torch.full((SEEDS,), math.inf), torch.zeros(SEEDS)
    for step in range(STEPS + 1):
        phi, then = two_layers(now, critic), two_layers(later, critic)
        predicted = value(phi)
        if step % EVERY == 0:
            with torch.no_grad():
                wrong = ((predicted - data.returned).square() * validates).sum(-1) / validates.sum(-1)
                found = ((value(two_layers(everywhere, critic)) - world.values).square() * world.met).sum(-1).sqrt()
                better = wrong < least
                least, kept = torch.where(better, wrong, least), torch.where(better, found.float(), kept)
        wanted = data.returned if target == "return" else data.reward + goes_on * value(then).detach()
        loss = (((predicted - wanted).square() * trains).sum(-1) / trains.sum(-1)).sum()
        optimiser.zero_grad()
        if variant:
            where = goes_on * trains
            own = prediction_errors(phi.detach(), then, data.actions, predictors, where)
            fixed = [[one.detach() for one in each] for each in predictors]
            shaped = self_prediction(prediction_errors(phi, then, data.actions, fixed, where), variant)
            loss = loss + weight * shaped.sum() + sum(one.sum() for one in own)
        loss.backward()
        optimiser.step()
    return kept


def paired(errors: Tensor, plain: Tensor) -> tuple[float, float, float]:
    """Return the mean of the differences between critics with the same episodes, and its 95 % interval."""
    apart = (errors - plain).double()
    half = T_95 * float(apart.std()) / math.sqrt(len(apart))
    return float(apart.mean()), float(apart.mean()) - half, float(apart.mean()) + half


class Row(NamedTuple):
    """A kind of critic."""

    variant: str
    weight: float
    errors: list[Tensor]
    """[counts of episodes] of [SEEDS] errors, in standard deviations of the values"""


def compare(world: World, target: str, counts: Sequence[int]) -> list[Row]:
    """Train critics without self-prediction, then with each kind of it."""
    kinds = [("", 0.0), *((variant, weight) for variant in LABELS for weight in WEIGHTS)]
    data = [play(world, count, seed) for seed, count in enumerate(counts)]
    return [Row(*kind, [errors_of(world, one, target, *kind) / world.spread for one in data]) for kind in kinds]


def format_rows(rows: Sequence[Row], counts: Sequence[int]) -> str:
    """Format a table of errors and paired differences."""
    cells = []
    for row in rows:
        name = f"{LABELS[row.variant]}, {row.weight:g}" if row.variant else "none"
        cell = [name]
        for errors, plain in zip(row.errors, rows[0].errors, strict=True):
            mean, low, high = paired(errors, plain)
            cell.append(f"{errors.mean():.3f}" + (f" ({mean:+.3f}, {low:+.3f} to {high:+.3f})" if row.variant else ""))
        cells.append(cell)
    return table(["self-prediction, weight", *(f"{count} episodes" for count in counts)], *cells)


def judge(tables: Sequence[Sequence[Row]]) -> str:
    """Say how many differences are clearly below and above zero for each variant, and what follows."""
    said, better_all, helped = [], list[str](), list[float]()
    for variant, label in LABELS.items():
        for weight in WEIGHTS:
            found = [(paired(errors, plain), float(plain.mean())) for rows in tables for row in rows
                     if (row.variant, row.weight) == (variant, weight)
                     for errors, plain in zip(row.errors, rows[0].errors, strict=True)]  # fmt: skip
            lower = [plain for (_, _, high), plain in found if high < 0]
            above = sum(low > 0 for (_, low, _), _ in found)
            said.append([f"{label}, {weight:g}", len(lower), len(found) - len(lower) - above, above])
            helped += lower
            if len(lower) == len(found):
                better_all.append(f"{label} at {weight:g}")
    where = (
        f" Where one is clearly lower, the error without it is {min(helped):.2f} to {max(helped):.2f} (that of a "
        "constant is 1): it steadies critics that have learned little."
    ) if helped else ""  # fmt: skip
    verdict = (
        f"Lower in all: {', '.join(better_all)}." if better_all else
        f"No kind of self-prediction lowers the critic's error everywhere.{where} At equal data that is not worth a "
        "loss of its own, and runs have none."
    )  # fmt: skip
    return table(["", "clearly lower", "neither", "clearly higher"], *said) + "\n" + verdict


@benchmark(page="docs/results/turn_critic.md")
def turn_critic(quick: bool, runs_dir: Path = ROOT / "runs" / "turn_critic") -> Iterator[Section]:
    """Train the policies, then critics of them. quick: of one that has hardly trained, with few episodes."""
    game = {"prepare.options.numbers": NUMBERS, "prepare.options.guesses": GUESSES, "environment.max_turns": GUESSES,
            "environment.options.guess.numbers": NUMBERS, "environment.options.guess.guesses": GUESSES,
            "rollout.max_completion_tokens": 8 * GUESSES}  # fmt: skip
    options = [f"--{name}={value}" for name, value in game.items()]
    tree, counts = grow(), EPISODES[:1] if quick else EPISODES
    parts, tables = list[str](), list[list[Row]]()
    for steps, label in list(POLICIES.items())[: 1 if quick else None]:
        launch(f"guess-{steps}", runs_dir.resolve(), "configs/guess.toml", f"--steps={steps}", *options)
        world = explore(tree, runs_dir.resolve() / f"guess-{steps}" / "latest")
        for target, called in TARGETS.items():
            rows = compare(world, target, counts)
            tables.append(rows)
            parts += [
                f"## A policy {label}; {called}",
                "",
                f"It finds the number in {world.values[0]:.3f} of the episodes; the values of the histories that it "
                f"meets have a standard deviation of {world.spread:.3f}, which is an error of 1.",
                "",
                format_rows(rows, counts),
            ]
    trained = trained_on(runs_dir.resolve() / f"guess-{min(POLICIES)}")
    yield Section("\n".join([
        "# Self-prediction at the turns of an environment: a critic's error",
        "",
        f"{measured_with('turn_critic')}. {trained}.",
        "",
        f"A tiny model finds a number from 1 to {NUMBERS} in {GUESSES} guesses, and is told \"higher\" or \"lower\". "
        f"Its {len(tree.histories):,} histories are enumerated with its own probabilities, so that their values are "
        f"known. A critic reads the model's hidden state where a guess begins ({HIDDEN} units, a representation of "
        f"{SIZE} numbers, a linear value) and learns from sampled episodes, a fifth of which says when to stop; the "
        "model itself has no gradient. Self-prediction adds a loss of the representation (benchmarks/turn_critic.py). "
        "Errors are root mean squares against the true values over the histories that the policy meets. "
        f"{SEEDS} critics for each cell, each with episodes of its own that every row shares; in brackets: the "
        "difference to the critic without self-prediction, with its 95 % interval over these pairs.",
        "",
        *parts,
        "## What follows",
        "",
        judge(tables),
        "",
    ]))  # fmt: skip
