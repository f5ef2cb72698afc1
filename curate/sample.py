"""The stage `sample`: completions of every problem, graded, as "pass_rate" and "samples" in its row.

    pass_rate = right completions / graded completions           (a verifier that failed says nothing about the problem)

The pass rate of open problems is null.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field
from pydantic.dataclasses import dataclass

from curate.stage import CurationStage, Decision, Kept, Rejected, Show, is_open
from shared import settings_file
from shared.clean_text import clean
from shared.errors import DataError
from shared.jsonl import Row
from shared.types import Group, Prompt, Verdict
from verify.verifiers import read_problem, verifier_for, without_environment

if TYPE_CHECKING:
    from shared.config import Config
    from trainer.solver import Solver


TOO_LONG = "too long for the model"
SPEED_EVERY_S = 10.0
BLOCKS, BLOCK_BYTES = 64, 1 << 14
"""number and size of the blocks of a weight file that identify it: a training step changes every block"""
FIRST = "run the stage sample first"
RUN_SETTINGS = {
    "temperature": "rollout.temperature",
    "max_completion_tokens": "rollout.max_completion_tokens",
    "system_prompt": "data.system_prompt",
    "seed": "seed",
    "max_sequences": "rollout.max_sequences",
    "cache_bytes": "rollout.cache_bytes",
}
"""option -> the setting of a run that it sets"""


class Sample(msgspec.Struct, frozen=True):
    """One graded completion."""

    answer: str | None
    """the final answer, None if there is none (and for programs)"""
    verdict: Verdict
    tokens: int


def samples_of_group(group: Group) -> list[Sample]:
    """Return the samples of a graded group; of programs only the verdict is kept."""
    is_program = verifier_for(group.prompt.problem).answer_in != "box"
    samples = []
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        assert reward is not None
        answer = None if is_program else reward.answer or None
        samples.append(Sample(answer, reward.verdict, len(completion.token_ids)))
    return samples


def pass_rate(samples: Sequence[Sample]) -> float | None:
    """Return the share of right completions among the graded ones, in [0, 1]; None if none was graded."""
    graded = [sample.verdict for sample in samples if sample.verdict.graded]
    return graded.count(Verdict.CORRECT) / len(graded) if graded else None


def with_samples(fields: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the row with its samples and pass rate; earlier ones are replaced."""
    rate = None if is_open(fields) else pass_rate(samples)
    return {**fields, "pass_rate": rate, "samples": msgspec.to_builtins(list(samples))}


def read_pass_rate(row: Row) -> float | None:
    """Read the row's pass rate; None if nothing could be graded. Raises DataError for a row without one."""
    if "pass_rate" not in row.fields:
        raise DataError(f"{row.where} lacks 'pass_rate': {FIRST}")
    rate = row.fields["pass_rate"]
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise DataError(f"{row.where}: 'pass_rate' is {rate!r:.40}: it must be a number between 0 and 1; {FIRST}")
    return float(rate)


def read_samples(row: Row) -> list[Sample]:
    """Read the row's samples. Raises DataError for a row without them."""
    if not row.fields.get("samples"):
        raise DataError(f"{row.where} lacks 'samples': {FIRST}")
    try:
        return msgspec.convert(row.fields["samples"], list[Sample])
    except msgspec.ValidationError as error:
        raise DataError(f"{row.where}: 'samples' is damaged ({error}): {FIRST}") from error


def _run_setting(name: str, text: str) -> Any:
    """Declare an option that replaces a setting of --config; its text is parsed as in a settings file."""
    default = settings_file.SETTINGS[RUN_SETTINGS[name]].get_default()
    shown = "" if default is None or len(str(default)) > 20 else f" (default {default})"
    return Field(default=None, description=f"{text}{shown}, or that of --config")


