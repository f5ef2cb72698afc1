"""The chat format: rendering, decoding, stop tokens, and templates with their own ideas."""

import json

import pytest

from shared.chat import Chat, system_prompt
from shared.errors import ModelError
from shared.languages import LANGUAGES, WITH_REQUEST, with_request
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
    assert len({language.request for language in WITH_REQUEST.values()}) == len(WITH_REQUEST) == 17
    assert with_request("2+3?", "fr") == "2+3?\n\nRéfléchis et réponds en français."
    assert with_request("2+3?", "") == "2+3?"


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
    """What a problem or a client spells is never a control token; a template may be written with some."""
    from serve.messages import ChatMessage
    from serve.system_prompts import PromptRenderer
    from shared.sections import Data
    from trainer.data.data_source import PromptFormat

    chat = Chat(make_folder(tmp_path))
    trained = PromptFormat(chat, Data(system_prompt="Be brief."))
    asked, think = ChatMessage(role="user", content=text), chat.encode("<think>")[0]
    ids = trained.render(text)
    assert ids == PromptRenderer(chat, "Be brief.").render([asked], "")
    assert text in chat.tokenizer.decode(ids) and ids.count(chat.eos_id) == 2 and think not in ids
    own = PromptFormat(chat, Data(system_prompt="", templates={"math": "<think>{problem}"})).render(text)
    assert (own.count(think), trained.render(text, also=[text, "<think>"]).count(think)) == (1, 0)
    also = PromptRenderer(chat, "").render([ChatMessage(role="system", content=text), asked], "")
    assert chat.tokenizer.decode(also).count(text) == 2 and also.count(chat.eos_id) == 2 and think not in also


def save(chat, folder):
    """The tokenizer as a model folder."""
    chat.tokenizer.save_pretrained(str(folder))
    return folder


KEPT = "{% for m in messages %}<{{ m['role'] }}>{{ CONTENT }}<eos>{% endfor %}<assistant>"
IF = "{% if CONDITION %}<{{"
ONLY = KEPT.replace("<{{", IF).replace("CONTENT", "m['content']").replace("<eos>", "<eos>{% endif %}")
PARTS = "{% for m in messages %}<{{ m['role'] }}>{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
PARTS += "{% endif %}{% endfor %}<eos>{% endfor %}<assistant>"
RULE, TASK = "Think first, then box the answer.", 'What is 6 * 7, <in> words & "figures"?\nSay it.'


@pytest.mark.parametrize(
    "template",
    [
        ONLY.replace("CONDITION", "m['role'] != 'system'"),
        ONLY.replace("CONDITION", "m['role'] in ['developer', 'user', 'assistant']"),
        ONLY.replace("CONDITION", "m['role'] != 'system' or tools"),
        ONLY.replace("CONDITION", "m['role'] != 'system' or messages|length == 2"),
        ONLY.replace("CONDITION", "not loop.first or m['role'] != 'system'"),
        "<system>You are kind.<eos>" + ONLY.replace("CONDITION", "m['role'] != 'system'"),
        "{% if messages[0]['role'] == 'system' and enable_system %}<system>{{ messages[0]['content'] }}<eos>{% endif %}"
        + ONLY.replace("CONDITION", "m['role'] != 'system'"),
    ],
)
def test_a_system_prompt_that_the_template_drops_stands_before_the_users_words(tmp_path, template):
    chat = Chat(make_folder(tmp_path, template))
    text = chat.tokenizer.decode(chat.render(TASK, RULE))
    assert text.endswith(f"<user>{RULE}\n\n{TASK}<eos><assistant>") and text.count(RULE) == 1
    assert "no system role" in chat.describe()
    turns = [{"role": "system", "content": RULE}, {"role": "user", "content": "A"}]
    turns += [{"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    assert chat.render_turns(turns).endswith(f"<user>{RULE}\n\nA<eos><assistant>B<eos><user>C<eos><assistant>")


@pytest.mark.parametrize(
    "template", [PARTS, PARTS.replace("m['content'] %}", "m['content'] if m['role'] != 'system' %}")]
)
def test_contents_are_lists_where_the_template_wants_them(tmp_path, template):
    chat = Chat(make_folder(tmp_path, template))
    text = chat.tokenizer.decode(chat.render(TASK, RULE))
    assert TASK in text and RULE in text
    assert "first" in chat.tokenizer.decode([*chat.render("first", ""), *chat.bridge([("user", "second")])])


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        *((KEPT.replace("CONTENT", content), "the system prompt and what the user says") for content in (
            "m['content'][:12]", "m['content']|lower", "m['content']|e", "m['content']|tojson",
            "m['content'].split('\n')[0]", "m['content']|replace('\n', ' ')", "m['content']|title", "m['text']",
            "m['content']|striptags",
        )),
        ("<user>{{ messages[0]['content'] }}<eos><assistant>", "earlier turns of the assistant"),
        ("<user>{{ messages[-1]['content'] }}<eos><assistant>", "the system prompt, what the user says and earlier"),
        (ONLY.replace("CONDITION", "m['role'] != 'assistant'"), "earlier turns of the assistant"),
        (ONLY.replace("CONDITION", "loop.last"), "the system prompt, what the user says and earlier turns"),
        ("<assistant>", "the system prompt and what the user says"),
    ],
)  # fmt: skip
def test_a_template_that_loses_or_changes_texts_is_refused_by_name(tmp_path, template, lost):
    with pytest.raises(ModelError, match=rf"loses or changes {lost}.*model\.chat_template"):
        Chat(make_folder(tmp_path, template))


