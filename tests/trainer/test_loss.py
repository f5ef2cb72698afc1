import math

import pytest
import torch
from torch import Tensor

from shared.config import Objective
from shared.errors import ConfigError
from trainer.kl import Reference, last_tokens
from trainer.loss import OBJECTIVES, LossInputs, LossOutput, token_loss

SETTINGS = Objective(clip_low=0.2, clip_high=0.28, truncate=2.0)


def run(
    name: str, ratios: list[float], advantages: list[float], weights: list[float] | None = None,
    settings: Objective = SETTINGS,
) -> tuple[LossOutput, Tensor]:
    """Loss and its gradient with respect to the log-probs, for tokens of given importance ratios (behaviour p = .5)."""
    behaviour = torch.full((len(ratios),), math.log(0.5))
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    inputs = LossInputs(
        logprobs, behaviour, torch.tensor(advantages, dtype=torch.float32),
        torch.tensor(weights or [1.0] * len(ratios)),
    )
    found = token_loss(name, inputs, torch.ones(len(ratios)), settings)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    return found, gradient


@pytest.mark.parametrize(
    ("ratio", "positive", "negative"),
    [(0.5, 0.5, 0),
     (0.79, 0.79, 0), (0.81, 0.81, -0.81), (1, 1, -1), (1.27, 1.27, -1.27), (1.29, 0, -1.29), (3, 0, -3)],
)
def test_clip_higher_gradients(ratio: float, positive: float, negative: float) -> None:
    """Derivative of the objective with respect to log pi, eps = (.2, .28), no dual clip."""
    _, gradient = run("clip_higher", [ratio, ratio], [1.0, -1.0])
    assert (-gradient).tolist() == pytest.approx([positive, negative], abs=1e-5)


def test_clip_higher_values() -> None:
    for ratio, advantage, objective in ((0.5, 1, 0.5), (0.5, -1, -0.8), (1.29, 1, 1.28), (3, -1, -3)):
        assert -run("clip_higher", [ratio], [advantage])[0].loss.item() == pytest.approx(objective, abs=1e-5)


def test_grpo_clips_at_the_same_distance_on_both_sides() -> None:
    _, gradient = run("grpo", [1.19, 1.21, 1.27, 0.79, 0.79], [1.0, 1.0, 1.0, -1.0, 1.0])
    assert (-gradient).tolist() == pytest.approx([1.19, 0, 0, 0, 0.79], abs=1e-5)


def test_truncated_importance_gradient_saturates_and_never_vanishes() -> None:
    _, gradient = run("truncated_importance", [0.25, 1.5, 4.0, 4.0], [1.0, 1.0, 1.0, -1.0])
    assert (-gradient).tolist() == pytest.approx([0.25, 1.5, 2.0, -2.0], abs=1e-5)


@pytest.mark.parametrize(
    ("truncate", "plain", "with_baseline"), [(1, 0.04, 0.064), (2, 0.08, 0.096), (4, 0.16, 0.16), (1e9, 0.16, 0.16)]
)
def test_truncated_importance_expected_gradient_on_two_arms(
    truncate: float, plain: float, with_baseline: float
) -> None:
    """pi = (.8, .2), mu = (.2, .8), r = (1, 0): the expectation over mu of the gradient on the first logit."""
    policy, behaviour, rewards = torch.tensor([0.8, 0.2]), torch.tensor([0.2, 0.8]), torch.tensor([1.0, 0.0])
    settings = Objective(truncate=truncate)
    for baseline, expected in ((0.0, plain), (float(behaviour @ rewards), with_baseline)):
        logits = policy.log().requires_grad_()
        inputs = LossInputs(logits.log_softmax(0), behaviour.log(), rewards - baseline, behaviour)
        token_loss("truncated_importance", inputs, torch.zeros(2), settings).loss.backward()
        assert logits.grad is not None
        assert -logits.grad[0].item() == pytest.approx(expected, abs=1e-6)


def test_group_token_weights_make_a_long_completion_count_by_its_tokens() -> None:
    """|o| = (1, 3), A = (+a, -a): each token weighs 1/4."""
    found, gradient = run("clip_higher", [1.0] * 4, [2.0, -2.0, -2.0, -2.0], [0.25] * 4)
    assert (-gradient).tolist() == pytest.approx([0.5, -0.5, -0.5, -0.5])
    assert found.loss.item() == pytest.approx(-(0.5 - 1.5))


def test_all_objectives_have_one_gradient_on_policy() -> None:
    """mu = pi gives the same gradient A under the same weights, for every reinforcement objective."""
    advantages, weights = [1.5, -0.5, 0.0, 2.0], [0.1, 0.2, 0.3, 0.4]
    expected = [-a * w for a, w in zip(advantages, weights, strict=True)]
    for name in OBJECTIVES.keys() - {"supervised"}:
        assert run(name, [1.0] * 4, advantages, weights)[1].tolist() == pytest.approx(expected, abs=1e-6), name


def test_importance_weights_are_right_for_given_log_ratios() -> None:
    """log-ratios (.1, -.3, .5, 0) are ratios 1.1052, .7408, 1.6487, 1."""
    ratios = [math.exp(value) for value in (0.1, -0.3, 0.5, 0.0)]
    found, gradient = run("truncated_importance", ratios, [1.0] * 4)
    assert (-gradient).tolist() == pytest.approx([1.1052, 0.7408, 1.6487, 1.0], abs=1e-4)
    assert found.sums["ratio"].item() == pytest.approx(sum(ratios), abs=1e-5)


