"""How much our server adds to the engine, beside vLLM's own server in the same run.

    python -m benchmarks.serve --model runs/quickstart/latest models/smollm2-135m-instruct

Both serve the same model with the same settings of the same engine (servers.py) and stream the same chats at
temperature 0, round by round in turn, the order swapped every time, so that what else happens on the machine happens to
both. Every response has the same number of tokens: in a copy of the model the end of text is a token that it never
samples. A small model is the hard case: its engine waits for nobody. With --policy the language policy of ours is on as
it is by default (told from the question, asked for, measured in the response; nothing is tried again), and theirs is
sent the conversation that ours makes of each chat, so that both have the same prompt tokens.

    throughput           tokens per second, from the first request to the last response
    first token          from the request to the first text
    between tokens       from the first text of a response to the last, divided by the tokens between them
    pauses               from one arrival of text to the next

A ratio is ours to theirs in one pair of rounds; the page shows the median pair, the lowest and the highest. Then, with
the first model: latency and memory with 1 to 1,000 open streams, and what happens beyond the capacity of ours.
Writes docs/results/serve.md, with --policy docs/results/serve-policy.md.
"""

from __future__ import annotations

import argparse
import datetime
import resource
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy

from benchmarks.load import Answer, Load, put
from benchmarks.section import ROOT, describe_machine
from benchmarks.servers import NAME, OURS, THEIRS, Running, endless, ours, theirs
from serve.server import model_name
from serve.system_prompts import POLICY, SYSTEM_PROMPTS, PromptRenderer
from shared.atomic_write import beside
from shared.languages import LANGUAGES
from verify.format import Tags

RESULTS = ROOT / "docs" / "results"
SEQUENCES = 64
CONNECTIONS = (1, 16, 128, 1000)
QUEUE_OF_OURS = 256
"""the default of the setting, for what happens beyond capacity"""
TARGETS = {"throughput": (">=", 0.97), "between tokens, p50": ("<=", 1.03)}


def chats(count: int, tokens: int, kind: str = OURS, policy: Tags | None = None) -> list[dict[str, Any]]:
    """Bodies of requests, no two alike, of about the same length. policy: the tags of the thoughts, where the language
    policy is on."""
    bodies = []
    for number in range(100, 100 + count):
        text = f"Tom has {number} apples. Tom buys {3 + number % 7} more of them. How many apples does Tom have now?"
        messages = [{"role": "user", "content": text}]
        if policy is not None and kind == THEIRS:
            messages[0]["content"] += f"\n\n{LANGUAGES['en'].clause}"
            messages.insert(0, {"role": "system", "content": SYSTEM_PROMPTS["en"].system_prompt(policy)})
        bodies.append({"model": NAME, "temperature": 0, "max_tokens": tokens, "messages": messages})
    return bodies


def check_prompts(servers: dict[str, Running], policy: Tags | None) -> None:
    """Raises SystemExit where the servers make other tokens of the same chats."""
    found = []
    for kind, server in servers.items():
        body = chats(1, 1, kind, policy)[0]
        reply = httpx.post(f"http://127.0.0.1:{server.port}/tokenize", json=body, timeout=60)
        found.append(reply.raise_for_status().json()["tokens"])
    if found[0] != found[1]:
        raise SystemExit(f"error: the servers make different prompts: {found[0][:40]}... and {found[1][:40]}...")


def figures(load: Load) -> dict[str, float]:
    """Of one round: tokens per second, and seconds."""
    wanted = (
        ("first token", load.first_s, 50), ("first token", load.first_s, 99),
        ("between tokens", load.token_s, 50), ("between tokens", load.token_s, 99), ("pauses", load.pauses_s, 99),
    )  # fmt: skip
    found = {f"{name}, p{percent}": float(numpy.percentile(values, percent)) for name, values, percent in wanted}
    return {"throughput": load.rate, **found}


