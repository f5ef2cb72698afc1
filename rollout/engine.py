"""One vLLM engine as its rollout rank uses it: sampling, scoring, weight updates in flight, restarts.

Every token is stored with its log-prob and policy version the moment its step ends, in this process, so that nothing is
lost when the engine process dies: `restart` builds a new one, puts the newest weights in and continues each completion
from its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections.abc import Awaitable
from typing import TypeVar

import torch

from rollout.start import last_words, own_gpus_first, started_within
from rollout.vllm_config import build_vllm_config, prepare_environment, read_stop_tokens

prepare_environment()

from vllm.distributed.weight_transfer.base import (  # noqa: E402
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError  # noqa: E402

from rollout.output_collector import OutputCollector, Scoring, copy_unfinished  # noqa: E402
from rollout.stream import TokenLLM, sampling_params, scoring_params  # noqa: E402
from rollout.trial import GIVEN_UP, Trial  # noqa: E402
from rollout.warm_up import Died, warm_up  # noqa: E402
from rollout.weights.adapters import adapter_request  # noqa: E402
from rollout.weights.layout import NO_VERSION  # noqa: E402
from rollout.weights.proof import Updated, WeightsHeld, add_workers  # noqa: E402
from rollout.weights.receiver import WeightReceiver  # noqa: E402
from rollout.weights.vllm_backend import ENGINE_VARIABLE  # noqa: E402
from shared.config import Config  # noqa: E402
from shared.errors import ConfigError, DeadlineExceeded, EngineLost, NonFinite, RunError, SyncMismatch  # noqa: E402
from shared.launch.messages import GenerateRequest  # noqa: E402
from shared.types import Completion  # noqa: E402

Result = TypeVar("Result")


class Engine:
    """Starts, feeds, updates and restarts one engine process; `outputs` holds its running completions."""

    def __init__(self, config: Config, model_dir: str, *, rank: int, engine: int, device: torch.device | None = None):
        """rank: this process's rank in the launch. engine: 0-based number of the engine, for names and seeds. device:
        the engine's first GPU, or the CPU."""
        self.device = device or torch.device("cpu")
        self.config, self.model_dir, self.rank, self.engine = config, model_dir, rank, engine
        self.stop_token_ids = read_stop_tokens(model_dir)
        self.llm: TokenLLM | None = None
        self.receiver: WeightReceiver | None = None
        self.version = NO_VERSION
        self.outputs = OutputCollector(engine, config.run_dir)
        self.trial = Trial()
        self.warm_up_s = 0.0
        """seconds of the last start that the warm-up took"""
        self.cache_bytes: int | None = None
        """for keys and values, as the first start found them free: later ones may share the GPU with a process"""
        self.asleep = False
        self.starts = 0
        self.ended = asyncio.Event()
        self.failure: BaseException | None = None
        """an error that no restart repairs"""
        self._serial = itertools.count()

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine process with the weights of the model folder. Blocks the event loop while it starts.

        Raises DeadlineExceeded if it hangs, EngineLost with the reason if vLLM could not start it or if it dies of its
        first prompts.
        """
        os.environ[ENGINE_VARIABLE] = str(self.rank)
        seed = (self.config.seed * 1_000_003 + self.engine * 101 + self.starts) % (1 << 31)
        self.starts += 1
        self.ended.clear()
        deadline_s, self.asleep = self.config.deadlines.start_s, False
        config = build_vllm_config(
            self.config, self.model_dir, seed=seed, device=self.device, cache_bytes=self.cache_bytes
        )
        try:
            with own_gpus_first(self.device, self.config.rollout.tensor_parallel), started_within(deadline_s):
                llm: TokenLLM = TokenLLM.from_vllm_config(config, disable_log_stats=True)
        except TimeoutError as error:
            name = f"engine rank {self.rank}"
            raise DeadlineExceeded(name, "start of the engine", "its engine process", deadline_s) from error
        except RuntimeError as error:
            words = str(error)
            if "Free memory on device" in words:
                words += " Another program uses this GPU: set rollout.cache_bytes to start beside it"
            raise EngineLost(words) from error
        self.llm = llm
        try:
            async with asyncio.timeout(deadline_s):
                if config.aux_output_config.enabled and not config.use_v2_model_runner:
                    await llm.collective_rpc("maestrale_return_routes")
                self.warm_up_s = await warm_up(llm, self.config.model.max_tokens)
        except TimeoutError as error:
            name = f"engine rank {self.rank}"
            raise DeadlineExceeded(name, "first prompts of the engine", "its engine process", deadline_s) from error
        except Died as error:
            dtype = self.config.model.dtype
            how = llm.how_it_ended() or "its process gave up"
            known = "" if last_words() else "; if nobody killed it, another model.dtype may do"
            raise EngineLost(f"engine {self.engine} {error} in {dtype} when it was tried: {how}{known}") from error
        llm.on_step = self.outputs.take_step
        llm.on_end = lambda error: self._end(llm, error)
        self.outputs.active_s, self.outputs.longest_s = time.monotonic(), None
        await self._ask(llm.update_weight_version(str(NO_VERSION)))
        if self.device.type == "cuda" and self.config.rollout.cache_bytes is None and self.cache_bytes is None:
            self.cache_bytes = min(await self._ask(llm.collective_rpc("maestrale_cache_bytes")))

    async def sleep(self) -> None:
        """Leave the GPU to the trainers: vLLM drops weights and KV cache (its level 2; with adapters it keeps the
        model, which no update brings, on the host: level 1), requests that run are kept and begin anew after `wake`.
        The next thing after that must be an update. On a CPU nothing is freed."""
        if self.device.type == "cuda" and not self.asleep:
            await self._ask(self._llm.sleep(level=1 if self.config.sends_adapters else 2, mode="keep"))
        self.version, self.asleep = NO_VERSION, True

    async def wake(self) -> None:
        """Take the GPU again, with weights that an update has yet to bring."""
        if self.device.type == "cuda" and self.asleep:
            await self._ask(self._llm.wake_up())
        self.asleep = False

    async def attach(self, receiver: WeightReceiver) -> None:
        """Connect the engine process to the trainers' weights. Raises RunError if it cannot open them."""
        self.receiver = receiver
        await self._attach()

    async def _attach(self) -> None:
        assert self.receiver is not None
        request = WeightTransferInitRequest(init_info=self.receiver.engine_info())
        try:
            await self._ask(self._llm.init_weight_transfer_engine(request))
        except EngineDeadError:
            raise
        except Exception as error:
            raise RunError(f"engine {self.engine} cannot open the trainers' weights: {error}") from error
        self.receiver.engine_back()

    async def restart(self) -> int:
        """Replace a dead engine process by one with the same weight version, which continues interrupted completions.
        Returns their number, without those that are given up (`trial.report`)."""
        if self.receiver is not None:
            self.receiver.engine_lost()
        self._llm.kill()
        self._llm.shutdown()
        self.outputs.step_timer.stop()
        self.outputs.cancel_scoring()
        await self.start()
        if self.receiver is not None:
            await self._attach()
        if self.receiver is not None and self.version != NO_VERSION:
            try:
                await asyncio.to_thread(self.receiver.wait_for, self.version, self.config.deadlines.sync_s)
                await self._apply(self.version)
            except SyncMismatch:
                if self.config.mode != "sft":
                    raise
                self.version = NO_VERSION  # its buffer holds a newer one, whose update comes: SFT leaves versions out
        interrupted = list(self.outputs.running.values())
        self.outputs.running.clear()
        for request in interrupted:
            request.completion.restarts += 1
        innocent, guilty = self.trial.sort(interrupted)
        for request in guilty:
            request.completion.finish_reason = GIVEN_UP
            self.outputs.on_finished(request)
        await self._submit(innocent)
        return len(innocent) + len(self.trial.waiting)

    async def stop(self) -> None:
        """End the engine process and free the buffers."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.on_end = None
            llm.kill()  # in a launch it does not hear SIGTERM, and it has nothing to put away
            llm.shutdown(timeout=5)
        if self.receiver is not None:
            self.receiver.close()

    @property
    def _llm(self) -> TokenLLM:
        if self.llm is None:
            raise RunError(f"engine {self.engine} was not started")
        return self.llm

    @property
    def _adapter(self) -> LoRARequest | None:
        """What a request names to be answered by the policy's adapters; None for the model alone."""
        return adapter_request() if self.config.sends_adapters and self.version != NO_VERSION else None

    def _end(self, llm: TokenLLM, error: BaseException) -> None:
        if llm is not self.llm:
            return
        if not isinstance(error, EngineDeadError):
            self.failure = error
        self.ended.set()

    async def _ask(self, call: Awaitable[Result]) -> Result:
        """Await an engine call, or raise EngineDeadError as soon as the engine is gone (vLLM would wait endlessly)."""
        self.outputs.begin()
        task = asyncio.ensure_future(call)
        gone = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDeadError()
            self.outputs.alive()
            return task.result()
        finally:
            for waiting in (task, gone):
                waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # read by nobody else
                waiting.cancel()

    async def answers(self, deadline_s: float) -> bool:
        """True if the engine process answers within the deadline."""
        try:
            await asyncio.wait_for(self._ask(self._llm.collective_rpc("maestrale_pid")), deadline_s)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    async def held_version(self) -> int:
        """Return the weight version that the engine process itself reports."""
        return int(await self._ask(self._llm.get_weight_version()))

    # ---- completions -----------------------------------------------------------------------------------------------

    async def generate(self, requests: list[GenerateRequest], hold: bool = False) -> None:
        """Start requests; each ends in `on_finished`. hold: the engine is paused until all are queued, so that batches
        are the same in every run. Raises ConfigError for a prompt that does not fit."""
        with contextlib.suppress(EngineDeadError):  # then `restart` starts them all
            if hold:
                await self._ask(self._llm.pause())
        await self._submit(requests)
        with contextlib.suppress(EngineDeadError):
            if hold:
                await self._ask(self._llm.resume())

    async def _submit(self, requests: list[GenerateRequest]) -> None:
        """Queue requests under the current version's cache salt: no new request hits an older version's cache."""
        self.outputs.begin()
        for request in requests:
            completion = request.completion
            tokens = request.prompt_ids + completion.token_ids
            if len(completion.token_ids) >= request.max_tokens or len(tokens) >= self.config.model.max_tokens:
                if not completion.token_ids:
                    raise ConfigError(
                        f"a prompt of {len(request.prompt_ids)} tokens leaves no room in model.max_tokens = "
                        f"{self.config.model.max_tokens}: raise it, or shorten the prompt"
                    )
                completion.finish_reason = "length"
                self.outputs.on_finished(request)
                continue
            name = f"{completion.group}.{completion.index}.{next(self._serial)}"
            self.outputs.running[name] = request
            params = sampling_params(request, self.stop_token_ids, self.outputs.routes.known(completion))
            try:
                await self._llm.submit(name, tokens, params, str(self.version), self._adapter)
            except EngineDeadError:
                self.ended.set()  # stays in `running`: the restart takes it up

    async def try_next(self) -> None:
        """Submit the next completion that is suspected of killing engines, unless one of them is running."""
        if (request := self.trial.next()) is not None:
            await self._submit([request])

    def unfinished(self) -> list[Completion]:
        """Return all unfinished completions."""
        return [request.completion for request in (*self.outputs.running.values(), *self.trial.waiting)]

    async def snapshot(self, completions: list[Completion]) -> list[Completion]:
        """Return copies of unfinished completions as they are now, once their routes are in files. Raises DiskError."""
        copies = [copy_unfinished(completion) for completion in completions]
        routes = await self.outputs.routes.put_away(completions)
        for each, files in zip(copies, routes, strict=True):
            each.routes = files
        return copies

    # ---- scoring ---------------------------------------------------------------------------------------------------

    async def score(self, sequences: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of every token but the first of fixed sequences, [sequences][tokens - 1], under the current weights.

        Raises ConfigError for a temperature other than 1 (vLLM gives prompt log-probs before temperature), NonFinite
        for a log-prob that is not finite.
        """
        if temperature != 1.0:
            raise ConfigError(f"the engine can score sequences at temperature 1 only, not {temperature}")
        futures: list[asyncio.Future[list[float]]] = []
        for sequence in sequences:
            name = f"score.{next(self._serial)}"
            scoring = Scoring(asyncio.get_running_loop().create_future())
            self.outputs.scoring[name] = scoring
            futures.append(scoring.future)
            await self._llm.submit(name, sequence, scoring_params(), f"{self.version}/{name}", self._adapter)
        scored = await self._ask(asyncio.gather(*futures))
        for sequence, logprobs in zip(sequences, scored, strict=True):
            if len(logprobs) != len(sequence) - 1:
                raise RunError(f"engine {self.engine} scored {len(logprobs)} of {len(sequence) - 1} tokens")
            if not all(map(math.isfinite, logprobs)):
                raise NonFinite(f"engine {self.engine}: log-probs of a probe sequence are not finite: {logprobs}")
        return scored

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def update(self, version: int) -> Updated:
        """Update to `version` in flight: running requests freeze between two steps and continue with the new weights on
        their KV cache. Raises SyncMismatch, DeadlineExceeded, or EngineDeadError (`restart` then finishes it)."""
        if self.receiver is None:
            raise RunError(f"engine {self.engine} was asked for version {version} before it was attached")
        start = time.perf_counter()
        await asyncio.to_thread(self.receiver.wait_for, version, self.config.deadlines.sync_s)
        received = time.perf_counter()
        unstarted = self.outputs.requeue_unstarted()  # must start under the new version's cache salt, not the old one's
        await self._ask(self._llm.abort_requests(unstarted))
        requeued = time.perf_counter()
        seconds, stall_s = await self._apply(version)
        seconds |= {"receive": received - start, "requeue": requeued - received}
        await self._submit([self.outputs.running.pop(f"requeued {name}") for name in unstarted])
        seconds["total"] = time.perf_counter() - start
        median_s = self.outputs.step_timer.median_s()
        stall = await stall_s
        return Updated(
            engine=self.engine, version=version, seconds=seconds, bytes=self.receiver.layout.payload_bytes,
            held=WeightsHeld(), stall_s=stall, stall_steps=stall / median_s if median_s else 0.0,
            running=len(self.outputs.running), gpu_peak_bytes=await self._gpu_peak_bytes(),
        )  # fmt: skip

    async def _gpu_peak_bytes(self) -> int:
        """Largest GPU memory that one of the engine's workers has allocated so far; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        return int(max(await self._ask(self._llm.collective_rpc("maestrale_gpu_peak_bytes"))))

    async def _apply(self, version: int) -> tuple[dict[str, float], Awaitable[float]]:
        """Pause, apply, finish with the version's label, resume. Returns seconds of each, and a future of the stall."""
        llm, marks = self._llm, [time.perf_counter()]
        self.version = version
        try:
            await self._ask(llm.pause())
            marks.append(time.perf_counter())
            await self._ask(llm.start_weight_update())
            await self._ask(llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version})))
            marks.append(time.perf_counter())
            await self._ask(llm.finish_weight_update(weight_version=str(version)))
            marks.append(time.perf_counter())
        except EngineDeadError:
            raise
        except Exception as error:
            raise SyncMismatch(f"engine {self.engine} could not take version {version}: {error}") from error
        await asyncio.sleep(0)  # tokens from before the pause are stored before the watch begins
        stall = asyncio.ensure_future(self._measure_stall())
        await asyncio.sleep(0)
        await self._ask(llm.resume())
        marks.append(time.perf_counter())
        names = ("pause", "apply", "finish", "resume")
        return {name: end - begin for name, (begin, end) in zip(names, itertools.pairwise(marks), strict=True)}, stall

    async def _measure_stall(self) -> float:
        """Seconds between the last tokens before now and the next ones; 0 if nothing runs."""
        before = self.outputs.step_timer.last_s
        if before is None or not self.outputs.running:
            return 0.0
        try:
            after = await asyncio.wait_for(
                self._ask(self.outputs.step_timer.next_step()), self.config.deadlines.token_s
            )
        except TimeoutError:
            return self.config.deadlines.token_s
        except EngineDeadError:
            return 0.0
        return after - before

    async def start_read_back(self, chosen: list[dict[str, list[int]]]) -> None:
        """Begin to read back what the engine process computes with, during generation. chosen: of each trainer rank,
        tensor -> columns of its rows that are read where the engine keeps it packed; the next step reads them."""
        await self._ask(self._llm.collective_rpc("maestrale_start_read_back", args=(chosen,)))

    async def read_back(self) -> WeightsHeld:
        """What the engine process computes with, since `start_read_back`."""
        assert self.receiver is not None
        while True:
            workers = await self._ask(self._llm.collective_rpc("maestrale_take_read_back"))
            if all(held is not None for held in workers):
                return add_workers(workers, self.receiver.layout)
            await asyncio.sleep(0.01)
