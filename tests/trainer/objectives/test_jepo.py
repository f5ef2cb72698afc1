r"""JEPO: the bound by enumeration of the reasoning, the whole loss by hand, and ground truths put where completions
give their own answer: what is kept, what follows, and which groups get a bound."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.quickstart.prepare import Options, make_tiny_model
from shared.chat import Chat
from shared.config import Config
from shared.types import CONTEXT, IMITATED, SAMPLED, Completion, Group, Problem, Prompt, Reward, TrainSequence, Verdict
from tests.tables import read_table
from trainer.objectives.inputs import LossInputs, completions_of
from trainer.objectives.jepo import (
    Jepo,
    bound_advantages,
    bound_value,
    encode_inside,
    normalised,
    others,
    splice_answer,
)  # fmt: skip
from trainer.objectives.kl import GRADIENTS
from trainer.objectives.loss import LossOutput, policy_loss
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of, read_objective
from verify.extract import extract_answer
from verify.format import after_reasoning

BOUNDS = ("single_sample", "multi_sample")


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("bound", BOUNDS)
def test_reasoning_and_answer_together_are_the_gradient_of_the_bound(bound, n):
    """Two kinds of reasoning, equally likely; the ground truth has probability .9 after the first and .1 after the
    second. The logits of reasoning and of answers are all trained; of the single-sample bound the reasoning's part is n
    times the bound's (the normalised advantages of the loss know no such factor)."""
    reasoning = torch.tensor([0.5, 0.5]).log().requires_grad_()
    answers = torch.tensor([math.log(9), -math.log(9)], requires_grad=True)
    value, estimate = torch.zeros(()), torch.zeros(())
    for kinds in itertools.product(range(2), repeat=n):
        logs = reasoning.log_softmax(0)[torch.tensor(kinds)]
        likelihoods = torch.nn.functional.logsigmoid(answers)[torch.tensor(kinds)]
        chance = logs.sum().exp()
        value = value + chance * bound_value(likelihoods, bound)
        pull = (bound_advantages(likelihoods, bound) * logs).sum() / (n if bound == "single_sample" else 1)
        estimate = estimate + chance.detach() * (pull + bound_value(likelihoods, bound))
    expected = torch.autograd.grad(value, [reasoning, answers], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(estimate, [reasoning, answers]), expected, atol=1e-6, rtol=0)


def test_advantages_of_answers_by_hand_and_without_overflow():
    likelihoods = torch.tensor([0.6, 0.2, 0.1]).log()
    # log mean .3 less that of the others: .15, .35, .4
    multi = [math.log(2), math.log(0.3 / 0.35), math.log(0.3 / 0.4)]
    single = [math.log(0.6 / math.sqrt(0.02)), math.log(0.2 / math.sqrt(0.06)), math.log(0.1 / math.sqrt(0.12))]
    for bound, expected in (("multi_sample", multi), ("single_sample", single)):
        assert bound_advantages(likelihoods, bound).tolist() == pytest.approx(expected, abs=1e-6)
        # likelihoods of e^-900 and less have no number; their ratios have
        assert bound_advantages(likelihoods - 900, bound).tolist() == pytest.approx(expected, abs=1e-3)
        assert bound_advantages(torch.tensor([-2.0]), bound).tolist() == [0.0], "alone: nothing to compare with"
        assert bound_value(torch.tensor([-2.0]), bound).item() == -2.0
    assert others(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[2, 3], [1, 3], [1, 2]]


def test_advantages_become_at_most_one_and_those_of_equal_help_nothing():
    """(1, 0, -1): deviation sqrt(2/3), 1.2247 is cut to 1. (.5, .5, .5, -1.5): sqrt(.75). About their mean: (3, 1)
    have deviation 1. Equal ones exactly 0: a rounding error over a deviation of rounding errors would be 1."""
    assert normalised(torch.tensor([1.0, 0.0, -1.0])).tolist() == [1.0, 0.0, -1.0]
    assert normalised(torch.tensor([0.5, 0.5, 0.5, -1.5])).tolist() == pytest.approx([0.57735] * 3 + [-1], abs=1e-5)
    assert normalised(torch.tensor([3.0, 1.0, 3.0, 1.0]) / 4).tolist() == [1.0] * 4
    for n, value, bound in itertools.product(range(1, 20), (0.0, -0.1, -1.3, -203.7), BOUNDS):
        assert normalised(bound_advantages(torch.full((n,), value), bound)).tolist() == [0.0] * n


