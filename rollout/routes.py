"""The experts that an engine chose, returned with its tokens: what vLLM's newer model runner does by itself.

vLLM 0.32 wires its routed experts (`enable_return_routed_experts`) to its model runner V2 only, which needs Triton. On
a CPU this module gives vLLM's own connector what the older runner knows of each step: the connector keeps routes with
cached prefixes, and its scheduler's side sends each token's with the next one, all of the prompt's with the first.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


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
