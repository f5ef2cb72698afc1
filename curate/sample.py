"""Stage `sample`: samples and grades completions of every problem, and adds "pass_rate" and "samples" to its row.

One engine samples as a run would: with the same prompts, verifiers and (for programs) tests. Seeds depend on the row's
position in the input and on --seed, so a stopped stage continues with the rows that are missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curate.sample_settings import OPTIONS, SAMPLES, add_options, digest_model, make_config
from curate.samples import samples_of_group, with_samples
from curate.stage import Command, Decision, Kept, Rejected, Show
from shared.errors import ConfigError
from shared.jsonl import Row, problem_of
from shared.types import Problem, Prompt, Verdict
from verify.code.exam import checked

if TYPE_CHECKING:
    from shared.config import Config
    from trainer.solver import Solver

TOO_LONG = "too long for the model"
SPEED_EVERY_S = 10.0

EXPLANATION = """
output: each row with
  "pass_rate"  share of right completions among the graded ones (null when none could be graded, and for open problems)
  "samples"    [{"answer", "verdict", "tokens"}, ...], an answer only for problems that have one
reason: too long for the model (prompt and --max-completion-tokens exceed its positions, or the model.max_tokens of
--config)

--config takes prompts, verifiers, lengths and engine settings of a run; single options go before it. [data], [reward]
and [rollout] of python -m trainer --help say what they mean.

examples:
  python -m curate sample problems.jsonl --model runs/quickstart/latest --out sampled.jsonl
  python -m curate sample problems.jsonl --model Qwen/Qwen3-0.6B --max-completion-tokens 4096 \\
      --cache-bytes 8589934592 --out sampled.jsonl
"""


class Sampling:
    """The stage `sample`: one model, its sampling settings, and the engine while it runs."""

    name = "sample"

    def __init__(self, config: Config, model_dir: Path, samples: int = SAMPLES):
        """config: model.max_tokens is the longest prompt + completion that may occur, not the length reserved."""
        if samples < 1:
            raise ConfigError(f"--samples = {samples}: must be at least 1")
        self.config, self.model_dir, self.samples = config, model_dir, samples
        self.digest = digest_model(model_dir)
        self.prompts: list[Prompt] = []
        self.solver: Solver | None = None
        self.speed = Speed()

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of model, sampling and prompts, and those that can change a verdict."""
        model, rollout, reward = self.config.model, self.config.rollout, self.config.reward
        return {
            "model": self.model_dir.resolve().name,
            "weights": self.digest,
            "dtype": model.dtype,
            "max_tokens": model.max_tokens,
            "samples": self.samples,
            "temperature": rollout.temperature,
            "max_completion_tokens": rollout.max_completion_tokens,
            "seed": self.config.seed,
            "system_prompt": self.config.data.system_prompt,
            "templates": self.config.data.templates,
            "deadline_s": reward.deadline_s,
            "sandbox": reward.sandbox.model_dump(mode="json", exclude={"max_concurrency"}),
        }

    @property
    def under_way(self) -> int:
        """Number of rows whose completions keep all of the engine's sequences in use."""
        return 2 * -(-self.config.rollout.max_sequences // self.samples)

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Render all prompts, so that the engine reserves no longer sequences than occur, and start it."""
        from shared.chat import Chat
        from trainer.data import PromptFormat
        from trainer.solver import Solver

        problems: list[Problem] = [checked(problem_of(row.fields, row.where), row.where) for row in rows]
        chat = Chat(self.model_dir)
        style = PromptFormat(chat, self.config.data)
        for index, problem in enumerate(problems):
            self.prompts.append(Prompt(index, problem, style.render(problem.text, problem.domain)))
            if index % 256 == 0:
                await show(index, len(problems))
        fitting = [len(prompt.token_ids) for prompt in self.prompts if self._fits(prompt)]
        longest = max(fitting, default=1) + self.config.rollout.max_completion_tokens
        model = self.config.model.model_copy(update={"max_tokens": longest})
        self.solver = Solver(self.config.model_copy(update={"model": model}), self.model_dir, chat, tell)
        if isolation := await self.solver.start(problems):
            tell(isolation)
        self.speed.begin()

    def _fits(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) + self.config.rollout.max_completion_tokens <= self.config.model.max_tokens

    async def judge(self, index: int, row: Row) -> Decision:
        """Sample and grade one problem."""
        assert self.solver is not None
        prompt, limit = self.prompts[index], self.config.rollout.max_completion_tokens
        if not self._fits(prompt):
            detail = f"{len(prompt.token_ids)} tokens and {limit} of completion exceed {self.config.model.max_tokens}"
            return Rejected(TOO_LONG, detail)
        samples = samples_of_group(await self.solver.solve(prompt, self.samples))
        tokens = sum(sample.tokens for sample in samples)
        self.speed.add(tokens)
        counts = {
            "completions": len(samples),
            "completion tokens": tokens,
            "completions cut at the limit": sum(sample.tokens >= limit for sample in samples),
            "right completions": sum(sample.verdict is Verdict.CORRECT for sample in samples),
            "completions without a grade": sum(not sample.verdict.graded for sample in samples),
        }
        return Kept([with_samples(row.fields, samples)], {name: count for name, count in counts.items() if count})

    async def close(self) -> None:
        """Stop the engine and the verifiers, and print the speed."""
        if self.solver is not None:
            await self.solver.close()
            self.speed.end()


def tell(text: str) -> None:
    """Print one line on the error stream, beside the bar."""
    sys.stderr.write(f"    {text}\n")


class Speed:
    """Prints completion tokens per second: a line every ten seconds, and one at the end."""

    def __init__(self) -> None:
        self.tokens = self.told_tokens = 0
        self.began_s = self.told_s = time.monotonic()

    def begin(self) -> None:
        """Start the clock, once the engine is running."""
        self.began_s = self.told_s = time.monotonic()

    def add(self, tokens: int) -> None:
        """Add sampled tokens, and print the recent speed if ten seconds have passed."""
        self.tokens += tokens
        now = time.monotonic()
        if now - self.told_s >= SPEED_EVERY_S:
            tell(f"{(self.tokens - self.told_tokens) / (now - self.told_s):,.0f} completion tokens/s")
            self.told_tokens, self.told_s = self.tokens, now

    def end(self) -> None:
        """Print the total and the mean speed."""
        seconds = max(time.monotonic() - self.began_s, 1e-6)
        if self.tokens:
            tell(f"{self.tokens:,} completion tokens in {seconds:.1f} s: {self.tokens / seconds:,.0f} tokens/s")


def make(options: argparse.Namespace) -> Sampling:
    """Make the stage from the options."""
    from shared.model import hf

    given = {key: getattr(options, option[2:].replace("-", "_")) for option, key, _ in OPTIONS}
    model_dir = hf.resolve(options.model)
    hf.check(model_dir)
    config = make_config(options.config, {key: text for key, text in given.items() if text is not None}, model_dir)
    return Sampling(config, model_dir, options.samples)


COMMAND = Command(
    summary="sample completions of every problem and grade them",
    explanation=EXPLANATION,
    add_options=add_options,
    make=make,
)
