"""The chat format: rendering, decoding, stop tokens, and templates with their own ideas."""

import json

import pytest

from shared.chat import Chat, joined, system_prompt
from shared.errors import ModelError
from shared.languages import LANGUAGES
from verify.verifiers import verifier_of

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}<assistant>"
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<think>", "</think>", "<turn>"]


def make_folder(path, template=PLAIN, eos="<eos>", **files):
    """A byte-level tokenizer with a few special tokens, written as a model folder would have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": eos}
    settings = {key: value for key, value in settings.items() if value}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_render_puts_system_then_user_then_opens_the_answer(tmp_path):
    chat = Chat(make_folder(tmp_path))
    assert chat.tokenizer.decode(chat.render("2+3?", "be brief")) == "<system>be brief<eos><user>2+3?<eos><assistant>"
    assert chat.tokenizer.decode(chat.render("2+3?", "")) == "<user>2+3?<eos><assistant>"


def test_decode_keeps_reasoning_visible_and_drops_only_the_final_end(tmp_path):
    chat = Chat(make_folder(tmp_path))
    text = "<think>\n2 + 3 , é 中</think>\n\\boxed{5}"
    assert chat.decode([*chat.encode(text), chat.eos_id]) == text
    assert chat.decode(chat.encode(text)) == text
    assert chat.decode([chat.eos_id, *chat.encode("x")]) == "<eos>x"
    assert chat.decode([]) == ""


def test_stop_tokens_come_from_tokenizer_and_generation_settings(tmp_path):
    chat = Chat(make_folder(tmp_path, generation_config={"eos_token_id": [7, 1]}, config={"eos_token_id": 1}))
    assert chat.eos_id == 1 and chat.stop_ids == (1, 7)


def test_template_that_opens_the_reasoning_is_noticed(tmp_path):
    chat = Chat(make_folder(tmp_path / "a", PLAIN + "<think>{{ '\n' }}"))
    assert chat.think_prefix == "<think>\n"
    for text in ("<think>\nx</think>y", "<think>x</think>y", "x</think>y"):
        assert chat.decode(chat.encode_completion(text)) == "x</think>y", "opened once, by the template"
    plain = Chat(make_folder(tmp_path / "b"))
    assert plain.think_prefix == "" and plain.decode(plain.encode_completion("<think>x")) == "<think>x"


def test_control_tokens_for_reasoning_are_found(tmp_path, monkeypatch):
    assert Chat(make_folder(tmp_path / "a")).think_ids is None
    monkeypatch.setattr(__name__ + ".SPECIAL", [*SPECIAL, "[THINK]", "[/THINK]"])
    chat = Chat(make_folder(tmp_path / "b", PLAIN + "[THINK]"))
    assert chat.think_ids == tuple(chat.encode("[THINK][/THINK]")) and chat.think_prefix == "[THINK]"


def test_template_without_system_role_gets_it_before_the_users_words(tmp_path):
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    chat = Chat(make_folder(tmp_path, strict))
    assert chat.tokenizer.decode(chat.render("2+3?", "be brief")) == "<user>be brief\n\n2+3?<eos><assistant>"


def test_folder_without_tokenizer_template_or_end_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Chat(tmp_path)
    with pytest.raises(ModelError, match="has no chat template"):
        Chat(make_folder(tmp_path / "a", template=""))
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        Chat(make_folder(tmp_path / "b", PLAIN.replace("<eos>", ""), eos=""))


def test_magistral_prompt_asks_for_all_that_the_reward_checks():
    text = system_prompt("magistral")
    for part in (
        "<think>",
        "</think>",
        r"\boxed{",
        "language of the task",
        "Markdown",
        "LaTeX",
        "as casual and as long",
    ):
        assert part in text
    assert "\\\n" not in text
    code = system_prompt("magistral", verifier_of("code").form)
    assert "```python" in code and r"\boxed" not in code and "{" not in code
    assert system_prompt("") == "" and system_prompt("my own") == "my own"


def test_every_language_asks_for_reasoning_in_itself():
    assert list(LANGUAGES) == ["en", "fr", "de", "es", "it", "ru", "zh"]
    assert len({language.clause for language in LANGUAGES.values()}) == 7
    assert joined("Base.", LANGUAGES["fr"].clause) == "Base.\n\nRéfléchis et réponds en français."
    assert joined("", LANGUAGES["zh"].clause) == "请用中文思考和回答。"


def test_plain_text_leaves_the_tokenizer_of_other_threads_alone(tmp_path):
    """To change the shared one waits for every thread that uses it, and holds Python meanwhile."""
    chat = Chat(make_folder(tmp_path))
    plain = chat.encode_plain("a<eos>b")
    assert not chat.tokenizer.backend_tokenizer.encode_special_tokens
    assert chat.eos_id not in plain and chat.decode(plain) == "a<eos>b"
    assert chat.encode("a<eos>b")[1] == chat.eos_id


def test_no_added_token_can_be_spelled(tmp_path):
    """Tokenizers split those that they call special; Qwen's <think> and <tool_call> are none of these."""
    chat = Chat(make_folder(tmp_path))
    chat.tokenizer.add_tokens(["<tool_call>", "call>"])
    chat = Chat(save(chat, tmp_path / "more"))
    text = "a <tool_call> b<think>call>"
    ids = chat.encode_plain(text)
    assert chat.tokenizer.decode(ids) == text and max(ids) < len(SPECIAL) + 256
    assert not {chat.encode(token)[0] for token in ("<tool_call>", "<think>", "call>")} & set(ids)


def test_blank_lines_that_a_family_adds_are_no_control_tokens(tmp_path):
    chat = Chat(make_folder(tmp_path))
    chat.tokenizer.add_tokens(["\n\n", "  "])
    chat = Chat(save(chat, tmp_path / "more"))
    assert chat.encode_plain("a\n\nb  c") == chat.encode("a\n\nb  c") and len(chat.encode("a\n\nb")) == 3


@pytest.mark.parametrize("text", ["2+3?", "a <eos> b", "<think>", "\ue0000\ue001 <eos>"])
def test_training_renders_a_problem_as_serving_does_whatever_it_spells(tmp_path, text):
    """What a problem or a client spells is never a control token; tools and templates may be written with some."""
    from serve.messages import ChatMessage
    from serve.system_prompts import PromptRenderer
    from shared.sections import Data
    from trainer.data import PromptFormat

    chat = Chat(make_folder(tmp_path))
    trained = PromptFormat(chat, Data(system_prompt="Be brief."))
    asked, think = ChatMessage(role="user", content=text), chat.encode("<think>")[0]
    ids = trained.render(text)
    assert ids == PromptRenderer(chat, "Be brief.").render([asked], "")
    assert text in chat.tokenizer.decode(ids) and ids.count(chat.eos_id) == 2 and think not in ids
    own = PromptFormat(chat, Data(system_prompt="", templates={"math": "<think>{problem}"})).render(text)
    assert own.count(think) == trained.render(text, also="<think>").count(think) == 1
    also = PromptRenderer(chat, "").render([ChatMessage(role="system", content=text), asked], "")
    assert chat.tokenizer.decode(also).count(text) == 2 and also.count(chat.eos_id) == 2 and think not in also


def save(chat, folder):
    """The tokenizer as a model folder."""
    chat.tokenizer.save_pretrained(str(folder))
    return folder
