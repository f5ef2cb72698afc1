"""Run folders for the tests of the dashboard, written by what a launch writes them with: metrics log, lock, settings.

Their completions are graded by the real verifiers. Nothing was sampled: texts and log-probs are drawn by a seed.
"""

import json
import math
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as BytesToText
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from shared import settings_file
from shared.config import Config
from shared.metrics import MetricsLog
from shared.types import Completion, Group, Problem, Prompt, Reward, TurnText, Verdict, VersionSpan
from trainer.data.data_source import write_jsonl
from trainer.evaluation import Breakdown, Evaluation, EvaluationRecord
from trainer.run_lock import LockHolder
from verify.reward import score

NO_PID = 2**22 + 1
"""larger than any process id"""
ASKED = ("de", "en", "es", "fr", "hi", "it", "ja", "none", "pt", "ru", "zh")
PROBLEMS = [
    Problem("sum-1", "Find $\\sum_{k=1}^{n} k$ for $n = 4$.", "10", "en"),
    Problem("äpfel-2", "Anna hat 5 Äpfel und kauft 3 dazu. Wie viele Äpfel hat sie jetzt?", "8", "de"),
    Problem("root-3", "What is $\\sqrt{144}$?", "12", "en"),
]
SAID = [
    ("The numbers from one to four are added, and the pairs make five each.", "The sum is"),
    ("Anna hat am Anfang fünf Äpfel, und dann kauft sie noch drei Äpfel dazu.", "Zusammen sind es genau"),
    ("I look for the number whose square is one hundred and forty-four.", "The root is $\\sqrt{144} ="),
]


def metrics(step: int, steps: int = 120, speed: float = 1.0) -> dict[str, float]:
    noise, done = random.Random(step), 1 - math.exp(-3 * speed * step / steps)
    draw = noise.gauss
    accuracy = min(max(0.22 + 0.68 * done + draw(0, 0.03), 0), 1)
    return {
        "reward/mean": 0.1 + 0.9 * accuracy, "reward/correctness": 0.9 * accuracy, "reward/format": 0.1,
        "reward/language": 0.08 + draw(0, 0.004), "reward/length": -0.01 * abs(draw(0, 1)),
        "reward/std": 0.4 - 0.2 * done,
        "accuracy": accuracy, "consistency": 0.5 + 0.4 * done + draw(0, 0.02), "format": 0.97,
        "length/mean": 60 + 90 * done,
        "length/p50": 55 + 85 * done, "length/p99": 140 + 200 * done, "length/max": 380, "truncated": 0.04,
        "staleness/mean": 1.2 + draw(0, 0.1), "staleness/max": 2, "groups/trained": 32, "groups/filtered": 3 + 8 * done,
        "loss": draw(0, 0.02), "ratio/mean": 1 + draw(0, 0.001), "ratio/max": 1.6 + abs(draw(0, 0.2)),
        "logprob_difference/mean": 0.003 + abs(draw(0, 2e-4)), "logprob_difference/max": 0.2 + abs(draw(0, 0.05)),
        "clip/low": 0.004, "clip/high": 0.009 + abs(draw(0, 0.001)), "entropy": 0.9 - 0.5 * done + draw(0, 0.01),
        "grad_norm": 0.4 + abs(draw(0, 0.05)), "lr": 1e-4, "stage": 0, "sync/total_s": 0.06 + abs(draw(0, 0.01)),
        "sync/update_s": 0.04, "sync/write_s": 0.01, "sync/stall_ms": 40 + abs(draw(0, 8)), "time/step_s": 4.0,
        "time/wait_batch_s": 1.2 + draw(0, 0.2), "time/train_s": 2.4, "time/wait_sync_s": 0.1,
        "time/checkpoint_s": 0.9 if step % 10 == 0 else 0.0, "time/total_s": 4.0 * step,
        "tokens/generated_per_s": 2100 + draw(0, 80), "tokens/trained_per_s": 2300 + draw(0, 80), "mfu": 0.31,
        "memory/trainer_peak_bytes": 9.1e8, "memory/engine_peak_bytes": 1.7e9, "verify/correct": 200.0 * step,
        "verify/wrong": 56.0 * step, "verify/no_answer": 4.0, "verify/timeout": 0, "engine/restarts": 0,
    }  # fmt: skip


