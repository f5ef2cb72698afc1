"""The environment and files that vLLM starts from."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from rollout import vllm_config
from rollout.vllm_config import KERNEL_CACHE, THREADS_VARIABLE, close_sockets, prepare_environment, read_stop_tokens
from shared.errors import ModelError
from shared.launch.launch_folder import LaunchFolder
from tests.families import config_of


def test_torchruns_variables_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare_environment()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
    assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]


@pytest.mark.parametrize(("given", "engine"), [("1", "1"), ("2", "1"), ("5", "2"), ("8,2", "4"), ("", "1")])
def test_an_engine_on_a_cpu_has_half_of_the_threads(monkeypatch: pytest.MonkeyPatch, given: str, engine: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv(THREADS_VARIABLE, "")
    monkeypatch.delenv(THREADS_VARIABLE)
    prepare_environment()
    assert (os.environ[THREADS_VARIABLE], os.environ["OMP_NUM_THREADS"]) == (engine, "1")
    monkeypatch.delenv(THREADS_VARIABLE)
    prepare_environment(5)
    assert os.environ[THREADS_VARIABLE] == "5", "that of a server"
    monkeypatch.setenv(THREADS_VARIABLE, "7")
    prepare_environment(5)
    assert os.environ[THREADS_VARIABLE] == "7", "the user's choice stays"


PRODUCTS = """
import psutil, torch
from rollout.vllm_config import prepare_environment
prepare_environment()
from vllm import _custom_ops
from vllm.platforms import current_platform
current_platform.import_kernels()
linears, sizes = [_custom_ops.create_onednn_mm(torch.ones(64, 32 * n), 1) for n in (1, 2, 3, 4)], []
for tokens in range(1, 201):
    for n, linear in enumerate(linears, 1):
        _custom_ops.onednn_mm(linear, torch.ones(tokens, 64), None)
    sizes.append(psutil.Process().memory_info().rss >> 20)
print(sizes[-1] - sizes[69])
"""


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.skipif(torch.cuda.is_available(), reason="of engines on a CPU")
@pytest.mark.parametrize("given", ["", "1024"])
def test_an_engine_does_not_grow_with_the_sizes_of_its_batches(given: str) -> None:
    """What oneDNN prepares for 70 sizes of batches and four weights is all that is kept."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **({KERNEL_CACHE: given} if given else {})}
    run = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True)
    grown = int(run.stdout.splitlines()[-1])
    assert grown > 60 if given else grown < 40, "MiB; oneDNN's own capacity would keep 130 more sizes"


def test_vllms_sockets_lie_where_only_this_user_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    variable, folders = "VLLM_RPC_BASE_PATH", list[LaunchFolder]()
    monkeypatch.setattr(atexit, "register", lambda leave: folders.append(leave.__self__))
    monkeypatch.setenv(variable, "chosen")
    close_sockets()
    assert os.environ[variable] == "chosen" and not folders, "the user's choice stays"
    monkeypatch.delenv(variable)
    close_sockets()
    close_sockets()
    [folder] = folders
    assert os.environ[variable] == str(folder.path) and folder.path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(tempfile, "tempdir", str(folder.path))
    monkeypatch.delenv(variable)
    close_sockets()
    assert variable not in os.environ, "a rank of a launch puts all it has into the launch's folder"
    folder.leave()
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"config.json": 5}, [5]),
        ({"config.json": 5, "generation_config.json": [7, 6]}, [6, 7]),
        ({"config.json": 5, "generation_config.json": None}, [5]),
    ],
    ids=["config", "generation config first", "fall back"],
)
def test_stop_tokens_come_from_generation_config_then_config(
    tmp_path: Path, files: dict[str, object], stops: list[int]
) -> None:
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value} if value is not None else {}))
    assert read_stop_tokens(str(tmp_path)) == stops


def test_a_model_without_stop_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no eos_token_id"):
        read_stop_tokens(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json cannot be read"):
        read_stop_tokens(str(tmp_path))


def test_a_model_that_also_sees_needs_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("mistral3")))
    monkeypatch.setattr(vllm_config.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match='only where torchvision is installed.*mode = "sft"') as told:
        vllm_config.make_vllm_config(str(tmp_path), dtype="float32", max_tokens=64, max_sequences=1, cache_bytes=None)
    assert "\n" not in str(told.value)
