"""Regularised rewards find their optimum in data of any policy, the usual policy gradient does not: by enumeration.

Two problems whose every probability is a table: a bandit of three arms, and completions of one or two tokens (seven of
them, the second token depending on the first). The data never change: they come from the reference, or from another
policy. The losses are those of the trainer, their expectations are sums over all completions; gradient descent with
momentum, the same for all.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from tests.trainer.objectives.descent import descend, methods
from tests.trainer.objectives.descent import optimum as optimum_of
from tests.trainer.objectives.tabular import Arms, Policy, Problem, draw_policy, draw_rewards

BETA, RATE, MOMENTUM = 0.5, 1.0, 0.7
REACHED = 1e-3
"""KL(pi || pi*), nats, below which the optimum counts as reached"""
LABELS = {
    "agro": "AGRO", "spo": "SPO", "dro": "DRO", "corrected": "policy gradient and KL, corrected",
    "naive": "policy gradient and KL, not corrected",
}  # fmt: skip
BANDIT, TOKENS = "three arms", "seven completions"
SAME, OTHER = "from the reference", "from another policy"


@dataclass(frozen=True)
class Case:
    """A problem and where its data came from."""

    reference: Policy | Arms
    behaviour: Policy | Arms
    rewards: Tensor
    """[completions]"""

    def start(self) -> Policy | Arms:
        """Return the policy that is trained: the reference, at first."""
        fresh = [table.clone().requires_grad_() for table in self.reference.parameters()]
        return Arms(fresh[0]) if isinstance(self.reference, Arms) else Policy(fresh[0], fresh[1])


@dataclass(frozen=True)
class Outcome:
    """What came of one method."""

    distances: list[float]
    """KL(pi || pi*) at the start and after each step, nats"""
    policy: list[float]
    """[completions] at the end"""
    value: float | None
    """of dro's value at the end"""

    @property
    def reached(self) -> str:
        """The first step from which on the optimum is near, "never" without one."""
        far = [step for step, distance in enumerate(self.distances) if distance >= REACHED]
        return "never" if far[-1] + 1 == len(self.distances) else str(far[-1] + 1)


Outcomes = dict[tuple[str, str], dict[str, Outcome]]
"""(problem, data) -> method -> what came of it"""


def cases() -> dict[tuple[str, str], Case]:
    """Return all cases: (problem, data) -> what it is."""
    uniform, skewed = Arms(torch.full((3,), 1 / 3).log()), Arms(torch.tensor([0.1, 0.3, 0.6]).log())
    arms, rewards = torch.tensor([1.0, 0.0, 0.0]), draw_rewards(0)
    reference, other = draw_policy(0), draw_policy(1, spread=1.2)
    return {
        (BANDIT, SAME): Case(uniform, uniform, arms),
        (BANDIT, OTHER): Case(uniform, skewed, arms),
        (TOKENS, SAME): Case(reference, reference, rewards),
        (TOKENS, OTHER): Case(reference, other, rewards),
    }


def run(case: Case, steps: int) -> dict[str, Outcome]:
    """Descend with each method; returns method -> what came of it."""
    found = {}
    best, value = optimum_of(case.reference.whole(), case.rewards, BETA)
    for name, settings in methods(BETA).items():
        learned = torch.zeros((), requires_grad=True) if name == "dro" else None
        problem = Problem(case.start(), case.behaviour, case.reference, None, case.rewards, learned)
        distances, policy = [], best
        for whole in descend(problem, settings, steps, RATE, value, MOMENTUM):
            policy = whole.log_softmax(0)  # float32 sums to 1 but for 1e-7
            distances.append((policy.exp() * (policy - best)).sum().item())
        found[name] = Outcome(distances, policy.exp().tolist(), None if learned is None else learned.item())
    return found