TOKENS = [
    # (log pi, log mu, weight, of the ground truth) of each token of a completion
    [(0.5, 0.4, 0.1, False), (0.25, 0.1, 0.1, False), (0.75, 1.0, 0.1, True), (0.8, 1.0, 0.1, True)],
    [(0.3, 0.6, 0.2, False), (0.2, 1.0, 0.2, True)],
    [(0.9, 0.9, 0.1, False), (0.5, 0.25, 0.1, False)],
    [(0.6, 0.5, 0.3, False)],
    [(0.4, 0.1, 0.2, False), (0.7, 0.7, 0.2, False)],
]
"""probabilities pi and mu, weights; groups (0, 0, 0), trained by the bound, and (1, 1), trained by rewards"""
CORRECTIONS = [[1.25, 2.0], [0.5], [1.0, 2.0], [1.2], [2.0, 1.0]]
"""min(pi / mu, 2) of the sampled tokens"""
REWARDS = [7.0, 7.0, 7.0, 0.5, -0.5]
"""advantages as they come; those of the bounded group are not looked at"""


def jepo(*chosen: int, name: str = "jepo", **given: Any) -> tuple[LossOutput, list[list[float]]]:
    """(the output, its gradient by completion and token) of the chosen completions of TOKENS, all unless given."""
    chosen = chosen or (0, 1, 2, 3, 4)
    rows = [TOKENS[number] for number in chosen]
    pi, mu, weights, imitated = (torch.tensor(part) for part in zip(*itertools.chain(*rows), strict=True))
    counts, logprobs = [len(row) for row in rows], pi.log().requires_grad_()
    objective = read_objective({"name": name, **given})
    sequences = [
        TrainSequence([0, *[1] * len(row)], bytes([CONTEXT, *(IMITATED if token[3] else SAMPLED for token in row)]),
                      0.0, [REWARDS[number]])
        for number, row in zip(chosen, rows, strict=True)
    ]  # fmt: skip
    if isinstance(objective, Jepo):
        objective.penalise([each for number, each in zip(chosen, sequences, strict=True) if number < 3])
    inputs = LossInputs(
        logprobs, mu.log(), torch.tensor([each.advantages[0] for each in sequences]).repeat_interleave(
            torch.tensor(counts)), weights, completions_of(counts, [int(number > 2) for number in chosen]),
        imitated=imitated, reference=torch.full_like(mu, 0.5).log() if given.get("kl") else None,
    )  # fmt: skip
    output = policy_loss(inputs, torch.ones_like(mu), objective)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, [part.tolist() for part in torch.split(gradient, counts)]


