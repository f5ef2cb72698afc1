"""Demonstrations: what is read, and how general instructions are mixed in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.chat import Chat
from shared.errors import DataError
from shared.sections import Data, Sft
from tests.shared.test_turns import chat_of
from trainer.data.data_source import PromptFormat
from trainer.data.demonstration_rows import completion_of
from trainer.data.written_text import WrittenTexts
from trainer.objectives.sequences import Demonstration
from trainer.sft import Demonstrations, load_demonstrations, read_demonstrations, sft_rate


class LetterChat:
    """One token a letter."""

    eos_id, stop_ids, think_ids, think_prefix = 0, (0,), None, ""
    added = re.compile("(?!)")
    tokenizer = SimpleNamespace(added_tokens_decoder={})

    def render(self, text: str, system: str, _quoted: object = None) -> list[int]:
        return [ord(letter) % 256 for letter in system + text]

    def render_turns(self, messages: list[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)

    def encode_completion(self, text: str) -> list[int]:
        return [ord(letter) % 256 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


PROMPTS = PromptFormat(LetterChat(), Data(system_prompt="S:", templates={"code": "{problem}!"}))  # type: ignore[arg-type]


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reasoning_has_the_prompt_of_its_domain_and_general_instructions_none(tmp_path: Path):
    reasoning = write(
        tmp_path / "traces.jsonl",
        {"problem": "add", "completion": "c"},
        {"problem": "add", "completion": "c", "domain": "code"},
        {"problem": "add", "completion": "c", "system": "tools:"},
        {"problem": "add", "completion": "c", "reasoning_language": "de"},
        {"problem": "1+1", "solution": "one more", "answer": "2"},
        {"problem": "x" * 500, "completion": "too long"},
    )
    general = write(tmp_path / "general.jsonl", {"problem": "hello", "completion": "hi"})
    found = load_demonstrations(reasoning, general, Sft(), PROMPTS, 100)
    german = b"S:add\n\nDenke und antworte auf Deutsch."
    prompts = [b"S:add", b"S:add!", b"S:\n\ntools:add", german, b"S:1+1"]
    assert [bytes(one.prompt) for one in found.reasoning] == prompts
    assert bytes(found.reasoning[4][1]) == b"<think>\none more\n</think>\nThe answer is \\boxed{2}.\0"
    assert found.general == [Demonstration([*b"hello"], [*b"hi", 0])]


def test_a_demonstration_asks_for_a_language_that_is_known(tmp_path: Path):
    rows = write(tmp_path / "traces.jsonl", {"problem": "add", "completion": "c", "reasoning_language": "deutsch"})
    with pytest.raises(DataError, match=r"traces\.jsonl:1: reasoning_language 'deutsch' .*is 'de' meant\?"):
        load_demonstrations(rows, None, Sft(), PROMPTS, 100)


def test_a_share_of_every_batch_is_general():
    demonstrations = Demonstrations([Demonstration([1], [1])], [Demonstration([2], [2])], general_share=0.1)
    counts = [sum(one.prompt == [2] for one in demonstrations.batch_at(step, 16, 0)) for step in range(400)]
    assert set(counts) == {1, 2} and 1.55 < sum(counts) / 400 < 1.65, "1.6 of 16 on average"
    assert demonstrations.batch_at(7, 16, 0) == demonstrations.batch_at(7, 16, 0)
    only = Demonstrations([Demonstration([1], [1])], [], general_share=0.1)
    assert only.batch_at(0, 8, 0) == [Demonstration([1], [1])] * 8


def test_a_file_without_anything_that_fits_names_its_setting(tmp_path: Path):
    long = write(tmp_path / "long.jsonl", {"problem": "x" * 500, "completion": "y"})
    with pytest.raises(DataError, match=r"sft\.demonstrations: .* model\.max_tokens = 100"):
        load_demonstrations(long, None, Sft(), PROMPTS, 100)
    short = write(tmp_path / "short.jsonl", {"problem": "x", "completion": "y"})
    with pytest.raises(DataError, match=r"sft\.general: "):
        load_demonstrations(short, long, Sft(), PROMPTS, 100)


def test_published_demonstrations_and_columns_of_the_users_own(tmp_path: Path):
    chats = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]
    chats += [{"ask": "hi", "say": "ho"}, {"problem": "hi", "completion": "ho"}]
    prompts = PromptFormat(LetterChat(), Data(system_prompt="", columns={"problem": "ask", "completion": "say"}))  # type: ignore[arg-type]
    lines: list[str] = []
    path = write(tmp_path / "chats.jsonl", *chats[1:])
    assert read_demonstrations(path, "sft.general", prompts, 100, lines) == [Demonstration([*b"hi"], [*b"ho", 0])] * 2
    assert not lines, "all in our own form"
    plain = PromptFormat(LetterChat(), Data(system_prompt=""))  # type: ignore[arg-type]
    [one] = read_demonstrations(write(path, chats[0]), "sft.general", plain, 100, lines)
    assert one == Demonstration([*b"hi"], [*b"ho", 0])
    assert lines == ["sft.general: read 1 as a conversation in 'conversations'"]


def test_the_rate_warms_up_and_decays():
    settings = Sft(steps=100, learning_rate=1.0)
    assert sft_rate(0, settings) == pytest.approx(0.05) and sft_rate(19, settings) == 1.0
    assert sft_rate(99, settings) == pytest.approx(0.1)


def test_a_demonstration_of_several_turns_is_what_an_episode_is(tmp_path: Path):
    build(tmp_path / "model", 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 64)
    chat = Chat(tmp_path / "model")
    messages = [("assistant", "5"), ("user", "<|end|>no"), ("assistant", "7")]
    row = {"problem": "?", "completion": [{"role": role, "content": text} for role, text in messages]}
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [one] = read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data(system_prompt="")), 100, [])
    between = chat.bridge([("user", "<|end|>no")])
    assert one.prompt == chat.render("?", "")
    path.write_text(json.dumps(row | {"system": "no ?"}) + "\n")
    [told] = read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data(system_prompt="7")), 100, [])
    assert told == one._replace(prompt=chat.render("?", "7\n\nno ?")), "what an environment adds to the system prompt"
    first, last = [*chat.encode("5"), chat.eos_id], [*chat.encode("7"), chat.eos_id]
    assert one.completion == first + between + last and chat.eos_id not in between
    assert one.mask == bytes([2] * len(first) + [0] * len(between) + [2] * len(last))
    for wrong, why in (
        ([("user", "x"), ("assistant", "5")], "begins"),
        ([("assistant", "5"), ("user", "x")], "must end"),
        ([], "must end"),
    ):
        row = {"problem": "?", "completion": [{"role": role, "content": text} for role, text in wrong]}
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=why):
            read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data()), 100, [])


WRITTEN = Path(__file__).with_name("written_completions.jsonl").read_text("utf-8").splitlines()
"""texts of demonstrations, what is said of each ("" for nothing), and whether it keeps the form of the run"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return chat_of(tmp_path_factory.mktemp("model"), "ours")


