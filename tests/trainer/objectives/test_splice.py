"""Ground truths put where completions give their own: what is kept, what follows, and which groups get a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.quickstart.prepare import Options, make_tiny_model
from shared.chat import Chat
from shared.config import Config
from shared.types import IMITATED, Completion, Group, Problem, Prompt, Reward, TrainSequence, Verdict
from trainer.objectives.jepo import Jepo, encode_inside, splice_answer
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of, read_objective
from verify.extract import extract_answer
from verify.format import after_reasoning

SMOLLM2 = Path(__file__).parents[3] / "models" / "smollm2-135m-instruct"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONTROL = ["<eos>", "[THINK]", "[/THINK]"]
MERGES = [("{", "4"), ("}", "."), ("{4", "}."), ("d", "{")]
"""so that tokens lie over the cut and over the end of the box"""
OVER = "©\\boxed{4"
"""a token that begins with the second byte of é"""
ANSWERS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|[]"), min_size=1, max_size=30)


def write(folder: Path, tokenizer: Tokenizer, template: str) -> Chat:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return Chat(folder)


def straddling(folder: Path, special: list[str], template: str = TEMPLATE) -> Chat:
    """Single bytes and the MERGES."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES), OVER]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return write(folder, tokenizer, template)


@pytest.fixture(scope="module", params=["tiny", "straddling"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    if request.param == "straddling":
        return straddling(folder, ["<eos>"])
    make_tiny_model(folder, Options(operations=(2, 2), max_tokens=192), 0)
    return Chat(folder)


@pytest.fixture
def bytewise(tmp_path: Path) -> Chat:
    return straddling(tmp_path / "model", ["<eos>"])


def spliced(chat: Chat, ids: list[int], answer: str) -> str:
    """The text with the answer in its place."""
    cut = splice_answer(chat, ids, answer)
    assert cut is not None and cut.ground_truth[-1] == chat.eos_id
    return chat.decode([*ids[: cut.kept], *cut.ground_truth])


@pytest.mark.parametrize(
    ("response", "kept"),
    [
        ("The answer is \\boxed{4}.", "The answer is \\boxed{"),
        ("The answer is \\boxed{\\frac{1}{2}}", "The answer is \\boxed{"),
        ("\\boxed{ 4 }", "\\boxed{"),
        ("\\boxed{3}, no: \\boxed{4}. That is all, and it took a while to see it.", "\\boxed{3}, no: \\boxed{"),
        ("\\boxed{\\text{so } \\boxed{4}}", "\\boxed{\\text{so } \\boxed{"),
        ("Так что \\boxed{4}.", "Так что \\boxed{"),
        ("It is 4, so \\boxed{4}.", "It is 4, so \\boxed{"),
        ("\\boxed{}" + " And so on." * 60, "\\boxed{"),
    ],
)
def test_the_ground_truth_answer_stands_where_the_graded_one_began(chat: Chat, response: str, kept: str) -> None:
    reasoning = "<think>Three and one: \\boxed{3}? No, 🙂 \\boxed{4}.</think>"
    text = reasoning + response
    ids = [*chat.encode(text), chat.eos_id]
    found = splice_answer(chat, ids, "7/2")
    assert found is not None and spliced(chat, ids, "7/2") == f"{reasoning}{kept}7/2}}"
    assert len(chat.decode(ids[: found.kept + 1])) > len(reasoning + kept), "no whole token before the cut is lost"


def test_of_boxes_that_are_one_answer_the_first_is_the_cue(chat: Chat) -> None:
    ids = chat.encode("<think>a</think>Either \\boxed{1} or \\boxed{2}.")
    assert spliced(chat, ids, "3, 4") == "<think>a</think>Either \\boxed{3, 4}"


@given(summary=ANSWERS, own=ANSWERS, answer=ANSWERS, rest=ANSWERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer_is_put_and_read_back(chat: Chat, summary: str, own: str, answer: str, rest: str) -> None:
    summary, own, rest = (part.translate({ord(sign): None for sign in "{}\\"}) for part in (summary, own, rest))
    before = chat.decode(chat.encode(f"<think>t</think>{summary}\\boxed{{"))
    ids = chat.encode(f"{before}{own}}}{rest}")
    whole = spliced(chat, ids, answer)
    known = chat.decode(chat.encode(answer))  # some tokenizers lack the bytes of rare letters
    assert whole == f"{before}{known}}}"
    if not set("{}\\") & set(answer):
        assert extract_answer(after_reasoning(whole) or "") == known.strip()


def test_a_token_over_the_cut_gives_its_first_letters_to_the_ground_truth(bytewise: Chat) -> None:
    chat = bytewise
    ids = chat.encode("<think>a</think>\\boxed{4}.")
    assert chat.tokenizer.convert_ids_to_tokens(ids)[-1] == "{4}."
    found = splice_answer(chat, ids, "5")
    assert found is not None and found.kept == len(ids) - 1
    assert chat.tokenizer.convert_ids_to_tokens(found.ground_truth) == ["{", "5", "}", "<eos>"]
    merged = chat.encode("<think>a</think>\\boxed{5}")
    found = splice_answer(chat, merged, "4")
    assert found is not None and chat.tokenizer.convert_ids_to_tokens(merged)[found.kept - 1] == "d{"
    assert chat.tokenizer.convert_ids_to_tokens(found.ground_truth) == ["4", "}", "<eos>"]


def test_sampled_tokens_are_kept_however_they_spell_their_text(bytewise: Chat) -> None:
    chat = bytewise
    ids = [token for letter in "<think>d{4}.</think>\\boxed{4}." for token in chat.encode(letter)]
    assert ids != chat.encode(chat.decode(ids)), "the tokenizer itself would merge"
    found = splice_answer(chat, ids, "4")
    assert found is not None and chat.decode(ids[: found.kept]) == "<think>d{4}.</think>\\boxed{"
    assert found.kept == len("<think>d{4}.</think>\\boxed{")


def test_half_a_character_is_not_kept(bytewise: Chat) -> None:
    chat = bytewise
    start, over = chat.encode("<think>a</think>"), chat.tokenizer.convert_tokens_to_ids(OVER)
    ids = [*start, chat.encode("é")[0], over, *chat.encode("}")]
    assert chat.decode(ids) == "<think>a</think>é\\boxed{4}"
    found = splice_answer(chat, ids, "5")
    assert found is not None and found.kept == len(start)
    assert chat.decode(found.ground_truth) == "é\\boxed{5}"


def test_a_long_completion_is_decoded_a_few_times_only(bytewise: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = bytewise
    ids = chat.encode(f"<think>{'word ' * 2000}</think>\\boxed{{4}} {'and more ' * 100}")
    decoded: list[int] = []
    decode = chat.decode
    monkeypatch.setattr(chat, "decode", lambda some: decoded.append(len(some)) or decode(some))
    found = splice_answer(chat, ids, "5")
    assert found is not None and decode(ids[: found.kept]).endswith("</think>\\boxed"), "{4} is one token"
    assert sum(decoded) < 6 * len(ids), "of all tokens; one by one it would be thousands of times"


@pytest.mark.parametrize(
    "text",
    [
        "<think>It is \\boxed{4}.</think>It is 4.",
        "<think>It is 4, so \\boxed{4}.",
        "<think>a</think>The answer is \\boxed{4",
        "It is \\boxed{4}.",
        "<think>a</think>\\boxed{4}</think>",
        "",
    ],
)
def test_a_completion_that_gives_no_answer_has_no_cue(chat: Chat, text: str) -> None:
    assert splice_answer(chat, chat.encode(text), "4") is None


def test_reasoning_that_the_template_opens(tmp_path: Path) -> None:
    chat = straddling(tmp_path / "model", ["<eos>"], TEMPLATE + "<think>")
    ids = chat.encode("a</think>So \\boxed{3}.")
    assert spliced(chat, ids, "5") == "a</think>So \\boxed{5}"
    assert splice_answer(chat, chat.encode("<think>a</think>\\boxed{3}"), "5") is None, "opened twice"


@pytest.mark.parametrize("opened", [False, True])
def test_control_tokens_for_reasoning(tmp_path: Path, opened: bool) -> None:
    chat = straddling(tmp_path / "model", CONTROL, TEMPLATE + ("[THINK]" if opened else ""))
    assert chat.think_ids == (1, 2)
    begin = [] if opened else [1]
    spelled = [token for letter in "[/THINK]\\boxed{9}" for token in chat.encode(letter)]
    ids = [*begin, *spelled, 2, *chat.encode("So \\boxed{4}."), chat.eos_id]
    found = splice_answer(chat, ids, "5")
    assert found is not None
    whole = [*ids[: found.kept], *found.ground_truth]
    assert whole == [*begin, *spelled, 2, *chat.encode("So \\boxe"), *chat.encode("d"), *chat.encode("{5}"), 0]
    assert splice_answer(chat, [*begin, *spelled, *chat.encode("\\boxed{4}")], "5") is None, (
        "spelled out closes nothing"
    )


def test_no_blank_is_put_before_the_ground_truth_answer(tmp_path: Path) -> None:
    """Some tokenizers begin every text with a blank, also one that goes on after another."""
    tokens = ["<eos>", "\n", "▁", *sorted({*"<think>a</think>So it is \\boxed{4}.57/2x"} - {" "})]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<eos>"])
    chat = write(tmp_path / "model", tokenizer, TEMPLATE)
    assert chat.decode([*chat.encode("4"), *chat.encode("5")]) == "4 5"
    assert chat.tokenizer.convert_ids_to_tokens(encode_inside(chat, "5 7")) == ["5", "▁", "7"]
    ids = chat.encode("<think>a</think>So it is \\boxed{4}.")
    assert spliced(chat, ids, "7/2") == "<think>a</think>So it is \\boxed{7/2}"


def group(domain: str, *verdicts: Verdict | None) -> Group:
    problem = Problem(
        "p", "?", "" if domain == "code" else "1", domain=domain, hidden=domain == "open", tests=["assert f(1) == 1"]
    )
    rewards = [None if one is None else Reward(0.1, 0.1, 0.0, 0.0, 0.0, one) for one in verdicts]
    return Group(Prompt(0, problem, [1]), [Completion(0, index, 0) for index in range(len(rewards))], rewards)


GROUPS = [
    group("math", Verdict.CORRECT, Verdict.WRONG),
    group("math", Verdict.WRONG, Verdict.NO_ANSWER, Verdict.TIMEOUT, None),
    group("open", Verdict.OPEN, Verdict.NO_ANSWER),
    group("code", Verdict.WRONG, Verdict.WRONG),
]


@pytest.mark.parametrize(
    ("bound_groups", "bounded"),
    [
        ("every", [True, True, True, False]),
        ("unsolved", [False, True, True, False]),
        ("open", [False, False, True, False]),
    ],
)
def test_which_groups_are_trained_by_their_bound(bound_groups: str, bounded: list[bool]) -> None:
    objective = read_objective({"name": "jepo", "bound_groups": bound_groups})
    assert isinstance(objective, Jepo) and [objective.is_bounded(group) for group in GROUPS] == bounded


def test_a_group_whose_ground_truth_answer_does_not_fit_is_trained_by_its_rewards(tmp_path: Path) -> None:
    r"""A prompt of 3 tokens, reasoning of 16 and 20, 6 for \boxed{ ("d{" is one token), 4 of the answer: 29 and 33."""
    chat = straddling(tmp_path / "model", ["<eos>"])
    texts = ["<think>a</think>\\boxed{1}", "<think>abcde</think>\\boxed{1}"]
    completions = [
        Completion(0, place, 0, found, [-1.0] * len(found)) for place, found in enumerate(map(chat.encode, texts))
    ]
    rewards = [Reward(value, 0.1, 0.0, 0.0, 0.0, Verdict.OPEN) for value in (1.0, 0.0)]
    asked = Group(Prompt(0, Problem("p", "?", "57", domain="open", hidden=True), [1, 2, 3]), completions, rewards)

    def trained(most: int, loss_aggregation: str = "completions") -> list[TrainSequence]:
        settings = {
            "objective": {"name": "jepo", "loss_aggregation": loss_aggregation},
            "model": {"max_tokens": most},
            "rollout": {"max_completion_tokens": 30},
            "reward": {"overlong_buffer": 8},
        }
        config = Config.model_validate(settings)
        return train_sequences([asked], objective_of(config), config, chat)

    bound, rewarded = trained(33), trained(32)
    assert [len(one.token_ids) for one in bound] == [29, 33]
    assert all(one.mask.count(IMITATED) == 4 and chat.decode(one.token_ids).endswith("{57}") for one in bound)
    assert all(one.advantages == [0.0] and one.columns["behaviour"][-4:] == [0.0] * 4 for one in bound)
    assert all(IMITATED not in one.mask for one in rewarded)
    assert [one.token_ids[3:] for one in rewarded] == [completion.token_ids for completion in completions]
    assert [one.advantages for one in rewarded] == [[0.5], [-0.5]]
    assert {one.weight for one in bound} == {one.weight for one in rewarded} == {0.5}
    by_tokens = {sequence.weight for sequence in trained(33, "batch_tokens")}
    assert by_tokens == {1 / (29 - 7 + 33 - 7)}, "only what was sampled counts"
