"""New weights put into vLLM's own model of each family, without an engine: each parameter then holds what vLLM itself
loads from our export of these weights, and what is read back is what the trainers sent."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.vllm_config import make_vllm_config, prepare_environment
from rollout.weights.checksum import checksum_rows
from rollout.weights.layout import plan_layout
from shared.model import hf
from tests.families import SENT, VISION_LANGUAGE, config_of, reference
from tests.model_folder import load_model
from tests.process import in_fresh_process

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # in make test: test_engine.py, with a dense model


def values(module: Any, name: str) -> torch.Tensor:
    """What a module computes with: its parameter, or the columns of its packed copy."""
    loaded: torch.Tensor = getattr(module, name).data
    if name == "weight" and hasattr(module, "cpu_linear") and loaded.numel() == 0:
        weights: torch.Tensor = module.cpu_linear(torch.eye(module.input_size), loaded, None)
        return weights
    return loaded


def differences(folder: Path, family: str) -> list[str]:
    """What differs between vLLM's model after an update and one that it loads itself from our export."""
    prepare_environment()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as state
    from vllm.model_executor.model_loader import get_model

    from rollout.weights.cpu.loader import load_stream
    from rollout.weights.parameters import plan_targets, read_plain

    def load(folder: Path) -> Any:
        config = make_vllm_config(
            str(folder), dtype="float32", max_tokens=256, max_sequences=4, cache_bytes=16 << 20,
            skip_tokenizer_init=True,
        )  # fmt: skip
        with set_current_vllm_config(config):
            state.ensure_model_parallel_initialized(1, 1)
            return get_model(vllm_config=config)

    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker has it on CPUs
    state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
    start, end = folder / "start", folder / "end"
    reference(config_of(family)).save_pretrained(start)
    (start / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in load_model(start, implementation="transformers").named_parameters()
    }
    hf.save_trained(end, start, tensors.items(), torch.float32)
    model, modules = load(start), dict(load(end).named_modules())
    layout = plan_layout([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], torch.float32, 1)
    targets = plan_targets(model, layout)
    load_stream(targets, tensors.items(), torch.float32)
    names = [(path, name) for path, each in model.named_modules() for name, _ in each.named_parameters(recurse=False)]
    sent = {name: (checksum_rows(tensor, 0, torch.float32), tensor.numel()) for name, tensor in tensors.items()}
    read, loaded = read_plain(targets, layout), dict(model.named_modules())
    assert names and read
    return [
        *(
            f"{path}.{name}"
            for path, name in names
            if not values(loaded[path], name).equal(values(modules[path], name))
        ),
        *(f"{name} is not what was sent" for name, found in read.items() if found != sent[name]),
    ]


@pytest.mark.parametrize("family", (*SENT, *VISION_LANGUAGE))
def test_updated_weights_are_those_that_vllm_loads(tmp_path, monkeypatch, family):
    if family in VISION_LANGUAGE and not importlib.util.find_spec("torchvision"):
        pytest.skip("vLLM needs torchvision for these")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert in_fresh_process(differences, tmp_path, family) == []