@pytest.mark.parametrize(("text", "told", "right"), [json.loads(line).values() for line in WRITTEN])
def test_a_demonstration_is_held_to_the_form_of_the_run(
    chat: Chat, tmp_path: Path, text: str, told: str, right: bool
) -> None:
    path = write(tmp_path / "rows.jsonl", {"problem": "2+3?", "completion": text})
    lines: list[str] = []
    [one] = read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data()), 1000, lines)
    assert (told in "\n".join(lines)) if told else not lines
    assert ("break the form" in "\n".join(lines)) is not right
    assert all(line.startswith("sft.demonstrations: 1 of 1 rows ") and "rows.jsonl:1: " in line for line in lines)
    controls = {token for token in one.completion if token in chat.tokenizer.added_tokens_decoder}
    assert controls <= {*map(chat.tokenizer.convert_tokens_to_ids, ("<think>", "</think>")), chat.eos_id}
    assert one.completion.count(chat.eos_id) == 1 and one.completion[-1] == chat.eos_id
    assert chat.decode(one.completion) == re.sub(r"(\s*<\|end\|>)+\s*$", "", text), "no letter is lost"


def test_a_demonstration_that_reasons_in_another_language_than_it_asks_for_is_counted(
    chat: Chat, tmp_path: Path
) -> None:
    german = "<think>\nZu den zwei Äpfeln kommen noch drei dazu: 2+3=5.\n</think>\nDas macht \\boxed{5}."
    formula = "<think>\n2+3=5\n</think>\n\\boxed{5}"
    rows = [{"problem": "2+3?", "completion": text, "reasoning_language": code}
            for text, code in ((german, "de"), (german, "fr"), (formula, "fr"), (german, ""))]  # fmt: skip
    lines: list[str] = []
    path = write(tmp_path / "rows.jsonl", *rows)
    read_demonstrations(path, "sft.demonstrations", PromptFormat(chat, Data()), 1000, lines)
    [line] = lines
    assert line.startswith(
        "sft.demonstrations: 1 of the first 3 rows of the right form that ask for a language reason in"
    )
    assert "rows.jsonl:2: de instead of fr" in line


