"""Ranks to roles and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shared.config import Config
from shared.errors import ConfigError
from shared.roles import first_gpu, kind_of, read_role


def test_rank_0_controls_the_next_train_the_rest_roll_out():
    assert [kind_of(rank, 2) for rank in range(5)] == ["controller", "trainer", "trainer", "engine", "engine"]


def test_gpus_are_taken_in_order_and_the_controller_takes_none():
    # node 0: controller, 4 trainers (9 ranks would need 8 GPUs), engines with 2 GPUs each
    assert [first_gpu(rank, rank, trainers=4, tensor_parallel=2) for rank in range(7)] == [0, 0, 1, 2, 3, 4, 6]
    # node 1 starts at rank 7 with engines only
    assert [first_gpu(7 + local, local, trainers=4, tensor_parallel=2) for local in range(4)] == [0, 2, 4, 6]


def set_launch(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)  # vLLM sets it in processes where it has run


def test_a_launch_of_another_size_names_both_settings_and_the_repair(monkeypatch: pytest.MonkeyPatch):
    set_launch(monkeypatch, 0, 5)
    message = r"5 ranks.*placement\.trainers = 1.*placement\.engines = 1.*--nproc-per-node=3"
    with pytest.raises(ConfigError, match=message):
        read_role(Config(), dist.HashStore(), Path())


def test_a_role_knows_its_place(monkeypatch: pytest.MonkeyPatch):
    set_launch(monkeypatch, 3, 4)
    role = read_role(Config.model_validate({"placement": {"trainers": 2}}), dist.HashStore(), Path())
    assert (role.kind, role.rank_in_role, role.one_node, role.name) == ("engine", 0, True, "engine 0 (rank 3)")
