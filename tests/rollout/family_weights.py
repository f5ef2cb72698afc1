"""Puts new weights into vLLM's own models of several families, without engines around them.

    python family_weights.py FOLDER FAMILY...

Writes FOLDER/found.json: family -> what went wrong, and how many parameters were compared.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.vllm_config import make_vllm_config, prepare_environment

prepare_environment()

import torch  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state as state  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402

from rollout.weights.checksum import checksum_rows  # noqa: E402
from rollout.weights.cpu.loader import load_stream  # noqa: E402
from rollout.weights.layout import plan_layout  # noqa: E402
from rollout.weights.parameters import plan_targets, read_plain  # noqa: E402
from shared.model import hf  # noqa: E402
from tests.families import config_of, reference  # noqa: E402
from tests.model_folder import load_model  # noqa: E402


def load(folder: Path) -> Any:
    """vLLM's model of a folder."""
    config = make_vllm_config(
        str(folder), dtype="float32", max_tokens=256, max_sequences=4, cache_bytes=16 << 20, skip_tokenizer_init=True
    )
    with set_current_vllm_config(config):
        state.ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)


def values(module: Any, name: str) -> torch.Tensor:
    """What a module computes with: its parameter, or the columns of its packed copy."""
    held: torch.Tensor = getattr(module, name).data
    if name == "weight" and hasattr(module, "cpu_linear") and held.numel() == 0:
        found: torch.Tensor = module.cpu_linear(torch.eye(module.input_size), held, None)
        return found
    return held


def compare(folder: Path, family: str) -> Iterator[str]:
    """Yield what differs between vLLM's model after an update and one that it loads itself from our export."""
    start, end = folder / "start", folder / "end"
    reference(config_of(family)).save_pretrained(start)
    (start / "tokenizer.json").write_text("{}")
    trained = load_model(start, implementation="transformers")
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in trained.named_parameters()
    }
    hf.save_trained(end, start, tensors.items(), torch.float32)
    model, wanted = load(start), load(end)
    layout = plan_layout([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], torch.float32, 1)
    targets = plan_targets(model, layout)
    load_stream(targets, tensors.items(), torch.float32)
    modules, compared = dict(wanted.named_modules()), 0
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            compared += 1
            if not torch.equal(values(module, name), values(modules[path], name)):
                yield f"{path}.{name} is not what vLLM loads"
    read = read_plain(targets, layout)
    for name, (checksum, count) in read.items():
        if (checksum, count) != (checksum_rows(tensors[name], 0, torch.float32), tensors[name].numel()):
            yield f"{name} is not what was sent"
    if not compared or not read:
        yield "nothing was compared"


def main(folder: Path, families: list[str]) -> None:
    """Compare one family after the other."""
    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker has it on CPUs
    state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
    found = {}
    for family in families:
        try:
            found[family] = list(compare(folder / family, family))
        except Exception:  # noqa: BLE001 - told by the test
            found[family] = [traceback.format_exc()]
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
