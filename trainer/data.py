"""Problems from a JSONL file, drawn in an order that is a pure function of (seed, index).

The draw at `index` is the same whoever asks and whenever: the cursor is one number (the ledger's `next_index`), so a
resumed run neither repeats nor skips. Each epoch has its own permutation. What it does not: filter by difficulty or
generate problems (stories.py). Who calls this: controller, evaluate.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from pathlib import Path

import msgspec

from shared.chat import Chat
from shared.config import Config
from shared.errors import DataError
from shared.rows import problem_of, read_rows
from shared.types import Problem, Prompt
from verify.code.exam import checked


def load_problems(path: Path, setting: str) -> list[Problem]:
    """Read a .jsonl or .jsonl.gz of {"problem", "answer" or "tests", "id"?, "language"?, "domain"?, "source"?} lines.

    `setting` is named in errors (e.g. "data.train"). Raises DataError with file, line number and what is missing.
    """
    problems = [checked(problem_of(row.fields, row.where), row.where) for row in read_rows(path, setting)]
    if not problems:
        raise DataError(f"{setting}: {path} holds no problem")
    return problems


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return order

def completion_seed(run_seed: int, index: int, sample: int) -> int:
    """Sampling seed of one completion: a function of (run, prompt, sample), never of the engine; [0, 2**62)."""
    digest = hashlib.blake2b(f"{run_seed}/{index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2

class DataSource:
    """Draws prompts by index and renders them with the model's chat format."""

    def __init__(self, problems: list[Problem], config: Config, chat: Chat, system_prompt: str):
        self.problems, self.chat, self.system_prompt = problems, chat, system_prompt
        self.seed, self.order = config.seed, config.data.order
        self.room = config.model.max_tokens - config.rollout.max_completion_tokens
        self.group_size = config.rollout.group_size
        self.too_long = 0

    def problem_at(self, index: int) -> Problem:
        """The problem of draw `index`: epoch index // n, position index % n in that epoch's order."""
        count = len(self.problems)
        epoch, position = divmod(index, count)
        return self.problems[_permutation(self.seed, epoch, count)[position] if self.order == "shuffle" else position]

    def render(self, problem: Problem, index: int) -> Prompt:
        """The prompt of a problem."""
        return Prompt(index, problem, self.chat.render(problem.text, self.system_prompt))

    def draw(self, index: int) -> Prompt:
        """The first prompt at or after `index` that fits the model's length; longer ones are counted and skipped."""
        for skipped in range(len(self.problems)):
            prompt = self.render(self.problem_at(index + skipped), index + skipped)
            if len(prompt.token_ids) <= self.room:
                return prompt
            self.too_long += 1
        raise DataError(
            f"every problem is longer than {self.room} tokens with the chat format: raise model.max_tokens or lower "
            "rollout.max_completion_tokens"
        )

    def seeds(self, prompt: Prompt) -> list[int]:
        """[group_size] sampling seeds of a prompt's completions."""
        return [completion_seed(self.seed, prompt.index, sample) for sample in range(self.group_size)]

def write_jsonl(path: Path, rows: list[msgspec.Struct]) -> None:
    """Write records, one JSON object a line, beside and renamed."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        for row in rows:
            stream.write(msgspec.json.encode(row) + b"\n")
    partial.replace(path)