class Rounds:
    """Rounds of both servers under one load."""

    def __init__(self, clients: int, policy: Tags | None):
        self.clients, self.policy = clients, policy
        self.requests = 0
        self.found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        self.client_share = 0.0
        """most of a core that the load's own process took"""
        self.front_s: dict[str, float] = {OURS: 0.0, THEIRS: 0.0}
        """processor time per token of the process that speaks HTTP, over all rounds"""

    def play(self, servers: dict[str, Running], rounds: int, tokens: int, seconds: float) -> None:
        """Measure. Raises SystemExit where a response is not whole, or the servers do not say the same."""
        warm = put(servers[OURS].port, chats(2 * self.clients, tokens), self.clients)
        put(servers[THEIRS].port, chats(2 * self.clients, tokens, THEIRS, self.policy), self.clients)
        check(warm, 2 * self.clients, tokens)
        self.requests = self.clients * max(2, round(seconds * warm.rate / tokens / self.clients))
        spent: dict[str, float] = dict.fromkeys(servers, 0.0)
        for number in range(rounds):
            loads = {}
            for kind in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
                before, _ = servers[kind].processor_s()
                load = put(servers[kind].port, chats(self.requests, tokens, kind, self.policy), self.clients)
                spent[kind] += servers[kind].processor_s()[0] - before
                check(load, self.requests, tokens)
                self.client_share = max(self.client_share, load.client_s / load.wall_s)
                self.found[kind].append(figures(load))
                loads[kind] = load.answers
                print(f"  {self.clients} clients, round {number + 1} of {rounds}, {kind}: {load.rate:.0f} tokens/s",
                      flush=True)  # fmt: skip
            compare(loads[OURS], loads[THEIRS])
        self.front_s = {kind: spent[kind] / rounds / self.requests / tokens for kind in servers}

    def ratios(self, name: str) -> list[float]:
        """Ours to theirs, pair by pair, sorted."""
        return sorted(
            mine[name] / other[name] for mine, other in zip(self.found[OURS], self.found[THEIRS], strict=True)
        )

    def table(self) -> list[str]:
        """Markdown."""
        who = "One client" if self.clients == 1 else f"{self.clients} clients at a time"
        lines = [f"{who}, {self.requests} requests a round:", "",
                 "| | ours | `vllm serve` | ratio (lowest to highest) | target |", "|---|---|---|---|---|"]  # fmt: skip
        for name in self.found[OURS][0]:
            mine, other = (statistics.median(found[name] for found in self.found[kind]) for kind in (OURS, THEIRS))
            ratios = self.ratios(name)
            middle = statistics.median(ratios)
            target = ""
            if name in TARGETS:
                sign, bound = TARGETS[name]
                met = middle >= bound if sign == ">=" else middle <= bound
                target = f"{sign} {bound}, {'met' if met else '**missed**'}"
            cells = [f"{value:.0f} tokens/s" if name == "throughput" else f"{value * 1e3:.2f} ms"
                     for value in (mine, other)]  # fmt: skip
            spread = f"{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            lines.append(f"| {name} | {' | '.join(cells)} | {spread} | {target} |")
        spent = " | ".join(f"{self.front_s[kind] * 1e6:.0f} µs" for kind in (OURS, THEIRS))
        return [*lines, f"| processor time of the HTTP process per token | {spent} | | |", "",
                f"The load itself took at most {self.client_share:.0%} of a core.", ""]  # fmt: skip


def check(load: Load, requests: int, tokens: int) -> None:
    """Raises SystemExit where not every response came whole."""
    whole = [answer for answer in load.whole if answer.completion_tokens == tokens]
    if len(whole) < requests:
        raise SystemExit(f"error: {requests - len(whole)} of {requests} responses are not whole, statuses "
                         f"{sorted({answer.status for answer in load.answers})}")  # fmt: skip
    if again := sum(answer.tries > 1 for answer in load.whole):
        raise SystemExit(f"error: {again} of {requests} responses are second tries for the language")


def compare(mine: list[Answer], theirs: list[Answer]) -> None:
    """Raises SystemExit where the servers did not get the same prompts, or do not begin their answers alike."""
    if [answer.prompt_tokens for answer in mine] != [answer.prompt_tokens for answer in theirs]:
        raise SystemExit("error: the servers make different prompts of the same chats")
    begins = [["".join(filter(str.isalnum, answer.text))[:20] for answer in found] for found in (mine, theirs)]
    same = sum(one == other for one, other in zip(*begins, strict=True)) / len(mine)
    if same < 0.5:  # not all: batches differ, and with them the last bits of the logits
        raise SystemExit(f"error: only {same:.0%} of the texts begin alike: the servers are not comparable")