@pytest.mark.parametrize(
    ("bound", "advantages", "value", "shares"),
    [
        # .75 * .8 = .6 and .2: log 3 and -log 3, over their deviation 1 and -1
        ("single_sample", [1.0, -1.0], (math.log(0.6) + math.log(0.2)) / 2, [0.5, 0.5]),
        # log mean(.6, .2) = log .4, of the others alone log .2 and log .6; deviation of the two log(3)/2. log 2 is cut
        ("multi_sample", [1.0, math.log(0.4 / 0.6) / (math.log(3) / 2)], math.log(0.4), [0.75, 0.25]),
    ],
)
@pytest.mark.parametrize(("answer_weight", "penalty"), [(0.01, 10.0), (1.0, 0.5), (0.0, 0.0)])
def test_the_loss_by_hand(bound, advantages, value, shares, answer_weight, penalty):
    """The third never answers: it loses the penalty, of which each of the others had expected one half. The first two,
    of weights .1 and .2, have their shares of the bound."""
    output, gradient = jepo(bound=bound, answer_weight=answer_weight, missing_answer_penalty=penalty)
    full = [advantage + penalty / 2 for advantage in advantages] + [-penalty, 0.5, -0.5]
    loss = -0.3 * answer_weight * value
    for number, (tokens, corrections) in enumerate(zip(TOKENS, CORRECTIONS, strict=True)):
        factors = [
            -weight * full[number] * correction
            for (_, _, weight, _), correction in zip(tokens, corrections, strict=False)
        ]
        loss += sum(factor * math.log(p) for factor, (p, *_) in zip(factors, tokens, strict=False))
        answer = [-0.3 * answer_weight * shares[number]] * (len(tokens) - len(factors)) if number < 2 else []
        assert gradient[number] == pytest.approx([*factors, *answer], abs=1e-6)
    assert output.loss.item() == pytest.approx(loss, abs=1e-5)


def test_a_group_trained_by_rewards_is_the_weighted_loss():
    output, gradient = jepo(3, 4)
    other, weighted = jepo(3, 4, name="aipo")
    assert output.loss.item() == other.loss.item() and gradient == weighted
    assert output.sums["clipped_high"].item() == other.sums["clipped_high"].item() == 1
    # beside a bounded group it adds the same
    assert (jepo()[0].loss - jepo(0, 1, 2)[0].loss).item() == pytest.approx(other.loss.item(), abs=1e-5)


def test_where_a_completion_is_alone_and_where_none_or_one_of_a_group_answers():
    """Alone it only imitates or is penalised. None answers: all lost the same, no gradient at all. One: it gains what
    the other lost, and its answer is imitated."""
    for bound in BOUNDS:
        output, gradient = jepo(0, bound=bound, answer_weight=0.5)
        assert output.loss.item() == pytest.approx(-0.5 * 0.1 * math.log(0.6), abs=1e-6)
        assert gradient == [pytest.approx([0, 0, -0.05, -0.05], abs=1e-6)]
        _, gradient = jepo(2, bound=bound, missing_answer_penalty=4.0)
        assert gradient == [pytest.approx([0.1 * 4, 0.1 * 4 * 2], abs=1e-6)]
    output, gradient = jepo(2, 2, missing_answer_penalty=10.0)
    assert output.loss.item() == 0 and gradient == [[0.0, 0.0]] * 2
    _, gradient = jepo(1, 2, missing_answer_penalty=10.0, answer_weight=0.5)
    good, bad = [-0.2 * 10 * 0.5, -0.5 * 0.2], [0.1 * 10 * 1, 0.1 * 10 * 2]
    assert gradient == [pytest.approx(good, abs=1e-6), pytest.approx(bad, abs=1e-6)]


