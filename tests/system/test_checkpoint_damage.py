"""The acceptance of checkpoints: damages planted into those of real runs, each through a real resume in a copy.

Every one must be named, the newest whole checkpoint taken, and what is trained again must be bitwise what the undamaged
run had: `make soak ARGS="-k checkpoint_damage"`. The same damages without a launch: tests/trainer/test_checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors import safe_open

from rollout.weights.checksum import checksum_rows
from shared.record_file import Written
from tests.system.conftest import Start
from tests.system.launch import Launch
from tests.trainer.damages import CHANGED, DAMAGES, TWO_RANKS, Damage, before, flip, flip_exponent, remove, shards_of
from trainer.checkpoint import reader
from trainer.checkpoint.shard_files import read_shards
from trainer.checkpoint.writer import Manifest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(5400)]
STEPS = 3
SHORT = {
    "steps": STEPS, "rollout__max_async_level": 0, "data__validation": "", "evaluate__every": 0, "checkpoint__keep": 20,
}  # fmt: skip
BESIDE = {
    "bit in the value head": Damage(flip("value_head.safetensors", 0.9, 6), CHANGED),
    "bit in the moved reference": Damage(flip("reference/model.safetensors", 0.5, 6), CHANGED),
    "missing file of the moved reference": Damage(remove("reference/tokenizer.json"), "is missing"),
}


class Line(NamedTuple):
    """One fault in the table."""

    fault: str
    message: str
    seconds: float
    code: int
    then: str


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[Line]]:
    lines: list[Line] = []
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{'fault':45} {'s':>5} {'exit':>4}  what the launch did; its message")
        for line in lines:
            print(f"{line.fault:45} {line.seconds:5.0f} {line.code:4}  {line.then}; {line.message}")
        print(f"{len(lines)} faults, each through a real launch")


def ended(launch: Launch) -> tuple[int, float]:
    """The exit code of the rank that failed first, 0 if none did; seconds."""
    began = time.monotonic()
    code = launch.wait(900)
    told = re.search(r"exitcode\s*: (-?\d+)", launch.output)
    return (int(told[1]) if code and told else code), time.monotonic() - began


def finished(start: Start, folder: Path, **settings: Any) -> Launch:
    launch = start(folder, **{**SHORT, **settings})
    assert launch.wait(900) == 0, launch.output[-6000:]
    return launch


@pytest.fixture(scope="module")
def whole(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A synchronous run of two trainers, with a checkpoint of every step."""
    return finished(start, tmp_path_factory.mktemp("whole"), placement__trainers=2)


def copied(launch: Launch, folder: Path) -> Path:
    """The newest checkpoint of a copy of a run."""
    run_dir = folder / launch.run_dir.name
    shutil.copytree(launch.run_dir, run_dir, symlinks=True)
    return run_dir / "checkpoints" / f"step_{STEPS}"


def said(output: str, *words: str) -> str:
    """The first line of the output with these words."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    found = [line for line in lines if all(word in line for word in words)]
    assert found, f"none says {words}:\n{output[-4000:]}"
    return found[0]


def digests(folder: Path) -> dict[str, str]:
    """What was trained: weights, moments, value head and reference."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def resume_damaged(start: Start, first: Launch, folder: Path, name: str, damage: Damage, **settings: Any) -> Line:
    """Plant the damage into a copy, go on from it, and check all that must hold."""
    newest = copied(first, folder)
    damage.spoil(newest)
    launch = start(folder, **{**SHORT, **settings})
    code, seconds = ended(launch)
    assert code == 0, launch.output[-6000:]
    message = said(launch.output, f"step_{STEPS}", damage.told, "skipped")
    assert f"from step {STEPS - 1} of {STEPS}" in launch.output
    assert digests(newest) == digests(first.run_dir / "checkpoints" / newest.name), "not what the whole run trained"
    assert launch.losses() == first.losses() and len(set(first.losses())) == STEPS
    assert launch.trained_prompts() == first.trained_prompts()
    assert newest.with_name(f"{newest.name}.damaged").is_dir() and reader.read(newest)
    return Line(name, message, seconds, code, f"trained step {STEPS} again from {before(newest).name}, bitwise")


@pytest.mark.parametrize("name", [*DAMAGES, *TWO_RANKS])
def test_a_damage_is_named_and_the_checkpoint_before_taken(
    start: Start, whole: Launch, table: list[Line], tmp_path: Path, name: str
):
    damage = {**DAMAGES, **TWO_RANKS}[name]
    table.append(resume_damaged(start, whole, tmp_path, name, damage, placement__trainers=2))


