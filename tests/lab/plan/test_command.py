"""`python -m lab.plan`: tables, JSON, settings that a run accepts, mistakes in one line, no torch."""

import json
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from benchmarks.plan import nemo_section
from lab.plan.__main__ import main, read
from lab.plan.report import gib, seconds, toml
from lab.plan.scenario import CARDS, MODELS
from shared.config import Config
from tests.trainer.test_dry_run import SMOLLM2
from trainer.colocate import share

USUAL = ["8b", "--gpus", "8", "--mean", "2000", "--p99", "8000"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_report_recommends_and_shows_the_settings(capsys):
    assert main(USUAL) == 0
    text = capsys.readouterr().out
    for words in ("trainers and", "step, asynchronous", "step, synchronous", "memory of a GPU"):
        assert words in text
    table = tomllib.loads(text[text.index("[placement]") :])
    assert Config.model_validate(table).placement.trainers >= 1


@pytest.mark.parametrize(("options", "card", "other"), [
    ("", "989 TFLOP/s, 3,350 GB/s (h100)", False), ("--card a100-80", "312 TFLOP/s, 2,039 GB/s (a100-80)", False),
    ("--memory 24", "3,350 GB/s (h100), which has 80 GB and not 24:", True),
    ("--memory 24 --tflops 165 --bandwidth 1008", "speeds of a GPU: 165 TFLOP/s, 1,008 GB/s one step", False),
])  # fmt: skip
def test_the_card_whose_speeds_are_taken_is_named(capsys, options, card, other):
    assert main(["0.6b", "--gpus", "1", *options.split()]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert card in words and ("not those of your card" in words) == other


def test_json_has_the_same_plan(capsys):
    found = planned(capsys, *USUAL)
    assert found["step_s"]["asynchronous"] == max(found["bounds_s"].values()) <= found["step_s"]["synchronous"]
    assert found["bounds_s"][found["bottleneck"]] == found["step_s"]["asynchronous"]
    used = found["settings"]
    gpus = used["placement.trainers"] + used["placement.engines"] * used["rollout.tensor_parallel"]
    assert gpus == 8 and used["model.max_tokens"] == 8200


def test_a_given_split_is_computed_as_it_is(capsys):
    used = planned(capsys, *USUAL, "--engines", "1", "--tensor-parallel", "4", "--async-level", "3")["settings"]
    assert [used[key] for key in ("placement.trainers", "placement.engines", "rollout.max_async_level")] == [4, 1, 3]


@pytest.mark.parametrize(("model", "card", "way"), [
    ("0.6b", "h100", "resident"), ("1.7b", "a100-40", ""), ("0.6b", "a100-40", "turns"),
    ("1.7b", "h100", "resident"),
    ("1.7b --micro-batch 32768 --max-completion 4000", "h100", "resident"), ("8b --lora 16", "h100", "turns"),
])  # fmt: skip
def test_a_single_gpu_is_shared_as_a_launch_shares_it(capsys, model, card, way):
    arguments = [*model.split(), "--gpus", "1", "--card", card, "--mean", "400", "--p99", "1000", "--prompts", "32"]
    if not way:
        assert main(arguments) == 2 and "hold no split" in capsys.readouterr().err
        return
    found = planned(capsys, *arguments)
    assert (
        found["settings"]["placement.colocate"] == way and found["split"]["trainers"] == found["split"]["engines"] == 1
    )
    assert found["settings"]["rollout.max_async_level"] == 0 or way == "resident"
    assert main(arguments) == 0
    text = capsys.readouterr().out
    launched = Config.model_validate(tomllib.loads(text[text.index("[placement]") :]))
    memory = CARDS[card].memory_bytes
    assert share(launched, MODELS[model.split()[0]], memory, 1e12).placement.colocate == way


def test_a_folder_gives_the_same_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    named, folder = read(["135m"])[0].decoder, read([str(tmp_path)])[0].decoder
    assert named.parameters == folder.parameters == 134_515_008


def test_numbers_replace_those_of_the_card():
    machine = read(["8b", "--card", "H200", "--memory", "100", "--mfu", "0.5", "--reduction-us", "20"])[0].machine
    assert (machine.memory_bytes, machine.bandwidth, machine.mfu) == (100e9, 4.8e12, 0.5)
    assert machine.reduction_s == 2e-5


@pytest.mark.parametrize(("arguments", "told"), [
    ([], "no model: name one"), (["404b"], "did you mean '405b'?"), (["8b", "--gpus", "1"], "--gpus 1 of 67.1 GiB"),
    (["8b", "--gpus", "-3"], "--gpus -3 must be above 0"), (["8b", "--gpus", "many"], "invalid int value: 'many'"),
    (["8b", "--mfu", "1.5"], "--mfu 1.5 is a share"), (["8b", "--mean", "nan"], "--mean nan must be above 0"),
    (["8b", "--p99", "10"], "at least the mean"), (["8b", "--card", "h1000"], "--card h1000 is none of"),
    (["8b", "--mean", "100", "--p99", "1500"], "at most 1497"),
    (["8b", "--engines", "2"], "--engines needs --tensor-parallel"),
    (["8b", "--tensor-parallel", "3"], "must divide the 32 heads"),
    (["0.6b", "--gpus", "1", "--tensor-parallel", "2"], "and be at most 1, the GPUs"),
    (["0.6b", "--gpus", "1", "--tensor-parallel", "1", "--engines", "2"], "leave -1 of 1 GPUs"),
    (["8b", "--engines", "8", "--tensor-parallel", "1"], "leave 0 of 8 GPUs to train"), (["405b"], "hold no split"),
    (["8b", "--colour"], "--colour: unknown option (python -m lab.plan --help lists all"),
    (["8b", "--memry", "24"], "--memry: unknown option; did you mean --memory?"),
    (["8b", "--async-level", "0"], "--async-level 0 must be above 0"),
])  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(arguments, told, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and error.count("\n") == 1


def test_help_teaches_with_examples_that_work(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out.replace("\\\n", "")
    assert ended.value.code == 0
    examples = [line.split()[3:] for line in text.splitlines() if line.strip().startswith("python -m lab.plan ")]
    assert len(examples) == 5
    for example in examples:
        if not any(word.startswith(("models/", "runs/")) for word in example):
            assert main(example) == 0


def test_it_starts_without_torch(root):
    program = "import sys, lab.plan.__main__; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr or "torch was loaded"


def test_the_documented_errors_are_those_of_the_present_plan(root):
    assert nemo_section() in (root / "docs" / "plan.md").read_text(), "run python -m benchmarks plan"


def test_figures_for_people():
    assert [seconds(s) for s in (0.0123, 3.456, 320)] == ["12 ms", "3.46 s", "5:20 min"]
    assert gib(1.5 * 2**30) == "1.5 GiB"
    assert toml({"a.x": 1, "b.y": 0, "a.z": 2}) == "[a]\nx = 1\nz = 2\n[b]\ny = 0"
