"""A vLLM worker in whose next update some parameters can be made to stay as they are: what the proof must find.

vLLM imports the class by name, as it does rollout/weights/vllm_backend.py.
"""

from __future__ import annotations

from typing import Any

from rollout.weights.vllm_backend import WorkerExtension

NAME = f"{__name__}.FaultyWorker"


class FaultyWorker(WorkerExtension):
    """The RPCs of a worker, and one that plants a fault."""

    def maestrale_keep_old(self, tensors: list[str]) -> int:
        """Let the plain parameters that are made of these tensors keep their values in the next update; returns their
        number (a CPU's linears have none)."""
        engine: Any = self.weight_transfer_engine
        targets = [one for one in engine.targets if one.plain and set(one.sources) & set(tensors)]
        parameters = [getattr(one.module, one.parameter) for one in targets]

        def receive(update_info: Any) -> None:
            del engine.receive_weights  # of this object: the class's is whole
            old = [parameter.data.clone() for parameter in parameters]
            engine.receive_weights(update_info)
            for parameter, before in zip(parameters, old, strict=True):
                if before.is_cuda:
                    parameter.data.copy_(before)
                else:  # the new values lie in the trainers' memory
                    parameter.data = before

        engine.receive_weights = receive
        return len(targets)
