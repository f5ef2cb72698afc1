"""BYOL-Pi, BYOL-AC and BYOL-VAR in tables: what their flows and their sampled losses find, beside theory."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from benchmarks.self_prediction import (
    VARIANTS,
    Variant,
    dynamics_of,
    fit_error,
    flow,
    limit,
    model_error,
    overlap,
    potential,
    random_dynamics,
    random_representation,
    sampled_loss,
    settle,
)

LABELS = {"pi": "BYOL-Pi", "ac": "BYOL-AC", "var": "BYOL-VAR"}
TARGETS = {"pi": "T, the value", "ac": "T_a, the action value", "var": "T_a - T, the advantage"}
PROBLEMS, STATES, ACTIONS, SIZE, STARTS = 100, 10, 4, 4, 3
RATE, BATCH, EVERY = 0.1, 64, 50
PLACES: dict[Variant, list[int]] = {"pi": [0, 1], "ac": [0, 2], "var": [2, 3]}


@dataclass(frozen=True)
class Ends:
    """Where the flows of all problems end."""

    dynamics: Tensor
    """[problems, actions, states, states]"""
    first: dict[Variant, Tensor]
    """[problems, states, size], from one start"""
    phi: dict[Variant, Tensor]
    """[problems, states, size], from the best of `STARTS`: that with the largest potential"""


def follow(problems: int, steps: int) -> Ends:
    """Follow each flow from all starts."""
    dynamics = random_dynamics(0, problems, STATES, ACTIONS)
    starts = [random_representation(seed, problems, STATES, SIZE) for seed in range(1, STARTS + 1)]
    first, best = {}, {}
    for variant in VARIANTS:
        found = torch.stack([settle(start, dynamics, variant, steps) for start in starts])
        place = potential(found, dynamics, variant).argmax(0)
        first[variant], best[variant] = found[0], found[place, torch.arange(problems)]
    return Ends(dynamics, first, best)


def shared_eigenvectors() -> tuple[Tensor, Tensor]:
    """Return eigenvectors [4, 4] and dynamics of two actions with eigenvalues (1, .5, .6, -.1), (1, .5, -.6, .1)."""
    vectors = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2
    values = torch.tensor([[1, 0.5, 0.6, -0.1], [1, 0.5, -0.6, 0.1]], dtype=torch.float64)
    return vectors.mT, torch.stack([vectors.mT @ value.diag() @ vectors for value in values])


def subspace_table(steps: int) -> str:
    """Format what the flows find where the dynamics share their eigenvectors."""
    vectors, dynamics = shared_eigenvectors()
    rows = []
    for variant in VARIANTS:
        start = random_representation(0, 1, 4, 2)[0]
        shares = (vectors.mT @ settle(start, dynamics, variant, 3 * steps)).square().sum(1)
        phi = flow(start, dynamics, variant, 100, 0.1)
        skew = (phi.mT @ phi - torch.eye(2)).abs().max().item()
        named = "{" + ", ".join(str(place + 1) for place in PLACES[variant]) + "}"
        rows.append([LABELS[variant], named, *(f"{share:.6f}" for share in shares.tolist()), f"{skew:.0e}"])
    return table(["", "theory", *(f"share of vector {n}" for n in range(1, 5)), "phi'phi - 1, flow"], *rows)


def error_table(ends: Ends) -> str:
    """Format the errors of each target, and how often its own variant is best."""
    rows = []
    for target in VARIANTS:
        for name, error in (("low rank", model_error), ("linear fit", fit_error)):
            errors = {variant: error(phi, ends.dynamics, target) for variant, phi in ends.phi.items()}
            least = [count_least({v: error(phi, ends.dynamics, target) for v, phi in of.items()}, target)
                     for of in (ends.first, ends.phi)]  # fmt: skip
            rows.append([TARGETS[target], name, *(f"{errors[variant].mean().item():.3f}" for variant in VARIANTS),
                         f"{LABELS[target]} {least[1]} ({least[0]})"])  # fmt: skip
    return table(["target", "error", *LABELS.values(), "least"], *rows)


def count_least(errors: dict[Variant, Tensor], target: Variant) -> int:
    """Return the number of problems in which the error of the target's own variant is the least."""
    others = torch.stack([one for variant, one in errors.items() if variant != target]).amin(0)
    return int((errors[target] < others).sum())


def overlap_table(ends: Ends) -> str:
    """Format how near the flows end to the eigenvectors that theory has for shared eigenvectors."""
    rows = []
    for variant, phi in ends.phi.items():
        found = overlap(phi, limit(ends.dynamics, variant, SIZE))
        best = potential(limit(ends.dynamics, variant, SIZE), ends.dynamics, variant)
        reached = potential(phi, ends.dynamics, variant) / best
        rows.append([LABELS[variant], f"{found.mean().item():.3f}", f"{found.min().item():.3f}",
                     f"{reached.mean().item():.3f}"])  # fmt: skip
    return table(["", "overlap, mean", "least", "potential: flow / eigenvectors, mean"], *rows)


