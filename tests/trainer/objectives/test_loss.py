"""Losses token by token, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.loss import LossOutput, policy_loss, sft_loss
from trainer.objectives.registry import read_objective

TOKEN_LOSSES = ("magistral", "gspo", "gspo_token", "reinforce")
LOSSES = (*TOKEN_LOSSES, "agro", "spo", "dro", "jepo")
LOG_RATIOS = [0.1, -0.3, 0.5, 0.0]
OF_LOGS = [math.exp(value) for value in LOG_RATIOS]
SERVED = {"kind": "served", "url": "http://x/v1", "model": "m"}


def run(
    ratios: list[float], advantages: list[float], weights: list[float] | None = None,
    counts: list[int] | None = None, extra: dict[str, Any] | None = None, **settings: Any,
) -> tuple[LossOutput, Tensor]:  # fmt: skip
    """Loss and its gradient with respect to the log-probs, for tokens of given importance ratios (behaviour p = .5);
    each is a completion of its own unless `counts` says otherwise."""
    behaviour = torch.full((len(ratios),), math.log(0.5))
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    inputs = LossInputs(
        logprobs, behaviour, torch.tensor(advantages, dtype=torch.float32),
        torch.tensor(weights or [1.0] * len(ratios)), completions_of(counts or [1] * len(ratios)), **(extra or {}),
    )  # fmt: skip
    output = policy_loss(inputs, torch.ones(len(ratios)), read_objective(settings))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


def pulls(ratios: list[float], advantages: list[float], **settings: Any) -> list[float]:
    """Derivative of the objective, not of the loss, with respect to each log pi."""
    return [-value for value in run(ratios, advantages, **settings)[1].tolist()]


def near(expected: Any, abs: float = 1e-6) -> Any:
    return pytest.approx(expected, abs=abs)


@pytest.mark.parametrize(
    ("ratio", "positive", "negative"),
    [(0.5, 0.5, 0), (0.79, 0.79, 0), (0.81, 0.81, -0.81), (1, 1, -1), (1.27, 1.27, -1.27), (1.29, 0, -1.29),
     (3, 0, -3)],
)  # fmt: skip
def test_clip_higher_gradients(ratio: float, positive: float, negative: float) -> None:
    """eps = (.2, .28), no dual clip."""
    assert pulls([ratio, ratio], [1.0, -1.0]) == near([positive, negative])


def test_clip_higher_values() -> None:
    for ratio, advantage, objective in ((0.5, 1, 0.5), (0.5, -1, -0.8), (1.29, 1, 1.28), (3, -1, -3)):
        assert -run([ratio], [advantage])[0].loss.item() == near(objective)


def test_grpo_clips_at_the_same_distance_on_both_sides() -> None:
    ratios, advantages = [1.19, 1.21, 1.27, 0.79, 0.79], [1.0, 1.0, 1.0, -1.0, 1.0]
    assert pulls(ratios, advantages, name="grpo") == near([1.19, 0, 0, 0, 0.79])


def test_dual_clip_ends_the_gradient_of_bad_tokens_that_became_likely() -> None:
    """c = 3: at r = 4 and A = -1 the objective is -3 without a gradient; A = 1 and r = 2 are as without it."""
    output, gradient = run([4.0, 2.0, 4.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    assert (-gradient).tolist() == near([0, -2, 0])
    assert -output.loss.item() == near(-3 - 2 + 1.28, 1e-5) and output.sums["clipped_high"].item() == 2


def test_gspo_ratio_is_the_geometric_mean_of_the_completion() -> None:
    """Log-ratios (.1, -.3, .5, 0): s = exp(.075) = 1.077884; each token's gradient is s A / 4 times its weight (1)."""
    wide: dict[str, Any] = {"clip_low": 0.9, "clip_high": 0.9, "counts": [4]}
    output, gradient = run(OF_LOGS, [1.0] * 4, name="gspo", **wide)
    assert -output.loss.item() == near(4 * 1.077884, 1e-5)
    assert (-gradient).tolist() == near([1.077884] * 4)
    assert pulls(OF_LOGS, [1.0, 2.0, 0.0, 1.0], name="gspo_token", **wide) == near(
        [1.077884, 2 * 1.077884, 0, 1.077884]
    )
    clipped, nothing = run(OF_LOGS, [1.0] * 4, counts=[4], name="gspo")
    assert nothing.tolist() == [0.0] * 4 and clipped.sums["clipped_high"].item() == 4


