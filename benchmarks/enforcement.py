"""How often thoughts are in the language that was asked for, by enforcement: docs/results/enforcement.md.

    python -m benchmarks.enforcement --model runs/quickstart/latest --model models/smollm2-135m-instruct

Serves each model with `python -m serve` and asks word problems over HTTP, in seven languages: once for the language of
the question (`auto`), once for another one than the question's. What the server reports is not believed: every response
is measured again here, and a response of `strict` in another language ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import httpx

from benchmarks.section import ROOT, describe_machine
from benchmarks.servers import OURS, Running
from examples.quickstart.word_problems import make_word_problem
from serve.reasoning_language import Enforcement, measure
from shared.atomic_write import beside

LANGUAGES = ("en", "fr", "de", "es", "it", "ru", "zh")
MODES: tuple[str, ...] = ("off", *get_args(Enforcement))
ANSWER_S = 600.0


class Outcome(NamedTuple):
    """Of one request."""

    kind: str
    """match, mismatch, undetermined, or refused (status 422 of strict)"""
    correct: bool
    tries: int
    answer: str = ""
    """language of the answer, "" where it has too few words to tell"""


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server of the model, until the block ends. Exits where it does not start."""
    with TemporaryDirectory() as folder:
        server = Running(OURS, ["serve", "--model", str(Path(model).absolute())], Path(folder) / "log")
        try:
            server.wait()
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.close()


def questions(count: int) -> list[tuple[str, str, str]]:
    """(language, problem, answer), `count` of each language."""
    found = []
    for language in LANGUAGES:
        rng = random.Random(f"enforcement {language}")
        stories = [make_word_problem(rng, language, (2, 2)) for _ in range(count)]
        found += [(language, story.text, str(story.answer)) for story in stories]
    return found


async def ask(client: httpx.AsyncClient, text: str, answer: str, language: str, mode: str, **body: Any) -> Outcome:
    """One question, with the thoughts wanted in a language."""
    wish = {"reasoning_language": "off"} if mode == "off" else {
        "reasoning_language": body.pop("wish"), "reasoning_language_enforcement": mode,
    }  # fmt: skip
    body.pop("wish", None)
    reply = await client.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": text}], **wish, **body,
    })  # fmt: skip
    if reply.status_code == 422:
        return Outcome("refused", False, 2)
    reply.raise_for_status()
    found = reply.json()
    message = found["choices"][0]["message"]
    measured = measure(message["reasoning"] or "", message["content"] or "", language)
    kind = {True: "match", False: "mismatch", None: "undetermined"}[measured.match]
    right = f"\\boxed{{{answer}}}" in (message["content"] or "")
    return Outcome(kind, right, found["reasoning_language"]["tries"], measured.answer.language)


Found = dict[str, dict[str, list[Outcome]]]
"""mode -> wanted language -> outcomes"""


async def measure_model(url: str, count: int, foreign: bool, most_tokens: int, budget: int) -> Found:
    """All modes. foreign: another language than the question's is wanted."""
    found: Found = {}
    limits = httpx.Limits(max_connections=48)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:
        for mode in MODES:
            begun = time.monotonic()
            asked = []
            for number, (language, text, answer) in enumerate(questions(count)):
                others = [one for one in LANGUAGES if one != language]
                wanted = others[number % len(others)] if foreign else language
                body: dict[str, Any] = {"seed": number, "temperature": 0.7, "max_tokens": most_tokens,
                                        "wish": wanted if foreign else "auto"}  # fmt: skip
                if budget:
                    body["thinking_token_budget"] = budget
                asked.append((wanted, ask(client, text, answer, wanted, mode, **body)))
            outcomes = await asyncio.gather(*(one for _, one in asked))
            found[mode] = {language: [] for language in LANGUAGES}
            for (wanted, _), outcome in zip(asked, outcomes, strict=True):
                found[mode][wanted].append(outcome)
            done = Counter(outcome.kind for outcome in outcomes)
            print(f"{mode:8} {'another language' if foreign else 'own language':16} {dict(done)} "
                  f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    return found


def cell(outcomes: list[Outcome]) -> str:
    """Share of matches among what was measured, and what was not."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    told = kinds["match"] + kinds["mismatch"]
    text = f"{100 * kinds['match'] / told:.0f}" if told else "-"
    notes = [f"{kinds[name]} {short}" for name, short in (("undetermined", "?"), ("refused", "refused")) if kinds[name]]
    return text + (f" ({', '.join(notes)})" if notes else "")


def table(found: Found) -> list[str]:
    """Markdown: one line a mode."""
    lines = ["| enforcement | all | " + " | ".join(LANGUAGES) + " | answers in it | right | tries |", "|---" * 12 + "|"]
    for mode, by_language in found.items():
        all_ = [outcome for outcomes in by_language.values() for outcome in outcomes]
        cells = [cell(by_language[language]) for language in LANGUAGES]
        right = sum(outcome.correct for outcome in all_) / len(all_)
        tries = sum(outcome.tries for outcome in all_) / len(all_)
        answers = [one.answer == language for language, part in by_language.items() for one in part if one.answer]
        told = f"{100 * sum(answers) / len(answers):.0f}" if answers else "-"
        more = f"{told} | {100 * right:.0f} % | {tries:.2f}"
        lines.append(f"| {mode} | **{cell(all_)}** | {' | '.join(cells)} | {more} |")
    return [*lines, ""]


def main() -> int:
    """Measure and write the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="model folder; may be given several times")
    parser.add_argument("--count", type=int, default=20, help="questions of each language (default: 20)")
    parser.add_argument("--most-tokens", type=int, default=220, help="of a response (default: 220)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "enforcement.md")
    given = parser.parse_args()
    lines = [
        "# Thoughts in the language that was asked for", "",
        f"Written by `python -m benchmarks.enforcement` on {datetime.date.today()}, {describe_machine()}. "
        f"{given.count} word problems of each language, temperature 0.7. A cell: of the responses whose thoughts have "
        "enough words to tell, the percentage that is in the language asked for, thoughts and answer; in brackets "
        "those that could not be told (?), most often because the model wrote no thoughts, and those that `strict` "
        "refused with status 422. `off` asks for no language. Answers in it: of those with enough words to tell.", "",
    ]  # fmt: skip
    bad = 0
    for model in given.model:
        folder = Path(model)
        name = folder.resolve().parent.parent.name if folder.name in ("latest", "best") else folder.name
        with serving(model) as url:
            context = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
            budget = 0 if context < 1024 else given.most_tokens // 2
            for foreign in (False, True):
                found = asyncio.run(measure_model(url, given.count, foreign, given.most_tokens, budget))
                wanted = "another language than the question's" if foreign else "the question's language (`auto`)"
                lines += [f"## {name}: {wanted}", "", *table(found)]
                bad += sum(one.kind == "mismatch" for part in found["strict"].values() for one in part)
    lines += [f"Responses of `strict` in another language than asked for: {bad}."]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with beside(given.out) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {given.out}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
