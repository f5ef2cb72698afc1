r"""JEPO: learning from ground truths that no verifier checks, by a lower bound of their likelihood (arXiv 2503.19618).

A completion is cut where its answer begins, and the ground truth a* put there:

    sampled   <think> ... </think> The sum is 4, so \boxed{4}.<end>
    kept      <think> ... </think> The sum is 4, so \boxed{           the sampled tokens themselves, not encoded again
    ground truth                                           5}<end>    log pi of these tokens is L_i

Over n completions of a prompt, whose reasoning is c_i, with L_i = log pi(a*|x, c_i), the sum over the answer's tokens:

    bound            value                     advantage of reasoning c_i                         gradient of the answer
    single_sample    mean_i L_i                L_i - mean_{j != i} L_j                            mean_i grad L_i
    multi_sample     log mean_i exp(L_i)       log mean_j exp(L_j) - log mean_{j != i} exp(L_j)   softmax(L)_i grad L_i

(equations 4, 7 and 8; the second is the tighter one.) What is trained is their appendix B.2: advantages divided by
their standard deviation over the group and kept within -1 and 1, a penalty for completions that never answer (they have
no L and are in no bound), and the answer's gradient times answer_weight:

    loss = - sum_i weight_i (A_i + penalty_i) sum_t c_t log pi(c_it) - answer_weight sum_i weight_i n_i s_i L_i

The paper cuts after the words "the final answer is". Our form has a cue of its own in every language, the box that is
graded, so the cut is there. The text before it is part of the reasoning c_i of the bound, the summary too, and a
summary may have named an answer already ("4" above): then L_i says mostly whether that one was right. The bound holds
for any cut, but reasoning that is followed by a wrong summary is blamed for it.
A token over the cut, as "{4" for "\boxed{4}", is not kept: its letters before the cut begin the ground truth.
Groups that are not bounded are trained by their rewards, as by any policy gradient.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from shared.chat import Chat
from shared.config import Config
from shared.lazy_module import LazyModule
from shared.types import IMITATED, SAMPLED, Completion, Group, TrainSequence, Verdict
from trainer.objectives.advantage import graded
from trainer.objectives.importance import Importance, TokenTruncated
from trainer.objectives.inputs import LossInputs, LossTerm
from trainer.objectives.objective import Need
from trainer.objectives.policy_gradient import PLAIN, PolicyGradient
from trainer.objectives.registry import publish
from trainer.objectives.sequences import sequence_of
from verify.extract import find_answer
from verify.format import parts_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

FEW = 32
"""tokens from the end of a completion among which its box is looked for first; then twice as many"""


# ---- the bound -----------------------------------------------------------------------------------------------------


def log_mean_exp(values: Tensor) -> Tensor:
    """Return log((1/n) sum exp(values)), 0-dimensional. values: [n]."""
    return values.logsumexp(-1) - math.log(values.shape[-1])


def others(values: Tensor) -> Tensor:
    """Return [n, n - 1], whose row i holds all values but the i-th. values: [n]."""
    n = values.shape[0]
    return values.expand(n, n)[~torch.eye(n, dtype=torch.bool, device=values.device)].view(n, n - 1)


def bound_advantages(likelihoods: Tensor, bound: str) -> Tensor:
    """Return the [n] advantages of the reasoning of n completions.

    likelihoods: [n] log-likelihoods of the ground truth after each reasoning.

    The sum over i of advantage_i times the score of c_i has the gradient of n times the single-sample and of the
    multi-sample bound as its expectation (leave-one-out takes nothing away); with the gradient of the answer's tokens
    that is the whole. A single one has advantage 0.
    """
    likelihoods = likelihoods.detach()
    if likelihoods.shape[0] < 2:
        return torch.zeros_like(likelihoods)
    if bound == "single_sample":
        return likelihoods - others(likelihoods).mean(-1)
    return log_mean_exp(likelihoods) - log_mean_exp(others(likelihoods))


def bound_value(likelihoods: Tensor, bound: str) -> Tensor:
    """Return the bound of one prompt, 0-dimensional; its gradient is that of the answer's tokens. likelihoods: [n]."""
    return likelihoods.mean() if bound == "single_sample" else log_mean_exp(likelihoods)


