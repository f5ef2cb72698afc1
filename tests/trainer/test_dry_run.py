"""`--dry-run`: placement, derived numbers and memory, by hand for a model of known size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared import settings_file
from shared.config import Config
from shared.errors import ModelError
from tests.shared.test_turns import chat_of
from trainer.__main__ import main
from trainer.check.plan import derived_lines, memory_lines, model_shape, placement_lines, plan_text
from trainer.check.remarks import remark_lines
from trainer.memory import size

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return str(tmp_path)


def settings(**sections: Any) -> Config:
    return Config.model_validate(sections)


def test_memory_is_shared_by_the_trainers(folder: str) -> None:
    config = settings(model={"path": folder}, placement={"trainers": 2}, rollout={"cache_bytes": 23040 * 1024})
    text = "\n".join(memory_lines(config, model_shape(config)))
    assert f"moments {size(16 * 134_515_008 / 2)}" in text
    assert f"weight buffers {size(4 * 134_515_008 / 2)}" in text
    assert "KV cache 22.5 MiB (1,024 tokens, 2 full sequences)" in text


def test_a_model_that_is_not_there_yet_has_no_estimate() -> None:
    config = settings(model={"path": "made/model"})
    assert model_shape(config) is None and "is made at the start" in "\n".join(memory_lines(config, None))
    assert model_shape(settings(model={"path": "owner/name"})) is None


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        plan_text(settings(model={"path": str(tmp_path)}))


def test_placement_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = [line.split() for line in placement_lines(settings(placement={"trainers": 2, "engines": 1}))]
    assert [line[1:] for line in lines] == [
        ["0", "controller", "CPU"], ["1", "trainer", "CPU"], ["2", "trainer", "CPU"], ["3", "engine", "CPU"]
    ]  # fmt: skip


def test_placement_on_gpus_counts_tensor_parallel_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = settings(placement={"trainers": 2, "engines": 2}, rollout={"tensor_parallel": 2})
    shared = ["CPU", "GPU 0", "GPU 1", "GPUs 0-1", "GPUs 2-3"]
    assert [line[20:].strip() for line in placement_lines(config)] == shared
    config = settings(placement={"trainers": 2, "engines": 2, "colocate": "never"}, rollout={"tensor_parallel": 2})
    assert [line[20:].strip() for line in placement_lines(config)] == [
        "CPU", "GPU 0", "GPU 1", "GPUs 2-3", "GPUs 4-5 (this machine has 4: more nodes are needed)"
    ]  # fmt: skip


def test_memory_on_gpus_says_how_they_are_shared(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=24 << 30))
    config = settings(model={"path": folder})
    text = "\n".join(memory_lines(config, model_shape(config)))
    assert "KV cache in what is free of each GPU" in text and "shared" not in text
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    text = "\n".join(memory_lines(config, model_shape(config)))
    assert "shared GPUs    both stay in GPU memory (resident)" in text and "256 full sequences" in text


def test_derived_numbers() -> None:
    rollout = {"prompts_per_step": 8, "group_size": 4, "max_async_level": 1, "max_completion_tokens": 64}
    config = settings(
        steps=10, rollout=rollout, model={"max_tokens": 128}, optimiser={"micro_batch_tokens": 1000},
        placement={"trainers": 2},
    )  # fmt: skip
    text = " ".join("\n".join(derived_lines(config)).split())
    assert "completions in a step 32 = 8 prompts x 4" in text
    assert "completions in the run 320 in 10 steps" in text
    assert "tokens in a step at most 4,096, of them sampled at most 2,048" in text
    assert "micro-batches of a trainer at most about 3 of 1,000 tokens" in text  # 4096 / 2 / 1000, rounded up
    assert "open groups (slots) 16 = 64 completions" in text
    assert "largest age of a token 2 versions (async level 1, window 8)" in text
    held = settings(rollout={"max_async_level": 2, "fixed_staleness": True})
    assert any("2 versions (held back: that of every token from step 3 on)" in line for line in derived_lines(held))
    valued = settings(steps=10, rollout=rollout, objective={"name": "spo", "value_samples": 3})
    told = " ".join("\n".join(derived_lines(valued)).split())
    assert "soft values 3 completions of at most 120 prompts" in told  # 1.25 * 8 * (10 + async_level + 1)


def test_what_is_probably_not_meant_is_said(folder: str) -> None:
    config = settings(model={"path": folder}, steps=3, rollout={"cache_bytes": 1 << 20, "max_sequences": 100_000})
    found = "\n".join(remark_lines(config, model_shape(config)))
    assert all(name in found for name in ("optimiser.warmup_steps", "rollout.max_sequences", "rollout.cache_bytes"))
    assert list(remark_lines(settings(), None)) == []


def test_the_printed_settings_can_be_used_as_a_file(tmp_path: Path) -> None:
    given = settings(seed=5, model={"path": "made/model"}, prepare={"script": "examples/quickstart/prepare.py"})
    text = plan_text(given)
    path = tmp_path / "printed.toml"
    path.write_text(text.split("placement (all")[0])
    assert settings_file.load(path) == given


def test_a_launch_reads_settings_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'seed = 1\nmodel.path = "made/model"\ndata.train = "made/train.jsonl"\n'
        'prepare.script = "examples/quickstart/prepare.py"\n'
    )
    monkeypatch.setenv("MAESTRALE_TRAIN_SEED", "2")
    monkeypatch.setenv("MAESTRALE_TRAIN_OBJECTIVE__KL__WEIGHT", "0.5")
    assert main([str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "\nseed = 2\n" in printed and '\nkl = {"weight" = 0.5}\n' in printed
    monkeypatch.setenv("MAESTRALE_TRAIN_OBJECTIVE__KLL", "0.5")
    assert main([str(path), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: MAESTRALE_TRAIN_OBJECTIVE__KLL: unknown setting objective.kll"), message


def test_sizes_for_people() -> None:
    assert [size(n) for n in (2048, 1.5 * 2**20, 340 * 2**20, 2**30, 3 * 2**40)] == [
        "2 KiB", "1.5 MiB", "340 MiB", "1.0 GiB", "3.0 TiB"
    ]  # fmt: skip


def test_stages_and_reference_model_are_told(folder: str):
    stages = [
        {"name": "short", "until_step": 5, "until": "accuracy > 0.9"},
        {"name": "long", "rollout": {"max_async_level": 1}},
    ]
    chat_of(Path(folder), "ours")
    config = Config.model_validate({"stages": stages, "objective": {"kl": {"weight": 0.1}}, "model": {"path": folder}})
    text = plan_text(config)
    assert "until step 5 or accuracy > 0.9" in text and "async level 1; until the end" in text
    plain = config.model_copy(update={"objective": Config().objective})
    told = ["reference model" in "".join(memory_lines(which, model_shape(which))) for which in (config, plain)]
    assert told == [True, False]


def test_models_beside_the_policy_take_memory_and_a_moving_reference_disk(folder: str) -> None:
    """Frozen: 4 bytes of a parameter, shared by two trainers, and all of them gathered, as the model is small."""
    count = 134_515_008
    frozen = size(4 * count / 2 + 4 * count)

    def told(**objective: Any) -> str:
        config = settings(model={"path": folder}, placement={"trainers": 2}, objective=objective)
        return "\n".join(memory_lines(config, model_shape(config)))

    assert f"teacher model {frozen}" in told(name="distill", teacher={"kind": "local", "path": folder})
    assert "reference model" not in told(name="distill", teacher={"kind": "local", "path": folder})
    assert f"reference model {frozen}" in told(kl={"weight": 0.1}) and f"checkpoint   {size(12 * count)} on" in told(
        kl={"weight": 0.1}
    )
    assert f"checkpoint   {size(16 * count)} on" in told(kl={"weight": 0.1, "reference": {"kind": "average"}})
    assert "teacher" not in told()
    assert "'owner/name' is not a folder here" in told(name="distill", teacher={"kind": "local", "path": "owner/name"})
    asked = told(name="distill", teacher={"kind": "served", "url": "http://127.0.0.1:8000/v1", "model": "x"})
    assert "teacher" not in asked, "it is in other machines' memory"


def test_groups_that_stay_whole_and_exceed_the_budget_are_told() -> None:
    """A prompt of 28, 4 completions of 100, in the second stage 8: 828 tokens."""

    def told(name: str, budget: int) -> str:
        stages = [{"name": "a", "until_step": 2}, {"name": "b", "rollout": {"group_size": 8}}]
        rollout = {"group_size": 4, "max_completion_tokens": 100, "max_sequences": 32}
        config = settings(
            model={"max_tokens": 128}, rollout=rollout, stages=stages, objective={"name": name},
            optimiser={"micro_batch_tokens": budget},
        )  # fmt: skip
        return "\n".join(remark_lines(config, None))

    assert "up to 828 tokens, above optimiser.micro_batch_tokens = 827" in told("agro", 827)
    assert told("agro", 828) == told("magistral", 827) == ""
    assert 'objective.name = "jepo"' in told("jepo", 100)


def test_objectives_that_are_probably_not_meant_are_told() -> None:
    def told(async_level: int = 2, minibatches: int = 1, **objective: Any) -> str:
        config = settings(
            rollout={"max_async_level": async_level, "prompts_per_step": 8},
            optimiser={"minibatches": minibatches},
            objective=objective,
        )
        return "\n".join(remark_lines(config, None))

    assert 'objective.name = "rloo" takes tokens of older policies' in told(name="rloo")
    assert "optimiser.minibatches = 2" in told(name="reinforce", async_level=0, minibatches=2)
    unweighted = {"importance": {"kind": "none"}}
    for biased in (told(name="decoupled_ppo", ratio_reference=unweighted), told(name="jepo", **unweighted)):
        assert "takes tokens of older policies" in biased
    start_of_batch = told(name="decoupled_ppo", ratio_reference=unweighted, async_level=0, minibatches=2)
    for fine in (
        told(name="rloo", async_level=0), told(name="rloo", importance={"kind": "token"}), told(), told(name="agro"),
        start_of_batch,
    ):  # fmt: skip
        assert "older policies" not in fine and "wrong" not in fine
