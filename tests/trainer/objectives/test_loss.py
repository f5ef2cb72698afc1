"""Losses token by token, against values worked out by hand."""

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
    found = policy_loss(inputs, torch.ones(len(ratios)), read_objective(settings))
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    return found, gradient


@pytest.mark.parametrize(
    ("ratio", "positive", "negative"),
    [(0.5, 0.5, 0), (0.79, 0.79, 0), (0.81, 0.81, -0.81), (1, 1, -1), (1.27, 1.27, -1.27), (1.29, 0, -1.29),
     (3, 0, -3)],
)  # fmt: skip
def test_clip_higher_gradients(ratio: float, positive: float, negative: float) -> None:
    """Derivative of the objective with respect to log pi, eps = (.2, .28), no dual clip."""
    _, gradient = run([ratio, ratio], [1.0, -1.0])
    assert (-gradient).tolist() == pytest.approx([positive, negative], abs=1e-6)


def test_clip_higher_values() -> None:
    for ratio, advantage, objective in ((0.5, 1, 0.5), (0.5, -1, -0.8), (1.29, 1, 1.28), (3, -1, -3)):
        assert -run([ratio], [advantage])[0].loss.item() == pytest.approx(objective, abs=1e-6)


def test_grpo_clips_at_the_same_distance_on_both_sides() -> None:
    _, gradient = run([1.19, 1.21, 1.27, 0.79, 0.79], [1.0, 1.0, 1.0, -1.0, 1.0], name="grpo")
    assert (-gradient).tolist() == pytest.approx([1.19, 0, 0, 0, 0.79], abs=1e-6)


