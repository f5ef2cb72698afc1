"""The engine of the server, on vLLM.

The engine process is a child of the server and dies with it. When it dies by itself, the requests under way wait for
its successor and continue there if that is possible without a visible difference; others end with EngineDied, and the
one that killed it with CrashingRequest (engine_deaths.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout import warm_up
from rollout.start import engine_processes, kill_engines, last_words, log_no_traceback, started_within
from rollout.vllm_config import GPU_SHARE, THREADS_VARIABLE, make_vllm_config, prepare_environment, read_stop_tokens
from serve.engine import Candidate, Constraint, Delta, EngineDied, EngineRefused, SamplingParameters
from serve.engine_deaths import EngineFailover, EngineWatch
from shared.errors import ConfigError, ModelError
from shared.launch.adaptive_deadline import AdaptiveDeadline
from shared.model.cpu.processor import fewest_fast, given_threads, usable_cores
from shared.model.model_card import read_card

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from serve.adapters import ServedAdapter
    from serve.vllm_parts import StepLLM

log = logging.getLogger("serve")
CPU_CACHE_BYTES = 1 << 30
LOAD_DEADLINE_S = 600.0
START_DEADLINE_S = 1800.0
"""long enough to read the largest models from slow disks; another start may take ten times as long as those before"""
UNCHANGED = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "skip_special_tokens"),
)
"""parameters of a sampling that vLLM takes under the same names, as they are"""
MINUS_INFINITY = -9999.0
"""minus infinity as vLLM's server returns it, since JSON has none"""


