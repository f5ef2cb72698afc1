"""Router replay in launches of a tiny mixture: routes outlive a kill -9 through a checkpoint, and are never missed in
silence. `pytest --soak tests/system/test_router_replay.py`."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.prepare import prepare
from shared.model import hf
from tests.families import config_of, reference
from tests.system.launch import TINY, Launch

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
STEPS = 6
OPTIONS = {name.rpartition(".")[2]: value for name, value in TINY.items() if name.startswith("prepare.options.")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    prepare(made, OPTIONS, seed=1)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.06}
    rows, folder = hf.load_config(made / "model")["vocab_size"], made / "mixture"
    reference(config_of("qwen3 moe", vocab_size=rows, **ends)).save_pretrained(folder)
    hf.copy_tokenizer(made / "model", folder)
    return folder


def launch(runs_dir: Path, model: Path, **settings: Any) -> Launch:
    """The engine in bfloat16, so that it chooses other experts than the trainer would."""
    return Launch(
        runs_dir, model__path=str(model), model__implementation="transformers", model__dtype="bfloat16", steps=STEPS,
        evaluate__every=0, objective__entropy_bonus=0.01, sft__steps=2, rollout__max_async_level=2, **settings,
    )  # fmt: skip


def test_a_killed_launch_goes_on_with_the_routes_of_its_checkpoint(tmp_path, model):
    run = launch(tmp_path, model)
    run.until_step(3)
    run.kill()
    assert not run.survivors()
    kept = list((run.run_dir / "checkpoints").glob("step_[12345]/routes/*/*"))
    assert kept, "groups were under way when the checkpoint was taken"
    shutil.rmtree(run.run_dir / "routes")
    again = launch(tmp_path, model).finish()
    assert again.resumed_from() >= 2
    differing = [row["experts/differing"] for row in again.metrics()]
    print("share of replayed choices that differ:", differing)
    assert len(differing) == STEPS and max(differing) > 0


def test_a_step_without_its_routes_stops_the_run_and_says_what_to_do(tmp_path, model):
    run = launch(tmp_path, model, checkpoint__every=0)
    run.until(lambda: len(list((run.run_dir / "routes").glob("*/*"))) > 8)
    for path in (run.run_dir / "routes").glob("*/*"):
        with suppress(FileNotFoundError):  # trained meanwhile
            path.write_bytes(path.read_bytes()[:-1])
    assert run.wait() == 1
    assert any("the routes of group" in line and "that were written" in line for line in run.errors), run.output[-3000:]