def test_each_prompt_is_looked_at_since_templates_leave_out_by_conditions(tmp_path):
    long = "A long task. " * 20
    chat = Chat(make_folder(tmp_path / "a", ONLY.replace("CONDITION", "m['content']|length < 200")))
    assert "A task" in chat.tokenizer.decode(chat.render("A task", RULE))
    with pytest.raises(ModelError, match="loses or changes what the user says"):
        chat.render(long, RULE)
    template = ONLY.replace("CONDITION", "m['role'] != 'system' or m['content']|length < 200")
    chat = Chat(make_folder(tmp_path / "b", template))
    assert chat.tokenizer.decode(chat.render("A task", long)) == f"<user>{long}\n\nA task<eos><assistant>"
    assert chat.tokenizer.decode(chat.render("A task", RULE)) == f"<system>{RULE}<eos><user>A task<eos><assistant>"


def test_a_template_of_a_single_turn_is_no_loss(tmp_path):
    single = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + PLAIN
    chat = Chat(make_folder(tmp_path, single))
    assert TASK in chat.tokenizer.decode(chat.render(TASK, RULE))
    with pytest.raises(ModelError, match="one turn only"):
        chat.bridge([("user", "more")])


ENDING = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}END{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("template", "eos", "stops", "end", "adds"),
    [
        (ENDING.replace("END", "<turn>\n"), "<eos>", [1, 7], "<turn>", False),
        (ENDING.replace("END", " <eos>"), "<eos>", [1], "<eos>", False),
        (ENDING.replace("END", "<turn>\n"), "<eos>", [1], "<turn>", True),
        (ENDING.replace("END", ""), "<eos>", [1, 2], "<user>", False),
        (ENDING.replace("END", "\n"), "<eos>", [1], "<eos>", False),
        (ENDING.replace("END", "{% if loop.last %}<eos>{% else %}<turn>{% endif %}"), "<eos>", [1, 7], "<turn>", False),
        (ENDING.replace("END", "</s>\n"), "<eos>", [1], "<eos>", False),
    ],
    ids=["Gemma", "Llama 2", "ChatML of a base model", "GLM", "nothing", "the last otherwise", "letters"],
)
def test_a_turn_ends_with_what_the_template_puts_behind_it(tmp_path, template, eos, stops, end, adds):
    chat = Chat(make_folder(tmp_path, template, eos, generation_config={"eos_token_id": stops}))
    assert chat.tokenizer.convert_ids_to_tokens(chat.eos_id) == end
    assert chat.adds_stop is adds and set(chat.stop_ids) == {*stops, chat.eos_id}
    assert [end in line for line in chat.warnings] == [True] * (adds or "</s>" in template)


def test_turns_are_bridged_where_the_template_ends_none(tmp_path):
    """The end is the model's own then, and all that the template writes follows it."""
    chat = Chat(make_folder(tmp_path / "a", ENDING.replace("END", "\n\n")))
    said = [*chat.encode("one"), chat.eos_id, *chat.bridge([("user", "two")])]
    assert chat.tokenizer.decode(said) == "one<eos>\n\n<user>two\n\n<assistant>"
    chat = Chat(make_folder(tmp_path / "b", ENDING.replace("END", "</s>")))
    with pytest.raises(ModelError, match="ends a turn of the assistant with '</s>"):
        chat.bridge([("user", "two")])


STRICT = (
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn!') }}"
    "{% endif %}{% endfor %}" + PLAIN
)


def test_turns_of_one_role_are_joined_where_the_template_wants_them_in_turn(tmp_path):
    from serve.messages import ChatMessage
    from serve.system_prompts import PromptRenderer

    chat, free = Chat(make_folder(tmp_path / "a", STRICT)), Chat(make_folder(tmp_path / "b"))

    def text(roles, chat=chat):
        turns = [ChatMessage(role=role, content=str(place)) for place, role in enumerate(roles.split())]
        return chat.tokenizer.decode(PromptRenderer(chat, "").render(turns, ""))

    assert "joined" in chat.describe() and "joined" not in free.describe()
    assert text("user user") == "<user>0\n\n1<eos><assistant>"
    assert text("user user", free) == "<user>0<eos><user>1<eos><assistant>"
    assert text("user assistant tool user") == (
        "<user>0<eos><assistant>1<eos><user><tool_response>\n2\n</tool_response>\n\n3<eos><assistant>"
    )
    assert text("user assistant assistant user") == "<user>0<eos><assistant>1\n\n2<eos><user>3<eos><assistant>"
    assert text("user system user") == "<system>1<eos><user>0\n\n2<eos><assistant>"
    with pytest.raises(ModelError, match="the first turn is the assistant's.*wants the user's first"):
        text("assistant user")
    assert text("assistant user", free) == "<assistant>0<eos><user>1<eos><assistant>"
    between = chat.bridge([("tool", "2"), ("user", "3")])
    whole = [*chat.render("0", ""), *chat.encode("1"), chat.eos_id, *between]
    assert chat.tokenizer.decode(whole) == text("user assistant tool user")