def connections(servers: dict[str, Running], tokens: int) -> list[str]:
    """Markdown: latency and memory with so many streams open at the same time."""
    lines = [f"Streams opened at the same time, {tokens} tokens each; {SEQUENCES} are decoded at a time, the others "
             "wait. Memory: resident, the most while they were open, of the process that speaks HTTP and of all.", "",
             "| streams | server | first token, p50 | p99 | whole response, p50 | p99 | memory, HTTP | all |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for count in CONNECTIONS:
        for kind, server in servers.items():
            with server.watched() as peak:
                load = put(server.port, chats(count, tokens), count)
            check(load, count, tokens)
            times = [*numpy.quantile(load.first_s, [0.5, 0.99]), *numpy.quantile(load.latencies_s, [0.5, 0.99])]
            cells = " | ".join(f"{value * 1e3:.0f} ms" for value in times)
            memory = f"{peak.front_bytes >> 20} MiB | {peak.bytes >> 20} MiB"
            lines.append(f"| {count} | {'ours' if kind == OURS else '`vllm serve`'} | {cells} | {memory} |")
            print(f"  {count} streams, {kind}: {load.wall_s:.1f} s", flush=True)
    return [*lines, ""]


def beyond(server: Running, count: int, tokens: int) -> list[str]:
    """Markdown: more requests than there are places. Raises SystemExit if one is neither answered nor refused."""
    load = put(server.port, chats(count, tokens), count)
    refused = [answer for answer in load.answers if answer.status == 503 and answer.retry_after]
    whole = [answer for answer in load.whole if answer.completion_tokens == tokens]
    if len(refused) + len(whole) < count:
        raise SystemExit(f"error: {count - len(refused) - len(whole)} requests were neither answered nor refused")
    last = max((answer.latency_s for answer in refused), default=0.0)
    print(f"  beyond capacity: {len(whole)} whole, {len(refused)} refused", flush=True)
    return [
        f"With {SEQUENCES} decoded at a time and a queue of {QUEUE_OF_OURS}, {count} requests at the same time: "
        f"{len(whole)} were admitted and every one of them came to its end with all of its tokens; "
        f"{len(refused)} got status 503 with `Retry-After`, the last of them after {last * 1e3:.0f} ms; "
        f"{count - len(whole) - len(refused)} were dropped.", "",
    ]  # fmt: skip


def measure(model: Path, first: bool, options: argparse.Namespace, scratch: Path) -> list[str]:
    """Markdown: everything about one model."""
    name = model_name(model)
    copy = endless(model.resolve(), scratch / name)
    policy = PromptRenderer.of_model(copy, POLICY).tags if options.policy else None
    lines = [f"## {name}", ""]
    with ExitStack() as stack:

        def begin(kind: str, queue: int) -> Running:
            log = scratch / f"{name}-{kind.split()[0]}-{queue}.log"
            own = ours(copy, SEQUENCES, queue, policy=policy is not None)
            command = own if kind == OURS else theirs(copy, SEQUENCES)
            server = Running(kind, command, log)
            stack.callback(server.close)
            print(f"starting {kind} with {name}", flush=True)
            server.wait()
            return server

        servers = {kind: begin(kind, max(CONNECTIONS)) for kind in (OURS, THEIRS)}
        check_prompts(servers, policy)
        for clients in options.clients:
            rounds = Rounds(clients, policy)
            rounds.play(servers, options.rounds, options.tokens, options.seconds)
            lines += rounds.table()
            print("\n".join(rounds.table()), flush=True)
        if first and policy is None:
            lines += ["### Open streams", "", *connections(servers, options.tokens)]
            for server in servers.values():
                server.close()
            lines += ["### Beyond capacity", "", *beyond(begin(OURS, QUEUE_OF_OURS), max(CONNECTIONS), options.tokens)]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="folders of models, the smallest first")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64], help="requests at a time")
    parser.add_argument("--policy", action="store_true", help="with the language policy on; nothing but the rounds")
    parser.add_argument("--rounds", type=int, default=6, help="of each server under each load")
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long a round is")
    parser.add_argument("--out", type=Path, help="the page")
    options = parser.parse_args(arguments)
    out = options.out or RESULTS / ("serve-policy.md" if options.policy else "serve.md")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a stream is an open file, here and in the servers
    lines = [
        "# Serving: what our server adds to the engine", "",
        f"Measured on {datetime.date.today()} on {describe_machine()}; this page is written by "
        "`python -m benchmarks.serve`, whose description says what is measured.", "",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for number, model in enumerate(options.model):
            lines += measure(model, number == 0, options, Path(scratch))
    out.parent.mkdir(parents=True, exist_ok=True)
    with beside(out) as partial:
        partial.write_text("\n".join(lines), encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
