"""Advantages of one group: from the rewards and answers of a prompt's completions to one number a completion.

    function         A_i                                          mean of (1/n) sum_i A_i s_i over groups of n
    mean_baseline    r_i - mean r                                 (1 - 1/n) grad E r
    leave_one_out    r_i - mean of the others' r                  grad E r
    maxrl            (r_i - mean r) / mean r                      grad of log P(right) to the order n - 1
    best_of          k E_S[max of S - max of S without i]         grad E[best reward of k]
    majority_of      k E_S[maj of S - maj of S without i]         grad E[majority of k is right]
    each_reward      sum_c weight_c (r_ci - mean r_c) / std r_c   the gradient of no known objective

n completions y_i; s_i = grad log pi(y_i); E_S: mean over all choices S of k of the completions, i among them.
A group of equal rewards (all right, all wrong) has exactly 0 everywhere, for k >= 2.
No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from shared.statistics import exact_majority_at_k


def mean_baseline(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean_j r_j (GRPO, arXiv 2402.03300, without its deviation; Magistral, arXiv 2506.10910).

    rewards: [completions]. The mean holds r_i itself: the gradient is (1 - 1/n) of that of E r. Equal rewards give
    exactly 0, whatever their mean rounds to.
    """
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean_{j != i} r_j = n/(n - 1) (r_i - mean_j r_j) (RLOO, arXiv 2402.14740): unbiased.

    rewards: [completions]. A completion alone has nothing to be compared with: 0.
    """
    count = len(rewards)
    return [centred * count / (count - 1) if count > 1 else 0.0 for centred in mean_baseline(rewards)]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean_j r_j) / mean_j r_j, 0 where the mean is 0 or below (MaxRL, arXiv 2602.02710).

    rewards: [completions], at least 0. For rewards of 0 and 1 with P(right) = p the expected gradient is that of
    -sum_{m=1}^{n-1} (1 - p)^m / m: log p to the order n - 1 in 1 - p. (Without a baseline, r_i / mean r, it is of order
    n; a baseline that is 0 in groups with none right takes off the last term, (1 - p)^(n-1) grad p.)
    """
    centred = mean_baseline(rewards)
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [value / mean if mean > 0 else 0.0 for value in centred]


def best_of(rewards: Sequence[float], k: int) -> list[float]:
    """How much each completion adds to the best of k: A_i = k E_S[max_S r - max_{S without i} r] (arXiv 2503.19595).

    S: all choices of k of the n completions that hold i. The mean over groups of (1/n) sum_i A_i s_i is the gradient of
    E[max of k rewards] (pass@k for rewards of 0 and 1), for any real rewards and 2 <= k <= n. None is negative;
    with k = n only the best has any: n (best - second best).

    In ascending order r_1 <= ... <= r_n: r_j exceeds the best of k - 1 others by the sum of those gaps r_{m+1} - r_m,
    m < j, below which all of the others are, which has chance C(m, k-1) / C(n-1, k-1). So
    A_j = k sum_{m=k-1}^{j-1} C(m, k-1) / C(n-1, k-1) (r_{m+1} - r_m), a sum without cancellation.

    rewards: [completions]. Raises ValueError for another k.
    """
    count = len(rewards)
    if not 2 <= k <= count:
        raise ValueError(f"objective.advantage.k = {k} with {count} completions in a group: it must be 2 to {count}")
    order = sorted(range(count), key=lambda i: rewards[i])
    added = [0.0] * count
    for below, (lower, upper) in enumerate(zip(order, order[1:], strict=False), start=1):
        chance = math.comb(below, k - 1) / math.comb(count - 1, k - 1)
        added[upper] = added[lower] + k * chance * (rewards[upper] - rewards[lower])
    return added


def majority_of(right: Sequence[bool], answers: Sequence[str | None], k: int) -> list[float]:
    """How much each completion adds to the majority of k: A_i = k E_S[f(S) - f(S without i)] (arXiv 2503.19595).

    f(S): chance that the most frequent answer of S is right, ties shared, right answers counting together whatever
    their form, 0 without votes (shared/statistics.py, majority_at_k). S: all choices of k of the n completions that
    hold i. The mean over groups of (1/n) sum_i A_i s_i is the gradient of E[f of k completions], for 1 <= k <= n.

    With U_k the mean of f over all choices of k, E_S f(S) = (C(n, k) U_k(all) - C(n-1, k) U_k(all without i)) /
    C(n-1, k-1), hence A_i = n U_k(all) - (n - k) U_k(all without i) - k U_{k-1}(all without i), in exact fractions.
    All right completions have the same, and wrong ones whose answers are equally frequent. With k = n only a vote that
    changes the outcome has any; k = 1 gives the reward itself.

    right: [completions]; answers: [completions] in a form in which equal ones are equal texts, None for one that does
    not vote (the answer of a right completion is not read). Raises ValueError for another k.
    """
    count = len(right)
    if not 1 <= k <= count:
        raise ValueError(f"objective.advantage.k = {k} with {count} completions in a group: it must be 1 to {count}")
    votes = Counter(answer for is_right, answer in zip(right, answers, strict=True) if not is_right)
    silent, rights = votes.pop(None, 0), sum(right)
    wrong = sorted(votes.values())
    every = count * exact_majority_at_k(rights, wrong, silent, k)

    def adds(is_right: bool, size: int) -> float:
        """A_i of a right completion, or of one whose wrong answer `size` completions have (0: no answer)."""
        if not is_right and size == 0:
            return 0.0
        others = list(wrong)
        if not is_right:
            others[others.index(size)] -= 1
        chances = [
            exact_majority_at_k(rights - is_right, others, silent, chosen) if 0 < chosen < count else Fraction()
            for chosen in (k, k - 1)
        ]
        return float(every - (count - k) * chances[0] - k * chances[1])

    pairs = zip(right, answers, strict=True)
    kinds = [(bool(is_right), 0 if is_right else votes[answer]) for is_right, answer in pairs]
    by_kind = {kind: adds(*kind) for kind in set(kinds)}
    return [by_kind[kind] for kind in kinds]


def each_reward(components: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """A_i = sum_c weight_c (r_ci - mean_j r_cj) / std_j r_cj: each reward by itself (GDPO, arXiv 2601.05242).

    components: [rewards][completions], not yet times their weights; weights: [rewards]. std is the population's; a
    reward that is the same (to the last bit) for the whole group adds nothing. The caller scales over the minibatch.
    """
    columns: list[list[float]] = []
    for rewards, weight in zip(components, weights, strict=True):
        centred = mean_baseline(rewards)
        deviation = math.sqrt(math.fsum(value * value for value in centred) / max(1, len(centred)))
        columns.append([weight * value / deviation if deviation else 0.0 for value in centred])
    return [math.fsum(values) for values in zip(*columns, strict=True)]