def text_of(place: int, answer: str) -> str:
    """A completion for a problem, with formulas and now and then some code."""
    thought, says = SAID[place]
    code = "\n\n```python\nsum(range(1, 5))  # 10\n```" if place == 0 and answer == "10" else ""
    return f"<think>{thought}</think>{says} $\\boxed{{{answer}}}$.{code}"


def tokenizer_of(texts: list[str]) -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), BytesToText()  # type: ignore[assignment]
    made.train_from_iterator(texts, BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet()))
    return made


def group_of(index: int, step: int, tokenizer: Tokenizer) -> Group:
    """A group of eight whose completions are right or wrong, the last one cut, the one before in a mixed language."""
    draw, place = random.Random(1000 * step + index), index % len(PROBLEMS)
    problem, version = PROBLEMS[place], max(step - 2, 0)
    texts = [text_of(place, problem.answer if draw.random() < 0.5 else str(draw.randint(13, 40))) for _ in range(8)]
    texts[6] = texts[6].replace(SAID[place][0], SAID[1 if place != 1 else 0][0])
    texts[7] = texts[7][: len(texts[7]) // 2]
    tokens = [tokenizer.encode(text).ids for text in texts]
    completions = [
        Completion(
            group=index, index=number, seed=number, token_ids=ids, finish_reason="length" if number == 7 else "stop",
            logprobs=[-abs(draw.gauss(0, 0.8)) for _ in ids], teacher=[-abs(draw.gauss(0, 0.9)) for _ in ids],
            spans=[VersionSpan(version, 0, len(ids) // 2), VersionSpan(version + 1, len(ids) // 2, len(ids))],
        )
        for number, ids in enumerate(tokens)
    ]  # fmt: skip
    rewards = [score(problem, text, Config(), tokens=len(ids)) for text, ids in zip(texts, tokens, strict=True)]
    return Group(Prompt(index, problem, [1, 2, 3]), completions, list(rewards), texts)


def episode(index: int) -> Group:
    """A group of two episodes: the environment grades one, the other failed."""
    problem = Problem(f"episode-{index}", "Find the number from 1 to 16.", "", environment="guess")
    turns = [[TurnText("policy", "3", 0.0), TurnText("environment", "higher"), TurnText("policy", "16", 1.0)],
             [TurnText("policy", "9", 0.0, "it does not answer")]]  # fmt: skip
    completions = [
        Completion(index, 0, 1, [5, 9, 9, 7], [-0.1, 0, 0, -2.5], [VersionSpan(3, 0, 1), VersionSpan(3, 3, 4)], "stop"),
        Completion(index, 1, 2, [5], [-0.1], [VersionSpan(3, 0, 1)], "timeout"),
    ]
    graded = Reward(1.0, None, 1.0, 0.0, 0.0, Verdict.CORRECT, "rewards of the environment: 0, 1", share=1.0)
    failed = Reward(0.0, None, 0.0, 0.0, 0.0, Verdict.TIMEOUT, "it does not answer")
    return Group(Prompt(index, problem, [1]), completions, [graded, failed], ["3 higher 16", "9"], turns)


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write a file of JSON lines; a text is a line as it is."""
    lines = (row if isinstance(row, str) else msgspec.json.encode(row).decode() for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))


def write_run(folder: Path, *, steps: int = 120, rollouts: int = 3, state: str = "finished", speed: float = 1.0,
              **settings: Any) -> Path:  # fmt: skip
    """A run of `steps` steps of 4 s, with rollouts of the last `rollouts` ones. state: how its lock says that it ended,
    or "running" (by this process) or "crashed" (a controller that is gone)."""
    config = Config(name=folder.name, runs_dir=str(folder.parent), steps=steps if state == "finished" else 2 * steps)
    config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update=settings)})
    settings_file.write(config, folder / "config.toml")
    log, now = MetricsLog(folder / "metrics.jsonl"), time.time()
    for step in range(1, 6):
        log.write(step, {"sft/loss": 3 / step, "sft/lr": 1e-3, "sft/tokens_per_s": 3000.0})
    for step in range(1, steps + 1):
        log.write(step, metrics(step, speed=speed))
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    write_lines(log.path, ({**row, "time": now - 4.0 * (len(rows) - 1 - place)} for place, row in enumerate(rows)))
    evaluations = []
    for version in range(0, steps + 1, 30):
        accuracy = min(0.3 + 0.005 * version, 0.92)
        for temperature in (1.0, 0.0):
            parts = {f"language/{code}": Breakdown(32, accuracy + more, 0.08, 0.8)
                     for code, more in (("de", -0.05), ("en", 0.05))}  # fmt: skip
            parts |= {f"asked/{code}": Breakdown(8, accuracy, 0.1, 0.8) for code in ASKED}
            made = Evaluation(64, accuracy, 0.06, 0.8, temperature=temperature, format=0.97, reward=accuracy,
                              tokens=80.0, parts=parts)  # fmt: skip
            evaluations.append(EvaluationRecord(version, 4.0 * version, made))
    write_lines(folder / "evaluations.jsonl", evaluations)
    phases = {"reading the problems": -40, "loading the model": -31, "connecting the engines": -12, "training": 0}
    begun = now - 4.0 * steps
    write_lines(folder / "phases.jsonl", ({"time": begun + after, "phase": name} for name, after in phases.items()))
    tokenizer = tokenizer_of([text_of(place, "8") for place in range(3)] * 20)
    for place in ("made/model", "rollouts"):
        (folder / place).mkdir(parents=True)
    tokenizer.save(str(folder / "made/model/tokenizer.json"))
    for step in range(steps - rollouts + 1, steps + 1):
        groups = [group_of(index, step, tokenizer) for index in range(3)]
        write_jsonl(folder / f"rollouts/step_{step}.jsonl", [*groups, episode(3)])
    write_lock(folder, state)
    return folder


def write_lock(folder: Path, state: str) -> None:
    """A lock as a launch on this machine leaves or holds it."""
    pid = os.getpid() if state == "running" else NO_PID
    ended = {"running": "", "crashed": "", "finished": "exit code 0", "stopped": "exit code 143"}.get(state, state)
    write_lines(folder / "lock", [LockHolder(pid, os.uname().nodename, "2026-11-26 04:23:15", ended)])


def write_foreign(folder: Path) -> Path:
    """A run of an older version or of another program: no lock, no kinds, other columns, records that are not whole."""
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": step, "time": 1000 + step, "my/score": step / 2, "note": "x", "reward/mean": 0.3}
            for step in range(1, 20)]  # fmt: skip
    write_lines(folder / "metrics.jsonl", [*rows[:9], "{broken", "[1, 2]", '{"step": "x"}', *rows[9:]])
    (folder / "config.toml").write_text('steps = 50\n[trainer]\nflavour = "vanilla"\n')
    old = {"prompt": {"problem": {"id": "old", "text": "1 + 1"}}, "texts": ["2"]}
    good = {**old, "completions": [{"token_ids": [1, 2], "trainer": [-0.5, -1.0], "logprobs": [-0.4, -1.1]}]}
    old |= {"completions": [{"token_ids": [1, 2]}, 7], "rewards": [{"total": "much", "verdict": "right"}], "more": [1]}
    write_lines(folder / "rollouts/step_3.jsonl", [good, old, "no json", [1]])
    return folder