def normalised(advantages: Tensor) -> Tensor:
    """Return clip(advantage / standard deviation over the n, -1, 1), [n]; zeros stay. advantages: [n]."""
    deviation = advantages.std(correction=0)
    return (advantages / deviation).clamp(-1, 1) if deviation > 0 else torch.zeros_like(advantages)


# ---- ground-truth answers in the place of sampled ones --------------------------------------------------------------


class Spliced(NamedTuple):
    """A completion whose answer is replaced: its first `kept` tokens, then `ground_truth`."""

    kept: int
    """leading sampled tokens that are kept"""
    ground_truth: list[int]
    """[tokens] of the ground truth, of the brace that closes its box, and the end of the sequence"""


def splice_answer(chat: Chat, completion_ids: list[int], answer: str) -> Spliced | None:
    r"""Cut a completion where the answer that is graded begins, and put the ground truth there.

    completion_ids: [tokens] as sampled. The text of the result is the completion's up to \boxed{, then `answer`, "}"
    and the end of the sequence. Of boxes that are one answer together ("\boxed{1} and \boxed{2}") the first is the cue.
    None when the format is broken by the rules that rewards go by (no box after the reasoning, reasoning never closed):
    such a completion gives no answer, gets the penalty and is in no bound (section 4 of the paper).
    """
    parts = parts_of(chat, completion_ids)
    if not parts.ok:
        return None
    text = chat.decode(completion_ids)
    first, _ = find_answer(parts.response)[0]
    kept, rest = cut(chat, completion_ids, text, len(text) - len(parts.response) + first)
    return Spliced(kept, [*encode_inside(chat, f"{rest}{answer}}}"), chat.eos_id])


def cut(chat: Chat, ids: list[int], text: str, at: int) -> tuple[int, str]:
    """Return the number of leading tokens whose text ends before or at character `at`, and the text between both.

    ids: [tokens], text: chat.decode(ids). No token is split, and no character whose bytes are in several tokens.
    """
    count = FEW
    while count < len(ids) and len(chat.decode(ids[-count:])) <= len(text) - at:
        count *= 2
    low = max(len(ids) - count, 0)
    before = len(text) - len(chat.decode(ids[low:]))
    # of the tokens from `low` on the first that ends after the cut; whole texts then decide, since decoding a part may
    # lose a blank or half a character
    behind = bisect_right(range(low, len(ids)), at - before, key=lambda end: len(chat.decode(ids[low:end])))
    kept = low + behind
    while len(head := chat.decode(ids[:kept])) > at or not text.startswith(head):
        kept -= 1
    return kept, text[len(head) : at]


def encode_inside(chat: Chat, text: str) -> list[int]:
    """Return the [tokens] of text that follows other text, without the blank that some tokenizers put before a text;
    what it spells is no control token."""
    if chat.decode(chat.encode("x") * 2) == "xx":
        return chat.encode_plain(text)
    line = chat.encode_plain("\n")
    return chat.encode_plain(f"\n{text}")[len(line) :]


# ---- the objective -------------------------------------------------------------------------------------------------


