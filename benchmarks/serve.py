"""How much our server adds to the engine, beside vLLM's own server in the same run.

Both serve the same model with the same settings of the same engine (servers.py) and stream the same chats at
temperature 0, round by round in turn, the order swapped every time, so that what else happens on the machine happens to
both. Every response has the same number of tokens: in a copy of the model the end of text is a token that it never
samples. `model`: folders, the smallest first, whose engine waits for nobody. With `policy` the language policy of ours
is on as it is by default (told from the question, asked for, measured in the response; nothing is tried again), and
theirs is sent the conversation that ours makes of each chat, so that both have the same prompt tokens.

    throughput           tokens per second, from the first request to the last response
    first token          from the request to the first text
    between tokens       from the first text of a response to the last, divided by the tokens between them
    pauses               from one arrival of text to the next

A ratio is ours to theirs in one pair of rounds; the page shows the median pair, the lowest and the highest. Then, with
the first model: latency and memory with 1 to 1,000 open streams, and what happens beyond the capacity of ours.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.load import Answer, Load, put
from benchmarks.memory import Watch
from benchmarks.report import table
from benchmarks.servers import NAME, OURS, THEIRS, Running, endless, ours, theirs
from serve.server import model_name
from serve.system_prompts import POLICY, PromptRenderer, prompts_of
from shared.errors import RunError
from shared.languages import LANGUAGES
from shared.reasoning_tags import Tags

SEQUENCES = 64
CONNECTIONS = (1, 16, 128, 1000)
QUEUE_OF_OURS = 256
"""the default of the setting, for what happens beyond capacity"""
TARGETS = {"throughput": (">=", 0.97), "between tokens, p50": ("<=", 1.03)}


def chats(count: int, tokens: int, kind: str = OURS, policy: Tags | None = None) -> list[dict[str, Any]]:
    """Return bodies of requests, no two alike, of about the same length. policy: the tags of the thoughts, where the
    language policy is on."""
    bodies = []
    for number in range(100, 100 + count):
        text = f"Tom has {number} apples. Tom buys {3 + number % 7} more of them. How many apples does Tom have now?"
        messages = [{"role": "user", "content": text}]
        if policy is not None and kind == THEIRS:
            messages[0]["content"] += f"\n\n{LANGUAGES['en'].request}"
            messages.insert(0, {"role": "system", "content": prompts_of("en").system_prompt(policy)})
        body = {"model": NAME, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "messages": messages}
        bodies.append(body)
    return bodies


def check_prompts(servers: dict[str, Running], policy: Tags | None) -> None:
    """Raises RunError where the servers make other tokens of the same chats."""
    found = []
    for kind, server in servers.items():
        body = chats(1, 1, kind, policy)[0]
        reply = httpx.post(f"http://127.0.0.1:{server.port}/tokenize", json=body, timeout=60)
        found.append(reply.raise_for_status().json()["tokens"])
    if found[0] != found[1]:
        raise RunError(f"the servers make different prompts: {found[0][:40]}... and {found[1][:40]}...")


def figures(load: Load) -> dict[str, float]:
    """Return tokens per second, and seconds, of one round."""
    pauses = [pause for answer in load.answers for pause in answer.pauses_s]
    first, token = [answer.first_s for answer in load.answers], [answer.token_s for answer in load.answers]
    wanted = (("first token", first, 50), ("first token", first, 99), ("between tokens", token, 50),
              ("between tokens", token, 99), ("pauses", pauses, 99))  # fmt: skip
    found = {f"{name}, p{percent}": float(numpy.percentile(values, percent)) for name, values, percent in wanted}
    return {"throughput": load.rate, **found}


class Size(NamedTuple):
    """How much is measured."""

    rounds: int
    """of each server under each load"""
    tokens: int
    """of each response"""
    seconds: float
    """about how long a round is"""


def compared(servers: dict[str, Running], clients: int, policy: Tags | None, size: Size) -> str:
    """Format what rounds of both servers under one load gave. Raises RunError where a response is not whole, or the
    servers do not say the same."""
    tokens = size.tokens
    warm = put(servers[OURS].port, chats(2 * clients, tokens), clients)
    put(servers[THEIRS].port, chats(2 * clients, tokens, THEIRS, policy), clients)
    check(warm, 2 * clients, tokens)
    requests = clients * max(2, round(size.seconds * warm.rate / tokens / clients))
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    spent, client_share = dict.fromkeys(servers, 0.0), 0.0
    for number in range(size.rounds):
        loads = {}
        for kind in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
            before, _ = servers[kind].processor_s()
            load = loads[kind] = put(servers[kind].port, chats(requests, tokens, kind, policy), clients)
            spent[kind] += servers[kind].processor_s()[0] - before
            check(load, requests, tokens)
            client_share = max(client_share, load.client_s / load.wall_s)
            found[kind].append(figures(load))
            print(f"  {clients} clients, round {number + 1}, {kind}: {load.rate:.0f} tokens/s", flush=True)
        compare(loads[OURS].answers, loads[THEIRS].answers)
    rows = [row(name, *([one[name] for one in found[kind]] for kind in (OURS, THEIRS))) for name in found[OURS][0]]
    front = [f"{spent[kind] / size.rounds / requests / tokens * 1e6:.0f} µs" for kind in (OURS, THEIRS)]
    who = "One client" if clients == 1 else f"{clients} clients at a time"
    cells = table(["", "ours", "`vllm serve`", "ratio (lowest to highest)", "target"], *rows,
                  ["processor time of the HTTP process per token", *front, "", ""])  # fmt: skip
    return (f"{who}, {requests} requests a round:\n\n{cells}\n"
            f"The load itself took at most {client_share:.0%} of a core.\n")  # fmt: skip


def row(name: str, ours: list[float], theirs: list[float]) -> list[str]:
    """Return the cells of one figure: medians, the median ratio of a pair of rounds with its range, the target."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    middle, target = statistics.median(ratios), ""
    if name in TARGETS:
        sign, bound = TARGETS[name]
        met = middle >= bound if sign == ">=" else middle <= bound
        target = f"{sign} {bound}, {'met' if met else '**missed**'}"
    cells = [f"{value:.0f} tokens/s" if name == "throughput" else f"{value * 1e3:.2f} ms"
             for value in map(statistics.median, (ours, theirs))]  # fmt: skip
    return [name, *cells, f"{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", target]


