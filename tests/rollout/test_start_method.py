"""Engines on GPUs are never forked: every entry point, on a machine that seems to have two GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor import compile_fx

from examples.quickstart.prepare import prepare
from shared.model.cpu.fused_layers import TF32_ADVICE
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Entry point -> what it was about to do."""
    folder = tmp_path_factory.mktemp("model")
    prepare(folder, {"problems": 16, "validation": 4, "max_tokens": 160}, 0)
    script, environment = Path(__file__).with_name("start_scene.py"), {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, script, folder], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line.split("\t") for line in ended.stdout.splitlines() if "\t" in line]
    assert ended.returncode == 0 and lines, ended.stderr[-3000:]
    return {name: json.loads(found) for name, found in lines}


@pytest.mark.soak  # what an engine is started with: test_vllm_config.py
@pytest.mark.timeout(900)
def test_every_entry_point_spawns_its_engine_with_the_memory_it_was_given(told):
    """An engine for which bytes are given starts beside whatever lies on its GPU: vLLM asks for a hundredth of it."""
    assert "VLLM_WORKER_MULTIPROC_METHOD=fork" in (refused := told.pop("fork")["error"]) and "unset it" in refused
    assert len(told) == 4
    for name, found in told.items():
        assert found.get("method") == "spawn" and found["float32"] == "ieee", (name, found)
        assert found["asked_early"] == [] and found["said"] == "", name
    given, shared = told["serve with a cache"], told["serve"]
    assert (given["cache"], given["share"], given["parallel"]) == (1_000_000, 0.01, 2)
    assert (shared["cache"], shared["share"], shared["parallel"]) == (None, 0.25, 1)
    for name in ("trainer", "curate"):  # vLLM's share less half a GiB and copies of two tables, of 80 GiB
        assert told[name]["cache"] is None and 0.9 < told[name]["share"] < 0.92 - 0.5 / 80


def test_the_advice_that_engines_do_not_show_is_torchs():
    assert f'"{TF32_ADVICE} for float32' in Path(compile_fx.__file__).read_text()


def test_vllms_settings_are_made_in_one_place(root):
    rooms = ("shared", "rollout", "trainer", "serve", "evaluation", "curate", "lab", "benchmarks")
    makers = [
        path.relative_to(root).as_posix()
        for room in rooms
        for path in (root / room).rglob("*.py")
        if any(word in path.read_text() for word in ("EngineArgs(", "create_engine_config", "LLM("))
        and path.name != "trl_grpo.py"
    ]
    assert sorted(makers) == ["rollout/stream.py", "rollout/vllm_config.py", "serve/vllm_parts.py"]
