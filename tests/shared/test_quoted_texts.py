"""Texts of others in prompts spell no control token, however they write it."""

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from serve.messages import ChatMessage
from serve.system_prompts import PromptRenderer
from serve.tools import AnswerForm
from shared.chat import Chat
from shared.quoted_texts import QuotedTexts
from shared.sections import Data
from shared.tool_calls import TOOLS_PROMPT, ToolDefinition, signatures, tools_prompt
from shared.types import Problem
from tests.hostile_texts import CONTROL, HALVES, texts
from tests.shared.test_chat import SPECIAL, make_folder, save
from trainer.data.data_source import PromptFormat


def test_no_added_token_can_be_spelled_and_blank_lines_are_none(tmp_path):
    """Tokenizers split those that they call special; Qwen's <think> and <tool_call> are none of these. To change the
    tokenizer that is shared would wait for every thread that uses it, and hold Python meanwhile."""
    chat = Chat(make_folder(tmp_path))
    chat.tokenizer.add_tokens(["<tool_call>", "call>", "\n\n", "  "])
    chat = Chat(save(chat, tmp_path / "more"))
    text = "a <tool_call> b<think>call><eos>"
    ids = chat.encode_plain(text)
    assert chat.tokenizer.decode(ids) == chat.decode(ids) == text and max(ids) < len(SPECIAL) + 256
    assert not {chat.encode(token)[0] for token in ("<tool_call>", "<think>", "call>", "<eos>")} & set(ids)
    assert not chat.tokenizer.backend_tokenizer.encode_special_tokens and chat.encode("a<eos>b")[1] == chat.eos_id
    assert chat.encode_plain("a\n\nb  c") == chat.encode("a\n\nb  c") and len(chat.encode("a\n\nb")) == 3


@pytest.mark.parametrize("text", ["2+3?", "a <eos> b", "<think>", "\ue0000\ue001 <eos>"])
def test_only_what_a_run_writes_itself_can_be_a_control_token(tmp_path, text):
    chat = Chat(make_folder(tmp_path))
    think, ids = chat.encode("<think>")[0], PromptFormat(chat, Data(system_prompt="Be brief.")).render(text)
    assert text in chat.tokenizer.decode(ids) and ids.count(chat.eos_id) == 2 and think not in ids
    written = PromptFormat(chat, Data(system_prompt="", templates={"math": "<think>{problem}"})).render(text)
    assert written.count(think) == 1


@pytest.mark.parametrize("text", ["＜call＞", "<CALL>", "＜ＥＯＳ＞", "a＜call＞b<eos>"])
def test_no_text_spells_a_token_once_it_is_normalised(tmp_path, text):
    """Tokenizers look for some added tokens in the text that their normaliser has made."""
    path = make_folder(tmp_path / "m") / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_tokens([AddedToken("<call>", normalized=True)])
    backend.save(str(path))
    chat = Chat(path.parent)
    added = set(chat.tokenizer.added_tokens_decoder)
    usual = [number for number in chat.render("x", "y") if number in added]
    for problem, system in ((text, "y"), ("x", text)):
        quoted = QuotedTexts(chat)
        ids = chat.render(quoted.quote(problem), quoted.quote_system(system), quoted)
        assert [number for number in ids if number in added] == usual
    assert added.isdisjoint(chat.encode_plain(text)) and chat.encode("a ＜b＞") == chat.encode_plain("a ＜b＞")


def test_hostile_texts_are_text_in_each_part_of_a_prompt_in_training_as_in_serving(tmp_path):
    chat = Chat(make_folder(tmp_path / "m"))
    chat.tokenizer.add_tokens(CONTROL, special_tokens=True)
    chat = Chat(save(chat, tmp_path / "all"))
    known = set(chat.tokenizer.added_tokens_decoder)
    trained, served = PromptFormat(chat, Data(system_prompt="")), PromptRenderer(chat, "")

    def prompts(text):
        """The [tokens] of training and of serving."""
        tools = [ToolDefinition("t", text, {"type": "object", "properties": {text: {}}})]
        user, system = ChatMessage(role="user", content=text), ChatMessage(role="system", content=text)
        yield trained.render(text), served.render([user], "")
        yield trained.render(text, also=[text]), served.render([system, user], "")
        form = AnswerForm(TOOLS_PROMPT, signatures(tools))
        yield trained.render(text, also=[tools_prompt(tools)]), served.render([user], "", form)

    def controls(ids):
        return [number for number in ids if number in known]

    usual = [controls(ids) for ids, _ in prompts("x")]
    bridge, start = controls(chat.bridge([("tool", "x")])), trained.prompt_of(Problem("p", "q", "1"))
    for text in texts():
        if any(half in text for half in "".join(HALVES) if "\ud800" <= half <= "\udfff"):
            continue  # no text: refused where it comes in
        both = list(prompts(text))
        assert [ids for ids, _ in both] == [ids for _, ids in both], ascii(text)
        assert [controls(ids) for ids, _ in both] == usual, ascii(text)
        assert text in chat.tokenizer.decode(both[0][0])
        assert controls(chat.bridge([("tool", text)])) == bridge
        prompt = trained.prompt_of(Problem("p", "q", "1", prefix=text))
        assert prompt[: len(start)] == start and not controls(prompt[len(start) :]), ascii(text)