def check(load: Load, requests: int, tokens: int) -> None:
    """Raises RunError where not every response came whole."""
    whole = [answer for answer in load.answers if answer.whole and answer.completion_tokens == tokens]
    if len(whole) < requests:
        raise RunError(f"{requests - len(whole)} of {requests} responses are not whole, statuses "
                         f"{sorted({answer.status for answer in load.answers})}")  # fmt: skip
    if again := sum(answer.tries > 1 for answer in load.answers):
        raise RunError(f"{again} of {requests} responses are second tries for the language")


def compare(mine: list[Answer], theirs: list[Answer]) -> None:
    """Raises RunError where the servers did not get the same prompts, or do not begin their answers alike."""
    if [answer.prompt_tokens for answer in mine] != [answer.prompt_tokens for answer in theirs]:
        raise RunError("the servers make different prompts of the same chats")
    begins = [["".join(filter(str.isalnum, answer.text))[:20] for answer in found] for found in (mine, theirs)]
    same = sum(one == other for one, other in zip(*begins, strict=True)) / len(mine)
    if same < 0.5:  # not all: batches differ, and with them the last bits of the logits
        raise RunError(f"only {same:.0%} of the texts begin alike: the servers are not comparable")


def connections(servers: dict[str, Running], tokens: int) -> str:
    """Format latency and memory with so many streams open at the same time."""
    rows = []
    for count in CONNECTIONS:
        for kind, server in servers.items():
            with Watch(server.memory_bytes, 0.2) as peak:
                load = put(server.port, chats(count, tokens), count)
            check(load, count, tokens)
            every = [[answer.first_s for answer in load.answers], [answer.latency_s for answer in load.answers]]
            times = [f"{numpy.quantile(values, share) * 1e3:.0f} ms" for values in every for share in (0.5, 0.99)]
            who = "ours" if kind == OURS else "`vllm serve`"
            rows.append([count, who, *times, *(f"{size >> 20} MiB" for size in peak.peaks)])
            print(f"  {count} streams, {kind}: {load.wall_s:.1f} s", flush=True)
    head = ("streams", "server", "first token, p50", "p99", "whole response, p50", "p99", "memory, HTTP", "all")
    return (f"Streams opened at the same time, {tokens} tokens each; {SEQUENCES} are decoded at a time, the others "
            "wait. Memory: resident, the most while they were open, of the process that speaks HTTP and of all.\n\n"
            f"{table(head, *rows)}")  # fmt: skip