THINKING = PLAIN + "{% if enable_thinking %}<think>{% else %}<think>{{ '\n\n' }}</think>{{ '\n\n' }}{% endif %}"


def test_arguments_of_the_template_open_and_close_the_reasoning(tmp_path):
    folder = make_folder(tmp_path, THINKING)
    closed = Chat(folder)
    assert closed.think_prefix == "<think>\n\n</think>\n\n" and closed.think_closed
    assert "set model.template = { enable_thinking = true }" in closed.warnings[0]
    opened = Chat(folder, arguments={"enable_thinking": True})
    assert opened.think_prefix == "<think>" and not opened.think_closed and not opened.warnings
    assert closed.with_arguments({"enable_thinking": True}).render(TASK, RULE) == opened.render(TASK, RULE)
    assert opened.with_arguments({"enable_thinking": False}).render(TASK, RULE) == closed.render(TASK, RULE)
    for name in ("enable_thinkng", "messages", "add_generation_prompt", "eos_token", "tools"):
        with pytest.raises(ModelError, match=f"reads no argument '{name}'"):
            Chat(folder, PLAIN, {name: True})
    lone = Chat(folder, PLAIN + "</think>")
    assert lone.think_prefix == "<think></think>" and lone.encode_completion("<think></think>5") == lone.encode("5")
    begun = Chat(
        folder, PLAIN.replace("<assistant>", "{% if add_generation_prompt %}<assistant><think>Well, {% endif %}")
    )
    assert begun.think_prefix == "<think>Well, " and not begun.think_closed


def test_a_run_gives_its_model_a_template_and_the_export_keeps_it(tmp_path):
    from shared.config import Config
    from shared.errors import ConfigError
    from trainer.export import note_training

    folder = make_folder(tmp_path / "base", template="", config={"eos_token_id": 1})
    file, text = tmp_path / "template.jinja", ENDING.replace("END", "<turn>")
    file.write_text(text)
    (tmp_path / "template.json").write_text(json.dumps({"chat_template": text}))
    for given in (str(file), text, str(tmp_path / "template.json")):
        config = Config.model_validate({"model": {"chat_template": given}, "data": {"system_prompt": ""}})
        chat = Chat.of_run(folder, config)
        assert chat.describe() == "model.chat_template; a turn ends with <turn>" and chat.stop_ids == (1, 7)
    note_training(config, folder, 3)
    later = Chat(folder)
    assert later.render(TASK, RULE) == chat.render(TASK, RULE)
    assert later.stop_ids == chat.stop_ids and not later.adds_stop, "another server ends turns there too"
    with pytest.raises(ConfigError, match=r"model\.chat_template = '.*gone\.jinja' is no template"):
        Chat.of_run(folder, Config.model_validate({"model": {"chat_template": str(tmp_path / "gone.jinja")}}))


def test_an_export_tells_whether_its_training_asked_for_languages(tmp_path):
    from shared.config import Config
    from shared.model.model_card import read_card
    from trainer.export import note_training

    row = {"problem": "1+1?", "answer": "2", "completion": "<think>.</think>2"}
    for name, fields in (("plain", {}), ("asking", {"reasoning_language": "de"})):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | fields)}\n")

    def exported(train: str, demonstrations: str, base: str) -> bool:
        folder = make_folder(tmp_path / f"{train}-{demonstrations}-{base}")
        data, sft = {"train": f"{tmp_path}/{train}.jsonl"}, {"demonstrations": f"{tmp_path}/{demonstrations}.jsonl"}
        note_training(Config.model_validate({"model": {"path": base}, "data": data, "sft": sft}), folder, 1)
        return read_card(folder).language_requests

    assert not exported("plain", "plain", "")
    assert exported("asking", "plain", "")
    assert exported("plain", "asking", "")
    assert exported("plain", "plain", str(tmp_path / "asking-plain-")), "the model that it began with learned it"
    assert read_card(tmp_path / "plain-plain-").tag_blanks == ("", "", ""), "as its demonstrations write the tags"
    (tmp_path / "usual.jsonl").write_text(json.dumps(row | {"completion": "<think>\nSo.\n</think>\n\n2"}))
    (tmp_path / "none.jsonl").write_text(json.dumps(row | {"completion": "2"}))
    exported("plain", "usual", "")
    assert read_card(tmp_path / "plain-usual-").tag_blanks == ("\n", "\n", "\n\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "maestrale.json").write_text("{")
    assert not exported("plain", "plain", str(tmp_path / "damaged"))