def test_dual_clip_ends_the_gradient_of_bad_tokens_that_became_likely() -> None:
    """c = 3: at r = 4 and A = -1 the objective is -3 without a gradient; A = 1 and r = 2 are as without it."""
    found, gradient = run([4.0, 2.0, 4.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    assert (-gradient).tolist() == pytest.approx([0, -2, 0], abs=1e-6)
    assert -found.loss.item() == pytest.approx(-3 - 2 + 1.28, abs=1e-5)
    assert found.sums["clipped_high"].item() == 2


def test_gspo_ratio_is_the_geometric_mean_of_the_completion() -> None:
    """Log-ratios (.1, -.3, .5, 0): s = exp(.075) = 1.077884; each token's gradient is s A / 4 times its weight (1)."""
    ratios = [math.exp(value) for value in LOG_RATIOS]
    wide = {"clip_low": 0.9, "clip_high": 0.9}
    found, gradient = run(ratios, [1.0] * 4, counts=[4], name="gspo", **wide)
    assert -found.loss.item() == pytest.approx(4 * 1.077884, abs=1e-5)
    assert (-gradient).tolist() == pytest.approx([1.077884] * 4, abs=1e-6)
    token, own = run(ratios, [1.0, 2.0, 0.0, 1.0], counts=[4], name="gspo_token", **wide)
    assert (-own).tolist() == pytest.approx([1.077884, 2 * 1.077884, 0, 1.077884], abs=1e-6)
    clipped, nothing = run(ratios, [1.0] * 4, counts=[4], name="gspo")
    assert nothing.tolist() == [0.0] * 4 and clipped.sums["clipped_high"].item() == 4


def test_cispo_keeps_a_gradient_where_the_clip_ends_it() -> None:
    """r = 3, A = 1, upper bound 1.28: gradient 1.28; clip: 0."""
    _, gradient = run([3.0], [1.0], name="cispo", importance={"high": 1.28})
    assert (-gradient).item() == pytest.approx(1.28, abs=1e-6)
    assert run([3.0], [1.0])[1].item() == 0


def test_truncated_importance_gradient_saturates_and_never_vanishes() -> None:
    _, gradient = run([0.25, 1.5, 4.0, 4.0], [1.0, 1.0, 1.0, -1.0], name="aipo")
    assert (-gradient).tolist() == pytest.approx([0.25, 1.5, 2.0, -2.0], abs=1e-6)


def test_decoupled_loss_at_the_start_of_a_batch_is_the_importance_weighted_gradient() -> None:
    """pi = prox: gradient rho A, whatever the clip."""
    _, gradient = run([0.25, 3.0], [1.0, -2.0], name="decoupled_ppo")
    assert (-gradient).tolist() == pytest.approx([0.25, -6.0], abs=1e-6)


def test_decoupled_loss_clips_against_the_start_of_the_batch() -> None:
    """prox = .5 as mu: ratio and weight of the policy that sampled are 1; with prox = pi / 1.5 and mu = .5: r = 1.5 is
    clipped for A > 0, and weighed by prox / mu = 2 for A < 0."""
    same = torch.full((2,), math.log(0.5))
    _, gradient = run([1.5, 1.1], [1.0, 1.0], name="decoupled_ppo", extra={"old": same})
    assert (-gradient).tolist() == pytest.approx([0, 1.1], abs=1e-6)
    moved = torch.full((2,), math.log(0.5 * 2))
    _, gradient = run([3.0, 3.0], [1.0, -1.0], name="decoupled_ppo", extra={"old": moved})
    assert (-gradient).tolist() == pytest.approx([0, -2 * 1.5], abs=1e-5)


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
    ratios = [math.exp(value) for value in LOG_RATIOS]
    found, gradient = run(ratios, [1.0] * 4, counts=[4], name="reinforce", importance={"kind": importance, **bounds})
    assert (-gradient).tolist() == pytest.approx(expected, abs=1e-4)
    assert found.sums["masked"].item() == (expected.count(0) if "masked" in importance else 0)


def test_divergence_mask_keeps_what_moves_back() -> None:
    """A <= 0 is left out where the probability fell by more than low, whatever it rose."""
    _, gradient = run([1.6, 0.5], [-1.0, -1.0], name="dppo", importance={"low": 0.2, "high": 0.2}, weights=[1.0, 1.0])
    assert (-gradient).tolist() == pytest.approx([-1.6, 0], abs=1e-6)


def test_the_weight_of_a_rare_token_that_became_likely_is_at_most_twenty() -> None:
    """DPPO: mu = .002 and pi = .05 differ by less than .2, and their ratio is 25."""
    mu = torch.tensor([0.002]).log()
    logprobs = torch.tensor([0.05]).log().requires_grad_()
    inputs = LossInputs(logprobs, mu, torch.ones(1), torch.ones(1), completions_of([1]))
    (gradient,) = torch.autograd.grad(
        policy_loss(inputs, torch.ones(1), read_objective({"name": "dppo"})).loss, logprobs
    )
    assert (-gradient).tolist() == pytest.approx([20.0])


def test_masked_weights_that_overflow_leave_no_trace() -> None:
    _, gradient = run(
        [math.exp(60)] * 2, [1.0, 1.0], counts=[2], name="reinforce", importance={"kind": "sequence_masked"}
    )
    assert gradient.tolist() == [0.0, 0.0]


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
        policy_loss(inputs, torch.zeros(2), settings).loss.backward()
        assert logits.grad is not None
        assert -logits.grad[0].item() == pytest.approx(expected, abs=1e-6)


def test_group_token_weights_make_a_long_completion_count_by_its_tokens() -> None:
    """|o| = (1, 3), A = (+a, -a): each token weighs 1/4."""
    found, gradient = run([1.0] * 4, [2.0, -2.0, -2.0, -2.0], [0.25] * 4)
    assert (-gradient).tolist() == pytest.approx([0.5, -0.5, -0.5, -0.5])
    assert found.loss.item() == pytest.approx(-(0.5 - 1.5))


def test_a_teacher_adds_its_lead_to_every_token() -> None:
    """log nu - log pi = log(.25 / .5), log(.5 / .5); weight 2, and advantages of .5 beside it."""
    teacher = torch.tensor([math.log(0.25), math.log(0.5)])
    _, gradient = run([1.0, 1.0], [0.5, 0.5], name="distill", teacher=SERVED | {"weight": 2.0},
                      extra={"teacher": teacher})  # fmt: skip
    assert (-gradient).tolist() == pytest.approx([0.5 - 2 * math.log(2), 0.5], abs=1e-6)
    with pytest.raises(ValueError, match="log-probs of the teacher"):
        run([1.0], [0.0], name="distill", teacher=SERVED)


def test_supervised_is_the_weighted_negative_log_likelihood() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), completions_of([2]))
    found = sft_loss(inputs, torch.ones(2))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-0.5 * (math.log(0.5) + math.log(0.25)))
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, -0.5]
    assert found.sums.keys() == {"tokens", "loss", "entropy"}


def test_metrics_are_sums_over_tokens_by_hand() -> None:
    found, _ = run([0.5, 0.5, 2.0, 2.0], [1.0, -1.0, 1.0, -1.0], [0.25] * 4)
    log2 = math.log(2)
    expected = {
        "tokens": 4,
        "compared": 4,
        "loss": -0.25 * (0.5 - 0.8 + 1.28 - 2.0),
        "entropy": 4,
        "abs_logprob_difference": 4 * log2,
        "logprob_difference": 0,
        "kl_k3": 2 * (0.5 - 1 + log2) + 2 * (2 - 1 - log2),
        "ratio": 5,
        "ratio_squared": 8.5,
        "clipped_low": 1,
        "clipped_high": 1,
        "masked": 0,
    }
    assert {name: value.item() for name, value in found.sums.items()} == pytest.approx(expected, abs=1e-5)
    assert {name: value.item() for name, value in found.maxima.items()} == pytest.approx(
        {"abs_logprob_difference": log2, "ratio": 2.0}
    )


def test_truncation_counts_tokens_of_either_sign() -> None:
    found, _ = run([4.0, 4.0, 1.0, 0.1], [1.0, -1.0, 1.0, -1.0], name="aipo")
    assert (found.sums["clipped_low"].item(), found.sums["clipped_high"].item()) == (0, 2)


