"""The chat format: rendering, decoding, stop tokens, and templates with ideas of their own (odd_templates.jsonl)."""

import json

import pytest

from serve.messages import ChatMessage
from serve.system_prompts import PromptRenderer
from shared.chat import Chat, system_prompt
from shared.config import Config
from shared.errors import ConfigError, ModelError
from shared.languages import LANGUAGES, WITH_REQUEST, with_request
from shared.model.model_card import read_card
from tests.tables import read_table
from trainer.export import note_training
from verify.verifiers import verifier_of

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}<assistant>"
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<think>", "</think>", "<turn>"]
RULE, TASK = "Think first, then box the answer.", 'What is 6 * 7, <in> words & "figures"?\nSay it.'


def write_tokenizer(path, control, merges=(), **settings):
    """A byte-level tokenizer with control tokens, as a model folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(control))
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {key: value for key, value in settings.items() if value}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    return vocabulary


def make_folder(path, template=PLAIN, eos="<eos>", **files):
    """A model's folder with a few special tokens."""
    write_tokenizer(path, SPECIAL, chat_template=template, eos_token=eos)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def save(chat, folder):
    """The tokenizer as a model folder."""
    chat.tokenizer.save_pretrained(str(folder))
    return folder


def shown(chat, problem=TASK, system=RULE):
    """The text of a prompt."""
    return chat.tokenizer.decode(chat.render(problem, system))


def test_prompts_open_the_answer_and_decoding_drops_only_the_final_end(tmp_path):
    chat = Chat(make_folder(tmp_path, generation_config={"eos_token_id": [7, 1]}, config={"eos_token_id": 1}))
    assert chat.eos_id == 1 and chat.stop_ids == (1, 7)
    assert shown(chat, "2+3?", "be brief") == "<system>be brief<eos><user>2+3?<eos><assistant>"
    assert shown(chat, "2+3?", "") == "<user>2+3?<eos><assistant>"
    text = "<think>\n2 + 3 , é 中</think>\n\\boxed{5}"
    assert chat.decode([*chat.encode(text), chat.eos_id]) == chat.decode(chat.encode(text)) == text
    assert chat.decode([chat.eos_id, *chat.encode("x")]) == "<eos>x" and chat.decode([]) == ""


def test_a_template_that_opens_the_reasoning_is_noticed(tmp_path, monkeypatch):
    chat, plain = Chat(make_folder(tmp_path / "a", PLAIN + "<think>{{ '\n' }}")), Chat(make_folder(tmp_path / "b"))
    assert chat.think_prefix == "<think>\n"
    for text in ("<think>\nx</think>y", "<think>x</think>y", "x</think>y"):
        assert chat.decode(chat.encode_completion(text)) == "x</think>y", "opened once, by the template"
    assert plain.think_prefix == "" and plain.decode(plain.encode_completion("<think>x")) == "<think>x"
    lone = Chat(tmp_path / "b", PLAIN + "</think>")
    assert lone.think_prefix == "<think></think>" and lone.encode_completion("<think></think>5") == lone.encode("5")
    begin = "{% if add_generation_prompt %}<assistant><think>Well, {% endif %}"
    begun = Chat(tmp_path / "b", PLAIN.replace("<assistant>", begin))
    assert begun.think_prefix == "<think>Well, " and not begun.think_closed
    assert plain.think_ids is None
    monkeypatch.setattr(__name__ + ".SPECIAL", [*SPECIAL, "[THINK]", "[/THINK]"])
    chat = Chat(make_folder(tmp_path / "c", PLAIN + "[THINK]"))
    assert chat.think_ids == tuple(chat.encode("[THINK][/THINK]")) and chat.think_prefix == "[THINK]"


@pytest.mark.parametrize(("template", "eos", "message"), [
    ("", "<eos>", "has no chat template"), (PLAIN.replace("<eos>", ""), "", "no end-of-sequence token"),
])  # fmt: skip
def test_a_folder_without_template_end_or_tokenizer_is_refused(tmp_path, template, eos, message):
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Chat(tmp_path)
    with pytest.raises(ModelError, match=message):
        Chat(make_folder(tmp_path, template, eos))