def beyond(server: Running, count: int, tokens: int) -> str:
    """Say what becomes of too many requests. Raises RunError if one is neither answered nor refused."""
    load = put(server.port, chats(count, tokens), count)
    refused = [answer for answer in load.answers if answer.status == 503 and answer.retry_after]
    whole = [answer for answer in load.answers if answer.whole and answer.completion_tokens == tokens]
    if len(refused) + len(whole) < count:
        raise RunError(f"{count - len(refused) - len(whole)} requests were neither answered nor refused")
    last = max((answer.latency_s for answer in refused), default=0.0)
    print(f"  beyond capacity: {len(whole)} whole, {len(refused)} refused", flush=True)
    return (
        f"With {SEQUENCES} decoded at a time and a queue of {QUEUE_OF_OURS}, {count} requests at the same time: "
        f"{len(whole)} were admitted and every one of them came to its end with all of its tokens; "
        f"{len(refused)} got status 503 with `Retry-After`, the last of them after {last * 1e3:.0f} ms; "
        f"{count - len(whole) - len(refused)} were dropped.\n"
    )


def measure(model: Path, clients: list[int], with_policy: bool, size: Size, streams: bool) -> Iterator[str]:
    """Yield everything about one model. streams: also many open streams, and what is beyond capacity."""
    name = model_name(model)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        copy = endless(model.resolve(), scratch / name)
        policy = PromptRenderer.of_model(copy, POLICY).tags if with_policy else None

        def begin(kind: str, queue: int) -> Running:
            own = ours(copy, SEQUENCES, queue, policy=with_policy)
            server = Running(kind, own if kind == OURS else theirs(copy, SEQUENCES), scratch / f"{kind}-{queue}.log")
            stack.callback(server.close)
            print(f"starting {kind} with {name}", flush=True)
            server.wait()
            return server

        servers = {kind: begin(kind, max(CONNECTIONS)) for kind in (OURS, THEIRS)}
        check_prompts(servers, policy)
        yield f"## {name}\n"
        for count in clients:
            yield compared(servers, count, policy, size)
        if streams:
            yield f"### Open streams\n\n{connections(servers, size.tokens)}"
            for server in servers.values():
                server.close()
            told = beyond(begin(OURS, QUEUE_OF_OURS), max(CONNECTIONS), size.tokens)
            yield f"### Beyond capacity\n\n{told}"


@benchmark(page="docs/results/serve.md")
def serve(
    quick: bool, model: list[Path], clients: list[int] = [1, 16, 64], policy: bool = False,  # noqa: B006
    rounds: int = 6, tokens: int = 64, seconds: float = 8.0,
) -> Iterator[Section]:  # fmt: skip
    """Compare both servers under every load. policy: nothing but the rounds; quick: one short round of few clients."""
    size = Size(1, 16, 1.0) if quick else Size(rounds, tokens, seconds)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a stream is an open file, here and in the servers
    lines = ["# Serving: what our server adds to the engine\n", f"{measured_with('serve')}.\n"]
    for number, folder in enumerate(model):
        streams = number == 0 and not policy and not quick
        lines += measure(folder, clients[:2] if quick else clients, policy, size, streams)
    yield Section("\n".join(lines), page="docs/results/serve-policy.md" if policy else "")