def test_control_tokens_in_a_turn_are_letters_and_general_texts_have_no_form(chat: Chat, tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "5<|end|>"}, {"role": "user", "content": "no"},
             {"role": "assistant", "content": "7 <|user|> 5"}]  # fmt: skip
    path, lines = tmp_path / "rows.jsonl", list[str]()
    path.write_text(json.dumps({"problem": "?", "completion": turns}) + "\n")
    [one] = read_demonstrations(path, "sft.general", PromptFormat(chat, Data()), 1000, lines)
    learned = [token for token, of in zip(one.completion, one.mask, strict=True) if of]
    assert learned == [*chat.encode("5"), chat.eos_id, *chat.encode_plain("7 <|user|> 5"), chat.eos_id]
    assert ["end with" in lines[0], "letters there" in lines[1], len(lines)] == [True, True, 2]


def test_tags_of_calls_stay_control_tokens_and_marks_of_roles_never_are(tmp_path: Path) -> None:
    """Also where the family calls its marks of roles ordinary tokens, as DeepSeek does."""
    chat = chat_of(tmp_path, "ours")
    chat.tokenizer.add_tokens(["<tool_call>", "<b>"])
    chat.tokenizer.add_tokens(["[INVENTED]"], special_tokens=True)
    chat.tokenizer.save_pretrained(tmp_path / "again")
    chat = Chat(tmp_path / "again")
    ids = chat.tokenizer.convert_tokens_to_ids(["<tool_call>", "<b>"])
    texts = WrittenTexts(chat)
    assert texts.tokens("<tool_call>ab<b>", "x") == [ids[0], *chat.encode("ab"), ids[1]] and not texts.doubts
    assert texts.tokens("he[INVENTED]<|assistant|>in", "x") == chat.encode_plain("he[INVENTED]<|assistant|>in")
    assert list(texts.doubts.values()) == [["x: [INVENTED]"]]


@pytest.mark.parametrize(
    ("solution", "completion"),
    [
        ("<think>\na\n</think>\n\\boxed{5}", "<think>\na\n</think>\n\\boxed{5}"),
        (" <think>a</think> So 5.", "<think>a</think> So 5.\nThe answer is \\boxed{5}."),
        ("a\n</think>\n\\boxed{5}", "<think>\na\n</think>\n\\boxed{5}"),
        ("a", "<think>\na\n</think>\nThe answer is \\boxed{5}."),
    ],
)
def test_a_solution_with_tags_gets_no_second_ones(solution: str, completion: str) -> None:
    assert completion_of({"solution": solution, "answer": "5"}, "x") == completion
