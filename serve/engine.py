"""What the server needs of an engine, and vLLM as one: tokens of a completion as they come, abort, health, version.

The engine process is a child of the server and dies with it. When it dies itself, the requests under way wait for its
successor and go on there, as far as that can be done without a trace; others end with EngineDied, and the one that has
killed it with Guilty (suspects.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rollout import warm_up
from rollout.start import engine_processes, kill_engines, started_within
from rollout.vllm_settings import make_vllm_config, prepare_environment, read_stop_tokens
from serve.lives import EngineDied as EngineDied
from serve.lives import Lives
from serve.response.tools import Constraint
from shared.card import read_card
from shared.errors import ModelError

if TYPE_CHECKING:
    from vllm import SamplingParams

    from serve.steps import StepLLM

CPU_CACHE_BYTES = 1 << 30
LOAD_DEADLINE_S = 600.0
START_DEADLINE_S = 1800.0
"""the largest models are read from slow disks"""
MINUS_INFINITY = -9999.0
"""as vLLM's server tells it: JSON has none"""


class Refused(Exception):
    """The engine does not take a request as it is; says why."""


class Candidate(NamedTuple):
    """A token that could have stood somewhere."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Sampling:
    """How one completion is sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    """beside the model's own"""
    include_stop: bool = False
    """the text of `stop` is told too"""
    ignore_eos: bool = False
    """the model's own ends do not end the completion"""
    min_tokens: int = 0
    skip_special_tokens: bool = False
    logprobs: int | None = None
    """most probable tokens to tell beside the sampled one; None for no log-probs at all"""
    prompt_logprobs: int | None = None
    """the same of the prompt's tokens, at temperature 1 whatever the sampling"""
    constraint: Constraint | None = None
    """what the whole completion must look like"""
    through: str = ""
    """text at which the completion ends, and which stands in it"""
    through_id: int | None = None
    """the token that it is, where it is a control token"""


class Delta(NamedTuple):
    """What a completion grew by in one step of the engine."""

    text: str
    token_ids: list[int]
    logprobs: list[list[Candidate]]
    """[tokens] the sampled token first, then the most probable ones; [] unless they were asked for"""
    finish_reason: str | None = None
    """"stop" or "length" on the last one"""
    prompt_logprobs: Sequence[list[Candidate]] = ()
    """[prompt_tokens - 1] on one of them where asked for: each token from the second on, then the most probable ones"""
    stop_reason: str | int | None = None
    """on the last one: which of `stop`, `stop_token_ids` or `through` it ended at; None for the model's own end"""


