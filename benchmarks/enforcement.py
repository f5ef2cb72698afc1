"""How often thoughts are in the language that was asked for, by enforcement.

Serves each model with `python -m serve` and asks word problems over HTTP, in seven languages: once for the language of
the question (`auto`), once for another one than the question's. What the server reports is not believed: every response
is measured again here. A response of `strict` in another language is an error.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import httpx

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from benchmarks.servers import OURS, Running
from examples.quickstart.word_problems import make_word_problem
from serve.reasoning_language import Enforcement, measure
from shared.errors import RunError

LANGUAGES = ("en", "fr", "de", "es", "it", "ru", "zh")
MODES: tuple[str, ...] = ("off", *get_args(Enforcement))
ANSWER_S = 600.0


class Outcome(NamedTuple):
    """What came of one request."""

    kind: str
    """match, mismatch, undetermined, or refused (status 422 of strict)"""
    correct: bool
    tries: int
    answer: str = ""
    """language of the answer, "" where it has too few words to tell"""


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server of the model, until the block ends. Raises RunError where it does not start."""
    with TemporaryDirectory() as folder:
        server = Running(OURS, ["serve", "--model", str(Path(model).absolute())], Path(folder) / "log")
        try:
            server.wait()
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.close()


def questions(count: int) -> list[tuple[str, str, str]]:
    """Return (language, problem, answer), `count` of each language."""
    found = []
    for language in LANGUAGES:
        rng = random.Random(f"enforcement {language}")
        stories = [make_word_problem(rng, language, (2, 2)) for _ in range(count)]
        found += [(language, story.text, str(story.answer)) for story in stories]
    return found


async def ask(client: httpx.AsyncClient, text: str, answer: str, language: str, mode: str, **body: Any) -> Outcome:
    """Ask one question, with the thoughts wanted in a language."""
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
    """Measure all modes. foreign: another language than the question's is wanted."""
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
    """Return the share of matches among what was measured, and what was not."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    told = kinds["match"] + kinds["mismatch"]
    text = f"{100 * kinds['match'] / told:.0f}" if told else "-"
    notes = [f"{kinds[name]} {short}" for name, short in (("undetermined", "?"), ("refused", "refused")) if kinds[name]]
    return text + (f" ({', '.join(notes)})" if notes else "")


def rows(found: Found) -> Iterator[list[str]]:
    """Yield the cells of each mode."""
    for mode, by_language in found.items():
        every = [outcome for outcomes in by_language.values() for outcome in outcomes]
        right, tries = (
            sum(values) / len(every) for values in zip(*((one.correct, one.tries) for one in every), strict=True)
        )
        answers = [one.answer == language for language, part in by_language.items() for one in part if one.answer]
        told = f"{100 * sum(answers) / len(answers):.0f}" if answers else "-"
        cells = [cell(by_language[language]) for language in LANGUAGES]
        yield [mode, f"**{cell(every)}**", *cells, told, f"{100 * right:.0f} %", f"{tries:.2f}"]


def of_model(model: Path, count: int, most_tokens: int) -> Iterator[str]:
    """Yield the tables of one model. Raises RunError where `strict` let another language pass."""
    name = model.resolve().parent.parent.name if model.name in ("latest", "best") else model.name
    with serving(str(model)) as url:
        context = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
        budget = 0 if context < 1024 else most_tokens // 2
        for foreign in (False, True):
            found = asyncio.run(measure_model(url, count, foreign, most_tokens, budget))
            if bad := sum(one.kind == "mismatch" for part in found["strict"].values() for one in part):
                raise RunError(f"{bad} responses of `strict` are in another language than asked for")
            wanted = "another language than the question's" if foreign else "the question's language (`auto`)"
            head = ("enforcement", "all", *LANGUAGES, "answers in it", "right", "tries")
            yield f"## {name}: {wanted}\n\n{table(head, *rows(found))}"


@benchmark(page="docs/results/enforcement.md")
def enforcement(quick: bool, model: list[Path], count: int = 20, most_tokens: int = 220) -> Iterator[Section]:
    """Ask every model. model: folders; count: questions of each language."""
    count, most_tokens = (1, 32) if quick else (count, most_tokens)
    tables = [part for one in model for part in of_model(one, count, most_tokens)]
    yield Section("\n".join([
        "# Thoughts in the language that was asked for", "",
        f"{measured_with('enforcement')}. "
        f"{count} word problems of each language, temperature 0.7. A cell: of the responses whose thoughts have "
        "enough words to tell, the percentage that is in the language asked for, thoughts and answer; in brackets "
        "those that could not be told (?), most often because the model wrote no thoughts, and those that `strict` "
        "refused with status 422. `off` asks for no language. Answers in it: of those with enough words to tell.", "",
        *tables, "Responses of `strict` in another language than asked for: 0.", "",
    ]))  # fmt: skip