def test_cispo_keeps_a_gradient_where_the_clip_ends_it() -> None:
    assert pulls([3.0], [1.0], name="cispo", importance={"high": 1.28}) == near([1.28])
    assert pulls([3.0], [1.0]) == [0]


def test_truncated_importance_gradient_saturates_and_never_vanishes() -> None:
    output, gradient = run([0.25, 1.5, 4.0, 4.0], [1.0, 1.0, 1.0, -1.0], name="aipo")
    assert (-gradient).tolist() == near([0.25, 1.5, 2.0, -2.0])
    assert (output.sums["clipped_low"].item(), output.sums["clipped_high"].item()) == (0, 2)


def test_decoupled_loss_clips_against_the_start_of_the_batch() -> None:
    """Not kept: gradient rho A, whatever the clip. prox = .5 as mu: ratio and weight of who sampled are 1; with
    prox = 1 and mu = .5: r = 1.5 is clipped for A > 0, and weighed by prox / mu = 2 for A < 0."""
    assert pulls([0.25, 3.0], [1.0, -2.0], name="decoupled_ppo") == near([0.25, -6.0])
    same, moved = ({"old": torch.full((2,), math.log(p))} for p in (0.5, 1.0))
    assert pulls([1.5, 1.1], [1.0, 1.0], name="decoupled_ppo", extra=same) == near([0, 1.1])
    assert pulls([3.0, 3.0], [1.0, -1.0], name="decoupled_ppo", extra=moved) == near([0, -2 * 1.5], 1e-5)


@pytest.mark.parametrize(
    ("importance", "bounds", "expected"),
    [
        ("none", {}, [1.0] * 4),
        ("token", {}, [1.1052, 0.7408, 1.6487, 1.0]),
        ("token_truncated", {"low": 0.8, "high": 1.5}, [1.1052, 0.8, 1.5, 1.0]),
        ("token_masked", {"low": 0.8, "high": 1.5}, [1.1052, 0, 0, 1.0]),
        ("sequence", {}, [1.349859] * 4),
        ("sequence_truncated", {"high": 1.2}, [1.2] * 4),
        ("sequence_masked", {"high": 1.2}, [0.0] * 4),
        ("sequence_masked", {"high": 1.4}, [1.349859] * 4),
        ("geometric_masked", {"low": 0.9, "high": 1.07}, [0.0] * 4),
        ("geometric_masked", {"low": 0.9, "high": 1.08}, [1.1052, 0.7408, 1.6487, 1.0]),
        # mu = .5: pi - mu = .0526, -.1296, .3244, 0; A > 0 is kept below high
        ("divergence_masked", {"low": 0.1, "high": 0.1}, [1.1052, 0.7408, 0, 1.0]),
    ],
)
def test_importance_weights_of_log_ratios(importance: str, bounds: dict[str, float], expected: list[float]) -> None:
    """Log-ratios (.1, -.3, .5, 0) of one completion; their product is 1.349859, their geometric mean 1.077884."""
    settings: dict[str, Any] = {"name": "reinforce", "importance": {"kind": importance, **bounds}}
    output, gradient = run(OF_LOGS, [1.0] * 4, counts=[4], **settings)
    assert (-gradient).tolist() == near(expected, 1e-4)
    assert output.sums["masked"].item() == (expected.count(0) if "masked" in importance else 0)


def test_divergence_mask_keeps_what_moves_back() -> None:
    """A <= 0 is left out where the probability fell by more than low, whatever it rose. Of a rare token that became
    likely, .002 -> .05, the weight is 20 at most, not 25."""
    bounds = {"low": 0.2, "high": 0.2}
    assert pulls([1.6, 0.5], [-1.0, -1.0], name="dppo", importance=bounds) == near([-1.6, 0])
    logprobs = torch.tensor([0.05]).log().requires_grad_()
    inputs = LossInputs(logprobs, torch.tensor([0.002]).log(), torch.ones(1), torch.ones(1), completions_of([1]))
    loss = policy_loss(inputs, torch.ones(1), read_objective({"name": "dppo"})).loss
    assert torch.autograd.grad(-loss, logprobs)[0].tolist() == near([20.0], 1e-4)