def test_ground_truth_answers_are_neither_clipped_nor_off_policy():
    """Metrics of ratios and of truncation are about what was sampled: of its 8 tokens two have a ratio above 2. An
    entropy bonus is of the reasoning alone: entropies are 1, weights .1 .1 of the first completion."""
    output, _ = jepo()
    sums = {name: value.item() for name, value in output.sums.items()}
    assert sums["ratio"] == pytest.approx(sum([1.25, 2.5, 0.5, 1.0, 2.0, 1.2, 4.0, 1.0]), abs=1e-5)
    assert sums["tokens"] == sums["entropy"] == 8, "an entropy of 1 each"
    assert sums["clipped_high"] == 2 and sums["clipped_low"] == 0
    assert output.maxima["ratio"].item() == pytest.approx(4.0)
    # of the first completion the geometric mean of the two sampled ratios is (1.25 * 2.5)^(1/2) = 1.77; with the two of
    # the ground truth, which are 1, it would be 1.33 and kept. Others: .5, (1 * 2)^(1/2), 1.2, 2
    output, _ = jepo(importance={"kind": "geometric_masked", "low": 0.1, "high": 1.5})
    assert output.sums["masked"].item() == 4 and output.sums["clipped_high"].item() == 4
    bonus = (jepo(0, entropy_bonus=0.5)[0].loss - jepo(0)[0].loss).item()
    assert bonus == pytest.approx(-0.5 * 0.2, abs=1e-6)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_divergence_is_of_the_reasoning_alone(kind):
    """Ground truths were not sampled: they add nothing to the divergence, its gradient or the sums for metrics."""
    still: dict[str, Any] = {"answer_weight": 0.0, "missing_answer_penalty": 0.0}
    assert jepo(0, **still)[1] == [[0.0] * 4]
    output, gradient = jepo(0, kl={"weight": 2.0, "gradient": kind}, **still)
    logs, ratios = [math.log(0.5 / 0.5), math.log(0.25 / 0.5)], [1.25, 2.5]
    whole = math.prod(ratios) * sum(logs)
    expected = {"return": [ratios[0] * sum(logs), ratios[1] * logs[1]],
                "weighted_k3": [ratios[0] * logs[0], ratios[1] * logs[1]]}.get(kind, [whole] * 2)  # fmt: skip
    assert gradient == [pytest.approx([0.2 * expected[0], 0.2 * expected[1], 0, 0], abs=1e-6)]
    assert output.sums["reference_log_ratio"].item() == pytest.approx(sum(logs), abs=1e-6)


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MERGES = [("{", "4"), ("}", "."), ("{4", "}."), ("d", "{")]
"""so that tokens lie over the cut and over the end of the box"""
OVER = "©\\boxed{4"
"""a token that begins with the second byte of é"""
ANSWERS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|[]"), min_size=1, max_size=30)


