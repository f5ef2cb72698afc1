r"""The quickstart's model, made in seconds: a tokenizer for word problems and toy programs, a small random Llama.

The tokenizer is byte-level BPE whose pieces are whole clauses, not words: the problems repeat their clauses, so a
problem is about 30 tokens and a completion too, which is what makes training on two cores a matter of minutes. Digits
stay single (sums are learned digit by digit); `<think>`, `</think>`, `\boxed{` and `}` are one token each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.model import hf
from shared.model.decoder import Decoder, DecoderConfig, initialise

VOCABULARY = 1280
"""tokens; a multiple of 64 suits every matrix product"""
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CONTROL = (PAD, END, SYSTEM, USER, ASSISTANT)
"""never written by people; left out when text is shown; they take the first ids, in this order"""
MARKS = ("<think>", "</think>", "\\boxed{", "}")
"""parts of a completion's form: one token each, and part of its text"""
CLAUSES = r"[^.:?!,。：？！，]*[.:?!,。：？！，]+(?:(?!\n\n)\s)*|[^.:?!,。：？！，]+"
"""a clause with its end and the space after it, an empty line with the clause after it; no token reaches over this"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens for such texts; the same call gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(CLAUSES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKS),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in _between_marks(text))
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    # few languages have fewer clauses than fit: no id may be without a token, since the model can sample any
    spare = vocabulary - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|spare_{number}|>") for number in range(spare)])
    return tokenizer


def _between_marks(completion: str) -> list[str]:
    """The pieces of a completion without its marks."""
    for mark in MARKS:
        completion = completion.replace(mark, "\0")
    return completion.split("\0")


def architecture(vocabulary: int, max_tokens: int) -> dict[str, Any]:
    """Content of config.json: a Llama of 0.9 M parameters with one key head and a tied embedding."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 128,
        "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": max_tokens, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.06, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": CONTROL.index(END), "pad_token_id": CONTROL.index(PAD),
    }  # fmt: skip


def build(
    folder: Path, seed: int, tokenizer: Tokenizer, max_tokens: int, parts: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Write a Hugging Face folder: random float32 weights that depend on `seed` alone, tokenizer, chat template.

    parts: of some texts that are one token, the shorter ones whose embeddings theirs are the sum of. The folder is
    complete or absent, as `hf.save_model` writes it. Raises CheckpointError when the disk fails.
    """
    config = architecture(tokenizer.get_vocab_size(), max_tokens)
    decoder = Decoder(DecoderConfig.from_hf(config))
    initialise(decoder, seed)
    table = decoder.model.embed_tokens.weight.data
    for whole, shorter in (parts or {}).items():
        (number,) = tokenizer.encode(whole).ids
        table[number] = table[[one for part in shorter for one in tokenizer.encode(part).ids]].sum(dim=0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        write_tokenizer(Path(beside), tokenizer, max_tokens)
        hf.save_model(folder, config, decoder.state_dict(), torch.float32, Path(beside))


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Write tokenizer, chat template and generation settings into a Hugging Face folder."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": CONTROL.index(END), "pad_token_id": CONTROL.index(PAD)}
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a file of JSON lines."""
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
