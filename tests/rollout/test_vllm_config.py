"""The environment and files that vLLM starts from."""

import atexit
import json
import os
import tempfile

import pytest
import torch

from rollout import vllm_config
from rollout.vllm_config import (
    KERNEL_CACHE,
    THREADS_VARIABLE,
    close_sockets,
    count_at_least,
    count_ranks_by_row,
    prepare_environment,
    read_stop_tokens,
)
from shared.errors import ModelError
from shared.launch.launch_folder import LaunchFolder
from tests.families import config_of


def test_torchruns_variables_are_removed(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare_environment()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
    assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]


@pytest.mark.parametrize(("given", "engine"), [("1", "1"), ("2", "1"), ("5", "2"), ("8,2", "4"), ("", "1")])
def test_an_engine_on_a_cpu_has_half_of_the_threads(monkeypatch, given, engine):
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


@pytest.mark.parametrize("given", ["", "1024"])
def test_onednn_keeps_few_kernels_unless_the_user_wants_more(monkeypatch, given):
    """Its own 1,024 let an engine grow by 275 MiB (vllm_config.py)."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(KERNEL_CACHE, given)
    if not given:
        monkeypatch.delenv(KERNEL_CACHE)
    prepare_environment()
    assert os.environ[KERNEL_CACHE] == (given or "256")


def test_vllms_sockets_lie_where_only_this_user_gets(monkeypatch):
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


@pytest.mark.parametrize(("files", "stops"), [
    ({"config.json": 5}, [5]),
    ({"config.json": 5, "generation_config.json": [7, 6]}, [6, 7]),
    ({"config.json": 5, "generation_config.json": None}, [5]),
], ids=["config", "generation config first", "fall back"])  # fmt: skip
def test_stop_tokens_come_from_generation_config_then_config(tmp_path, files, stops):
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value} if value is not None else {}))
    assert read_stop_tokens(str(tmp_path)) == stops


def test_a_model_without_stop_token_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no eos_token_id"):
        read_stop_tokens(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json cannot be read"):
        read_stop_tokens(str(tmp_path))


def test_a_model_that_also_sees_needs_torchvision(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(config_of("mistral3")))
    monkeypatch.setattr(vllm_config.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match='only where torchvision is installed.*mode = "sft"') as told:
        vllm_config.make_vllm_config(str(tmp_path), dtype="float32", max_tokens=64, max_sequences=1, cache_bytes=None)
    assert "\n" not in str(told.value)


def test_ranks_are_counted_by_hand_and_as_vllm_counts_them():
    x = torch.tensor([[-1.0, -3.0, -2.0], [-5.0, -5.0, -0.1], [0.0, float("-inf"), float("-inf")]])
    values = torch.tensor([[-2.0], [-5.0], [0.0]])
    counts = count_at_least(x, values)
    assert counts.tolist() == [2, 3, 1] and counts.dtype == torch.int64
    logprobs = torch.randn(7, 4099, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    sampled = logprobs.gather(-1, torch.arange(7)[:, None])
    assert torch.equal(count_at_least(logprobs, sampled), (logprobs >= sampled).sum(-1))


@pytest.mark.parametrize("compiled", [False, True])
def test_vllm_counts_so_unless_it_compiles(monkeypatch, compiled):
    prepare_environment()
    from vllm.v1.sample import sampler

    theirs = object()
    monkeypatch.setattr(sampler, "batched_count_greater_than", theirs)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0" if compiled else "1")
    count_ranks_by_row()
    assert sampler.batched_count_greater_than is (theirs if compiled else count_at_least)
