"""Does a model reason in the language that it is asked to? Questions in seven languages, each asked for in all seven.

Serves each model with `python -m serve` and asks held-out word problems over HTTP. Every question is asked once for
each language, so accuracy in the question's own language and in another one are of the same questions. What the server
reports is not believed: every response is measured again here, on the words that the model wrote itself. A response
with too few words to tell its language, and one that `strict` refuses, count as not in the language. A model that
writes no reasoning is measured by its answer. The end of the page tells whether two bounds hold.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

import httpx

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
from benchmarks.servers import OURS, Running
from evaluation.samples import written
from examples.quickstart.word_problems import PHRASES, WordProblem, make_word_problem
from serve.reasoning_language import Enforcement, measure
from shared.errors import ConfigError, RunError
from verify.extract import extract_answer

LANGUAGES = tuple(PHRASES)
OFF, OWN, OTHER = "off", "the question's own", "another one"
BOUNDED = ("prompt", "strict")
"""enforcements for which the bounds are to hold"""
LEAST_SHARE, MOST_LOSS = 0.95, 0.03
ANSWER_S = 600.0
TEMPERATURE = 0.7
CONNECTIONS = 128
"""requests under way"""


class Outcome(NamedTuple):
    """What came of one request."""

    question: str
    """language of the question"""
    asked: str
    """language asked for, with `off` that of the question"""
    match: bool | None
    """whether the model's own words are in it; None for too few words"""
    correct: bool
    seconds: float
    tokens: int = 0
    tries: int = 0
    refused: bool = False


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server of the model, until the block ends. Raises RunError where it does not start."""
    with TemporaryDirectory() as folder:
        command = ["serve", "--model", str(Path(model).absolute()), "--max-sequences", str(CONNECTIONS)]
        server = Running(OURS, command, Path(folder) / "log")
        try:
            server.wait()
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.close()


def questions(count: int) -> list[WordProblem]:
    """Return `count` word problems of each language, whose sums are never trained on."""
    found = []
    for language in LANGUAGES:
        rng = random.Random(f"enforcement {language}")
        found += [make_word_problem(rng, language, (2, 2), validation=True) for _ in range(count)]
    return found


async def ask(client: httpx.AsyncClient, problem: WordProblem, asked: str, mode: str, body: dict[str, Any]) -> Outcome:
    """Ask one question for reasoning in a language; with `off` for none."""
    wish = {"reasoning_language": asked, "reasoning_language_enforcement": mode}
    wish = {"reasoning_language": OFF} if mode == OFF else wish
    began = time.monotonic()
    messages = [{"role": "user", "content": problem.text}]
    reply = await client.post("/v1/chat/completions", json={"messages": messages, **wish, **body})
    seconds = time.monotonic() - began
    if reply.status_code == 422:
        return Outcome(problem.language, asked, False, False, seconds, refused=True)
    reply.raise_for_status()
    content = reply.json()
    message, language = content["choices"][0]["message"], content["reasoning_language"]
    answer = message["content"] or ""
    match = measure(written(message["reasoning"] or "", language), answer, asked).match
    numbers = [extract_answer(answer), *reversed(re.findall(r"\d+", answer))]
    correct = next(filter(None, numbers), "") == str(problem.answer)
    tokens = content["usage"]["completion_tokens"]
    return Outcome(problem.language, asked, match, correct, seconds, tokens, language["tries"])


async def measure_model(url: str, modes: Sequence[str], count: int, most_tokens: int) -> dict[str, list[Outcome]]:
    """Ask all questions for all languages with each enforcement, and with `off` once."""
    found = {}
    context = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    budget = {} if context < 1024 else {"thinking_token_budget": most_tokens // 2}
    most_tokens = min(most_tokens, context // 2)
    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client:
        gate = asyncio.Semaphore(CONNECTIONS)

        async def one(number: int, problem: WordProblem, asked: str, mode: str) -> Outcome:
            body = {"seed": number, "temperature": TEMPERATURE, "max_tokens": most_tokens, **budget}
            async with gate:
                return await ask(client, problem, asked, mode, body)

        for mode in (OFF, *modes):
            began = time.monotonic()
            found[mode] = await asyncio.gather(*(
                one(number, problem, asked, mode)
                for number, problem in enumerate(questions(count))
                for asked in ([problem.language] if mode == OFF else LANGUAGES)
            ))  # fmt: skip
            shares = f"in the language {in_language(found[mode]):.3f}, right {accuracy(found[mode]):.3f}"
            print(f"{mode:10} {len(found[mode])} responses, {shares}, {time.monotonic() - began:.0f} s", flush=True)
    return found


def in_language(outcomes: Sequence[Outcome]) -> float:
    """Return the share of responses in the language asked for."""
    return sum(one.match is True for one in outcomes) / max(1, len(outcomes))


def accuracy(outcomes: Sequence[Outcome]) -> float:
    """Return the share of responses with the right answer."""
    return sum(one.correct for one in outcomes) / max(1, len(outcomes))


def halves(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Return the outcomes of requests for the question's own language, and of those for another one."""
    own = [one for one in outcomes if one.asked == one.question]
    return own, [one for one in outcomes if one.asked != one.question]