class Jepo(PolicyGradient):
    """Settings and loss of the Jensen bound."""

    gradient_follows_advantages = False
    compares_rewards = False
    advantages_by_token = False
    several_turns = "puts the ground truth in the place of the only answer of a completion"

    importance: Importance = TokenTruncated()
    """weight of a sampled token, as in a policy gradient"""
    bound: Literal["multi_sample", "single_sample"] = "multi_sample"
    """Jensen bound: of the mean over a group's completions (tighter), or of each alone"""
    bound_groups: Literal["every", "unsolved", "open"] = "every"
    """groups that are trained by the bound: every one, those without a right completion, or those whose answer no
    verifier compares; the others by their rewards"""
    answer_weight: float = Field(0.01, ge=0)
    """weight of imitating the ground truth after the reasoning: 1 for long answers, 0 to 0.01 for short ones"""
    missing_answer_penalty: float = Field(10.0, ge=0)
    """penalty of a completion that never gives an answer (no box after its reasoning)"""

    @property
    def needs(self) -> set[Need]:
        """Return what the bound needs in addition to the policy gradient: whole groups and ground truths."""
        return super().needs | {Need.GROUPS, Need.GROUND_TRUTH}

    def is_bounded(self, group: Group) -> bool:
        """Return whether a group is trained by the bound. Programming problems have tests and no answer, hence none."""
        if not group.prompt.problem.answer:
            return False
        if self.bound_groups == "open":
            return not group.prompt.problem.verified
        if self.bound_groups == "unsolved":
            return all(reward is None or reward.verdict is not Verdict.CORRECT for reward in group.rewards)
        return True

    @property
    def learns_from(self) -> Literal["rows", "log-probs", ""]:
        """None: its bound is one of the policy's own reasoning."""
        return ""

    def sequences(
        self, groups: Sequence[Group], config: Config, chat: Chat | None, values: Mapping[str, float] | None
    ) -> list[list[TrainSequence | None]]:
        """Return, of bounded groups, the reasoning with the ground truth after it, and the penalties as advantages.

        A group in which one would be longer than model.max_tokens is trained by its rewards.
        """
        rows = super().sequences(groups, config, chat, values)
        for number, group in enumerate(groups):
            if chat is None or not self.is_bounded(group):
                continue
            row = [
                splice(chat, group, completion) if graded(reward) else None
                for completion, reward in zip(group.completions, group.rewards, strict=True)
            ]
            if all(one is None or len(one.token_ids) <= config.model.max_tokens for one in row):
                self.penalise([one for one in row if one is not None and SAMPLED in one.mask])
                rows[number] = row
        return rows

    def penalise(self, sequences: Sequence[TrainSequence]) -> None:
        """Set the advantages of a bounded group: what each loses for an answer that is missing, less what the others
        lose in the mean."""
        missing = [float(IMITATED not in sequence.mask) for sequence in sequences]
        for sequence, without in zip(sequences, missing, strict=True):
            share = (math.fsum(missing) - without) / (len(missing) - 1) if len(missing) > 1 else 0.0
            sequence.advantages = [-self.missing_answer_penalty * (without - share)]

    def loss(self, inputs: LossInputs) -> LossTerm:
        """Return the loss above, summed over the groups of a micro-batch, which must be whole.

        Groups with a ground truth in them are bounded.
        """
        if inputs.imitated is None:
            return super().loss(inputs)
        completions, ground_truth = inputs.completions, inputs.imitated
        likelihoods = completions.sums(inputs.logprobs * ground_truth)
        answered = completions.sums(ground_truth.to(inputs.weights.dtype)) > 0
        advantages = inputs.advantages[completions.first].clone()
        imitated = torch.zeros_like(inputs.weights).sum()
        for group in completions.group[answered].unique().tolist():
            good = ((completions.group == group) & answered).nonzero().squeeze(-1)
            advantages[good] += normalised(bound_advantages(likelihoods[good], self.bound))
            weight = inputs.weights[completions.first[good]].sum()
            imitated = imitated + weight * bound_value(likelihoods[good], self.bound)
        reasoning = replace(
            inputs,
            advantages=advantages[completions.index],
            weights=inputs.weights * ~ground_truth,
            # ground-truth answers were not sampled: their log-probs now stand in, so that their ratios are 1
            behaviour=torch.where(ground_truth, inputs.logprobs.detach(), inputs.behaviour),
        )
        term = super().loss(reasoning)
        return LossTerm(
            term.loss - self.answer_weight * imitated,
            *(touched & ~ground_truth for touched in (term.clipped_low, term.clipped_high, term.masked)),
        )


def splice(chat: Chat, group: Group, completion: Completion) -> TrainSequence:
    """Return a completion with the ground truth in the place of its answer; as it was sampled where it gives none."""
    sequence = sequence_of(group, completion, [0.0])
    if (spliced := splice_answer(chat, completion.token_ids, group.prompt.problem.answer)) is not None:
        kept = len(group.prompt.token_ids) + spliced.kept
        sequence.token_ids = sequence.token_ids[:kept] + spliced.ground_truth
        sequence.mask = sequence.mask[:kept] + bytes([IMITATED]) * len(spliced.ground_truth)
        unknown = [0.0] * len(spliced.ground_truth)
        sequence.columns = {name: column[: spliced.kept] + unknown for name, column in sequence.columns.items()}
    return sequence


publish("jepo", Jepo, "arXiv 2503.19618, equations 4, 7 and 8", filter_groups_by="off", **PLAIN)
