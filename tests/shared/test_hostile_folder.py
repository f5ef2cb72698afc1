"""Model folders of others: no code of theirs is run, and nothing in them is read or rendered without end."""

import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from shared.chat import Chat
from shared.errors import ModelError
from shared.model.folder import load_config
from tests.shared.test_chat import PLAIN, make_folder

AUTO_MAPS = {
    "tokenizer_config": {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"},
    "config": {"auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}, "model_type": "evil"},
    "processor_config": {"auto_map": {"AutoProcessor": "evil.C"}, "processor_class": "C"},
    "preprocessor_config": {"auto_map": {"AutoImageProcessor": "evil.C"}},
    "generation_config": {"auto_map": {"GenerationConfig": "evil.C"}, "custom_generate": "evil"},
}
"""file of a model -> what in it names code of the folder"""
EVIL = "open('executed', 'w')\nfrom transformers import PretrainedConfig as C, PreTrainedTokenizerFast as T\n"
PROGRAM = """
import sys
from pathlib import Path
from shared.chat import Chat
from shared.errors import ModelError
for folder in sys.argv[1:]:
    try: Chat(Path(folder))
    except ModelError as error: print(error)
print('end of', 'all')
"""


def read_terminal(ours):
    try:
        return os.read(ours, 1 << 16).decode()
    except OSError:  # nobody has it open any more
        return ""


def test_code_of_a_folder_is_not_run_and_nobody_is_asked(tmp_path):
    """On a terminal, where transformers would ask, and where y is the answer to all that is asked."""
    for name, content in AUTO_MAPS.items():
        path = make_folder(tmp_path / name) / f"{name}.json"
        path.with_name("evil.py").write_text(EVIL)
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    ours, terminal = os.openpty()
    os.write(ours, b"y\n" * 20)
    command = [sys.executable, "-c", PROGRAM, *AUTO_MAPS]
    surroundings = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, cwd=tmp_path, env=surroundings, stdin=terminal, stdout=terminal, stderr=terminal):
        os.close(terminal)
        shown = "".join(iter(lambda: read_terminal(ours), ""))
    os.close(ours)
    assert "end of all" in shown and "[y/N]" not in shown and not (tmp_path / "executed").exists()
    assert shown.count("needs code of the folder (auto_map), which is never run") == 1, "other files need none"


LOOP = "{% for c in range(99999) %}{% endfor %}"
for letter in "ba":
    LOOP = f"{{% for {letter} in range(99999) %}}{LOOP}{{% endfor %}}"
ENDLESS = {
    "always": LOOP,
    "in a macro": f"{{% macro go() %}}{LOOP}{{% endmacro %}}{{{{ go() }}}}",
    "for earlier turns": f"{{% if messages|length > 2 %}}{LOOP}{{% endif %}}",
    "for long conversations": f"{{% if messages|length > 900 %}}{LOOP}{{% endif %}}",
    "lists of itself": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "memory": "{% set x = 'x' * 10000000000 %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr("shared.template_trial.CPU_S", 1)
    monkeypatch.setattr("shared.template_trial._tried", {})
    why = "needs more than 2 GiB" if name == "memory" else "does not end in 1 s"
    with pytest.raises(ModelError, match=f"the chat template {why} for a conversation"):
        Chat(make_folder(tmp_path, ENDLESS[name] + PLAIN))


@pytest.mark.parametrize("kind", ["pipe", "device", "kernel", "socket"])
def test_a_folder_with_a_file_that_never_ends_is_refused_by_its_name(tmp_path, monkeypatch, kind):
    """Nothing of it is opened."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/tool.jinja",
                 "processor_config.json"):  # fmt: skip
        path = make_folder(tmp_path / name.replace("/", " ")) / name
        folder = tmp_path / name.replace("/", " ")
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as there:
                monkeypatch.chdir(path.parent)  # names of sockets have 107 bytes
                there.bind(path.name)
        else:
            path.symlink_to("/dev/zero" if kind == "device" else "/proc/kmsg")
        for load in (Chat, load_config):
            with pytest.raises(ModelError, match=f"{path.name} is no regular file"):
                load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_of_a_hundred_gigabytes_or_nested_too_deeply_is_refused_by_its_name(tmp_path, name):
    path = make_folder(tmp_path) / name
    if name != "tokenizer.json":
        path.write_text("[" * 200_000)
        with pytest.raises(ModelError, match=f"{name} cannot be read .nested too deeply"):
            Chat(tmp_path)
    for file in (path, tmp_path / "chat_template.jinja"):
        make_folder(tmp_path)
        with file.open("wb") as stream:
            stream.truncate(100 << 30)  # nothing of it is on the disk
        with pytest.raises(ModelError, match=f"{file.name} has 107,374,182,400 bytes"):
            Chat(tmp_path)
        file.unlink()


def test_what_transformers_says_of_a_folder_is_clean(tmp_path):
    Chat(make_folder(tmp_path, config={"model_type": "\x1b]0;PWNED\x07"}))
    logger = logging.getLogger("transformers")
    record = logger.makeRecord("transformers", logging.WARNING, "", 0, "of type %s", ("\x1b]0;PWNED\x07",), None)
    assert record.getMessage() == "of type ·]0;PWNED·"


def test_templates_beside_the_default_leave_it_in_force(tmp_path):
    (make_folder(tmp_path) / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(LOOP)
    assert Chat(tmp_path).template.text == PLAIN
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="has no chat template"):
        Chat(tmp_path)
