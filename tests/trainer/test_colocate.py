"""How trainers and engines share GPUs: by hand for a model of a thousand million parameters."""

import json
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lab.plan.scenario import MODELS
from shared.config import Config
from shared.errors import ConfigError
from shared.model.config import DecoderConfig
from tests.tables import read_table
from trainer.colocate import (
    GIB,
    check_own_gpus,
    open_sequences,
    settle,
    shards_of,
    share,
    trainer_memory,
    with_replicas,
)
from trainer.settings import load

FOLDER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32768, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPE = DecoderConfig.from_hf(FOLDER)
PARAMETERS = 1_040_254_976
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KL = {"kl": {"weight": 0.1}}
LONGER = ("--rollout.max_completion_tokens=3072", "--model.max_tokens=3584", "--rollout.max_sequences=256")


def settings(level: int = 0, **sections: Any) -> Config:
    rollout = {"max_async_level": level, "max_sequences": 64, "max_completion_tokens": 1024}
    sections["rollout"] = rollout | sections.get("rollout", {})
    return Config.model_validate({"model": {"max_tokens": 2048}, "optimiser": {"activation_bytes": 0}, **sections})


def test_a_trainers_memory_is_the_sum_of_its_parts():
    assert SHAPE.parameters == PARAMETERS
    parts = trainer_memory(settings(), SHAPE, on_gpu=True)
    layer, table = 60_821_504, 32768 * 2048
    assert parts.states == 16 * PARAMETERS and parts.buffers == 4 * PARAMETERS and parts.frozen == 0
    assert parts.gathered == 6 * (table + 2 * layer) and PARAMETERS - 16 * layer == table + 2048
    inputs = 2 * 2048  # of one layer, which is computed again, whole; those of all others wait on the host
    whole = 2 * (4 * 2048 + 2 * 2048 + 2 * 512 + 2 * 8192)
    assert parts.activations == 8192 * (inputs + whole)
    few = settings(optimiser={"activation_bytes": 8192 * (15 * inputs + whole)})
    assert trainer_memory(few, SHAPE, on_gpu=True).activations == 8192 * (15 * inputs + whole)
    two = trainer_memory(settings(placement={"trainers": 2}, objective=KL), SHAPE, on_gpu=True)
    assert two.states == 8 * PARAMETERS and two.frozen == 2 * PARAMETERS


@pytest.mark.parametrize("row", read_table("trainer/colocations"), ids=itemgetter("name"))
def test_memory_decides_and_the_error_names_what_to_lower(row):
    """Trainer 15.5 + 1.1 + 3.9 + 0.8 GiB, engine 1.9 + 3 GiB and keys and values of 64 MiB a sequence."""
    given = {name: row[name] for name in ("placement", "stages") if name in row}
    config = settings(row.get("level", 0), rollout={"cache_bytes": row.get("cache_bytes")}, **given)
    try:
        shared = share(config, SHAPE, row["gpu"] * GIB, row.get("host", 256) * GIB)
    except ConfigError as error:
        assert all(words in str(error) for words in row["refused"]), error
        return
    least, most = row.get("cache_gib", (0, 99))
    assert shared.placement.colocate == row["way"] and least * GIB <= shared.rollout.cache_bytes <= most * GIB


def test_turns_with_a_stage_that_samples_ahead_are_refused_by_the_settings():
    assert open_sequences(settings()) == 64
    stages = [{"name": "a", "until_step": 2}, {"name": "b", "rollout": {"max_async_level": 1}}]
    with pytest.raises(ValueError, match='colocate = "turns" samples and trains in turns, but rollout.max_async_level'):
        settings(placement={"colocate": "turns"}, stages=stages)


@pytest.mark.parametrize(("file", "options"), [("magistral", ()), ("gsm8k_gpu", ()), ("gsm8k_gpu", LONGER)])
def test_examples_for_a_card_stay_resident_on_80_gb(file, options):
    """With Qwen3 0.6B, as their pages say, and with the longer reasoning that one of them proposes."""

    def way(model: str, *options: str) -> str:
        config = load(str(EXAMPLES / file / "settings.toml"), options)
        return share(config, MODELS[model], 80e9, 256 * GIB).placement.colocate

    assert way("0.6b", *options) == "resident"
    if file == "magistral":
        trainer = trainer_memory(load(str(EXAMPLES / file / "settings.toml"), options), MODELS["0.6b"], on_gpu=True)
        assert f"trainer {trainer.total / GIB:.0f} GiB" in (EXAMPLES / file / "README.md").read_text(encoding="utf-8")
        with pytest.raises(ConfigError, match="do not fit"):
            way("1.7b")
        assert way("1.7b", "--placement.colocate=turns", "--rollout.max_async_level=0") == "turns"


def fits(config: Config, gpu: float) -> bool:
    """Whether both stay in a GPU of so many GiB."""
    try:
        return share(config, SHAPE, gpu * GIB, 256 * GIB).placement.colocate == "resident"
    except ConfigError:
        return False


