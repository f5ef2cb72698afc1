"""What the server needs of an engine, and vLLM as one: tokens of a completion as they come, abort, health, version.

The engine process is a child of the server; it dies with it, and its death ends every request under way with
EngineDied. What this does not do: HTTP, or splitting thoughts from answers. Who calls this: generation.py, app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rollout.start import engine_processes, kill_engines, started_within
from rollout.vllm_settings import make_vllm_config, prepare_environment, read_stop_tokens
from serve.response.tools import Constraint
from shared.card import read_card
from shared.errors import ModelError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_CACHE_BYTES = 1 << 30
LOAD_DEADLINE_S = 600.0
START_DEADLINE_S = 1800.0
"""the largest models are read from slow disks"""
MINUS_INFINITY = -9999.0
"""as vLLM's server tells it: JSON has none"""


class EngineDied(Exception):
    """The engine process is gone; another try may find its successor."""


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
    """What a completion grew by."""

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
        """Sample one completion. Closing the iterator aborts it. Raises EngineDied, Refused."""

    async def is_alive(self) -> bool:
        """Whether the engine process is there."""

    async def reload(self, model_dir: str, patience_s: float) -> None:
        """Take the weights of another export of the same model. New completions wait for them; those under way end
        first, or after `patience_s` go on under them. Raises ModelError, and keeps the old ones."""

    async def stop(self) -> None:
        """End the engine process."""


class VllmEngine:
    """vLLM's AsyncLLM in this process, its engine in a child."""

    def __init__(self, model_dir: str, *, max_tokens: int, max_sequences: int, cache_bytes: int, dtype: str = "auto"):
        """max_tokens: context of prompt and completion together. cache_bytes: for keys and values; 0: 1 GiB on
        a CPU, on a GPU what vLLM finds free."""
        self.model_dir, self.max_tokens, self.max_sequences = model_dir, max_tokens, max_sequences
        self.cache_bytes, self.dtype = cache_bytes, dtype
        self.version = version_of(model_dir)
        self.llm: AsyncLLM | None = None
        self._stop_ids = read_stop_tokens(model_dir)
        self._names = itertools.count()
        self._changing = asyncio.Lock()
        """held while an engine process starts or ends: there are never two"""

    async def start(self) -> None:
        """Start the engine process, beside the event loop. Raises ModelError for a folder that vLLM cannot serve."""
        async with self._changing:
            others = engine_processes()
            try:
                self.llm = await asyncio.to_thread(self._begin)
            except asyncio.CancelledError:
                kill_engines(others)  # else the thread, and with it this process, would wait until it has started
                raise

    def _begin(self) -> AsyncLLM:
        prepare_environment()
        import torch
        from vllm.v1.engine.async_llm import AsyncLLM

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
                llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except TimeoutError as error:
            raise ModelError(f"vLLM hangs at the start of {self.model_dir}: {error}") from error
        # what the imports left will stay: searching through it for garbage would stop all responses each time
        gc.collect()
        gc.freeze()
        return llm

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Sample one completion."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm is None:  # it is being started again
            raise EngineDied
        by_text = bool(sampling.through) and sampling.through_id is None
        through = {sampling.through, sampling.through_id} - {"", None}
        through_ids = [] if sampling.through_id is None else [sampling.through_id]
        own_stops = [] if sampling.ignore_eos else self._stop_ids
        params = SamplingParams(
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
            stop_token_ids=[*own_stops, *sampling.stop_token_ids, *through_ids],
            include_stop_str_in_output=sampling.include_stop,
            ignore_eos=sampling.ignore_eos,
            min_tokens=min(sampling.min_tokens, sampling.max_tokens),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            structured_outputs=structured_outputs(sampling.constraint),
            skip_special_tokens=sampling.skip_special_tokens,  # tags of thoughts may be some
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            stream = self.llm.generate(tokens_input(prompt_ids), params, f"r{next(self._names)}")
            async with contextlib.aclosing(stream):  # closing it is what aborts the request
                async for output in stream:
                    found = output.outputs[0]
                    if found.finish_reason not in (None, "stop", "length"):
                        raise EngineDied  # it was stopped: vLLM ends what is under way as if it were done
                    ranked = candidates(found.token_ids, found.logprobs, sampling.logprobs)
                    told = output.prompt_logprobs  # once; of the first token there is none
                    prompt = candidates(prompt_ids[1:], told[1:], sampling.prompt_logprobs) if told else ()
                    text, reason = found.text, found.stop_reason
                    if reason in through:
                        text, reason = text + sampling.through, sampling.through
                    elif reason in own_stops and reason not in sampling.stop_token_ids:
                        reason = None
                    yield Delta(text, list(found.token_ids), ranked, found.finish_reason, prompt, reason)
        except EngineDeadError as error:
            raise EngineDied from error
        except VLLMValidationError as error:
            raise Refused(str(error)) from error

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
                await self.stop()
            raise ModelError(f"the engine cannot load it: {error}") from error
        self.model_dir, self.version = model_dir, version_of(model_dir)

    async def is_alive(self) -> bool:
        """Whether the engine process is there."""
        return self.llm is not None and not self.llm.errored

    async def stop(self) -> None:
        """End the engine process."""
        async with self._changing:
            llm, self.llm = self.llm, None
            if llm is not None:
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