class VllmEngine:
    """An engine on vLLM: its AsyncLLM in this process, its engine core in a child process."""

    def __init__(
        self, model_dir: str, *, max_tokens: int, max_sequences: int, cache_bytes: int, dtype: str = "auto",
        gpu_share: float = GPU_SHARE, tensor_parallel: int = 1, quantization: str = "",
        adapters: Mapping[str, ServedAdapter] | None = None, stop_ids: Collection[int] = (),
    ):  # fmt: skip
        """max_tokens: context of prompt and completion together. cache_bytes: for keys and values; 0: 1 GiB on
        a CPU, on a GPU what is free of its share `gpu_share`. tensor_parallel: GPUs. quantization: vLLM's name of a
        method to quantise weights with; "" for what the checkpoint says. adapters: by the name in
        `SamplingParameters.adapter`. stop_ids: tokens that end a completion; none for those that the folder names.

        Raises ConfigError for more GPUs than there are."""
        self.model_dir, self.max_tokens, self.max_sequences = model_dir, max_tokens, max_sequences
        self.cache_bytes, self.dtype, self.gpu_share = cache_bytes, dtype, gpu_share
        self.tensor_parallel, self.quantization = tensor_parallel, quantization
        if tensor_parallel > max(1, gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"tensor_parallel = {tensor_parallel}: this process sees {gpus} GPUs; give at most as many"
            )
        self.version = version_of(model_dir)
        self._adapters = AdapterRequests(adapters or {})
        self.llm: StepLLM | None = None
        self.warm_up_s = 0.0
        """seconds that the warm-up of the last start took"""
        self.failover = EngineFailover(lambda: self.llm, self._sample)
        self.watch = EngineWatch()
        self._patience = AdaptiveDeadline()
        self._stop_ids = sorted(stop_ids) or read_stop_tokens(model_dir)
        self._names = itertools.count()
        self._changing = asyncio.Lock()
        """held while an engine process starts or ends, so that there are never two"""

    async def start(self) -> None:
        """Start the engine process in a thread, and warm it up. Raises ModelError for a folder that vLLM cannot serve,
        or cannot serve on this machine."""
        async with self._changing:
            others = engine_processes()
            try:
                await asyncio.to_thread(import_vllm)
                self.llm = await asyncio.to_thread(self._begin)
                self.watch.start(self.llm.is_sleeping, engine_processes() - others)
                await self._keep_threads(self.llm)
                for name, request in self._adapters.current.items():
                    await self._add_adapter(self.llm, name, request)
                await self._warm_up()
            except asyncio.CancelledError:
                kill_engines(others)  # else the thread, and with it this process, would wait until it has started
                raise
            except Exception:
                await self._end_process()  # it may be there, without its adapters or its warm-up
                raise
        self.failover.release_waiting(True)

    async def _keep_threads(self, llm: StepLLM) -> None:
        """Log the number of threads that the engine process has chosen, and let later ones take it too: another number
        rounds differently."""
        if "-" not in os.environ.get(THREADS_VARIABLE, ""):
            return
        [seconds] = await llm.collective_rpc("maestrale_threads")
        threads = fewest_fast(seconds)
        os.environ[THREADS_VARIABLE] = str(threads)
        measured = ", ".join(f"{count}: {1000 * took:.2f} ms" for count, took in seconds.items())
        log.info(
            "threads of the engine: %d (a layer took with %s); OMP_NUM_THREADS sets another number", threads, measured
        )

    async def _warm_up(self) -> None:
        """Sample from the warm-up prompts before users' prompts. Raises ModelError if the engine dies of one."""
        began = time.monotonic()
        for prompt in warm_up.prompts(self.max_tokens):
            try:
                sampling = SamplingParameters(max_tokens=warm_up.NEW_TOKENS, temperature=0)
                async with contextlib.aclosing(self._sample(prompt, sampling)) as deltas:
                    async for _ in deltas:
                        pass
            except EngineDied as error:
                if self.watch.frozen:
                    raise ModelError(f"the engine of {self.model_dir} {self.watch.frozen}") from error
                died = f"the engine of {self.model_dir} {warm_up.Died(prompt)} ({self.dtype})"
                raise ModelError(f"{died}: {last_words() or 'try another dtype, e.g. float32'}") from error
        self.warm_up_s = time.monotonic() - began

    def _begin(self) -> StepLLM:
        from serve.vllm_parts import EngineSettings, StepLLM

        on_gpu = torch.cuda.is_available()
        more: dict[str, Any] = {"quantization": self.quantization} if self.quantization else {}
        if on_gpu:
            more["gpu_memory_utilization"] = self.gpu_share
        more |= self._adapters.engine_arguments()
        config = make_vllm_config(
            self.model_dir,
            dtype=self.dtype,
            max_tokens=self.max_tokens,
            max_sequences=self.max_sequences,
            cache_bytes=self.cache_bytes or (None if on_gpu else CPU_CACHE_BYTES),
            tensor_parallel=self.tensor_parallel,
            worker_extension_cls="serve.vllm_process.ServingWorkerExtension",
            load_format="safetensors",
            # JSON without blanks: an unsure model would write blanks without end
            structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
            additional_config=EngineSettings(),
            **more,
        )
        try:
            began = time.monotonic()
            with started_within(self._patience("start", START_DEADLINE_S)):
                llm: StepLLM = StepLLM.from_vllm_config(config, disable_log_stats=True)
            self._patience.took("start", time.monotonic() - began)
        except TimeoutError as error:
            raise ModelError(f"vLLM hangs at the start of {self.model_dir}: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"vLLM cannot serve {self.model_dir}: {error}") from error
        # what the imports left will stay: searching through it for garbage would stop all responses each time
        gc.collect()
        gc.freeze()
        return llm

    def generate(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        """Sample one completion, in several engines if one dies."""
        return self.failover.generate(prompt_ids, sampling)

    def _params(self, sampling: SamplingParameters) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        by_text = bool(sampling.through) and sampling.through_id is None
        through_ids = [] if sampling.through_id is None else [sampling.through_id]
        return SamplingParams(
            **{name: getattr(sampling, name) for name in UNCHANGED},
            stop=[*sampling.stop, *([sampling.through] if by_text else [])],
            stop_token_ids=[*self._own_stops(sampling), *sampling.stop_token_ids, *through_ids],
            include_stop_str_in_output=sampling.include_stop,
            min_tokens=min(sampling.min_tokens, sampling.max_tokens),
            structured_outputs=structured_outputs(sampling.constraint),
            output_kind=RequestOutputKind.DELTA,
        )

    def _own_stops(self, sampling: SamplingParameters) -> list[int]:
        """Return the model's own stop tokens; none if the sampling ignores them."""
        return [] if sampling.ignore_eos else self._stop_ids

    def _end_of(self, reason: str | int | None, sampling: SamplingParameters) -> tuple[str, str | int | None]:
        """Return the text to append to a completion, and its `stop_reason`; reason: vLLM's stop reason."""
        if reason is not None and reason in (sampling.through, sampling.through_id):
            return sampling.through, sampling.through
        if reason in self._own_stops(sampling) and reason not in sampling.stop_token_ids:
            return "", None
        return "", reason

    async def _sample(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        """Sample in the current engine. Raises EngineDied, EngineRefused."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self.llm
        if llm is None:  # it is being started again
            raise EngineDied
        queue, finished = None, False
        try:
            adapter = self._adapters.current.get(sampling.adapter)
            queue = await llm.submit(f"r{next(self._names)}", prompt_ids, self._params(sampling), adapter)
            while not finished:
                output, steps = await queue.take()
                self.watch.moved = True
                completion, finished = output.outputs[0], output.finished
                if completion.finish_reason == "error":
                    raise EngineRefused("the engine gave the request up, as where its constraints leave no token")
                if completion.finish_reason not in (None, "stop", "length"):
                    raise EngineDied  # it was stopped: vLLM ends what is under way as if it were done
                of_prompt = output.prompt_logprobs  # once; of the first token there is none
                prompt = candidates(prompt_ids[1:], of_prompt[1:], sampling.prompt_logprobs) if of_prompt else ()
                end, stop = self._end_of(completion.stop_reason, sampling)
                for step in steps:
                    ranked = candidates(step.token_ids, step.logprobs, sampling.logprobs) if step.logprobs else []
                    if step.last:
                        yield Delta(step.text + end, step.token_ids, ranked, completion.finish_reason, prompt, stop)
                    else:
                        yield Delta(step.text, step.token_ids, ranked, None, prompt)
                    prompt = ()
        except EngineDeadError as error:
            self.failover.mark_dead(llm)
            raise EngineDied from error
        except VLLMValidationError as error:
            raise EngineRefused(str(error)) from error
        finally:
            if queue is not None and not finished:
                await llm.abort(queue.request_id, internal=True)

    async def reload(self, model_dir: str, patience_s: float) -> None:
        """Load newer weights. Raises ModelError; a failed load also ends the engine process."""
        llm = self.llm
        if llm is None:
            raise ModelError("the engine is being started")
        try:
            async with asyncio.timeout(patience_s):
                await llm.pause_generation(mode="wait")
        except TimeoutError:
            pass  # those that still run go on under the new weights
        try:
            with self.watch.loading():
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

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Let new completions of an adapter use this version; those under way end with theirs. Raises ModelError."""
        if self.llm is None:
            raise ModelError("the engine is being started")
        request = self._adapters.request(name, folder)
        await self._add_adapter(self.llm, name, request)
        self._adapters.current[name] = request

    async def _add_adapter(self, llm: StepLLM, name: str, request: LoRARequest) -> None:
        """Load an adapter into the engine. Raises ModelError if vLLM refuses it."""
        try:
            with self.watch.loading():
                async with asyncio.timeout(LOAD_DEADLINE_S):
                    await llm.add_lora(request)
        except Exception as error:
            why = error if str(error) else f"no answer after {LOAD_DEADLINE_S:g} s"
            raise ModelError(f"vLLM cannot serve {request.lora_path} as {name}: {why}") from error

    async def is_alive(self) -> bool:
        """Whether the engine process is there."""
        return self.llm is not None and not self.llm.errored

    async def restart(self) -> None:
        """Replace a dead engine process."""
        await self._end()
        await self.start()

    async def stop(self) -> None:
        """End the engine process."""
        self.failover.over = True
        await self._end()
        self.failover.release_waiting(False)

    async def _end(self) -> None:
        async with self._changing:
            await self._end_process()

    async def _end_process(self) -> None:
        if self.llm is not None and self.llm.errored:
            await asyncio.to_thread(last_words)  # its process may still be ending
        await self.watch.end()
        llm, self.llm = self.llm, None
        if llm is not None:
            self.failover.mark_dead(llm, meant=not llm.errored)
            await asyncio.to_thread(llm.shutdown, 5)
            # its destructor shuts down once more, which fails when the interpreter ends
            setattr(llm, "shutdown", lambda *_: None)  # noqa: B010 - no method of the class is meant


def import_vllm() -> None:
    """Import vLLM in a call of its own: one of its modules keeps the stack of its first import, and its variables."""
    cores = usable_cores()
    prepare_environment(given_threads(otherwise=0) or (f"1-{cores}" if cores > 1 else 1))
    from serve import vllm_parts  # noqa: F401

    log_no_traceback("vllm.v1.engine.async_llm")  # the engine process says why it died


class AdapterRequests:
    """The adapters of one server as vLLM knows them. Each version has a number and a name of its own: vLLM's cache of
    keys and values knows an adapter by its name."""

    def __init__(self, served: Mapping[str, ServedAdapter]):
        self.served, self._numbers = served, itertools.count(1)
        self.current: dict[str, LoRARequest] = {}
        """name for clients -> its version that new completions use"""

    def request(self, name: str, folder: Path) -> LoRARequest:
        """A new version of an adapter."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        return LoRARequest(f"{name}@{number}", number, str(folder))

    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's arguments: a slot for each adapter and one for a version that comes while the one before ends."""
        if not self.served:
            return {}
        from rollout.weights.adapters import engine_arguments

        self.current = self.current or {name: self.request(name, one.folder) for name, one in self.served.items()}
        settings = [one.settings for one in self.served.values()]
        layers = sorted({target.rpartition(".")[2] for one in settings for target in one.targets})
        return engine_arguments(max(one.rank for one in settings), layers, slots=len(settings) + 1)


def version_of(model_dir: str) -> str:
    """Return a name of a folder's weights, "RUN, step VERSION" from its card; "" without a card."""
    card = read_card(Path(model_dir))
    return f"{card.run}, step {card.version}" if card is not None else ""


def structured_outputs(constraint: Constraint | None) -> Any:
    """Convert a constraint into vLLM's parameters; None for none."""
    from vllm.sampling_params import StructuredOutputsParams

    if constraint is None:
        return None
    kind = "grammar" if constraint.kind == "structural_tag" else constraint.kind
    return StructuredOutputsParams(**{kind: constraint.value or True})


def candidates(token_ids: Iterable[int], tables: Any, most: int | None) -> list[list[Candidate]]:
    """Convert vLLM's log-probs, if any, to [tokens]: the token itself, then the `most` most probable ones."""
    rows = []
    for token_id, table in zip(token_ids, tables or [], strict=False):
        ranked = sorted(
            (
                Candidate(key, entry.decoded_token or "", max(entry.logprob, MINUS_INFINITY))
                for key, entry in table.items()
            ),
            key=lambda candidate: -candidate.logprob,
        )
        itself = next(candidate for candidate in ranked if candidate.token_id == token_id)
        rows.append([itself, *ranked[: most or 0]])
    return rows