@dataclass
class SampleStage(CurationStage):
    """Sample completions of every problem and grade them.

    One engine samples as a run would: with the same prompts, verifiers and (for programs) tests. Seeds depend on the
    row's position in the input and on --seed, so a stopped stage goes on with the rows that are missing.

    output: each row with
      "pass_rate"  share of right completions among the graded ones (null when none could be graded, and for open
                   problems)
      "samples"    [{"answer", "verdict", "tokens"}, ...], an answer only for problems that have one
    reason: too long for the model (prompt and --max-completion-tokens exceed its positions, or the model.max_tokens of
    --config)

    --config takes prompts, verifiers, lengths and engine settings of a run; single options go before it. [data],
    [reward] and [rollout] of python -m trainer --help say what they mean.

    examples:
      python -m curate sample problems.jsonl --model runs/quickstart/latest --out sampled.jsonl
      python -m curate sample problems.jsonl --model Qwen/Qwen3-0.6B --max-completion-tokens 4096 \\
          --cache-bytes 8589934592 --out sampled.jsonl
    """

    name = "sample"
    model: str = Field(description="Hugging Face folder or Hub id")
    samples: int = Field(default=16, ge=1, description="completions of each problem")
    config: Path | None = Field(default=None, description="settings of a run, a TOML file")
    temperature: str | None = _run_setting("temperature", "sampling temperature")
    max_completion_tokens: str | None = _run_setting("max_completion_tokens", "a completion is cut at this length")
    system_prompt: str | None = _run_setting("system_prompt", '"magistral", "" for none, or the text itself')
    seed: str | None = _run_setting("seed", "another seed gives other samples")
    max_sequences: str | None = _run_setting("max_sequences", "completions that the engine decodes at once")
    cache_bytes: str | None = _run_setting("cache_bytes", "KV cache of the engine, bytes")

    def __post_init__(self) -> None:
        """Read settings and model. Raises ConfigError, ModelError."""
        from shared.model import hf

        super().__post_init__()
        self.model_dir = hf.resolve(self.model, "--model")
        hf.check(self.model_dir)
        self.run_config = self._read_config(hf.load_config(self.model_dir))
        self.digest = _digest_weights(self.model_dir, sorted(hf.weight_files(self.model_dir)))
        self.solver: Solver | None = None

    def _read_config(self, described: Mapping[str, Any]) -> Config:
        """Return the settings to sample with: those of --config, overridden by options, for this model.

        Rewards that do not decide whether an answer is right are disabled. model.max_tokens is the longest prompt and
        completion that may occur, not the length reserved. described: the model's config.json.
        """
        table = {} if self.config is None else settings_file.read_toml(self.config)
        given: list[settings_file.Given] = [
            (f"--{name.replace('_', '-')}", key, settings_file.parse_value(key, text))
            for name, key in RUN_SETTINGS.items()
            if (text := getattr(self, name)) is not None
        ]
        if self.config is None:
            where = f"{self.model_dir}/config.json: max_position_embeddings"
            given.append((where, "model.max_tokens", described.get("max_position_embeddings", 4096)))
            if "float32" in (described.get("dtype"), described.get("torch_dtype")):
                given.append((str(self.model_dir), "model.dtype", "float32"))
        off = {"model.path": str(self.model_dir), "reward.length": 0.0, "reward.max_failure_share": 1.0}
        off |= {"reward.extra": {}, "reward.options": {}, "reward.plugins": []}
        given += [("options", key, value) for key, value in off.items()]
        return settings_file.check(table, str(self.config or "options"), settings_file.put_all(table, given))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of model, sampling and prompts, and those that can change a verdict."""
        config = self.run_config
        return {
            "model": self.model_dir.resolve().name,
            "weights": self.digest,
            "dtype": config.model.dtype,
            "max_tokens": config.model.max_tokens,
            "samples": self.samples,
            "temperature": config.rollout.temperature,
            "max_completion_tokens": config.rollout.max_completion_tokens,
            "seed": config.seed,
            "system_prompt": config.data.system_prompt,
            "templates": config.data.templates,
            **({"template": config.model.template} if config.model.template else {}),
            **({"chat_template": config.model.chat_template} if config.model.chat_template else {}),
            "deadline_s": config.reward.deadline_s,
            "refuse": sorted(config.reward.refuse),
            "sandbox": config.reward.sandbox.model_dump(mode="json", exclude={"max_concurrency"}),
        }

    @property
    def concurrency(self) -> int:
        """Number of rows whose completions keep all of the engine's sequences in use."""
        return 2 * -(-self.run_config.rollout.max_sequences // self.samples)

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Render all prompts, so that the engine reserves no longer sequences than occur, and start it."""
        from shared.chat import Chat
        from trainer.data.data_source import PromptFormat
        from trainer.solver import Solver

        config = self.run_config
        what = f"python -m curate {self.name} samples"
        problems = [read_problem({"environment": config.environment.name} | row.fields, row.where) for row in rows]
        for problem, row in zip(problems, rows, strict=True):
            without_environment(problem, row.where, what)
        chat = Chat.of_run(self.model_dir, config)
        style = PromptFormat(chat, config.data)
        self.prompts: list[Prompt] = []
        for index, problem in enumerate(problems):
            self.prompts.append(Prompt(index, problem, style.prompt_of(problem)))
            if index % 256 == 0:
                await show(index, len(problems))
        fitting = [len(prompt.token_ids) for prompt in self.prompts if self._fits(prompt)]
        longest = max(fitting, default=1) + config.rollout.max_completion_tokens
        model = config.model.model_copy(update={"max_tokens": longest})
        self.solver = Solver(config.model_copy(update={"model": model}), self.model_dir, chat, _write_line)
        if isolation := await self.solver.start(problems):
            _write_line(isolation)
        self.speed = TokenSpeed()

    def _fits(self, prompt: Prompt) -> bool:
        limit = self.run_config.rollout.max_completion_tokens
        return len(prompt.token_ids) + limit <= self.run_config.model.max_tokens

    async def decide(self, index: int, row: Row) -> Decision:
        """Sample and grade one problem."""
        assert self.solver is not None
        prompt, limit = self.prompts[index], self.run_config.rollout.max_completion_tokens
        if not self._fits(prompt):
            most = self.run_config.model.max_tokens
            return Rejected(TOO_LONG, f"{len(prompt.token_ids)} tokens and {limit} of completion exceed {most}")
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


def _digest_weights(folder: Path, files: Sequence[Path]) -> str:
    """Return a digest, 16 hexadecimal digits, of config.json and of each weight file's size and 64 spread blocks."""
    made = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in files:
        size = path.stat().st_size
        made.update(f"{path.name} {size}".encode())
        with path.open("rb") as stream:
            for block in range(BLOCKS):
                stream.seek(block * size // BLOCKS)
                made.update(stream.read(BLOCK_BYTES))
    return made.hexdigest()


def _write_line(text: str) -> None:
    """Print one line on the error stream, next to the bar."""
    sys.stderr.write(f"    {clean(text)}\n")


class TokenSpeed:
    """Prints completion tokens per second: a line every ten seconds, and one at the end."""

    def __init__(self) -> None:
        self.tokens = self.shown_tokens = 0
        self.began_s = self.shown_s = time.monotonic()

    def add(self, tokens: int) -> None:
        """Add sampled tokens, and print the recent speed if ten seconds have passed."""
        self.tokens += tokens
        now = time.monotonic()
        if now - self.shown_s >= SPEED_EVERY_S:
            _write_line(f"{(self.tokens - self.shown_tokens) / (now - self.shown_s):,.0f} completion tokens/s")
            self.shown_tokens, self.shown_s = self.tokens, now

    def end(self) -> None:
        """Print the total and the mean speed."""
        seconds = max(time.monotonic() - self.began_s, 1e-6)
        if self.tokens:
            _write_line(f"{self.tokens:,} completion tokens in {seconds:.1f} s: {self.tokens / seconds:,.0f} tokens/s")