def test_prompts_ask_for_all_that_rewards_check_and_every_language_for_itself():
    words = ["<think>", "</think>", r"\boxed{", "language of the task", "Markdown", "LaTeX", "as casual and as long"]
    assert [word for word in words if word not in system_prompt("magistral")] == []
    code = system_prompt("magistral", verifier_of("code").form)
    assert "```python" in code and r"\boxed" not in code and "{" not in code and "\\\n" not in code
    assert system_prompt("") == "" and system_prompt("my own") == "my own"
    assert list(LANGUAGES) == ["en", "fr", "de", "es", "it", "ru", "zh"]
    assert len({language.request for language in WITH_REQUEST.values()}) == len(WITH_REQUEST) == 17
    assert with_request("2+3?", "fr") == "2+3?\n\nRéfléchis et réponds en français." and with_request("x", "") == "x"


def odd(kind):
    """Templates of this kind."""
    return pytest.mark.parametrize("row", read_table("shared/odd_templates", kind=kind), ids=lambda row: row["name"])


@odd("no system role")
def test_a_system_prompt_that_the_template_does_not_take_stands_before_the_users_words(tmp_path, row):
    chat = Chat(make_folder(tmp_path, row["template"]))
    text = shown(chat)
    assert text.endswith(f"<user>{RULE}\n\n{TASK}<eos><assistant>") and text.count(RULE) == 1
    assert "no system role" in chat.describe()
    turns = [{"role": "system", "content": RULE}, {"role": "user", "content": "A"}]
    turns += [{"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    assert chat.render_turns(turns).endswith(f"<user>{RULE}\n\nA<eos><assistant>B<eos><user>C<eos><assistant>")


@odd("lists")
def test_contents_are_lists_where_the_template_wants_them(tmp_path, row):
    chat = Chat(make_folder(tmp_path, row["template"]))
    assert TASK in shown(chat) and RULE in shown(chat)
    assert "first" in chat.tokenizer.decode([*chat.render("first", ""), *chat.bridge([("user", "second")])])


@odd("loses")
def test_a_template_that_loses_changes_or_turns_texts_is_refused_by_name(tmp_path, row):
    with pytest.raises(ModelError, match=rf"loses or changes {row['lost']}.*model\.chat_template"):
        Chat(make_folder(tmp_path, row["template"]))


def test_each_prompt_is_looked_at_since_templates_leave_out_by_conditions(tmp_path):
    long, only_if = "A long task. " * 20, "{% for m in messages if CONDITION %}"
    short = PLAIN.replace("{% for m in messages %}", only_if.replace("CONDITION", "m['content']|length < 200"))
    chat = Chat(make_folder(tmp_path, short))
    assert "A task" in shown(chat, "A task")
    with pytest.raises(ModelError, match="loses or changes what the user says"):
        chat.render(long, RULE)
    chat = Chat(tmp_path, short.replace("if m", "if m['role'] != 'system' or m"))
    assert shown(chat, "A task", long) == f"<user>{long}\n\nA task<eos><assistant>"
    assert shown(chat, "A task") == f"<system>{RULE}<eos><user>A task<eos><assistant>"
    single = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + PLAIN
    chat = Chat(tmp_path, single)
    assert TASK in shown(chat), "a template of a single turn loses nothing"
    with pytest.raises(ModelError, match="one turn only"):
        chat.bridge([("user", "more")])


def ending(text):
    """A template that ends turns so."""
    return PLAIN.replace("<eos>", text)


@odd("ends")
def test_a_turn_ends_with_what_the_template_puts_behind_it(tmp_path, row):
    chat = Chat(make_folder(tmp_path, row["template"], generation_config={"eos_token_id": row["stops"]}))
    assert chat.tokenizer.convert_ids_to_tokens(chat.eos_id) == row["end"]
    assert chat.adds_stop is row["adds"] and set(chat.stop_ids) == {*row["stops"], chat.eos_id}
    assert [row["end"] in line for line in chat.warnings] == [True] * (row["adds"] or "</s>" in row["template"])


def test_turns_are_bridged_where_the_template_ends_none(tmp_path):
    """The end is the model's own then, and all that the template writes follows it."""
    chat = Chat(make_folder(tmp_path, ending("\n\n")))
    episode = [*chat.encode("one"), chat.eos_id, *chat.bridge([("user", "two")])]
    assert chat.tokenizer.decode(episode) == "one<eos>\n\n<user>two\n\n<assistant>"
    with pytest.raises(ModelError, match="ends a turn of the assistant with '</s>"):
        Chat(tmp_path, ending("</s>")).bridge([("user", "two")])


STRICT = (
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn!') }}"
    "{% endif %}{% endfor %}" + PLAIN
)
WITH_TOOL = "<user>0<eos><assistant>1<eos><user><tool_response>\n2\n</tool_response>\n\n3<eos><assistant>"


def test_turns_of_one_role_are_joined_where_the_template_wants_them_in_turn(tmp_path):
    chat, free = Chat(make_folder(tmp_path / "a", STRICT)), Chat(make_folder(tmp_path / "b"))

    def text(roles, chat=chat):
        turns = [ChatMessage(role=role, content=str(place)) for place, role in enumerate(roles.split())]
        return chat.tokenizer.decode(PromptRenderer(chat, "").render(turns, ""))

    assert "joined" in chat.describe() and "joined" not in free.describe()
    assert text("user user") == "<user>0\n\n1<eos><assistant>"
    assert text("user user", free) == "<user>0<eos><user>1<eos><assistant>"
    assert text("user assistant tool user") == WITH_TOOL
    assert text("user assistant assistant user") == "<user>0<eos><assistant>1\n\n2<eos><user>3<eos><assistant>"
    assert text("user system user") == "<system>1<eos><user>0\n\n2<eos><assistant>"
    with pytest.raises(ModelError, match="the first turn is the assistant's.*wants the user's first"):
        text("assistant user")
    assert text("assistant user", free) == "<assistant>0<eos><user>1<eos><assistant>"
    between = chat.bridge([("tool", "2"), ("user", "3")])
    assert chat.tokenizer.decode([*chat.render("0", ""), *chat.encode("1"), chat.eos_id, *between]) == WITH_TOOL


THINKING = PLAIN + "{% if enable_thinking %}<think>{% else %}<think>{{ '\n\n' }}</think>{{ '\n\n' }}{% endif %}"


def test_arguments_of_the_template_open_and_close_the_reasoning(tmp_path):
    folder = make_folder(tmp_path, THINKING)
    closed, opened = Chat(folder), Chat(folder, arguments={"enable_thinking": True})
    assert closed.think_prefix == "<think>\n\n</think>\n\n" and closed.think_closed
    assert "set model.template = { enable_thinking = true }" in closed.warnings[0]
    assert opened.think_prefix == "<think>" and not opened.think_closed and not opened.warnings
    assert closed.with_arguments({"enable_thinking": True}).render(TASK, RULE) == opened.render(TASK, RULE)
    assert opened.with_arguments({"enable_thinking": False}).render(TASK, RULE) == closed.render(TASK, RULE)
    for name in ("enable_thinkng", "messages", "add_generation_prompt", "eos_token", "tools"):
        with pytest.raises(ModelError, match=f"reads no argument '{name}'"):
            Chat(folder, PLAIN, {name: True})


def test_a_run_gives_its_model_a_template_and_the_export_keeps_it(tmp_path):
    folder = make_folder(tmp_path / "base", template="", config={"eos_token_id": 1})
    text = ending("<turn>")
    (tmp_path / "template.jinja").write_text(text)
    (tmp_path / "template.json").write_text(json.dumps({"chat_template": text}))

    def run(template):
        return Config.model_validate({"model": {"chat_template": str(template)}, "data": {"system_prompt": ""}})

    for template in (tmp_path / "template.jinja", text, tmp_path / "template.json"):
        chat = Chat.of_run(folder, run(template))
        assert chat.describe() == "model.chat_template; a turn ends with <turn>" and chat.stop_ids == (1, 7)
    note_training(run(text), folder, 3)
    later = Chat(folder)
    assert later.render(TASK, RULE) == chat.render(TASK, RULE)
    assert later.stop_ids == chat.stop_ids and not later.adds_stop, "another server ends turns there too"
    with pytest.raises(ConfigError, match=r"model\.chat_template = '.*gone\.jinja' is no template"):
        Chat.of_run(folder, run(tmp_path / "gone.jinja"))


def test_a_base_model_takes_the_plain_template_by_name(tmp_path):
    folder = make_folder(tmp_path / "base", template="", config={"eos_token_id": 1})
    with pytest.raises(ModelError, match='no chat template.*set model.chat_template = "plain"'):
        Chat(folder)
    config = Config.model_validate({"model": {"chat_template": "plain"}, "data": {"system_prompt": ""}})
    plain = Chat.of_run(folder, config)
    assert shown(plain, "1+1?", "Box it.") == "Box it.\n\nUser:\n1+1?\n\nAssistant:\n" and plain.stop_ids == (1,)
    note_training(config, folder, 3)
    assert shown(Chat(folder), "1+1?", "") == "User:\n1+1?\n\nAssistant:\n", "the export keeps it"


ROW = {"problem": "1+1?", "answer": "2", "completion": "<think>.</think>2"}
DEMONSTRATIONS = {
    "plain": [ROW, ROW], "asking": [ROW, ROW | {"reasoning_language": "de"}],
    "usual": [ROW | {"completion": "<think>\nSo.\n</think>\n\n2"}],
}  # fmt: skip


@pytest.mark.parametrize(("train", "demonstrations", "base", "asks", "blanks"), [
    ("plain", "plain", "", False, ("", "", "")),  # as its demonstrations write the tags
    ("asking", "plain", "", True, ("", "", "")),
    ("plain", "asking", "", True, ("", "", "")),
    ("plain", "plain", "asks", True, ("", "", "")),  # the model that it began with learned it
    ("plain", "plain", "damaged", False, ("", "", "")),
    ("plain", "usual", "", False, ("\n", "\n", "\n\n")),
])  # fmt: skip
def test_an_export_tells_whether_its_training_asked_for_languages(tmp_path, train, demonstrations, base, asks, blanks):
    for name, rows in DEMONSTRATIONS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": {"train": f"{tmp_path}/{train}.jsonl"}}
    settings["sft"] = {"demonstrations": f"{tmp_path}/{demonstrations}.jsonl"}
    if base:
        card = {"run": "r", "version": 1, "system_prompt": "", "language_requests": True}
        (make_folder(tmp_path / base) / "maestrale.json").write_text(json.dumps(card) if base == "asks" else "{")
        settings["model"] = {"path": str(tmp_path / base)}
    note_training(Config.model_validate(settings), make_folder(tmp_path / "exported"), 1)
    card = read_card(tmp_path / "exported")
    assert card.language_requests is asks and card.tag_blanks == blanks


def test_a_text_longer_than_the_tokenizer_is_made_for_is_measured_without_a_warning(tmp_path):
    """transformers would print one at the first: its length is what the caller wants to know."""
    write_tokenizer(tmp_path, SPECIAL, chat_template=PLAIN, eos_token="<eos>", model_max_length=8)
    chat = Chat(tmp_path)
    assert len(chat.encode("six times seven")) > 8
    assert "sequence-length-is-longer-than-the-specified-maximum" not in chat.tokenizer.deprecation_warnings
