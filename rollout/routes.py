"""The experts that an engine chose, returned with its tokens: what vLLM's newer model runner does by itself.

vLLM 0.32 wires its routed experts (`enable_return_routed_experts`) to its model runner V2 only, which needs Triton. On
a CPU this module gives vLLM's own connector what the older runner knows of each step: the connector keeps routes with
cached prefixes, and its scheduler's side sends each token's with the next one, all of the prompt's with the first.
Here, too, the engine's rank keeps them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from shared import route_files
from shared.types import Completion, RouteFile


def allow_routes() -> None:
    """Turn off vLLM's refusal to return routes with its older runner, which `return_routes` makes do so. In the
    engine's process, on a CPU; elsewhere nothing changes."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        VllmConfig._verify_aux_output_compatibility = lambda self: None


def return_routes(runner: Any) -> None:
    """Make a model runner (V1, synchronous scheduling, without speculation) return the routes of each step. In the
    engine's process, once its KV cache is there and before its first request."""
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    connector = AuxOutputWorkerConnector(
        vllm_config=runner.vllm_config, model=runner.get_model(), kv_cache_config=runner.kv_cache_config
    )
    execute, sample, pending = runner.execute_model, runner.sample_tokens, list[Any]()

    def execute_model(scheduled: Any, *more: Any) -> Any:
        connector.begin_step(scheduled.aux_output_connector_metadata)
        ended = execute(scheduled, *more)
        if ended is None:  # a step whose tokens are to be sampled
            batch = runner.input_batch
            count = batch.num_reqs
            step: Any = SimpleNamespace(  # the parts of a batch that the connector reads
                req_ids=batch.req_ids[:count],
                query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
            )
            pending.append(connector.prepare_output(step))
        return ended

    def sample_tokens(*inputs: Any) -> Any:
        output = sample(*inputs)
        if pending and (step := pending.pop()) is not None:
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            step.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = step.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


class RouteKeeper:
    """Keeps the routes of an engine's completions until they are in files (shared/route_files.py)."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._rows: dict[tuple[int, int], bytearray] = {}
        """(group, index) -> routes of a completion that follow those in files"""
        self._cut: dict[tuple[int, int], list[tuple[str, bytes, int]]] = {}
        """(group, index) -> files that are to be written: name, content, tokens"""
        self._width = 1
        self._writing = asyncio.Lock()

    def add(self, completion: Completion, routed: np.ndarray) -> None:
        """Keep the routes of the next tokens, [tokens, layers, experts of a token]."""
        self._rows.setdefault((completion.group, completion.index), bytearray()).extend(routed.tobytes())
        self._width = routed[:1].nbytes or self._width

    def known(self, completion: Completion) -> int:
        """Tokens whose routes are here or in files."""
        key = completion.group, completion.index
        cut = sum(tokens for *_, tokens in self._cut.get(key, ()))
        return sum(file.tokens for file in completion.routes) + cut + len(self._rows.get(key, b"")) // self._width

    async def put_away(self, completions: Sequence[Completion]) -> list[list[RouteFile]]:
        """Write what is kept of these completions, and add the files to their `routes`; returns the files that each has
        for the tokens of now, also where more come meanwhile. What could not be written is kept. Raises DiskError."""
        counts = []
        for one in completions:
            before, rows = self.known(one), bytes(self._rows.pop(key := (one.group, one.index), b""))
            if tokens := len(rows) // self._width:
                name = f"{one.group}/{one.index}.{one.anew}.{before - tokens}"
                self._cut.setdefault(key, []).append((name, rows, tokens))
            counts.append(len(one.routes) + len(self._cut.get(key, ())))
        for one in completions if self._cut else ():
            async with self._writing:
                while cut := self._cut.get((one.group, one.index)):
                    file = await asyncio.to_thread(route_files.write, self.run_dir, *cut[0])
                    one.routes = [*one.routes, file]
                    del cut[0]
                self._cut.pop((one.group, one.index), None)
        return [one.routes[:count] for one, count in zip(completions, counts, strict=True)]