def descend(dynamics: Tensor, phi: Tensor, variant: Variant, steps: int, seed: int) -> list[float]:
    """Return the potential along stochastic gradient descent on sampled transitions, every `EVERY` steps."""
    rng = torch.Generator().manual_seed(seed)
    phi, levels = phi.clone().requires_grad_(), []
    for step in range(steps + 1):
        if step % EVERY == 0:
            levels.append(potential(torch.linalg.qr(phi.detach()).Q, dynamics, variant).item())
        states = torch.randint(STATES, (BATCH,), generator=rng)
        actions = torch.randint(ACTIONS, (BATCH,), generator=rng)
        following = torch.multinomial(dynamics[actions, states], 1, generator=rng).squeeze(1)
        loss = sampled_loss(phi, dynamics, states, actions, following, variant)
        phi = (phi - RATE * torch.autograd.grad(loss, phi)[0]).detach().requires_grad_()
    return levels


def draw(dynamics: Tensor, start: Tensor, steps: int) -> bytes:
    """Draw a PNG: the potential along the flow and along sampled descent, of one problem."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from trainer.plot import BLUE, GREY, STYLE

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
        for axis, variant in zip(axes, VARIANTS, strict=True):
            clock = 2 * RATE / STATES  # of the flow, in one step of descent
            phi, levels = start, [potential(start, dynamics, variant).item()]
            for _ in range(steps // EVERY):
                phi = flow(phi, dynamics, variant, 2, clock * EVERY / 2)
                levels.append(potential(phi, dynamics, variant).item())
            at = [clock * EVERY * n for n in range(len(levels))]
            for seed in range(3):
                axis.plot(at, descend(dynamics, start, variant, steps, seed), color=GREY, linewidth=1.0,
                          label="sampled loss, three seeds" if seed == 0 else None)  # fmt: skip
            axis.plot(at, levels, color=BLUE, label="flow")
            axis.set_title(LABELS[variant], fontsize=9.5)
            axis.set_xlabel("time of the flow")
        axes[0].set_ylabel("potential")
        axes[0].legend(loc="lower right")
        found = io.BytesIO()
        figure.savefig(found, dpi=110)
        pyplot.close(figure)
    return found.getvalue()


def page(ends: Ends, subspaces: str, seconds: float) -> str:
    """Return the page."""
    spread = dynamics_of(ends.dynamics, "var").square().sum((-2, -1)).mean()
    return "\n".join([
        "# Self-prediction in tables: BYOL-Pi, BYOL-AC, BYOL-VAR",
        "",
        f"{measured_with('byol')} in {seconds:.0f} s.",
        "",
        "Khetarpal et al. 2024 (2406.02035), `benchmarks/self_prediction.py`. A representation phi [states, k] "
        "predicts its own next value: with one predictor (Pi), with one for each action (AC), or their difference "
        "(VAR). Predictors are at their optimum, the predicted phi has no gradient, states are uniform, the dynamics "
        "T_a symmetric; T is their mean. All is float64. Flows are followed by fourth-order Runge-Kutta, whose error "
        "is what is told of phi'phi (the flow itself keeps it), and to their ends by long orthonormalised steps.",
        "",
        "## Shared eigenvectors",
        "",
        "Two actions, four states, k = 2, eigenvalues (1, .5, .6, -.1) and (1, .5, -.6, .1). Theory: Pi finds the "
        "largest of T^2, AC of the mean of T_a^2, VAR of the mean of (T_a - T)^2.",
        "",
        subspaces,
        "",
        "## Random problems",
        "",
        f"{len(ends.dynamics)} problems with {STATES} states, {ACTIONS} actions and k = {SIZE}; symmetric dynamics, "
        "mixtures of permutations and their inverses, which share no eigenvectors. Low rank: mean over actions of "
        "|S - phi P phi'|^2; linear fit: of |S r - phi w|^2 for rewards r of unit covariance; S is the "
        "target's matrix. "
        f"|T_a - T|^2 is {spread.item():.2f} on average. A flow can end in a local optimum: errors are those of the "
        f"best of {STARTS} starts, by their own potential; the last column counts problems, in brackets of one start.",
        "",
        error_table(ends),
        "",
        "The low-rank error is what each flow descends, so that it is least for its own variant is theory; how well "
        "linear functions fit values, action values and advantages is another question, which the second rows answer.",
        "",
        "Without shared eigenvectors the ends are near those that theory names, not the same:",
        "",
        overlap_table(ends),
        "",
        "## Sampled losses",
        "",
        f"Stochastic gradient descent on {BATCH} sampled transitions a step (rate {RATE:g}) with the stop-gradient, "
        "beside the flow, on the first of the problems:",
        "",
        "![Potential over time](byol.png)",
        "",
        "Nothing here says that these losses help a language model: there the transition is known (append the token), "
        "and a predictor with the action copies the next input. The next state is not the policy's to know at the "
        "turns of an environment: what self-prediction does for a critic there is measured on "
        "[a page of its own](turn_critic.md).",
        "",
    ])  # fmt: skip


@benchmark(page="docs/results/byol.md")
def byol(quick: bool, steps: int = 1000, descent: int = 4_000) -> Iterator[Section]:
    """Follow the flows and the sampled losses, and draw."""
    problems = 5 if quick else PROBLEMS
    steps, descent = (min(steps, 50), min(descent, 500)) if quick else (steps, descent)
    torch.set_num_threads(1)  # matrices of a few numbers
    began = time.monotonic()
    ends = follow(problems, steps)
    start = random_representation(1, 1, STATES, SIZE)[0]
    subspaces, drawn = subspace_table(steps), draw(ends.dynamics[0], start, descent)
    yield Section(page(ends, subspaces, time.monotonic() - began), files={".png": drawn})
