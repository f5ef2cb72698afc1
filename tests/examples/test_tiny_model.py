"""The tiny model's folder: loads in transformers, in our decoder and our chat, deterministic, short in tokens."""

import json
import random
from pathlib import Path

import pytest
import torch

from examples.quickstart.prepare import Options, make_tiny_model, texts_of
from examples.quickstart.tiny_model import END, MARKS, VOCABULARY, train_tokenizer
from examples.quickstart.word_problems import NO_FLAWS, demonstrate, make_word_problem
from shared.chat import Chat
from shared.model import hf
from tests.model_folder import load_model
from tests.packed import pack_from

OPTIONS = Options(operations=(2, 2), max_tokens=192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(made, OPTIONS, 0)
    return made


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return Chat(folder)


def texts(count: int) -> list[tuple[str, str]]:
    rng = random.Random(4)
    languages = OPTIONS.languages
    found = []
    for number in range(count):
        problem = make_word_problem(rng, languages[number % len(languages)], OPTIONS.operations)
        found.append((problem.text, demonstrate(rng, problem, languages, NO_FLAWS)))
    return found


def test_text_survives_the_tokenizer(chat: Chat) -> None:
    for text, completion in [*texts(70), ("a 漢 ж\n{x} \\frac{1}{2} 🙂", "<think>\n\n</think> \\boxed{}")]:
        assert chat.decode(chat.encode(text)) == text
        assert chat.decode(chat.encode(completion)) == completion


def test_marks_and_digits_are_single_tokens(chat: Chat) -> None:
    for mark in (*MARKS, END, *"0123456789"):
        assert len(chat.encode(mark)) == 1
    assert len(chat.encode("1907")) == 4


def test_a_completion_ends_with_a_token_that_the_chat_stops_at(chat: Chat) -> None:
    end = chat.encode(END)
    assert chat.stop_ids == tuple(end) and chat.eos_id == end[0]
    assert chat.decode([*chat.encode("7"), *end]) == "7"
    assert chat.think_prefix == ""


def test_prompts_and_completions_are_short(chat: Chat) -> None:
    pairs = texts(140)
    assert sum(len(chat.render(problem, "")) for problem, _ in pairs) / len(pairs) < 25
    assert sum(len(chat.encode(completion)) for _, completion in pairs) / len(pairs) < 40


def test_the_chat_template_marks_every_role(chat: Chat) -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    text = chat.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>S<|user|>U<|assistant|>A<|end|><|user|>V<|assistant|>"


def test_it_loads_in_transformers_with_the_logits_of_our_decoder(folder: Path, chat: Chat) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder)
    ids = chat.render(texts(1)[0][0], "")

    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        found = ours(pack_from([ids], [1]), output="logits")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert sum(parameter.numel() for parameter in ours.parameters()) < 1_200_000
    assert theirs.generation_config.eos_token_id == chat.eos_id


def test_every_id_has_a_token_even_for_one_language() -> None:
    tokenizer = train_tokenizer(texts_of(Options(languages=["it"])))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert all(tokenizer.id_to_token(number) is not None for number in range(VOCABULARY))


def test_the_seed_alone_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "same", OPTIONS, 0)
    make_tiny_model(tmp_path / "other", OPTIONS, 1)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "same" / file).read_bytes() == (folder / file).read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_settings_reach_the_folder(folder: Path) -> None:
    assert hf.load_config(folder)["max_position_embeddings"] == 192