def test_masked_weights_that_overflow_leave_no_trace() -> None:
    masked = {"kind": "sequence_masked"}
    assert pulls([math.exp(60)] * 2, [1.0, 1.0], counts=[2], name="reinforce", importance=masked) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("truncate", "plain", "with_baseline"), [(1, 0.04, 0.064), (2, 0.08, 0.096), (4, 0.16, 0.16), (1e9, 0.16, 0.16)]
)
def test_aipo_expected_gradient_on_two_arms(truncate: float, plain: float, with_baseline: float) -> None:
    """pi = (.8, .2), mu = (.2, .8), r = (1, 0): the expectation over mu of the gradient on the first logit."""
    policy, behaviour, rewards = torch.tensor([0.8, 0.2]), torch.tensor([0.2, 0.8]), torch.tensor([1.0, 0.0])
    settings = read_objective({"name": "aipo", "importance": {"high": truncate}})
    for baseline, expected in ((0.0, plain), (float(behaviour @ rewards), with_baseline)):
        logits = policy.log().requires_grad_()
        inputs = LossInputs(
            logits.log_softmax(0), behaviour.log(), rewards - baseline, behaviour, completions_of([1, 1])
        )
        loss = policy_loss(inputs, torch.zeros(2), settings).loss
        assert -torch.autograd.grad(loss, logits)[0][0].item() == near(expected)


def test_a_teacher_adds_its_lead_to_every_token() -> None:
    """log nu - log pi = log(.25 / .5), log(.5 / .5); weight 2, and advantages of .5 beside it."""
    extra = {"teacher": torch.tensor([math.log(0.25), math.log(0.5)])}
    given = pulls([1.0, 1.0], [0.5, 0.5], name="distill", teacher=SERVED | {"weight": 2.0}, extra=extra)
    assert given == near([0.5 - 2 * math.log(2), 0.5])


def test_supervised_is_the_weighted_negative_log_likelihood() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), completions_of([2]))
    output = sft_loss(inputs, torch.ones(2))
    assert output.loss.item() == near(-0.5 * (math.log(0.5) + math.log(0.25)))
    assert torch.autograd.grad(output.loss, logprobs)[0].tolist() == [-0.5, -0.5]
    assert output.sums.keys() == {"tokens", "loss", "entropy"}


def test_metrics_are_sums_over_tokens_by_hand() -> None:
    output, _ = run([0.5, 0.5, 2.0, 4.0], [-1.0, -1.0, 1.0, -1.0], [0.25] * 4)
    log2 = math.log(2)
    expected = {
        "tokens": 4,
        "compared": 4,
        "loss": -0.25 * (-0.8 - 0.8 + 1.28 - 4.0),
        "entropy": 4,
        "abs_logprob_difference": 5 * log2,
        "logprob_difference": -log2,
        "kl_k3": 2 * (0.5 - 1 + log2) + (2 - 1 - log2) + (4 - 1 - 2 * log2),
        "ratio": 7,
        "ratio_squared": 20.5,
        "clipped_low": 2,
        "clipped_high": 1,
        "masked": 0,
    }
    assert {name: value.item() for name, value in output.sums.items()} == near(expected, 1e-5)
    maxima = {name: value.item() for name, value in output.maxima.items()}
    assert maxima == near({"abs_logprob_difference": 2 * log2, "ratio": 4.0})


