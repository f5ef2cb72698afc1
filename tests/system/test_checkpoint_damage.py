"""The acceptance of checkpoints: damages planted into those of real runs, each through a real resume in a copy.

Every one must be named, the newest whole checkpoint taken, and what is trained again must be bitwise what the undamaged
run had: `make soak ARGS="-k checkpoint_damage"`. The same damages without a launch: tests/trainer/test_checkpoint.py.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.system.launch import Launch
from tests.trainer.damages import CHANGED, DAMAGES, TWO_RANKS, Damage, flip, remove
from trainer.checkpoint import reader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(5400)]
STEPS = 3
SHORT: dict[str, Any] = {
    "steps": STEPS, "rollout__max_async_level": 0, "data__validation": "", "evaluate__every": 0, "checkpoint__keep": 20,
}  # fmt: skip
TWO = {**SHORT, "placement__trainers": 2}
DRO = {
    **SHORT, "objective__name": "dro", "objective__reference__kind": "previous", "objective__reference__every": 2,
}  # fmt: skip
BESIDE = {
    "bit in the value head": Damage(flip("value_head.safetensors", 0.9, 6), CHANGED),
    "bit in the moved reference": Damage(flip("reference/model.safetensors", 0.5, 6), CHANGED),
    "missing file of the moved reference": Damage(remove("reference/tokenizer.json"), "is missing"),
}
EVERY = {**DAMAGES, **TWO_RANKS, **BESIDE}


def ended(launch: Launch) -> int:
    """The exit code of the rank that failed first, 0 if none did."""
    code, ended_with = launch.wait(), re.search(r"exitcode\s*: (-?\d+)", launch.output)
    return int(ended_with[1]) if code and ended_with else code


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """A synchronous run of two trainers, with a checkpoint of every step."""
    return start(tmp_path_factory.mktemp("whole"), **TWO).finish()


@pytest.fixture(scope="module")
def beside(start, tmp_path_factory):
    """A run whose checkpoints also hold a value head and a reference that moves."""
    return start(tmp_path_factory.mktemp("beside"), **DRO).finish()


def copied(launch: Launch, folder: Path) -> Path:
    """The newest checkpoint of a copy of a run."""
    run_dir = Path(shutil.copytree(launch.run_dir, folder / launch.run_dir.name, symlinks=True))
    return run_dir / "checkpoints" / f"step_{STEPS}"


def tell(fault: str, launch: Launch, *words: str) -> str:
    """Print the first line of the output with these words."""
    lines = [" ".join(line.split()) for line in launch.output.splitlines()]
    line = next((line for line in lines if all(word in line for word in words)), "")
    assert line, f"none says {words}:\n{launch.output[-4000:]}"
    print(f"{fault:45} {line}")
    return line


def digests(folder: Path) -> dict[str, str]:
    """What was trained: weights, moments, value head and reference."""
    files = sorted(folder.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", EVERY)
def test_a_damage_is_named_and_the_checkpoint_before_taken(start, request, tmp_path, name):
    first: Launch = request.getfixturevalue("beside" if name in BESIDE else "whole")
    newest = copied(first, tmp_path)
    EVERY[name].spoil(newest)
    launch = start(tmp_path, **(DRO if name in BESIDE else TWO)).finish()
    tell(name, launch, f"step_{STEPS}", EVERY[name].told, "skipped")
    assert f"from step {STEPS - 1} of {STEPS}" in launch.output
    assert digests(newest) == digests(first.run_dir / "checkpoints" / newest.name), "not what the whole run trained"
    assert launch.losses() == first.losses() and len(set(first.losses())) == STEPS
    assert launch.trained_prompts() == first.trained_prompts()
    assert newest.with_name(f"{newest.name}.damaged").is_dir() and reader.read(newest)


@pytest.mark.parametrize("kind", ["without a manifest", "of an older format"])
def test_nothing_readable_is_an_error_that_deletes_nothing(start, whole, tmp_path, kind):
    newest, older = copied(whole, tmp_path), kind == "of an older format"
    for folder in newest.parent.iterdir():
        DAMAGES["older format"].spoil(folder) if older else (folder / "manifest.json").unlink()
    content = {path: path.read_bytes() for path in newest.parents[1].rglob("*") if path.is_file()}
    launch = start(tmp_path, **TWO)
    assert ended(launch) == 2, launch.output[-3000:]
    words = "older version of Maestrale" if older else "no checkpoint that can be read"
    tell(f"every checkpoint {kind}", launch, "error:", words)
    assert "--name" in launch.output
    of_launches = {"phases.jsonl", "lock", "launches.jsonl", "stacks"}  # tell of the launch that was refused
    for path, as_before in content.items():
        assert of_launches & set(path.parts) or path.read_bytes() == as_before, path


def test_the_policy_of_the_start_damaged_between_launches(start, tmp_path):
    first = start(tmp_path / "first", **SHORT, objective__kl__weight=0.1).finish()
    newest = copied(first, tmp_path / "second")
    shutil.rmtree(newest)
    weights = newest.parents[1] / "reference" / "model.safetensors"
    flip(weights.name, 0.5, 6)(weights.parent)
    launch = start(tmp_path / "second", **SHORT, objective__kl__weight=0.1)
    assert ended(launch) == 2 and not newest.exists()
    tell("bit in the policy of the start", launch, "reference", "model.safetensors", "->")