def regularised(name: str, **settings: Any) -> tuple[LossOutput, Tensor, Tensor]:
    """Loss and its gradients on log-probs and entropies; two completions of two tokens, pi = ref * (e, 1, 1, 1/e)."""
    logprobs = torch.tensor([-1.0, -2.0, -1.5, -3.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)
    weights = torch.tensor([0.1, 0.1, 0.4, 0.4])
    reference = torch.tensor([-2.0, -2.0, -1.5, -2.0])
    inputs = LossInputs(logprobs, logprobs.detach().clone(), torch.tensor([1.0, 1.0, -0.5, -0.5]), weights,
                        completions_of([2, 2]), reference=reference)  # fmt: skip
    found = policy_loss(inputs, entropy, read_objective(dict(name=name, **settings)))
    gradients = torch.autograd.grad(found.loss, (logprobs, entropy), materialize_grads=True)
    return found, *gradients


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_divergence_and_entropy_bonus_add_to_every_loss(name: str) -> None:
    plain, gradient, _ = regularised(name)
    found, with_both, on_entropy = regularised(name, kl={"weight": 0.5, "gradient": "weighted_k3"}, entropy_bonus=0.2)
    # weight * r * l, r = 1, l = (1, 0, 0, -1)
    assert (with_both - gradient).tolist() == pytest.approx([0.05, 0, 0, -0.2])
    assert on_entropy.tolist() == pytest.approx([-0.02, -0.02, -0.08, -0.08])
    # exp(-l) - 1 + l is 1/e and e - 2; .2 (.1 * 1.5 + .4 * 3.5)
    added = 0.5 * (0.1 / math.e + 0.4 * (math.e - 2)) - 0.31
    assert (found.loss - plain.loss).item() == pytest.approx(added, abs=1e-6)
    assert found.sums["loss"].item() == plain.sums["loss"].item()
    assert found.sums.keys() - plain.sums.keys() == {"reference_log_ratio", "regularisation"}
    assert found.sums["regularisation"].item() == pytest.approx(added, abs=1e-6)
    assert found.sums["reference_log_ratio"].item() == pytest.approx(0)


def test_what_is_needed_and_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the log-probs of a reference"):
        run([1.0], [1.0], name="grpo", kl={"weight": 0.1})
    for name in ("agro", "spo"):
        with pytest.raises(ValueError, match="needs the log-probs of a reference"):
            run([1.0], [1.0], name=name)
    with pytest.raises(ValueError, match="needs a value head"):
        run([1.0], [1.0], name="dro", extra={"reference": torch.zeros(1)})


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_a_loss_of_zero_and_no_maxima(name: str) -> None:
    nothing = torch.zeros(0)
    extra = {"reference": nothing, "values": nothing, "imitated": nothing.bool()}
    found, gradient = run([], [], counts=[], name=name, extra=extra)
    assert found.loss.item() == 0 and gradient.shape == (0,) and not found.maxima


def test_inputs_of_another_type_are_refused() -> None:
    half = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        LossInputs(half, half, half, half, completions_of([1]))
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="completions have"):
        LossInputs(one, one, one, one, completions_of([2]))


def test_an_entropy_target_moves_clip_high_by_hand() -> None:
    """Bounds .2 and .4: .01 a step at most. Entropy half, all, none, 1.5 and 9 times the target of .6."""
    settings = read_objective({"name": "magistral", "entropy_target": {"nats": 0.6}})
    for share, moved in ((0.5, 0.285), (1.0, 0.28), (0.0, 0.29), (1.5, 0.275), (9.0, 0.27)):
        assert settings.after_step(0.6 * share) == {"clip_high": pytest.approx(moved)}
    narrow = {"name": "magistral", "entropy_target": {"nats": 0.6, "clip_high_bounds": [0.279, 0.281]}}
    assert read_objective({**narrow, "clip_high": 0.281}).after_step(0.0) == {"clip_high": 0.281}
    assert read_objective({**narrow, "clip_high": 0.279}).after_step(9.0) == {"clip_high": 0.279}
    assert read_objective({"name": "magistral"}).after_step(0.0) == {}, "no target: it stays"
    assert read_objective({"name": "aipo"}).after_step(0.0) == {}


def test_an_entropy_that_follows_clip_high_is_brought_to_its_target() -> None:
    """A policy whose entropy tends to 4 (clip_high - .2) by a tenth a step, from 1.2: .4 is that of clip_high = .3."""
    table, entropy = {"name": "magistral", "entropy_target": {"nats": 0.4}}, 1.2
    for _ in range(400):
        table |= read_objective(table).after_step(entropy)
        entropy += (4 * (table["clip_high"] - 0.2) - entropy) / 10
    assert (table["clip_high"], entropy) == (pytest.approx(0.3, abs=1e-3), pytest.approx(0.4, abs=5e-3))