def write(folder: Path, tokenizer: Tokenizer, template: str, *special: str) -> Chat:
    tokenizer.add_special_tokens(["<eos>", *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return Chat(folder)


def straddling(folder: Path, template: str = TEMPLATE, *special: str) -> Chat:
    """Single bytes and the MERGES."""
    tokens = ["<eos>", *special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES), OVER]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return write(folder, tokenizer, template, *special)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    return straddling(tmp_path_factory.mktemp("bytewise"))


@pytest.fixture(scope="module", params=["tiny", "straddling"])
def chat(request, bytewise, tmp_path_factory):
    if request.param == "straddling":
        return bytewise
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tiny_model(folder, Options(operations=(2, 2), max_tokens=192), 0)
    return Chat(folder)


def spliced(chat: Chat, ids: list[int], answer: str) -> tuple[int, list[int], str]:
    """(tokens that are kept, those of the ground truth, the text of both)."""
    cut = splice_answer(chat, ids, answer)
    assert cut is not None and cut.ground_truth[-1] == chat.eos_id
    return *cut, chat.decode([*ids[: cut.kept], *cut.ground_truth])


@pytest.mark.parametrize("row", read_table("trainer/objectives/splices"), ids=lambda row: row["case"])
def test_the_ground_truth_answer_stands_where_the_graded_one_began(chat, row):
    """A completion that gives no answer has no such place."""
    ids, kept = [*chat.encode(row["text"]), chat.eos_id], row["kept"]
    if kept is None:
        assert splice_answer(chat, ids[:-1], "7/2") is None
        return
    count, _, text = spliced(chat, ids, "7/2")
    assert text == f"{kept}7/2}}"
    assert len(chat.decode(ids[: count + 1])) > len(kept), "no whole token before the cut is lost"


@given(summary=ANSWERS, other=ANSWERS, answer=ANSWERS, rest=ANSWERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer_is_put_and_read_back(chat, summary, other, answer, rest):
    summary, other, rest = (part.translate({ord(sign): None for sign in "{}\\"}) for part in (summary, other, rest))
    before = chat.decode(chat.encode(f"<think>t</think>{summary}\\boxed{{"))
    _, _, whole = spliced(chat, chat.encode(f"{before}{other}}}{rest}"), answer)
    known = chat.decode(chat.encode(answer))  # some tokenizers lack the bytes of rare letters
    assert whole == f"{before}{known}}}"
    if not set("{}\\") & set(answer):
        assert extract_answer(after_reasoning(whole) or "") == known.strip()


def test_tokens_over_the_cut_and_sampled_spellings(bytewise):
    """A token over the cut gives its first letters to the ground truth; sampled tokens are kept however they spell
    their text; half a character is not kept."""
    chat, names = bytewise, bytewise.tokenizer.convert_ids_to_tokens
    ids = chat.encode("<think>a</think>\\boxed{4}.")
    count, ground_truth, _ = spliced(chat, ids, "5")
    assert names(ids)[-1] == "{4}." and count == len(ids) - 1 and names(ground_truth) == ["{", "5", "}", "<eos>"]
    merged = chat.encode("<think>a</think>\\boxed{5}")
    count, ground_truth, _ = spliced(chat, merged, "4")
    assert names(merged)[count - 1] == "d{" and names(ground_truth) == ["4", "}", "<eos>"]
    ids = [token for letter in "<think>d{4}.</think>\\boxed{4}." for token in chat.encode(letter)]
    assert ids != chat.encode(chat.decode(ids)), "the tokenizer itself would merge"
    count, _, _ = spliced(chat, ids, "4")
    assert chat.decode(ids[:count]) == "<think>d{4}.</think>\\boxed{" and count == len("<think>d{4}.</think>\\boxed{")
    start, over = chat.encode("<think>a</think>"), chat.tokenizer.convert_tokens_to_ids(OVER)
    ids = [*start, chat.encode("é")[0], over, *chat.encode("}")]
    assert chat.decode(ids) == "<think>a</think>é\\boxed{4}"
    count, ground_truth, _ = spliced(chat, ids, "5")
    assert count == len(start) and chat.decode(ground_truth) == "é\\boxed{5}"


def test_a_long_completion_is_decoded_a_few_times_only(bytewise, monkeypatch):
    ids = bytewise.encode(f"<think>{'word ' * 2000}</think>\\boxed{{4}} {'and more ' * 100}")
    decoded, decode = list[int](), bytewise.decode
    monkeypatch.setattr(bytewise, "decode", lambda some: decoded.append(len(some)) or decode(some))
    cut = splice_answer(bytewise, ids, "5")
    assert cut is not None and decode(ids[: cut.kept]).endswith("</think>\\boxed"), "{4} is one token"
    assert sum(decoded) < 6 * len(ids), "of all tokens; one by one it would be thousands of times"


def test_reasoning_that_the_template_opens(tmp_path):
    chat = straddling(tmp_path, TEMPLATE + "<think>")
    assert spliced(chat, chat.encode("a</think>So \\boxed{3}."), "5")[2] == "a</think>So \\boxed{5}"
    assert splice_answer(chat, chat.encode("<think>a</think>\\boxed{3}"), "5") is None, "opened twice"


@pytest.mark.parametrize("opened", [False, True])
def test_control_tokens_for_reasoning(tmp_path, opened):
    chat = straddling(tmp_path, TEMPLATE + ("[THINK]" if opened else ""), "[THINK]", "[/THINK]")
    assert chat.think_ids == (1, 2)
    spelled = [token for letter in "[/THINK]\\boxed{9}" for token in chat.encode(letter)]
    begun = [*([] if opened else [1]), *spelled]
    ids = [*begun, 2, *chat.encode("So \\boxed{4}."), chat.eos_id]
    count, ground_truth, _ = spliced(chat, ids, "5")
    expected = [*begun, 2, *chat.encode("So \\boxe"), *chat.encode("d"), *chat.encode("{5}"), 0]
    assert [*ids[:count], *ground_truth] == expected
    assert splice_answer(chat, [*begun, *chat.encode("\\boxed{4}")], "5") is None, "spelled out closes nothing"


def test_no_blank_is_put_before_the_ground_truth_answer(tmp_path):
    """Some tokenizers begin every text with a blank, also one that goes on after another."""
    tokens = ["<eos>", "\n", "▁", *sorted({*"<think>a</think>So it is \\boxed{4}.57/2x"} - {" "})]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    chat = write(tmp_path, tokenizer, TEMPLATE)
    assert chat.decode([*chat.encode("4"), *chat.encode("5")]) == "4 5"
    assert chat.tokenizer.convert_ids_to_tokens(encode_inside(chat, "5 7")) == ["5", "▁", "7"]
    ids = chat.encode("<think>a</think>So it is \\boxed{4}.")
    assert spliced(chat, ids, "7/2")[2] == "<think>a</think>So it is \\boxed{7/2}"


@pytest.mark.parametrize(("domain", "verdicts", "bounded"), [
    ("math", [Verdict.CORRECT, Verdict.WRONG], {"every"}),
    ("math", [Verdict.WRONG, Verdict.NO_ANSWER, Verdict.TIMEOUT, None], {"every", "unsolved"}),
    ("open", [Verdict.OPEN, Verdict.NO_ANSWER], {"every", "unsolved", "open"}),
    ("code", [Verdict.WRONG, Verdict.WRONG], set()),
])  # fmt: skip
def test_which_groups_are_trained_by_their_bound(domain, verdicts, bounded):
    answer, tests = ("", ["assert f(1) == 1"]) if domain == "code" else ("1", [])
    problem = Problem("p", "?", answer, domain=domain, hidden=domain == "open", tests=tests)
    rewards = [None if each is None else Reward(0.1, 0.1, 0.0, 0.0, 0.0, each) for each in verdicts]
    group = Group(Prompt(0, problem, [1]), [Completion(0, index, 0) for index in range(len(rewards))], rewards)
    kinds = ("every", "unsolved", "open")
    assert {
        each for each in kinds if read_objective({"name": "jepo", "bound_groups": each}).is_bounded(group)
    } == bounded


def test_a_group_whose_ground_truth_answer_does_not_fit_is_trained_by_its_rewards(bytewise):
    r"""A prompt of 3 tokens, reasoning of 16 and 20, 6 for \boxed{ ("d{" is one token), 4 of the answer: 29 and 33."""
    ids = [bytewise.encode(f"<think>{text}</think>\\boxed{{1}}") for text in ("a", "abcde")]
    completions = [Completion(0, place, 0, each, [-1.0] * len(each)) for place, each in enumerate(ids)]
    rewards = [Reward(value, 0.1, 0.0, 0.0, 0.0, Verdict.OPEN) for value in (1.0, 0.0)]
    asked = Group(Prompt(0, Problem("p", "?", "57", domain="open", hidden=True), [1, 2, 3]), completions, rewards)

    def trained(most: int, loss_aggregation: str = "completions") -> list[TrainSequence]:
        config = Config.model_validate({
            "objective": {"name": "jepo", "loss_aggregation": loss_aggregation}, "model": {"max_tokens": most},
            "rollout": {"max_completion_tokens": 30}, "reward": {"overlong_buffer": 8},
        })  # fmt: skip
        return train_sequences([asked], objective_of(config), config, bytewise)

    bound, rewarded = trained(33), trained(32)
    assert [len(each.token_ids) for each in bound] == [29, 33]
    assert all(each.mask.count(IMITATED) == 4 and bytewise.decode(each.token_ids).endswith("{57}") for each in bound)
    assert all(each.advantages == [0.0] and each.columns["behaviour"][-4:] == [0.0] * 4 for each in bound)
    assert all(IMITATED not in each.mask for each in rewarded)
    assert [each.token_ids[3:] for each in rewarded] == ids
    assert [each.advantages for each in rewarded] == [[0.5], [-0.5]]
    assert {each.weight for each in bound} == {each.weight for each in rewarded} == {0.5}
    assert {each.weight for each in trained(33, "batch_tokens")} == {1 / (29 - 7 + 33 - 7)}, (
        "only what was sampled counts"
    )
