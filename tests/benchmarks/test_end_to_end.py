"""What the end-to-end benchmark reads, leaves out and compares; no model is trained here."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import end_to_end as e2e
from benchmarks.end_to_end import FULL, QUICK, SYSTEM, Files, Side, StepTime
from benchmarks.figures import NotMeasured
from benchmarks.llama import Shape
from benchmarks.memory import tree_bytes
from shared import settings_file
from shared.chat import Chat
from shared.errors import RunError
from shared.model.cpu.processor import multiplies_bfloat16_fast
from tests.shared.test_cpu import AMD, INTEL, is_processor
from trainer.objectives.registry import objective_of

STEPS = [StepTime(2.0, 100.0), StepTime(3.0, 200.0), StepTime(1.0, 100.0), StepTime(4.0, 100.0)]


def test_rates_are_tokens_over_time_of_consecutive_parts():
    assert e2e.parts(STEPS, 3) == [STEPS[:1], STEPS[1:3], STEPS[3:]]
    assert e2e.parts(STEPS[:2], 3) == [STEPS[:1], STEPS[1:2]], "none is empty"
    assert e2e.rates(STEPS) == [50.0, 75.0, 25.0] and e2e.step_seconds(STEPS) == [2.0, 2.0, 4.0]
    assert e2e.counted(STEPS, 1, 1) == STEPS[1:3] and e2e.counted(STEPS, 1, 0) == STEPS[1:]
    with pytest.raises(RunError, match="4 steps were made, 4 of them do not count"):
        e2e.counted(STEPS, 3, 1)


def test_steps_are_read_from_a_runs_metrics_and_from_the_peers_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "kind": "sft", "sft/loss": 1.0},
             {"step": 1, "kind": "train", "time/step_s": 4.0, "tokens/trained_per_s": 25.0}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert e2e.from_metrics(path) == [StepTime(4.0, 100.0)]
    text = 'a warning\n{"trl": "1.16.0", "threads": 2}\n{"step": 1, "seconds": 2.5, "tokens": 80}\n'
    assert e2e.from_lines(text) == ({"trl": "1.16.0", "threads": 2}, [StepTime(2.5, 80)])
    with pytest.raises(RunError, match="printed nothing"):
        e2e.from_lines("a warning\n")


@pytest.mark.parametrize("load", [FULL, e2e.CUT_SHORT, QUICK])
def test_our_settings_are_the_workload(tmp_path, load):
    files = Files(tmp_path / "model", tmp_path / "problems.jsonl", tmp_path / "prompts.json", True)
    command = e2e.settings_of(tmp_path, files, load, e2e.OURS)
    assert command[1:3] == ["-m", "trainer"]
    config = settings_file.load(command[3], command[4:])
    for section in (config, config.rollout, config.optimiser):
        for name, value in vars(load).items() if hasattr(load, "__dict__") else load._asdict().items():
            assert getattr(section, name, value) == value, name
    assert objective_of(config).filter_groups_by == "off" and config.data.order == "file"
    level, dtype = config.rollout.max_async_level, config.model.dtype
    assert (level, dtype) == (e2e.OURS["rollout.max_async_level"], e2e.OURS["model.dtype"])
    assert config.run_dir == tmp_path / "end-to-end" and config.data.system_prompt == SYSTEM


def test_ours_stands_beside_the_fastest_trl_or_alone(tmp_path, monkeypatch):
    ran: list[tuple[str, int, int]] = []

    def run_trl(_: Files, load: Any, cores: int, setting: dict[str, Any]) -> Side:
        fast = setting["precision"] == "autocast" and setting["batch"] == FULL.peer_batches[-1]
        ran.append((setting["precision"], setting["batch"], load.peer_steps))
        return Side([StepTime(10.0 if fast else 20.0, 100.0)], 2**32, {"trl": "1.16.0"})

    monkeypatch.setattr(e2e, "prepare", lambda folder: Files(tmp_path, tmp_path, tmp_path, False))
    monkeypatch.setattr(e2e, "run_ours", lambda *_: Side(STEPS, 2**31, {}))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(NotMeasured, match="make install-peers"):
        e2e.trl_python()
    rows = {row.name: row for row in e2e.end_to_end(quick=True)}
    assert rows["trained, ours"].values == [50.0, 75.0, 25.0]
    assert rows["peak memory of all processes, ours"].values == [2.0]
    assert rows["trained tokens a second"].not_measured == rows["peak memory"].not_measured == e2e.INSTALL
    monkeypatch.setattr(e2e, "run_trl", run_trl)
    rows = {row.name: row for row in e2e.end_to_end(quick=False)}
    assert len(ran) == 5 and ran[-1] == ("autocast", FULL.peer_batches[-1], FULL.peer_steps)
    assert rows["trained, TRL tried in float32 with batches of 2"].values == [5.0]
    assert rows["trained tokens a second"].values == [5.0, 7.5, 2.5] and rows["trained tokens a second"].met
    assert rows["seconds of an optimiser step"].values == pytest.approx([0.2, 0.2, 0.4])
    assert rows["peak memory"].values == [0.5] and rows["peak memory"].of == "TRL's GRPOTrainer 1.16.0"


def test_a_watched_command_gives_its_output_and_the_memory_of_its_tree_or_its_end(tmp_path):
    text, peak = e2e.watched([sys.executable, "-c", "print('done')"], os.environ, tmp_path)
    assert text == "done\n" and peak >= 0
    with pytest.raises(RunError, match=r"ended with code 3:\nwhy it ended"):
        e2e.watched([sys.executable, "-c", "import sys; print('why it ended'); sys.exit(3)"], os.environ, tmp_path)
    program = "block = bytearray(64 << 20); print(flush=True); input()"
    before = tree_bytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = tree_bytes(os.getpid()) - before
        child.communicate(b"\n")
    assert grown > 60 << 20 and tree_bytes(child.pid) == 0, "it has ended"


@pytest.mark.slow
def test_a_stand_in_has_a_text_for_every_id_that_can_be_sampled(tmp_path):
    shape = Shape(hidden=16, layers=2, heads=2, kv_heads=1, inner=32, vocabulary=2000)
    files = e2e.prepare(tmp_path, shape, tmp_path / "absent")
    assert not files.real_model and files.model.is_dir()
    chat = Chat(files.model)
    assert chat.decode([1999]) and len(chat.tokenizer) == 2000 and chat.eos_id == shape.config()["eos_token_id"]
    prompts = json.loads(files.prompts.read_text())
    problems = [json.loads(line) for line in files.problems.read_text().splitlines()]
    assert len(prompts) == len(problems) == e2e.PROBLEMS
    assert chat.encode(prompts[0]) == chat.render(problems[0]["problem"], SYSTEM)


@pytest.mark.parametrize(("flags", "vendor", "fast"), [
    ({"avx512_fp16": True}, INTEL, True), ({"avx512_fp16": True, "avx512_bf16": True}, INTEL, True),
    ({"avx512_fp16": True, "amx_bf16": True}, INTEL, False), ({"avx512_fp16": True, "avx512_bf16": True}, AMD, False),
    ({"amx_bf16": True}, INTEL, False), ({}, AMD, False),
])  # fmt: skip
def test_float16_is_for_cpus_with_its_instructions_whose_bfloat16_is_slow(monkeypatch, tmp_path, flags, vendor, fast):
    is_processor(monkeypatch, tmp_path, flags, vendor)
    multiplies_bfloat16_fast.cache_clear()
    try:
        assert e2e.multiplies_float16_fast("cpu") is fast and e2e.multiplies_float16_fast("cuda") is True
    finally:
        multiplies_bfloat16_fast.cache_clear()