def test_slots_and_readers_of_an_update_count():
    """Streamed: two slots of the embedding, 128 MiB each, and a context instead of one whole tensor. Of eight engines
    each card's buffers are open in the processes of the seven others."""
    tensor, context = 2 * 32768 * 2048, 500 << 20
    narrow = {"cache_bytes": 512 << 20}
    least = next(gib / 64 for gib in range(1, 99 * 64) if fits(settings(rollout=narrow), gib / 64))
    streamed = settings(rollout={**narrow, "transport": "network"})
    assert not fits(streamed, least)
    assert fits(streamed, least + (tensor + context) / GIB / 0.95) and not fits(streamed, least + context / GIB)
    eight = settings(placement={"trainers": 8, "engines": 8})
    assert trainer_memory(eight, SHAPE, True, readers=7).buffers == 4 * PARAMETERS / 8 + 7 * context


@pytest.fixture
def node(tmp_path, monkeypatch):
    """The GiB of its GPUs, which a test sets; it has 256 of its own, and the model in tmp_path."""
    (tmp_path / "config.json").write_text(json.dumps(FOLDER))
    sizes = {"gpu": 80.0}
    properties = lambda index: SimpleNamespace(total_memory=sizes["gpu"] * GIB)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * GIB))
    return sizes


def test_a_rank_on_its_own_gpu_is_refused_with_the_arithmetic(node, tmp_path):
    apart = settings(placement={"colocate": "never"})
    check_own_gpus(apart, SHAPE, 24 * GIB, 2)
    with pytest.raises(ConfigError, match=r"a trainer takes 20\.9 GiB before activations .*15\.5.*placement\.trainers"):
        check_own_gpus(apart, SHAPE, 20 * GIB, 2)
    many = settings(placement={"trainers": 16, "colocate": "never"}, model={"max_tokens": 1 << 17})
    with pytest.raises(ConfigError, match=r"an engine takes 6\.\d GiB .*keys and values 4\.0.*tensor_parallel"):
        check_own_gpus(many, SHAPE, 5 * GIB, 17)
    node["gpu"] = 20
    with pytest.raises(ConfigError, match="before activations"):
        settle(apart, tmp_path, 2, one_node=True)
    with pytest.raises(ConfigError, match="needs a GPU for each trainer and engine"):
        settle(settings(rollout={"transport": "network"}), tmp_path, 1, one_node=True)


def test_each_node_has_a_replica_as_far_as_memory_allows():
    """A rank's states are 15.5 GiB over its shards, the rest 3.9 GiB: gathered 1.1, buffers of a quarter 1.0,
    activations 0.5, its process 1; 5 % stay free."""

    def chosen(trainers: int, node_trainers: int, gpu: float, **placement: Any) -> tuple[int | None, int]:
        config = settings(placement={"trainers": trainers, **placement})
        split = with_replicas(config, SHAPE, node_trainers, gpu * GIB, on_gpu=True)
        return split.placement.replicas, shards_of(split)

    assert [chosen(4, 1, gpu) for gpu in (21, 19, 13, 11, 4)] == [(4, 1), (2, 2), (2, 2), (1, 4), (1, 4)]
    assert chosen(16, 8, 80) == (2, 8) and chosen(24, 8, 80) == (3, 8)
    assert [chosen(6, 8, 80), chosen(12, 8, 80), chosen(8, 0, 80)] == [(1, 6), (1, 12), (1, 8)]
    assert chosen(16, 8, 80, replicas=1) == (1, 16) and chosen(16, 8, 4, replicas=4) == (4, 4)
    two = trainer_memory(settings(placement={"trainers": 8, "replicas": 2}, objective=KL), SHAPE, on_gpu=True)
    assert (two.states, two.frozen, two.buffers) == (4 * PARAMETERS, PARAMETERS, 4 * PARAMETERS / 8)
    with pytest.raises(ValueError, match="placement.replicas = 3 must divide placement.trainers = 8"):
        settings(placement={"trainers": 8, "replicas": 3})
    with pytest.raises(ConfigError, match=r"lower placement\.replicas"):
        check_own_gpus(settings(placement={"trainers": 16, "replicas": 16}), SHAPE, 16 * GIB, 8)


def test_a_launch_is_settled_by_the_gpus_of_its_node(node, tmp_path):
    def settled(gpus: int, one_node: bool = True, **placement: Any) -> tuple[str, int | None]:
        config = settle(settings(placement=placement), tmp_path, gpus, one_node)
        return config.placement.colocate, config.rollout.cache_bytes

    def replicas(gpus: int, node_trainers: int, one_node: bool = False) -> int | None:
        apart = settings(placement={"trainers": 4, "engines": 4, "colocate": "never"})
        return settle(apart, tmp_path, gpus, one_node, node_trainers).placement.replicas

    assert settled(0) == settled(2) == settled(8, trainers=4, engines=4) == ("never", None)
    assert settled(1) == settled(8, trainers=8, engines=8) == ("resident", 4 * GIB)
    assert settled(1, one_node=False) == ("never", None)
    assert settled(0, colocate="turns") == ("turns", None)  # the order of work alone
    assert [replicas(8, 2), replicas(8, 1), replicas(8, 3), replicas(8, 8)] == [2, 4, 1, 1]
    assert [replicas(0, 2), replicas(0, 4, one_node=True)] == [2, None]
    node["gpu"] = 26
    assert settled(1) == ("turns", 4 * GIB)
    node["gpu"] = 13
    assert [replicas(8, 2), replicas(8, 1)] == [2, 2]
