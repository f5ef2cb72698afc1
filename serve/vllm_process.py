"""Extends the engine process for the server: it dies with its parent, and loads newer weights from a folder.

vLLM imports this module in the process that holds the worker (`worker_extension_cls`).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollout.weights.layout import plan_layout
from shared.errors import ModelError
from shared.launch.watchdog import die_with_parent


class ServingWorkerExtension:
    """RPCs of the vLLM worker in addition to its own (self is the worker)."""

    device: torch.device
    vllm_config: Any

    def maestrale_load_weights(self, folder: str) -> None:
        """Replace all weights by those of another export of the same model. Only while the engine is paused. Raises
        ModelError, before anything is replaced, if the two do not fit or the model is quantised."""
        if self.vllm_config.quant_config is not None:
            raise ModelError("weights of a quantised model are not replaced in a running engine: start it again")
        model = self.get_model()  # type: ignore[attr-defined]  # the worker's
        with ExitStack() as files:
            tensors = open_tensors(Path(folder), files)
            if self.device.type == "cpu":
                load_on_cpu(model, tensors)
            else:
                model.load_weights((name, file.get_tensor(name)) for name, file in tensors.items())


def open_tensors(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Open the safetensors files of a folder; returns tensor name -> the open file that holds it."""
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt"))
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors


@torch.no_grad()
def load_on_cpu(model: torch.nn.Module, tensors: dict[str, Any]) -> None:
    """Copy the tensors into a model on the CPU, and repack the packed copies that vLLM's linears compute with."""
    from rollout.weights.cpu.loader import pack
    from rollout.weights.parameters import plan_targets

    dtype = next(parameter.dtype for parameter in model.parameters())
    shapes = [(name, tuple(file.get_slice(name).get_shape())) for name, file in tensors.items()]
    for target in plan_targets(model, plan_layout(shapes, dtype, 1)):
        rows = torch.cat([tensors[name].get_tensor(name) for name in target.sources]).to(dtype)
        parameter = getattr(target.module, target.parameter)
        if target.plain:
            parameter.data[: rows.shape[0]].copy_(rows)
        if target.packed:
            if parameter.shape[0] > rows.shape[0]:  # a head with padding rows
                rows = torch.cat([rows, rows.new_zeros(parameter.shape[0] - rows.shape[0], *rows.shape[1:])])
            target.module.cpu_linear = pack(rows)  # type: ignore[assignment]  # a function, not a submodule


die_with_parent()
