"""Real launches with tensor, context and expert parallel trainers: every update proved by the engines, and a resume by
one trainer. `pytest --soak tests/system/test_split.py`."""

import pytest

from examples.quickstart.prepare import prepare
from shared.model import hf
from tests.families import config_of, reference
from tests.system.launch import TINY, Launch

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
OPTIONS = {name.rpartition(".")[2]: value for name, value in TINY.items() if name.startswith("prepare.options.")}
SPLIT = {
    "tensor": {"placement__trainers": 2, "placement__tensor": 2},
    "context": {"placement__trainers": 2, "placement__context": 2},
    "tensor of 4": {"placement__trainers": 4, "placement__tensor": 2},
    "both": {"placement__trainers": 4, "placement__tensor": 2, "placement__context": 2},
    "adapters": {"placement__trainers": 2, "placement__tensor": 2, "lora__rank": 4},
    "experts": {"placement__trainers": 2, "placement__experts": 2},
}


@pytest.mark.parametrize("name", SPLIT)
def test_updates_are_proved_and_one_trainer_goes_on(tmp_path, name):
    settings = {"steps": 2, "evaluate__every": 0, "sft__steps": 20, **SPLIT[name]}
    if name == "experts":
        (tmp_path / "made").mkdir()
        prepare(tmp_path / "made", OPTIONS, seed=1)
        made = tmp_path / "made" / "model"
        ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.06}
        rows = hf.load_config(made)["vocab_size"]
        reference(config_of("qwen3 moe", vocab_size=rows, **ends)).save_pretrained(tmp_path / "model")
        hf.copy_tokenizer(made, tmp_path / "model")
        settings["model__path"] = str(tmp_path / "model")
    run = Launch(tmp_path, name="run", **settings).finish()
    rows = run.metrics()
    assert len(rows) == 2 and all(row["sync/logprob_diff_mean"] < 1e-4 for row in rows)
    alone = {"placement__trainers": 1, "placement__tensor": 1, "placement__context": 1, "placement__experts": 1}
    resumed = Launch(tmp_path, name="run", **{**settings, "steps": 3, **alone}).finish()
    assert resumed.resumed_from() == 2 and len(resumed.metrics()) == 3
