"""Demonstrations: what is read, and how general instructions are mixed in."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.chat import Chat
from shared.errors import DataError
from shared.sections import Data, Sft
from tests.shared.test_turns import chat_of
from tests.tables import read_table
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
        return self.encode_completion(system + text)

    def render_turns(self, messages: list[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)

    def encode_completion(self, text: str) -> list[int]:
        return [ord(letter) % 256 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def prompts_of(chat: Any = None, **data: Any) -> PromptFormat:
    return PromptFormat(chat or LetterChat(), Data(**data))


PROMPTS = prompts_of(system_prompt="S:", templates={"code": "{problem}!"})
HI = Demonstration([*b"hi"], [*b"ho", 0])


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(*pairs: tuple[str, str]) -> dict[str, object]:
    return {"problem": "?", "completion": [{"role": role, "content": text} for role, text in pairs]}


def test_reasoning_has_the_prompt_of_its_domain_and_general_instructions_none(tmp_path):
    reasoning = write(
        tmp_path / "traces.jsonl",
        {"problem": "add", "completion": "c"},
        {"problem": "add", "completion": "c", "domain": "code"},
        {"problem": "add", "completion": "c", "system": "tools:"},
        {"problem": "add", "completion": "c", "reasoning_language": "de"},
        {"problem": "1+1", "solution": "one more", "answer": "2"},
        {"problem": "x" * 500, "completion": "too long"},
    )
    general = write(tmp_path / "general.jsonl", {"problem": "hi", "completion": "ho"})
    loaded = load_demonstrations(reasoning, general, Sft(), PROMPTS, 100)
    german = b"S:add\n\nDenke und antworte auf Deutsch."
    expected = [b"S:add", b"S:add!", b"S:\n\ntools:add", german, b"S:1+1"]
    assert [bytes(made.prompt) for made in loaded.reasoning] == expected
    assert bytes(loaded.reasoning[4][1]) == b"<think>\none more\n</think>\nThe answer is \\boxed{2}.\0"
    assert loaded.general == [HI]


def test_files_that_cannot_be_used_are_named_with_their_setting(tmp_path):
    asks = write(tmp_path / "traces.jsonl", {"problem": "add", "completion": "c", "reasoning_language": "deutsch"})
    long = write(tmp_path / "long.jsonl", {"problem": "x" * 500, "completion": "y"})
    short = write(tmp_path / "short.jsonl", {"problem": "x", "completion": "y"})
    for reasoning, general, named in (
        (asks, None, r"traces\.jsonl:1: reasoning_language 'deutsch' .*is 'de' meant\?"),
        (long, None, r"sft\.demonstrations: .* model\.max_tokens = 100"),
        (short, long, r"sft\.general: "),
    ):
        with pytest.raises(DataError, match=named):
            load_demonstrations(reasoning, general, Sft(), PROMPTS, 100)


def test_a_share_of_every_batch_is_general_and_the_rate_warms_up_and_decays():
    demonstrations = Demonstrations([Demonstration([1], [1])], [Demonstration([2], [2])], general_share=0.1)
    counts = [sum(made.prompt == [2] for made in demonstrations.batch_at(step, 16, 0)) for step in range(400)]
    assert set(counts) == {1, 2} and 1.55 < sum(counts) / 400 < 1.65, "1.6 of 16 on average"
    assert demonstrations.batch_at(7, 16, 0) == demonstrations.batch_at(7, 16, 0)
    only = Demonstrations([Demonstration([1], [1])], [], general_share=0.1)
    assert only.batch_at(0, 8, 0) == [Demonstration([1], [1])] * 8
    settings = Sft(steps=100, learning_rate=1.0)
    assert [sft_rate(step, settings) for step in (0, 19, 99)] == pytest.approx([0.05, 1.0, 0.1])


def test_published_demonstrations_and_columns_of_the_users_own(tmp_path):
    chat = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    rows = [{"ask": "hi", "say": "ho"}, {"problem": "hi", "completion": "ho"}]
    prompts, lines = prompts_of(system_prompt="", columns={"problem": "ask", "completion": "say"}), list[str]()
    path = write(tmp_path / "chats.jsonl", *rows)
    assert read_demonstrations(path, "sft.general", prompts, 100, lines) == [HI] * 2
    assert not lines, "all in our own form"
    assert read_demonstrations(write(path, chat), "sft.general", prompts_of(system_prompt=""), 100, lines) == [HI]
    assert lines == ["sft.general: read 1 as a conversation in 'conversations'"]


def test_a_demonstration_of_several_turns_is_what_an_episode_is(tmp_path):
    build(tmp_path / "model", 0, train_tokenizer(["no 5 7 ?"] * 9, 280), 64)
    chat, path = Chat(tmp_path / "model"), tmp_path / "turns.jsonl"

    def read(row: dict[str, object], **data: Any) -> Demonstration:
        [made] = read_demonstrations(write(path, row), "sft.demonstrations", prompts_of(chat, **data), 100, [])
        return made

    row = turns(("assistant", "5"), ("user", "<|end|>no"), ("assistant", "7"))
    made, between = read(row, system_prompt=""), chat.bridge([("user", "<|end|>no")])
    assert made.prompt == chat.render("?", "")
    added = read(row | {"system": "no ?"}, system_prompt="7")
    assert added == made._replace(prompt=chat.render("?", "7\n\nno ?")), "what an environment adds to the system prompt"
    first, last = ([*chat.encode(text), chat.eos_id] for text in "57")
    assert made.completion == first + between + last and chat.eos_id not in between
    assert made.mask == bytes([2] * len(first) + [0] * len(between) + [2] * len(last))
    for pairs, why in (
        ([("user", "x"), ("assistant", "5")], "begins"),
        ([("assistant", "5"), ("user", "x")], "must end"),
        ([], "must end"),
    ):
        with pytest.raises(DataError, match=why):
            read(turns(*pairs))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return chat_of(tmp_path_factory.mktemp("model"), "ours")


@pytest.mark.parametrize("row", read_table("trainer/written_completions"))
def test_a_demonstration_is_held_to_the_form_of_the_run(chat, tmp_path, row):
    path, lines = write(tmp_path / "rows.jsonl", {"problem": "2+3?", "completion": row["text"]}), list[str]()
    [made] = read_demonstrations(path, "sft.demonstrations", prompts_of(chat), 1000, lines)
    assert (row["warning"] in "\n".join(lines)) if row["warning"] else not lines
    assert ("break the form" in "\n".join(lines)) is not row["keeps_the_form"]
    assert all(line.startswith("sft.demonstrations: 1 of 1 rows ") and "rows.jsonl:1: " in line for line in lines)
    controls = {token for token in made.completion if token in chat.tokenizer.added_tokens_decoder}
    assert controls <= {*map(chat.tokenizer.convert_tokens_to_ids, ("<think>", "</think>")), chat.eos_id}
    assert made.completion.count(chat.eos_id) == 1 and made.completion[-1] == chat.eos_id
    assert chat.decode(made.completion) == re.sub(r"(\s*<\|end\|>)+\s*$", "", row["text"]), "no letter is lost"


def test_a_demonstration_that_reasons_in_another_language_than_it_asks_for_is_counted(chat, tmp_path):
    german = "<think>\nZu den zwei Äpfeln kommen noch drei dazu: 2+3=5.\n</think>\nDas macht \\boxed{5}."
    pairs = ((german, "de"), (german, "fr"), ("<think>\n2+3=5\n</think>\n\\boxed{5}", "fr"), (german, ""))
    form = {"problem": "2+3?", "source": "flawed on purpose"}
    rows = [{**form, "completion": text, "reasoning_language": code} for text, code in pairs]
    lines: list[str] = []
    path = write(tmp_path / "rows.jsonl", *rows)
    read_demonstrations(path, "sft.demonstrations", prompts_of(chat), 1000, lines)
    [line] = lines
    assert (
        line.startswith("sft.demonstrations: 1 of the first 3 rows ")
        and "rows.jsonl:2: de instead of fr; source: flawed on purpose)" in line
    )


def test_control_tokens_in_a_turn_are_letters_and_general_texts_have_no_form(chat, tmp_path):
    row, lines = turns(("assistant", "5<|end|>"), ("user", "no"), ("assistant", "7 <|user|> 5")), list[str]()
    [made] = read_demonstrations(write(tmp_path / "rows.jsonl", row), "sft.general", prompts_of(chat), 1000, lines)
    learned = [token for token, of in zip(made.completion, made.mask, strict=True) if of]
    assert learned == [*chat.encode("5"), chat.eos_id, *chat.encode_plain("7 <|user|> 5"), chat.eos_id]
    assert ["end with" in lines[0], "letters there" in lines[1], len(lines)] == [True, True, 2]


def test_tags_of_calls_stay_control_tokens_and_marks_of_roles_never_are(tmp_path):
    """Also where the family calls its marks of roles ordinary tokens, as DeepSeek does."""
    chat = chat_of(tmp_path, "ours")
    chat.tokenizer.add_tokens(["<tool_call>", "<b>"])
    chat.tokenizer.add_tokens(["[INVENTED]"], special_tokens=True)
    chat.tokenizer.save_pretrained(tmp_path / "again")
    chat = Chat(tmp_path / "again")
    call, bold = chat.tokenizer.convert_tokens_to_ids(["<tool_call>", "<b>"])
    texts = WrittenTexts(chat)
    assert texts.tokens("<tool_call>ab<b>", "x") == [call, *chat.encode("ab"), bold] and not texts.doubts
    assert texts.tokens("he[INVENTED]<|assistant|>in", "x") == chat.encode_plain("he[INVENTED]<|assistant|>in")
    assert list(texts.doubts.values()) == [["x: [INVENTED]"]]


@pytest.mark.parametrize(("solution", "completion"), [
    ("<think>\na\n</think>\n\\boxed{5}", "<think>\na\n</think>\n\\boxed{5}"),
    (" <think>a</think> So 5.", "<think>a</think> So 5.\nThe answer is \\boxed{5}."),
    ("a\n</think>\n\\boxed{5}", "<think>\na\n</think>\n\\boxed{5}"),
    ("a", "<think>\na\n</think>\nThe answer is \\boxed{5}."),
])  # fmt: skip
def test_a_solution_with_tags_gets_no_second_ones(solution, completion):
    assert completion_of({"solution": solution, "answer": "5"}, "x") == completion
