"""What the end-to-end benchmark reads, leaves out and compares; no model is trained here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end
from benchmarks.end_to_end import (
    CUT_SHORT,
    FULL,
    INSTALL,
    OURS,
    PROBLEMS,
    QUICK,
    SYSTEM,
    Files,
    Side,
    StepTime,
    counted,
    from_lines,
    from_metrics,
    parts,
    prepare,
    rates,
    settings_of,
    step_seconds,
    trl_python,
    watched,
)
from benchmarks.figures import NotMeasured
from benchmarks.memory import tree_bytes
from shared import settings_file
from shared.chat import Chat
from shared.errors import RunError
from shared.model.cpu.processor import multiplies_bfloat16_fast
from tests.benchmarks.test_training_benchmark import TINY
from tests.shared.test_cpu import AMD, INTEL, is_processor
from trainer.objectives.registry import objective_of

STEPS = [StepTime(2.0, 100.0), StepTime(3.0, 200.0), StepTime(1.0, 100.0), StepTime(4.0, 100.0)]


def test_parts_are_consecutive_and_none_is_empty() -> None:
    assert parts(STEPS, 3) == [STEPS[:1], STEPS[1:3], STEPS[3:]]
    assert parts(STEPS[:2], 3) == [STEPS[:1], STEPS[1:2]]


def test_a_rate_is_tokens_over_time_of_a_part() -> None:
    assert rates(STEPS) == [50.0, 75.0, 25.0]
    assert step_seconds(STEPS) == [2.0, 2.0, 4.0]


def test_the_first_and_last_steps_do_not_count() -> None:
    assert counted(STEPS, 1, 1) == STEPS[1:3] and counted(STEPS, 1, 0) == STEPS[1:]
    with pytest.raises(RunError, match="4 steps were made, 4 of them do not count"):
        counted(STEPS, 3, 1)


def test_steps_are_read_from_a_runs_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "kind": "sft", "sft/loss": 1.0},
             {"step": 1, "kind": "train", "time/step_s": 4.0, "tokens/trained_per_s": 25.0}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert from_metrics(path) == [StepTime(4.0, 100.0)]


def test_the_peers_lines_are_read_and_other_words_are_not() -> None:
    text = 'a warning\n{"trl": "1.16.0", "threads": 2}\n{"step": 1, "seconds": 2.5, "tokens": 80}\n'
    assert from_lines(text) == ({"trl": "1.16.0", "threads": 2}, [StepTime(2.5, 80)])
    with pytest.raises(RunError, match="printed nothing"):
        from_lines("a warning\n")


@pytest.mark.parametrize("load", [FULL, CUT_SHORT, QUICK])
def test_our_settings_are_the_workload(tmp_path: Path, load: Any) -> None:
    files = Files(tmp_path / "model", tmp_path / "problems.jsonl", tmp_path / "prompts.json", True)
    command = settings_of(tmp_path, files, load, OURS)
    assert command[1:3] == ["-m", "trainer"]
    config = settings_file.load(command[3], command[4:])
    assert config.rollout.prompts_per_step == load.prompts_per_step and config.rollout.group_size == load.group_size
    assert config.rollout.max_completion_tokens == load.max_completion_tokens and config.steps == load.steps
    assert config.optimiser.learning_rate == load.learning_rate and config.data.system_prompt == SYSTEM
    assert objective_of(config).filter_groups_by == "off" and config.data.order == "file"
    assert config.rollout.cache_bytes == load.cache_bytes
    assert config.optimiser.micro_batch_tokens == load.micro_batch_tokens
    assert (
        config.rollout.max_async_level == OURS["rollout.max_async_level"] and config.model.dtype == OURS["model.dtype"]
    )
    assert config.run_dir == tmp_path / "end-to-end"


def test_without_trl_ours_is_measured_and_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(NotMeasured, match="make install-peers"):
        trl_python()
    files = Files(tmp_path, tmp_path, tmp_path, True)
    monkeypatch.setattr(end_to_end, "prepare", lambda folder: files)
    monkeypatch.setattr(end_to_end, "run_ours", lambda *_: Side(STEPS, 2**31, {}))
    found = {row.name: row for row in end_to_end.end_to_end(quick=True)}
    assert found["trained, ours"].values == [50.0, 75.0, 25.0]
    assert found["peak memory of all processes, ours"].values == [2.0]
    assert found["trained tokens a second"].not_measured == found["peak memory"].not_measured == INSTALL


def test_ours_stands_beside_the_fastest_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_trl(_: Files, load: Any, cores: int, own: dict[str, Any]) -> Side:
        fast = own["precision"] == "autocast" and own["batch"] == FULL.peer_batches[-1]
        ran.append((own["precision"], own["batch"], load.peer_steps))
        return Side([StepTime(10.0 if fast else 20.0, 100.0)], 2**32, {"trl": "1.16.0"})

    ran: list[tuple[str, int, int]] = []
    files = Files(tmp_path, tmp_path, tmp_path, False)
    monkeypatch.setattr(end_to_end, "prepare", lambda folder: files)
    monkeypatch.setattr(end_to_end, "run_ours", lambda *_: Side(STEPS, 2**31, {}))
    monkeypatch.setattr(end_to_end, "run_trl", run_trl)
    found = {row.name: row for row in end_to_end.end_to_end(quick=False)}
    assert len(ran) == 5 and ran[-1] == ("autocast", FULL.peer_batches[-1], FULL.peer_steps)
    assert found["trained, TRL tried in float32 with batches of 2"].values == [5.0]
    assert found["trained tokens a second"].values == [5.0, 7.5, 2.5] and found["trained tokens a second"].met
    assert found["seconds of an optimiser step"].values == pytest.approx([0.2, 0.2, 0.4])
    assert found["peak memory"].values == [0.5] and found["peak memory"].of == "TRL's GRPOTrainer 1.16.0"


def test_memory_of_a_child_belongs_to_the_tree() -> None:
    program = "block = bytearray(64 << 20); print(flush=True); input()"
    before = tree_bytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        grown = tree_bytes(os.getpid()) - before
        child.stdin.write(b"\n")
        child.stdin.close()
    assert grown > 60 << 20
    assert tree_bytes(child.pid) == 0, "it has ended"


def test_a_watched_command_tells_its_output_and_memory_or_its_end(tmp_path: Path) -> None:
    text, peak = watched([sys.executable, "-c", "print('done')"], os.environ, tmp_path)
    assert text == "done\n" and peak >= 0
    with pytest.raises(RunError, match=r"ended with code 3:\nwhy it ended"):
        watched([sys.executable, "-c", "import sys; print('why it ended'); sys.exit(3)"], os.environ, tmp_path)


@pytest.mark.slow
def test_a_stand_in_has_a_text_for_every_id_that_can_be_sampled(tmp_path: Path) -> None:
    shape = TINY._replace(vocabulary=2000)
    files = prepare(tmp_path, shape, tmp_path / "absent")
    assert not files.real_model and files.model.is_dir()
    chat = Chat(files.model)
    assert chat.decode([1999]) and len(chat.tokenizer) == 2000
    prompts = json.loads(files.prompts.read_text())
    problems = [json.loads(line) for line in files.problems.read_text().splitlines()]
    assert len(prompts) == len(problems) == PROBLEMS
    assert chat.encode(prompts[0]) == chat.render(problems[0]["problem"], SYSTEM)


@pytest.mark.parametrize(
    ("found", "vendor", "fast"),
    [({"avx512_fp16": True}, INTEL, True), ({"avx512_fp16": True, "avx512_bf16": True}, INTEL, True),
     ({"avx512_fp16": True, "amx_bf16": True}, INTEL, False), ({"avx512_fp16": True, "avx512_bf16": True}, AMD, False),
     ({"amx_bf16": True}, INTEL, False), ({}, AMD, False)],
)  # fmt: skip
def test_float16_is_for_cpus_with_its_instructions_whose_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, bool], vendor: str, fast: bool
) -> None:
    is_processor(monkeypatch, tmp_path, found, vendor)
    multiplies_bfloat16_fast.cache_clear()
    try:
        assert end_to_end.multiplies_float16_fast("cpu") is fast
        assert end_to_end.multiplies_float16_fast("cuda") is True
    finally:
        multiplies_bfloat16_fast.cache_clear()
