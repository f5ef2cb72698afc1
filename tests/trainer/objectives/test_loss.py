"""Losses token by token, against values worked out by hand. losses.jsonl: a line a case."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tables import read_table
from tests.trainer.objectives.named import example
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.kl import GRADIENTS, KlTerms
from trainer.objectives.loss import LossOutput, policy_loss, sft_loss
from trainer.objectives.registry import read_objective

TOKEN_LOSSES = ("magistral", "gspo", "gspo_token", "reinforce")


def run(
    logs: list[float], advantages: list[float], weights: list[float], counts: list[int], settings: dict[str, Any],
    behaviour: float = 0.5, **extra: Tensor,
) -> tuple[LossOutput, Tensor]:  # fmt: skip
    """Loss and its gradient with respect to the log-probs, for tokens of given log-ratios to who sampled."""
    sampled = torch.full((len(logs),), math.log(behaviour))
    logprobs = (sampled + torch.tensor(logs)).requires_grad_()
    inputs = LossInputs(logprobs, sampled, torch.tensor(advantages), torch.tensor(weights), completions_of(counts),
                        **extra)  # fmt: skip
    output = policy_loss(inputs, torch.ones(len(logs)), read_objective(settings))
    return output, torch.autograd.grad(output.loss, logprobs)[0]


@pytest.mark.parametrize("row", read_table("trainer/objectives/losses"), ids=lambda row: row["case"])
def test_losses_by_hand(row):
    """Each token is a completion of its own with A = 1, weight 1 and mu = .5 unless the row says otherwise. pulls: the
    derivative of the objective, not of the loss, with respect to each log pi."""
    logs = row.get("logs") or [math.log(ratio) for ratio in row["ratios"]]
    ones = [1.0] * len(logs)
    extra = {name: torch.tensor(row[name]).log() for name in ("old", "teacher") if name in row}
    output, gradient = run(
        logs, [float(a) for a in row.get("advantages", ones)], row.get("weights", ones),
        row.get("counts", [1] * len(logs)), row["objective"], row.get("behaviour", 0.5), **extra,
    )  # fmt: skip
    assert (-gradient).tolist() == pytest.approx(row["pulls"], rel=1e-5, abs=1e-6)
    if "value" in row:
        assert -output.loss.item() == pytest.approx(row["value"], rel=1e-5)
    for name, value in row.get("sums", {}).items():
        assert output.sums[name].item() == pytest.approx(value, abs=1e-5), name
    if "maxima" in row:
        assert output.sums.keys() == row["sums"].keys(), "all of them"
        assert {name: value.item() for name, value in output.maxima.items()} == pytest.approx(row["maxima"])


def test_supervised_is_the_weighted_negative_log_likelihood():
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), completions_of([2]))
    output = sft_loss(inputs, torch.ones(2))
    assert output.loss.item() == pytest.approx(-0.5 * (math.log(0.5) + math.log(0.25)))
    assert torch.autograd.grad(output.loss, logprobs)[0].tolist() == [-0.5, -0.5]
    assert output.sums.keys() == {"tokens", "loss", "entropy"}


def regularised(name: str, **settings: Any) -> tuple[LossOutput, Tensor, Tensor]:
    """Loss and its gradients on log-probs and entropies; two completions of two tokens, pi = ref * (e, 1, 1, 1/e)."""
    logprobs = torch.tensor([-1.0, -2.0, -1.5, -3.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)
    inputs = LossInputs(
        logprobs, logprobs.detach().clone(), torch.tensor([1.0, 1.0, -0.5, -0.5]), torch.tensor([0.1, 0.1, 0.4, 0.4]),
        completions_of([2, 2]), reference=torch.tensor([-2.0, -2.0, -1.5, -2.0]),
    )  # fmt: skip
    output = policy_loss(inputs, entropy, read_objective({"name": name, **settings}))
    return output, *torch.autograd.grad(output.loss, (logprobs, entropy), materialize_grads=True)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_divergence_and_entropy_bonus_add_to_every_loss(name):
    plain, gradient, _ = regularised(name)
    output, with_both, on_entropy = regularised(name, kl={"weight": 0.5, "gradient": "weighted_k3"}, entropy_bonus=0.2)
    # weight * r * l, r = 1, l = (1, 0, 0, -1)
    assert (with_both - gradient).tolist() == pytest.approx([0.05, 0, 0, -0.2], abs=1e-6)
    assert on_entropy.tolist() == pytest.approx([-0.02, -0.02, -0.08, -0.08])
    # exp(-l) - 1 + l is 1/e and e - 2; .2 (.1 * 1.5 + .4 * 3.5)
    added = pytest.approx(0.5 * (0.1 / math.e + 0.4 * (math.e - 2)) - 0.31, abs=1e-6)
    assert (output.loss - plain.loss).item() == added and output.sums["regularisation"].item() == added
    assert output.sums["loss"].item() == plain.sums["loss"].item()
    assert output.sums.keys() - plain.sums.keys() == {"reference_log_ratio", "regularisation"}
    assert output.sums["reference_log_ratio"].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_every_divergence_by_hand(name):
    """pi, ref and r of a completion of three tokens and one of one."""
    tokens = [(0.5, 0.3, 2.0), (0.25, 0.5, 1.0), (0.1, 0.4, 0.5), (0.9, 0.3, 3.0)]
    logs, ratios = [math.log(pi / ref) for pi, ref, _ in tokens], [r for _, _, r in tokens]
    to_the_end = [sum(logs[:3]), sum(logs[1:3]), logs[2], logs[3]]
    whole = [math.prod(ratios[:3]) * sum(logs[:3])] * 3 + [ratios[3] * logs[3]]
    expected = {
        "return": [r * rest for r, rest in zip(ratios, to_the_end, strict=True)],
        "weighted_k3": [r * log for r, log in zip(ratios, logs, strict=True)],
        "sequence_k2": whole,
        "sequence_k3": whole,
    }[name]
    logprobs = torch.tensor([math.log(pi) for pi, _, _ in tokens], requires_grad=True)
    ratio = (logprobs - logprobs.detach() + torch.tensor(ratios).log()).exp()
    log_ratio = logprobs - torch.tensor([math.log(ref) for _, ref, _ in tokens])
    terms = GRADIENTS[name](KlTerms(logprobs, ratio, log_ratio, completions_of([3, 1])))
    assert torch.autograd.grad(terms.sum(), logprobs)[0].tolist() == pytest.approx(expected, abs=1e-5)


def hand(
    name: str, rewards: list[float], logs: list[float], groups: list[int], values: Tensor | None = None,
    **settings: Any,
) -> tuple[LossOutput, list[float]]:  # fmt: skip
    """(output, gradient by completion): completions of two tokens, each with half of log pi / ref; weights
    .1, .2, .3, .4."""
    logprobs = torch.full((8,), -2.0, requires_grad=True)
    inputs = LossInputs(
        logprobs, torch.full((8,), -3.0), torch.tensor(rewards).repeat_interleave(2),
        torch.arange(1, 5).repeat_interleave(2) / 10, completions_of([2] * 4, groups),
        reference=logprobs.detach() - torch.tensor(logs).repeat_interleave(2) / 2, values=values,
    )  # fmt: skip
    output = policy_loss(inputs, torch.zeros(8), read_objective({"name": name, **settings}))
    (gradient,) = torch.autograd.grad(output.loss, logprobs, retain_graph=True)
    assert torch.equal(gradient[::2], gradient[1::2])
    return output, gradient[::2].tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand():
    """Log-ratios (.4, -.2, 1) and -1 in two groups. Reference points: mean of the others, at least 0: max(0, .4) = .4,
    .7, .1, and 0 for the one alone. Rewards above .5 are desirable; they count 1, the others 2; beta = .5."""
    output, gradient = hand(example("kto"), [1.0, 0.1, 0.6, 0.5], [0.4, -0.2, 1.0, -1.0], [0, 0, 0, 1], beta=0.5,
                               undesirable_weight=2.0)  # fmt: skip
    felt = [sigmoid(0.5 * lead) for lead in (0.4 - 0.4, 0.7 + 0.2, 1.0 - 0.1, 1.0)]
    counted = [0.1 * 1, 0.2 * 2, 0.3 * 1, 0.4 * 2]
    assert output.loss.item() == pytest.approx(sum(c * (1 - f) for c, f in zip(counted, felt, strict=True)) / 0.5)
    signs = [-1, 1, -1, 1]  # down for what is desirable: the loss falls as its probability rises
    pulls = [s * c * f * (1 - f) for s, c, f in zip(signs, counted, felt, strict=True)]
    assert gradient == pytest.approx(pulls, abs=1e-6)


def test_a_lol_by_hand():
    """Rewards less values (.5, -.2, .6, .3), of which the second counts for nothing; ratios e^.4, e^-.2, e^1 (cut at
    1.9) and e^-3 (cut at .1)."""
    values = torch.tensor([0.5, 0.3, 0.4, 0.7], requires_grad=True)
    output, gradient = hand(example("a_lol"), [1.0, 0.1, 1.0, 1.0], [0.4, -0.2, 1.0, -3.0], [0, 1, 2, 3], values)
    factors = [0.1 * 0.5 * math.exp(0.4), 0.0, 0.3 * 0.6 * 1.9, 0.4 * 0.3 * 0.1]
    errors = zip((0.1, 0.2, 0.3, 0.4), (0.5, -0.2, 0.6, 0.3), strict=True)
    assert output.loss.item() == pytest.approx(4 * sum(factors) + sum(w * e * e for w, e in errors) / 2, abs=1e-5)
    assert gradient == pytest.approx([-factor for factor in factors], abs=1e-6)
    (head,) = torch.autograd.grad(output.loss, values)
    assert head.tolist() == pytest.approx([-0.05, 0.04, -0.18, -0.12], abs=1e-6)
    assert [output.sums[name].item() for name in ("clipped_low", "clipped_high", "masked")] == [2, 2, 2]


REGULAR: tuple[list[float], list[float]] = [1.0, 0.0, 0.5, 2.0], [0.2, 0.4, -0.2, 2.0]
"""rewards and log pi / ref; at beta = .5 R = (.9, -.2, .6, 1)"""


def test_agro_by_hand():
    """The first three are a group, the last is alone: mean R = 1.3/3, n/(n - 1) = 3/2, 1/(2 beta) = 1."""
    rest = [0.9 - 1.3 / 3, -0.2 - 1.3 / 3, 0.6 - 1.3 / 3]
    output, gradient = hand("agro", *REGULAR, [7, 7, 7, 3], beta=0.5)
    assert output.loss.item() == pytest.approx(1.5 * (0.1 * rest[0] ** 2 + 0.2 * rest[1] ** 2 + 0.3 * rest[2] ** 2))
    # d/dR_i of sum_j w_j d_j^2 is 2 (w_i d_i - mean_j w_j d_j); dR/dlogpi = -beta on each of its tokens
    pulls = [w * d for w, d in zip((0.1, 0.2, 0.3), rest, strict=True)]
    assert gradient == pytest.approx([*(-0.5 * 1.5 * 2 * (pull - sum(pulls) / 3) for pull in pulls), 0], abs=1e-6)


@pytest.mark.parametrize(("divergence", "slopes"), [
    ("js", [0.5 * math.log((1 + math.exp(u)) / 2) for u in (1.8, -0.4, 1.2, 2.0)]), ("kl", [0.4, -0.7, 0.1, 0.5]),
    ("total_variation", [0.25, -0.25, 0.25, 0.25]),
])  # fmt: skip
def test_f_dpg_by_hand(divergence, slopes):
    """In groups of two, u = R / .5 = (1.8, -.4, 1.2, 2); importance weights left out."""
    a, b, c, d = slopes
    _, gradient = hand(example("f_dpg"), *REGULAR, [0, 0, 1, 1], beta=0.5, divergence=divergence,
                          importance={"kind": "none"})  # fmt: skip
    assert gradient == pytest.approx([-0.1 * (a - b), -0.2 * (b - a), -0.3 * (c - d), -0.4 * (d - c)], abs=1e-6)


@pytest.mark.parametrize(("needed", "settings"), [
    ("teacher", {"name": "distill", "teacher": {"kind": "served", "url": "http://x/v1", "model": "m"}}),
    ("reference", {"name": "grpo", "kl": {"weight": 0.1}}),
    *(("reference", {"name": name}) for name in ("agro", "spo")), ("value head", {"name": "dro"}),
])  # fmt: skip
def test_what_is_needed_and_missing_is_refused(needed, settings):
    extra = {"reference": torch.zeros(1)} if needed == "value head" else {}
    with pytest.raises(ValueError, match=needed):
        run([0.0], [1.0], [1.0], [1], settings, **extra)


@pytest.mark.parametrize("name", [*TOKEN_LOSSES, "agro", "spo", "dro", "jepo"])
def test_no_tokens_give_a_loss_of_zero_and_no_maxima(name):
    nothing = torch.zeros(0)
    output, gradient = run([], [], [], [], {"name": name}, reference=nothing, values=nothing, imitated=nothing.bool())
    assert output.loss.item() == 0 and gradient.shape == (0,) and not output.maxima


def test_an_entropy_target_moves_clip_high_by_hand():
    """Bounds .2 and .4: .01 a step at most. Entropy half, all, none, 1.5 and 9 times the target of .6."""
    table = {"name": "magistral", "entropy_target": {"nats": 0.6}}
    for share, moved in ((0.5, 0.285), (1.0, 0.28), (0.0, 0.29), (1.5, 0.275), (9.0, 0.27)):
        assert read_objective(table).after_step(0.6 * share) == {"clip_high": pytest.approx(moved)}
    narrow = {"name": "magistral", "entropy_target": {"nats": 0.6, "clip_high_bounds": [0.279, 0.281]}}
    for bound, entropy in ((0.281, 0.0), (0.279, 9.0)):
        assert read_objective({**narrow, "clip_high": bound}).after_step(entropy) == {"clip_high": bound}
    for name in ("magistral", "aipo"):
        assert read_objective({"name": name}).after_step(0.0) == {}, "no target: it stays"


def test_an_entropy_that_follows_clip_high_is_brought_to_its_target():
    """A policy whose entropy tends to 4 (clip_high - .2) by a tenth a step, from 1.2: .4 is that of clip_high = .3."""
    table, entropy = {"name": "magistral", "entropy_target": {"nats": 0.4}}, 1.2
    for _ in range(400):
        table |= read_objective(table).after_step(entropy)
        entropy += (4 * (table["clip_high"] - 0.2) - entropy) / 10
    assert (table["clip_high"], entropy) == (pytest.approx(0.3, abs=1e-3), pytest.approx(0.4, abs=5e-3))


def test_sums_end_with_the_completion():
    rows = completions_of([2, 1, 3])
    assert rows.last.tolist() == [1, 1, 2, 5, 5, 5] and rows.first.tolist() == [0, 2, 3] and rows.groups == 3
    values = torch.tensor([1.0, 2.0, 5.0, 0.5, 0.25, 0.25])
    assert rows.returns_to_go(values).tolist() == [3.0, 2.0, 5.0, 1.0, 0.5, 0.25]
    assert rows.sums(values).tolist() == [3.0, 5.0, 1.0]
    assert rows.turn_means(values).tolist() == pytest.approx([1.5, 5.0, 1 / 3])
    none = completions_of([])
    assert none.returns_to_go(torch.zeros(0)).shape == none.sums(torch.zeros(0)).shape == (0,) and none.count == 0
    # after 50,000 tokens whose sum is 1.5e5, a completion's own sums still have seven digits
    rows, values = completions_of([50_000, 3]), torch.tensor([3.1] * 50_000 + [1e-3, 2e-3, -4e-3])
    assert rows.returns_to_go(values)[-3:].tolist() == pytest.approx([-1e-3, -2e-3, -4e-3], rel=1e-6)
    assert rows.sums(values).tolist() == pytest.approx([155_000, -1e-3], rel=1e-6)


@pytest.mark.parametrize(("reference", "tokens", "named"), [
    (torch.zeros(2, requires_grad=True), 2, "reference must be without gradients"),
    (torch.zeros(2, dtype=torch.bfloat16), 2, "reference is torch.bfloat16"),
    (torch.zeros(3), 2, r"reference is .* \(3,\)"), (torch.zeros(2), 3, "completions"),
])  # fmt: skip
def test_inputs_with_gradients_of_another_type_or_shape_are_refused(reference, tokens, named):
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=named):
        LossInputs(zeros, zeros, zeros, zeros, completions_of([tokens]), reference=reference)
    if reference.dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="logprobs"):
            LossInputs(*[reference] * 4, completions_of([2]))
