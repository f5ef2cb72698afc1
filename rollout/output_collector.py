"""Appends the tokens of each engine step, with log-probs and policy version, to their completions.

They are stored in this process the moment the step ends, so nothing is lost when the engine process dies. A log-prob
that is not finite raises NonFinite, which names its completion and position.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from rollout.routes import RouteKeeper
from rollout.weights.layout import NO_VERSION
from shared.errors import NonFinite, RunError
from shared.launch.messages import GenerateRequest
from shared.types import Completion, VersionSpan

REMEMBERED_STEPS = 200
FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass
class Scoring:
    """A request for the log-probs of a fixed sequence."""

    future: asyncio.Future[list[float]]
    logprobs: list[float] = field(default_factory=list)


def extend(completion: Completion, token_ids: list[int], logprobs: list[float], version: int, engine: int) -> None:
    """Append tokens that `version` sampled. token_ids, logprobs: [new tokens]. Raises NonFinite or RunError."""
    if len(token_ids) != len(logprobs):
        raise RunError(f"engine {engine} returned {len(token_ids)} tokens with {len(logprobs)} log-probs")
    start = len(completion.token_ids)
    for position, value in enumerate(logprobs, start):
        if not math.isfinite(value):
            raise NonFinite(
                f"engine {engine}: log-prob {value} of token {position} in completion {completion.index} of group "
                f"{completion.group}, sampled by version {version}"
            )
    completion.token_ids.extend(token_ids)
    completion.logprobs.extend(logprobs)
    if completion.spans and completion.spans[-1].version == version and completion.spans[-1].end == start:
        start = completion.spans.pop().start
    completion.spans.append(VersionSpan(version, start, len(completion.token_ids)))


def copy_unfinished(completion: Completion) -> Completion:
    """Return a copy of an unfinished completion that later tokens do not change."""
    return Completion(
        group=completion.group, index=completion.index, seed=completion.seed, token_ids=list(completion.token_ids),
        logprobs=list(completion.logprobs), spans=list(completion.spans), restarts=completion.restarts,
        anew=completion.anew, turns=list(completion.turns), routes=list(completion.routes),
    )  # fmt: skip


class StepTimer:
    """Records the times of engine steps that produced tokens: the length of decode steps, and the end of the next."""

    def __init__(self) -> None:
        self.last_s: float | None = None
        self.intervals_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._next: asyncio.Future[float] | None = None

    def step(self, time_s: float) -> None:
        """Record that a step produced tokens at `time_s`."""
        if self.last_s is not None:
            self.intervals_s.append(time_s - self.last_s)
        self.last_s = time_s
        if self._next is not None and not self._next.done():
            self._next.set_result(time_s)

    def stop(self) -> None:
        """Record that no request runs: the time until the next step is not a decode interval."""
        self.last_s = None

    def median_s(self) -> float:
        """Median decode interval of the last 200 steps, seconds; 0 without any."""
        return statistics.median(self.intervals_s) if self.intervals_s else 0.0

    def next_step(self) -> asyncio.Future[float]:
        """Return a future of the time of the next step."""
        self._next = asyncio.get_running_loop().create_future()
        return self._next


class OutputCollector:
    """Stores an engine's outputs in its requests, kept by request id. `on_finished` is called with each that ended."""

    def __init__(self, engine: int, run_dir: Path):
        self.engine, self.routes = engine, RouteKeeper(run_dir)
        self.running: dict[str, GenerateRequest] = {}
        self.scoring: dict[str, Scoring] = {}
        self.step_timer = StepTimer()
        self.active_s = time.monotonic()
        """when the engine last showed a sign of life, or its work began"""
        self.longest_s: float | None = None
        """longest time between two signs of life while it had work; None before its first tokens"""
        self.on_finished: Callable[[GenerateRequest], None] = lambda request: None

    def begin(self) -> None:
        """Record that work begins: if there was none, silence is counted from now."""
        if not (self.running or self.scoring):
            self.active_s = time.monotonic()

    def alive(self, tokens: bool = False) -> None:
        """Record a sign of life of the engine. tokens: whether it came with outputs of an engine step."""
        now = time.monotonic()
        if tokens or self.longest_s is not None:
            self.longest_s = max(self.longest_s or 0.0, now - self.active_s)
        self.active_s = now

    def take_step(self, outputs: EngineCoreOutputs) -> None:
        """Store everything that one engine step produced."""
        self.alive(tokens=bool(outputs.outputs))
        version = NO_VERSION if outputs.weight_version is None else int(outputs.weight_version)
        any_tokens = False
        for output in outputs.outputs:
            if request := self.running.get(output.request_id):
                any_tokens |= bool(output.new_token_ids)
                self._take_tokens(request, output, version)
            elif scoring := self.scoring.get(output.request_id):
                self._take_score(scoring, output)
        if any_tokens:
            self.step_timer.step(outputs.timestamp)
        if not self.running:
            self.step_timer.stop()

    def _take_tokens(self, request: GenerateRequest, output: EngineCoreOutput, version: int) -> None:
        if output.new_token_ids:
            logprobs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
            extend(request.completion, output.new_token_ids, logprobs, version, self.engine)
        if output.routed_experts is not None and request.keep_routes:
            self.routes.add(request.completion, output.routed_experts)
        if output.finish_reason is None:
            return
        self.running.pop(output.request_id)
        reason = FINISH_NAMES.get(output.finish_reason)
        if reason is None:
            raise RunError(
                f"engine {self.engine} ended completion {request.completion.index} of group {request.completion.group} "
                f"with {output.finish_reason} after {len(request.completion.token_ids)} tokens"
            )
        request.completion.finish_reason = reason
        self.on_finished(request)

    def _take_score(self, scoring: Scoring, output: EngineCoreOutput) -> None:
        if output.new_prompt_logprobs_tensors is not None:
            scoring.logprobs += output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            self.scoring.pop(output.request_id)
            if not scoring.future.done():
                scoring.future.set_result(scoring.logprobs)

    def requeue_unstarted(self) -> list[str]:
        """Rename the requests whose turn has no token yet, so that whatever the engine still sends for them is ignored.

        They stay in `running`, so that a restart in between submits them again. Returns their names in the engine.
        """
        old = [name for name, request in self.running.items() if not request.completion.turn_begun]
        for name in old:
            self.running[f"requeued {name}"] = self.running.pop(name)
        return old

    def cancel_scoring(self) -> None:
        """Cancel the scoring requests of an engine that died."""
        for scoring in self.scoring.values():
            scoring.future.cancel()
        self.scoring.clear()