@pytest.fixture(scope="module")
def beside(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A run whose checkpoints also hold a value head and a reference that moves."""
    return finished(start, tmp_path_factory.mktemp("beside"), **DRO)


DRO = {"objective__name": "dro", "objective__reference__kind": "previous", "objective__reference__every": 2}


@pytest.mark.parametrize("name", BESIDE)
def test_a_damage_of_what_lies_beside_the_shards_too(
    start: Start, beside: Launch, table: list[Line], tmp_path: Path, name: str
):
    table.append(resume_damaged(start, beside, tmp_path, name, BESIDE[name], **DRO))


@pytest.mark.parametrize("kind", ["without a manifest", "of an older format"])
def test_nothing_readable_is_an_error_that_deletes_nothing(
    start: Start, whole: Launch, table: list[Line], tmp_path: Path, kind: str
):
    newest = copied(whole, tmp_path)
    for folder in newest.parent.iterdir():
        if kind == "without a manifest":
            (folder / "manifest.json").unlink()
        else:
            DAMAGES["older format"].spoil(folder)
    content = {path: path.read_bytes() for path in newest.parents[1].rglob("*") if path.is_file()}
    launch = start(tmp_path, **SHORT, placement__trainers=2)
    code, seconds = ended(launch)
    assert code == 2, launch.output[-3000:]
    words = "no checkpoint that can be read" if kind == "without a manifest" else "older version of Maestrale"
    message = said(launch.output, "error:", words)
    assert "--name" in launch.output
    own = {"phases.jsonl", "lock", "launches.jsonl", "stacks"}  # tell of the launch that was refused
    for path, before_it in content.items():
        assert own & set(path.parts) or path.read_bytes() == before_it, path
    table.append(Line(f"every checkpoint {kind}", message, seconds, code, "refused, all files as before"))


def test_the_policy_of_the_start_damaged_between_launches(start: Start, table: list[Line], tmp_path: Path):
    first = finished(start, tmp_path / "first", objective__kl__weight=0.1)
    newest = copied(first, tmp_path / "second")
    shutil.rmtree(newest)
    weights = newest.parents[1] / "reference" / "model.safetensors"
    flip(weights.name, 0.5, 6)(weights.parent)
    launch = start(tmp_path / "second", **SHORT, objective__kl__weight=0.1)
    code, seconds = ended(launch)
    message = said(launch.output, "reference", "model.safetensors", "->")
    assert code == 2 and not newest.exists()
    table.append(Line("bit in the policy of the start", message, seconds, code, "refused"))


def test_changed_settings_are_refused_until_they_are_accepted(
    start: Start, whole: Launch, table: list[Line], tmp_path: Path
):
    shutil.rmtree(copied(whole, tmp_path))
    settings = {**SHORT, "placement__trainers": 1, "optimiser__learning_rate": 2e-3}
    kept = (tmp_path / "run" / "config.toml").read_bytes()
    launch = start(tmp_path, **settings)
    code, seconds = ended(launch)
    message = said(launch.output, "optimiser.learning_rate: 0.001 -> 0.002")
    said(launch.output, "changed: placement.trainers: 2 -> 1")
    assert code == 2 and "--accept-changes" in launch.output
    assert (tmp_path / "run" / "config.toml").read_bytes() == kept
    table.append(Line("another learning rate", message, seconds, code, "refused"))
    launch = start(tmp_path, options=("--accept-changes",), **settings)
    code, seconds = ended(launch)
    message = said(launch.output, "accepted", "optimiser.learning_rate")
    assert code == 0 and f"from step {STEPS - 1} of {STEPS}" in launch.output, launch.output[-3000:]
    table.append(Line("another learning rate, accepted", message, seconds, code, "resumed"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "launches.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["began", "refused", "resumed with accepted changes"]
    assert "--accept-changes" in lines[-1]["arguments"]


def reseal(folder: Path, live: bool) -> None:
    """Make the manifest fit what lies there now. live: the checksums too, as if weights had been ruined before they
    were saved."""
    if live:
        sums = {}
        for shard in read_shards(folder):
            with safe_open(shard.path, framework="pt") as file:
                sums[shard.path.name] = {
                    name: checksum_rows(file.get_tensor(f"weight/{name}"), first, torch.float32)
                    for name, first in shard.first_row.items()
                }
        (folder / "checksums.msgpack").write_bytes(msgspec.msgpack.encode(sums))
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    for path in (*shards_of(folder), folder / "checksums.msgpack"):
        manifest.files[path.name] = Written(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    (folder / "manifest.json").write_bytes(manifest.content())


def test_weights_that_were_ruined_before_they_were_saved_stop_the_run(start: Start, table: list[Line], tmp_path: Path):
    """Nothing is wrong with the files: the step itself tells, by groups that were sampled before."""
    settings = {"rollout__max_async_level": 2, "checkpoint__every": 2, "objective__filter_groups_by": "off"}
    first = finished(start, tmp_path / "first", **{**settings, "steps": 4})
    run_dir = tmp_path / "second" / "run"
    shutil.copytree(first.run_dir, run_dir, symlinks=True)
    shutil.rmtree(run_dir / "checkpoints" / "step_4")
    flip_exponent(run_dir / "checkpoints" / "step_2")
    reseal(run_dir / "checkpoints" / "step_2", live=True)
    launch = start(tmp_path / "second", **{**SHORT, **settings, "steps": 30})
    code, seconds = ended(launch)
    message = said(launch.output, "error:", "step 3")
    assert code == 1 and "TrainingDied" in message, launch.output[-4000:]
    assert "checkpoints/" in message and not (run_dir / "checkpoints" / "step_4").exists()
    table.append(Line("weights ruined before they were saved", message, seconds, code, "stopped at its first step"))


def stale(folder: Path) -> None:
    """The first rank's shard of the step before, whose header says that it is of this one."""
    path, number = shards_of(folder)[0], int(folder.name.removeprefix("step_"))
    content = (before(folder) / path.name).read_bytes()
    for key in ("version", "step"):
        old, new = (f'\\"{key}\\": {value},'.encode() for value in (number - 1, number))
        assert content.count(old) == 1
        content = content.replace(old, new)
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["stale", "one bit"])
def test_a_shard_that_was_not_live_is_refused_by_name_though_every_hash_is_right(
    start: Start, whole: Launch, table: list[Line], tmp_path: Path, name: str
):
    newest = copied(whole, tmp_path)
    stale(newest) if name == "stale" else flip_exponent(newest)
    reseal(newest, live=False)
    launch = start(tmp_path, **{**SHORT, "placement__trainers": 2})
    code, seconds = ended(launch)
    message = said(launch.output, "error:", f"step_{STEPS} does not hold the weights that were live")
    assert code == 1 and "trainer-0-of-2.safetensors" in message and "trainer-1-of-2" not in message
    table.append(Line(f"{name}, every hash made to fit", message, seconds, code, "refused, all files as before"))
