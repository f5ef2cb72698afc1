"""The same reinforcement learning for both sides of the end-to-end benchmark: model, prompts, sizes.

English word problems under a system prompt, rendered once as the model's chat format has it, taken in the order of the
file. Every group is trained (`filter_groups_by = "off"`), as TRL does, so that both sides sample what they train.
The model is models/smollm2-135m-instruct where `make smollm2` and `python -m examples.quickstart.smollm2` made it;
without it a stand-in of the same shape: random weights, the quickstart's tokenizer with spare tokens up to the same
vocabulary.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import ROOT
from benchmarks.llama import SMOLLM2_135M, Shape, write_model, write_tokenizer
from examples.quickstart.word_problems import make_word_problem
from shared.chat import Chat

MODEL = ROOT / "models" / "smollm2-135m-instruct"
SYSTEM = "Think step by step inside <think> </think>, then give the final answer in \\boxed{}."
PROBLEMS = 256


class Workload(NamedTuple):
    """What both sides do, and how much of it each side holds at a time."""

    prompts_per_step: int
    group_size: int
    max_completion_tokens: int
    learning_rate: float
    steps: int
    """of ours"""
    peer_steps: int
    micro_batch_tokens: int
    """of a micro-batch of ours: a third of a group, on average"""
    cache_bytes: int
    """of the engine: what is in flight most of the time, not all completions at their longest"""
    peer_batches: tuple[int, ...]
    """completions that the peer trains at a time: the fastest of these"""


FULL = Workload(4, 8, 512, 1e-5, 9, 4, 896, 448 << 20, (2, 4))
"""room to think: SmolLM2-135M-Instruct writes 290 tokens on average, from 10 to the limit, which three in ten reach"""
CUT_SHORT = Workload(4, 8, 128, 1e-5, 12, 5, 640, 160 << 20, (8, 16))
"""the same cut off where three in four completions have not ended: lengths hardly differ, little is padded"""
QUICK = Workload(2, 4, 32, 1e-5, 6, 3, 640, 160 << 20, (8,))


class Files(NamedTuple):
    """Where it lies."""

    model: Path
    problems: Path
    """JSON lines for ours"""
    prompts: Path
    """a JSON list of rendered prompts for the peer"""
    real_model: bool


def prepare(folder: Path, shape: Shape = SMOLLM2_135M, model: Path = MODEL) -> Files:
    """Write prompts, and a model where `model` is not there, into the folder."""
    real = model.is_dir()
    found = Files(model if real else folder / "model", folder / "problems.jsonl", folder / "prompts.json", real)
    if not real:
        found.model.mkdir()
        write_model(found.model, shape)
        write_tokenizer(found.model, shape)
    rng = random.Random("workload")
    stories = [make_word_problem(rng, "en", (2, 3)) for _ in range(PROBLEMS)]
    problems = [{"problem": story.text, "answer": str(story.answer), "language": "en"} for story in stories]
    found.problems.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
    chat = Chat(found.model)
    turns = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": story.text}] for story in stories]
    found.prompts.write_text(json.dumps([chat.render_turns(one) for one in turns]), encoding="utf-8")
    return found