def regularised(name: str, **settings: Any) -> tuple[LossOutput, Tensor, Tensor]:
    """Loss and its gradients on log-probs and entropies; two completions of two tokens, pi = ref * (e, 1, 1, 1/e)."""
    logprobs = torch.tensor([-1.0, -2.0, -1.5, -3.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)
    weights = torch.tensor([0.1, 0.1, 0.4, 0.4])
    reference = torch.tensor([-2.0, -2.0, -1.5, -2.0])
    inputs = LossInputs(logprobs, logprobs.detach().clone(), torch.tensor([1.0, 1.0, -0.5, -0.5]), weights,
                        completions_of([2, 2]), reference=reference)  # fmt: skip
    output = policy_loss(inputs, entropy, read_objective(dict(name=name, **settings)))
    gradients = torch.autograd.grad(output.loss, (logprobs, entropy), materialize_grads=True)
    return output, *gradients


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_divergence_and_entropy_bonus_add_to_every_loss(name: str) -> None:
    plain, gradient, _ = regularised(name)
    output, with_both, on_entropy = regularised(name, kl={"weight": 0.5, "gradient": "weighted_k3"}, entropy_bonus=0.2)
    # weight * r * l, r = 1, l = (1, 0, 0, -1)
    assert (with_both - gradient).tolist() == near([0.05, 0, 0, -0.2])
    assert on_entropy.tolist() == near([-0.02, -0.02, -0.08, -0.08])
    # exp(-l) - 1 + l is 1/e and e - 2; .2 (.1 * 1.5 + .4 * 3.5)
    added = 0.5 * (0.1 / math.e + 0.4 * (math.e - 2)) - 0.31
    assert (output.loss - plain.loss).item() == near(added) == output.sums["regularisation"].item()
    assert output.sums["loss"].item() == plain.sums["loss"].item()
    assert output.sums.keys() - plain.sums.keys() == {"reference_log_ratio", "regularisation"}
    assert output.sums["reference_log_ratio"].item() == near(0)


@pytest.mark.parametrize(
    ("needed", "settings", "extra"),
    [
        ("teacher", {"name": "distill", "teacher": SERVED}, {}),
        ("reference", {"name": "grpo", "kl": {"weight": 0.1}}, {}),
        ("reference", {"name": "agro"}, {}),
        ("reference", {"name": "spo"}, {}),
        ("value head", {"name": "dro"}, {"reference": torch.zeros(1)}),
    ],
)
def test_what_is_needed_and_missing_is_refused(needed: str, settings: dict[str, Any], extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=needed):
        run([1.0], [1.0], extra=extra, **settings)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_a_loss_of_zero_and_no_maxima(name: str) -> None:
    nothing = torch.zeros(0)
    extra = {"reference": nothing, "values": nothing, "imitated": nothing.bool()}
    output, gradient = run([], [], counts=[], name=name, extra=extra)
    assert output.loss.item() == 0 and gradient.shape == (0,) and not output.maxima


def test_an_entropy_target_moves_clip_high_by_hand() -> None:
    """Bounds .2 and .4: .01 a step at most. Entropy half, all, none, 1.5 and 9 times the target of .6."""
    settings = read_objective({"name": "magistral", "entropy_target": {"nats": 0.6}})
    for share, moved in ((0.5, 0.285), (1.0, 0.28), (0.0, 0.29), (1.5, 0.275), (9.0, 0.27)):
        assert settings.after_step(0.6 * share) == {"clip_high": near(moved)}
    narrow = {"name": "magistral", "entropy_target": {"nats": 0.6, "clip_high_bounds": [0.279, 0.281]}}
    assert read_objective({**narrow, "clip_high": 0.281}).after_step(0.0) == {"clip_high": 0.281}
    assert read_objective({**narrow, "clip_high": 0.279}).after_step(9.0) == {"clip_high": 0.279}
    for name in ("magistral", "aipo"):
        assert read_objective({"name": name}).after_step(0.0) == {}, "no target: it stays"


def test_an_entropy_that_follows_clip_high_is_brought_to_its_target() -> None:
    """A policy whose entropy tends to 4 (clip_high - .2) by a tenth a step, from 1.2: .4 is that of clip_high = .3."""
    table, entropy = {"name": "magistral", "entropy_target": {"nats": 0.4}}, 1.2
    for _ in range(400):
        table |= read_objective(table).after_step(entropy)
        entropy += (4 * (table["clip_high"] - 0.2) - entropy) / 10
    assert (table["clip_high"], entropy) == (near(0.3, 1e-3), near(0.4, 5e-3))
