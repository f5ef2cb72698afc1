"""What `python -m trainer` gives the ranks that it starts (that they train is tested in tests/system)."""

import importlib
import os

import pytest
import torch
from torch.distributed import run as torchrun

from shared import processor
from shared.config import Config


@pytest.mark.parametrize(
    ("installed", "gpu", "before", "expected"),
    [
        ("libtcmalloc_minimal.so.4", False, {}, "libtcmalloc_minimal.so.4"),
        ("libtcmalloc_minimal.so.4", False, {"LD_PRELOAD": "mine.so"}, "mine.so"),
        ("libtcmalloc_minimal.so.4", True, {}, None),
        ("", False, {}, None),
    ],
)
def test_ranks_on_a_cpu_start_with_tcmalloc_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: str, gpu: bool, before: dict[str, str], expected: str | None
) -> None:
    started = []
    monkeypatch.setattr(processor, "spare_allocator", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torchrun, "run", lambda arguments: started.append((arguments, dict(os.environ))))
    monkeypatch.setattr(os, "environ", dict(before))
    command = importlib.import_module("trainer.__main__")  # here: it sets variables as it is imported
    assert command.launch(Config(), ["some.toml"]) == 0
    [(arguments, environment)] = started
    assert arguments.training_script_args == ["some.toml"] and arguments.nproc_per_node == str(Config().world_size)
    # no store on TCP: torch unpickles what any local user writes there
    assert (arguments.rdzv_backend, arguments.rdzv_conf, arguments.standalone) == ("c10d", "store_type=file", False)
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert arguments.rdzv_endpoint.startswith(environment["TMPDIR"] + "/")
    assert not os.path.exists(environment["TMPDIR"]), "the private folder goes with the launch"
    assert environment.get("LD_PRELOAD") == expected and environment["OMP_NUM_THREADS"] == "1"