def loss(outcomes: Sequence[Outcome]) -> float:
    """Return how far the accuracy in another language lies below that in the question's own."""
    own, other = halves(outcomes)
    return accuracy(own) - accuracy(other)


HEAD = ("enforcement", "language asked for", "responses", "in it", "too few words", "refused", "right", "tokens",
        "seconds, median", "tries")  # fmt: skip


def rows(found: dict[str, list[Outcome]]) -> Iterator[list[str]]:
    """Yield the cells of each enforcement: for the question's own language, and for another one."""
    for mode, outcomes in found.items():
        for asked, chosen in zip((OWN, OTHER), halves(outcomes), strict=True):
            if not chosen:
                continue
            answered = [one for one in chosen if not one.refused]
            tokens, tries = (
                f"{statistics.mean(values):.{digits}f}" if values else "-"
                for values, digits in (([one.tokens for one in answered], 1), ([one.tries for one in answered], 2))
            )
            yield [mode, "none" if mode == OFF else asked, str(len(chosen)), f"**{in_language(chosen):.3f}**",
                   str(sum(one.match is None for one in chosen)), str(len(chosen) - len(answered)),
                   f"{accuracy(chosen):.3f}", tokens,
                   f"{statistics.median(one.seconds for one in chosen):.2f}", tries]  # fmt: skip


def matrix(outcomes: list[Outcome]) -> str:
    """Return a table of the share in the language asked for: a row for each language of the question, a column for each
    one asked for."""
    pairs = {pair: in_language([one for one in outcomes if one[:2] == pair]) for pair in product(LANGUAGES, repeat=2)}
    cells = ([question, *(f"{pairs[question, asked]:.2f}" for asked in LANGUAGES)] for question in LANGUAGES)
    return table(("question", *LANGUAGES), *cells)


def verdict(name: str, mode: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the cells that tell whether the bounds hold."""
    share, lost = in_language(outcomes), loss(outcomes)
    holds = share >= LEAST_SHARE and lost <= MOST_LOSS
    own, other = map(accuracy, halves(outcomes))
    return [name, mode, f"{share:.3f}", f"{own:.3f}", f"{other:.3f}", f"{lost:+.3f}", "yes" if holds else "**no**"]


def of_model(name: str, found: dict[str, list[Outcome]]) -> Iterator[str]:
    """Yield the tables of one model."""
    yield f"## {name}\n\n{table(HEAD, *rows(found))}"
    if outcomes := found.get("prompt"):
        yield f"`prompt`, share of responses in the language asked for:\n\n{matrix(outcomes)}"


@benchmark(page="docs/results/enforcement.md")
def enforcement(
    quick: bool,
    model: list[Path],
    count: int = 40,
    most_tokens: int = 220,
    enforcements: list[str] = list(BOUNDED),  # noqa: B006
    page: str = "enforcement",
) -> Iterator[Section]:
    """Ask every model. model: folders; count: questions of each language; page: its name in docs/results. Raises
    ConfigError, RunError."""
    if unknown := [mode for mode in enforcements if mode not in get_args(Enforcement)]:
        raise ConfigError(f"there is no enforcement '{unknown[0]}': known are {', '.join(get_args(Enforcement))}")
    count, most_tokens = (1, 32) if quick else (count, most_tokens)
    tables, verdicts = list[str](), list[list[str]]()
    for folder in model:
        name = folder.absolute().parent.name if folder.name in ("latest", "best") else folder.name
        with serving(str(folder)) as url:
            found = asyncio.run(measure_model(url, enforcements, count, most_tokens))
        if wrong := sum(one.match is False and not one.refused for one in found.get("strict", [])):
            raise RunError(f"{wrong} responses of `strict` are in another language than asked for")
        tables += of_model(name, found)
        verdicts += [verdict(name, mode, found[mode]) for mode in enforcements if mode in BOUNDED]
    yield Section("\n".join([
        "# Does a model reason in the language that it is asked to?", "",
        f"{measured_with('enforcement')}. "
        f"{count} held-out word problems in each of {len(LANGUAGES)} languages, each asked for reasoning in all "
        f"{len(LANGUAGES)}; temperature {TEMPERATURE}, {CONNECTIONS} requests under way. `off` asks for no language, "
        "and is measured against the question's.", "",
        "- **in it**: share of all responses whose own words, reasoning and answer, are in the language asked for. "
        "What the server wrote into the reasoning does not count. A response with too few words to tell, and one that "
        "`strict` refused (status 422), count as not in it. Where a model writes no reasoning, its answer is measured.",
        "- **right**: share of all responses with the right answer.",
        "- **tokens**: of a response that was not refused, those of discarded tries too.", "",
        *tables, "## Bounds", "",
        f"At least {LEAST_SHARE} of all responses are in the language asked for, and accuracy in another language is "
        f"at most {MOST_LOSS} below that in the question's own.", "",
        table(("model", "enforcement", "in it", "right, own", "right, another", "loss", "holds"), *verdicts),
    ]), page=f"docs/results/{page}.md")  # fmt: skip