class Engine(Protocol):
    """What the server needs."""

    version: str
    """which weights answer"""

    async def start(self) -> None:
        """Be ready to generate. Raises ModelError."""

    def generate(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Sample one completion, one token a delta. Closing the iterator aborts it. Raises EngineDied, Refused, Guilty
        (suspects.py)."""

    async def is_alive(self) -> bool:
        """Whether the engine process is there."""

    async def reload(self, model_dir: str, patience_s: float) -> None:
        """Take the weights of another export of the same model. New completions wait for them; those under way end
        first, or after `patience_s` go on under them. Raises ModelError, and keeps the old ones."""

    async def restart(self) -> None:
        """Replace a dead engine process; what was under way goes on in the new one. Raises ModelError; what was under
        way then waits for the next try, until `stop`."""

    async def stop(self) -> None:
        """End the engine process, and with EngineDied what is under way."""


class VllmEngine:
    """vLLM's AsyncLLM in this process, its engine in a child."""

    def __init__(self, model_dir: str, *, max_tokens: int, max_sequences: int, cache_bytes: int, dtype: str = "auto"):
        """max_tokens: context of prompt and completion together. cache_bytes: for keys and values; 0: 1 GiB on
        a CPU, on a GPU what vLLM finds free."""
        self.model_dir, self.max_tokens, self.max_sequences = model_dir, max_tokens, max_sequences
        self.cache_bytes, self.dtype = cache_bytes, dtype
        self.version = version_of(model_dir)
        self.llm: StepLLM | None = None
        self.warm_up_s = 0.0
        """that the last start took longer for it"""
        self.lives = Lives(lambda: self.llm, self._sample)
        self._stop_ids = read_stop_tokens(model_dir)
        self._names = itertools.count()
        self._changing = asyncio.Lock()
        """held while an engine process starts or ends: there are never two"""

    async def start(self) -> None:
        """Start the engine process, beside the event loop, and try it. Raises ModelError for a folder that vLLM cannot
        serve, or cannot serve here."""
        async with self._changing:
            others = engine_processes()
            try:
                self.llm = await asyncio.to_thread(self._begin)
                await self._warm_up()
            except asyncio.CancelledError:
                kill_engines(others)  # else the thread, and with it this process, would wait until it has started
                raise
        self.lives.tell_waiting(True)

    async def _warm_up(self) -> None:
        """Let the new engine meet the shortest prompts before users do. Raises ModelError."""
        began = time.monotonic()
        for prompt in warm_up.prompts(self.max_tokens):
            try:
                sampling = Sampling(max_tokens=warm_up.NEW_TOKENS, temperature=0)
                async with contextlib.aclosing(self._sample(prompt, sampling)) as deltas:
                    async for _ in deltas:
                        pass
            except EngineDied as error:
                died = f"the engine of {self.model_dir} {warm_up.Died(prompt)} ({self.dtype})"
                raise ModelError(f"{died}: try another dtype, e.g. float32") from error
        self.warm_up_s = time.monotonic() - began

    def _begin(self) -> StepLLM:
        prepare_environment()
        import torch

        from serve.steps import StepLLM

        config = make_vllm_config(
            self.model_dir,
            dtype=self.dtype,
            max_tokens=self.max_tokens,
            max_sequences=self.max_sequences,
            cache_bytes=self.cache_bytes or (None if torch.cuda.is_available() else CPU_CACHE_BYTES),
            distributed_executor_backend="uni",
            worker_extension_cls="serve.engine_process.WorkerExtension",
            load_format="safetensors",
            # JSON without blanks: an unsure model would write them for ever
            structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
            trust_remote_code=False,
        )
        try:
            with started_within(START_DEADLINE_S):
                llm: StepLLM = StepLLM.from_vllm_config(config, disable_log_stats=True)
        except TimeoutError as error:
            raise ModelError(f"vLLM hangs at the start of {self.model_dir}: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"vLLM cannot serve {self.model_dir}, as it says above: {error}") from error
        # what the imports left will stay: searching through it for garbage would stop all responses each time
        gc.collect()
        gc.freeze()
        return llm

    def generate(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Sample one completion, in one engine or, where one dies, in several."""
        return self.lives.generate(prompt_ids, sampling)

    def _params(self, sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        by_text = bool(sampling.through) and sampling.through_id is None
        through_ids = [] if sampling.through_id is None else [sampling.through_id]
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=sampling.bad_words,
            seed=sampling.seed,
            stop=[*sampling.stop, *([sampling.through] if by_text else [])],
            stop_token_ids=[*self._own_stops(sampling), *sampling.stop_token_ids, *through_ids],
            include_stop_str_in_output=sampling.include_stop,
            ignore_eos=sampling.ignore_eos,
            min_tokens=min(sampling.min_tokens, sampling.max_tokens),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            structured_outputs=structured_outputs(sampling.constraint),
            skip_special_tokens=sampling.skip_special_tokens,  # tags of thoughts may be some
            output_kind=RequestOutputKind.DELTA,
        )

    def _own_stops(self, sampling: Sampling) -> list[int]:
        """Tokens at which the model ends by itself."""
        return [] if sampling.ignore_eos else self._stop_ids

    def _end_of(self, reason: str | int | None, sampling: Sampling) -> tuple[str, str | int | None]:
        """What a completion ended at, as vLLM tells it -> the text that stands at its end, and `stop_reason`."""
        if reason is not None and reason in (sampling.through, sampling.through_id):
            return sampling.through, sampling.through
        if reason in self._own_stops(sampling) and reason not in sampling.stop_token_ids:
            return "", None
        return "", reason

    async def _sample(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Sample in the engine that lives now. Raises EngineDied, Refused."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self.llm
        if llm is None:  # it is being started again
            raise EngineDied
        queue, finished = None, False
        try:
            queue = await llm.submit(f"r{next(self._names)}", prompt_ids, self._params(sampling))
            while not finished:
                output, steps = await queue.take()
                found, finished = output.outputs[0], output.finished
                if found.finish_reason not in (None, "stop", "length"):
                    raise EngineDied  # it was stopped: vLLM ends what is under way as if it were done
                told = output.prompt_logprobs  # once; of the first token there is none
                prompt = candidates(prompt_ids[1:], told[1:], sampling.prompt_logprobs) if told else ()
                end, stop = self._end_of(found.stop_reason, sampling)
                for step in steps:
                    ranked = candidates(step.token_ids, step.logprobs, sampling.logprobs) if step.logprobs else []
                    if step.last:
                        yield Delta(step.text + end, step.token_ids, ranked, found.finish_reason, prompt, stop)
                    else:
                        yield Delta(step.text, step.token_ids, ranked, None, prompt)
                    prompt = ()
        except EngineDeadError as error:
            self.lives.bury(llm)
            raise EngineDied from error
        except VLLMValidationError as error:
            raise Refused(str(error)) from error
        finally:
            if queue is not None and not finished:
                await llm.abort(queue.request_id, internal=True)

    async def reload(self, model_dir: str, patience_s: float) -> None:
        """Take newer weights."""
        llm = self.llm
        if llm is None:
            raise ModelError("the engine is being started")
        try:
            async with asyncio.timeout(patience_s):
                await llm.pause_generation(mode="wait")
        except TimeoutError:
            pass  # those that still run go on under the new weights
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                await llm.pause_generation(mode="keep")  # keys and values are computed anew afterwards
                await llm.collective_rpc("maestrale_load_weights", args=(model_dir,))
                await llm.resume_generation()
        except Exception as error:
            # nobody knows which weights it holds; the server's watch starts it again with the old ones
            if self.llm is llm:
                await self._end()
            raise ModelError(f"the engine cannot load it: {error}") from error
        self.model_dir, self.version = model_dir, version_of(model_dir)

    async def is_alive(self) -> bool:
        """Whether the engine process is there."""
        return self.llm is not None and not self.llm.errored

    async def restart(self) -> None:
        """Replace a dead engine process."""
        await self._end()
        await self.start()

    async def stop(self) -> None:
        """End the engine process."""
        self.lives.over = True
        await self._end()
        self.lives.tell_waiting(False)

    async def _end(self) -> None:
        async with self._changing:
            llm, self.llm = self.llm, None
            if llm is not None:
                self.lives.bury(llm, meant=not llm.errored)
                await asyncio.to_thread(llm.shutdown, 5)
                # its destructor shuts down once more, which fails when the interpreter ends
                setattr(llm, "shutdown", lambda *_: None)  # noqa: B010 - no method of the class is meant


def version_of(model_dir: str) -> str:
    """Which weights a folder holds, in words; "" where it does not say."""
    card = read_card(Path(model_dir))
    return f"{card.run}, step {card.version}" if card is not None else ""


def structured_outputs(constraint: Constraint | None) -> Any:
    """A constraint as vLLM takes it."""
    from vllm.sampling_params import StructuredOutputsParams

    if constraint is None:
        return None
    return StructuredOutputsParams(**{constraint.kind: constraint.value or True})


def candidates(token_ids: Iterable[int], tables: Any, most: int | None) -> list[list[Candidate]]:
    """[tokens] of vLLM's log-probs, if there are any: the token itself, then the `most` most probable ones."""
    found = []
    for token_id, table in zip(token_ids, tables or [], strict=False):
        ranked = sorted(
            (Candidate(key, one.decoded_token or "", max(one.logprob, MINUS_INFINITY)) for key, one in table.items()),
            key=lambda candidate: -candidate.logprob,
        )
        itself = next(candidate for candidate in ranked if candidate.token_id == token_id)
        found.append([itself, *ranked[: most or 0]])
    return found