def test_supervised_is_the_weighted_negative_log_likelihood() -> None:
    found, gradient = run("supervised", [1.0, 0.5], [1.0, 1.0], [0.5, 0.5])
    assert found.loss.item() == pytest.approx(-0.5 * (math.log(0.5) + math.log(0.25)))
    assert gradient.tolist() == [-0.5, -0.5]
    assert found.sums.keys() == {"tokens", "loss", "entropy"}


def test_metrics_are_sums_over_tokens_by_hand() -> None:
    found, _ = run("clip_higher", [0.5, 0.5, 2.0, 2.0], [1.0, -1.0, 1.0, -1.0], [0.25] * 4)
    log2 = math.log(2)
    expected = {
        "tokens": 4,
        "loss": -0.25 * (0.5 - 0.8 + 1.28 - 2.0),
        "entropy": 4,
        "abs_logprob_difference": 4 * log2,
        "logprob_difference": 0,
        "kl_k3": 2 * (0.5 - 1 + log2) + 2 * (2 - 1 - log2),
        "ratio": 5,
        "ratio_squared": 8.5,
        "clipped_low": 1,
        "clipped_high": 1,
    }
    assert {name: value.item() for name, value in found.sums.items()} == pytest.approx(expected, abs=1e-5)
    assert {name: value.item() for name, value in found.maxima.items()} == pytest.approx(
        {"abs_logprob_difference": log2, "ratio": 2.0}
    )


def test_truncation_counts_tokens_of_either_sign() -> None:
    found, _ = run("truncated_importance", [4.0, 4.0, 1.0, 0.1], [1.0, -1.0, 1.0, -1.0])
    assert (found.sums["clipped_low"].item(), found.sums["clipped_high"].item()) == (0, 2)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_setting_named_by_a_loss_changes_it_and_no_other_does(name: str) -> None:
    changed = {
        key: run(name, [0.5, 0.5, 4.0, 4.0], [1.0, -0.7, 1.0, -0.7], settings=Objective(**{key: value}))[0].loss.item()
        for key, value in (("clip_low", 0.3), ("clip_high", 0.5), ("truncate", 3.0))
    }
    base = run(name, [0.5, 0.5, 4.0, 4.0], [1.0, -0.7, 1.0, -0.7])[0].loss.item()
    used = {"clip_higher": {"clip_low", "clip_high"}, "grpo": {"clip_low"}, "truncated_importance": {"truncate"}}
    assert {key for key, value in changed.items() if value != pytest.approx(base)} == used.get(name, set())


def regularised(name: str, settings: Objective) -> tuple[LossOutput, Tensor, Tensor]:
    """Loss and its gradients on log-probs and entropies; two completions of two tokens, pi = ref * (e, 1, 1, 1/e)."""
    logprobs = torch.tensor([-1.0, -2.0, -1.5, -3.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)
    weights = torch.tensor([0.1, 0.1, 0.4, 0.4])
    inputs = LossInputs(logprobs, logprobs.detach().clone(), torch.tensor([1.0, 1.0, -0.5, -0.5]), weights)
    reference = Reference(torch.tensor([-2.0, -2.0, -1.5, -2.0]), last_tokens([2, 2]))
    found = token_loss(name, inputs, entropy, settings, reference)
    gradients = torch.autograd.grad(found.loss, (logprobs, entropy), materialize_grads=True)
    return found, *gradients


@pytest.mark.parametrize("name", OBJECTIVES)
def test_divergence_and_entropy_bonus_add_to_every_objective_but_the_supervised_one(name: str) -> None:
    plain, gradient, _ = regularised(name, Objective())
    found, with_both, on_entropy = regularised(name, Objective(kl=0.5, kl_gradient="k2", entropy_bonus=0.2))
    on = float(name != "supervised")
    # k2: weight * l, l = (1, 0, 0, -1)
    assert (with_both - gradient).tolist() == pytest.approx([0.05 * on, 0, 0, -0.2 * on])
    assert on_entropy.tolist() == pytest.approx([-0.02 * on, -0.02 * on, -0.08 * on, -0.08 * on])
    # .5 (.1 * .5 + .4 * .5) and .2 (.1 * 1.5 + .4 * 3.5)
    assert (found.loss - plain.loss).item() == pytest.approx((0.125 - 0.31) * on)
    assert found.sums["loss"].item() == plain.sums["loss"].item()
    assert found.sums.keys() - plain.sums.keys() == ({"reference_log_ratio", "regularisation"} if on else set())
    if on:
        assert found.sums["regularisation"].item() == pytest.approx(0.125 - 0.31)
        assert found.sums["reference_log_ratio"].item() == pytest.approx(0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_switched_off_they_leave_the_loss_to_the_last_bit(name: str) -> None:
    values = [0.3, 1.7, 2.0, 0.9]
    expected, gradient = run(name, values, [1.0, -1.0, 0.5, 2.0])
    for gradient_name in ("return", "weighted_k3", "k1", "k2", "k3"):
        settings = SETTINGS.model_copy(update={"kl_gradient": gradient_name})
        found, same = run(name, values, [1.0, -1.0, 0.5, 2.0], settings=settings)
        assert found.loss.item() == expected.loss.item() and torch.equal(same, gradient)
        assert found.sums.keys() == expected.sums.keys()


def test_divergence_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the log-probs of a reference"):
        run("grpo", [1.0], [1.0], settings=Objective(kl=0.1))


def test_no_tokens_give_a_loss_of_zero_and_no_maxima() -> None:
    for name in OBJECTIVES:
        found, gradient = run(name, [], [])
        assert found.loss.item() == 0 and gradient.shape == (0,) and not found.maxima


def test_a_loss_of_another_name_or_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="objective.loss = 'ppo'"):
        run("ppo", [1.0], [1.0])
    half = torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        LossInputs(half, half, half, half)