def draw(outcomes: Outcomes) -> bytes:
    """Draw a PNG: a panel for each problem and data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from trainer.plot import BLUE, GREEN, GREY, ORANGE, RED, STYLE

    looks = {"agro": (BLUE, "-"), "spo": (ORANGE, "--"), "dro": (GREEN, ":"), "corrected": (GREY, "-"),
             "naive": (RED, "-")}  # fmt: skip
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.6), layout="constrained", sharey=True)
        for axis, ((problem, data), methods_of) in zip(axes.flat, outcomes.items(), strict=True):
            for name, outcome in methods_of.items():
                color, line = looks[name]
                style = {"linewidth": 4.0, "alpha": 0.4} if name == "agro" else {"linewidth": 1.8}  # dro lies on it
                axis.plot(outcome.distances, color=color, linestyle=line, label=LABELS[name], **style)
            axis.set_yscale("log")
            axis.set_ylim(1e-8, 5)
            if problem == BANDIT:
                axis.set_xlim(0, 80)  # nothing new after that
            axis.set_title(f"{problem[0].upper()}{problem[1:]}, data {data}", fontsize=9.5)
        for axis in axes[1]:
            axis.set_xlabel("gradient step")
        for axis in axes[:, 0]:
            axis.set_ylabel("KL(policy || optimum), nats")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        found = io.BytesIO()
        figure.savefig(found, dpi=110)
        pyplot.close(figure)
    return found.getvalue()


def distance_table(outcomes: Outcomes) -> str:
    """Format how far each ends from the optimum, and when it gets near."""
    rows = []
    for name, label in LABELS.items():
        ends = [found[name] for found in outcomes.values()]
        rows.append([label, *(f"{max(end.distances[-1], 0):.1e} ({end.reached})" for end in ends)])
    return table(["", *(f"{problem}, data {data}" for problem, data in outcomes)], *rows)


def policy_table(outcomes: Outcomes, case: Case) -> str:
    """Format the policies of the bandit at the end."""

    def shown(policy: list[float]) -> str:
        return "(" + ", ".join(f"{p:.4f}" for p in policy) + ")"

    best, value = optimum_of(case.reference.whole(), case.rewards, BETA)
    rows = [["optimum", shown(best.exp().tolist()), "the same"]]
    for name, label in LABELS.items():
        rows.append([label, *(shown(outcomes[BANDIT, data][name].policy) for data in (SAME, OTHER))])
    values = [outcomes[BANDIT, data]["dro"].value or 0.0 for data in (SAME, OTHER)]
    told = f"The soft value is {value:.6f}; DRO's value head ends at {values[0]:.6f} and {values[1]:.6f}."
    return table(["", f"data {SAME}", f"data {OTHER}"], *rows) + f"\n{told}"


def page(outcomes: Outcomes, steps: int, seconds: float) -> str:
    """Return the page."""
    other = ", ".join(f"{p:.3f}" for p in cases()[TOKENS, OTHER].behaviour.whole().exp().tolist())
    return "\n".join([
        "# Regularised rewards: the same optimum from any data",
        "",
        f"{measured_with('optimum')} in {seconds:.0f} s.",
        "",
        "All maximise E r - beta KL(policy || reference), whose optimum is reference exp(r / beta) up to a factor. The "
        "data never change: they come from the reference, or from another policy. Every probability is a table, the "
        "losses are the trainer's own, and their expectations are sums over all completions (all pairs of them for "
        "AGRO): nothing is sampled, so what is seen is where a method leads, not its noise.",
        "",
        "* AGRO, SPO and DRO: `name = \"agro\"`, `\"spo\"`, `\"dro\"`. SPO knows the exact soft value.",
        "* Not corrected: `name = \"rloo\"`, `kl = 0.5`, `kl_gradient = \"sequence_k2\"`: the divergence and its "
        "gradient are exact, but rewards count as if the policy had sampled the data itself.",
        "* Corrected: the same with `correction = \"sequence\"`, the ratios of whole completions. Exact here; of long "
        "completions these ratios vary too much to be of use.",
        "",
        "![KL from the optimum over gradient steps](optimum.png)",
        "",
        f"KL(policy || optimum) after {steps} steps of gradient descent (rate {RATE:g}, momentum {MOMENTUM:g}, beta "
        f"{BETA:g}), nats; in brackets the step from which on it is below {REACHED:g}.",
        "",
        distance_table(outcomes),
        "The bandit: rewards (1, 0, 0), a uniform reference, the other policy (0.1, 0.3, 0.6). At the end:",
        "",
        policy_table(outcomes, cases()[BANDIT, SAME]),
        "",
        "The completions: three first tokens, of which one ends the completion, and three second ones after each other "
        f"first; tables and rewards drawn at random, with fixed seeds. The other policy samples them with ({other}). "
        "Regressions are slow to learn completions that the data rarely hold, the corrected gradient those that the "
        "policy itself makes rare.",
        "",
    ])  # fmt: skip


@benchmark(page="docs/results/optimum.md")
def optimum(quick: bool, steps: int = 400) -> Iterator[Section]:
    """Descend and draw."""
    steps = min(steps, 20) if quick else steps
    torch.set_num_threads(1)  # tensors of a few numbers
    began = time.monotonic()
    outcomes = {key: run(case, steps) for key, case in cases().items()}
    yield Section(page(outcomes, steps, time.monotonic() - began), files={".png": draw(outcomes)})
