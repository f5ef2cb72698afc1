"""Ranks to roles and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shared import launch_folder
from shared.config import Config
from shared.errors import ConfigError
from shared.ranks import first_gpu, invite, join_meeting, kind_of, open_meeting, open_store, read_role


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


def test_on_several_nodes_ranks_meet_in_the_runs_folder_and_take_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Torchrun's store says no more than where, and whoever changes that gets nobody to follow."""
    torchruns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_launch(monkeypatch, 0, 3)
    for name, value in {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(torchruns.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    node, run_dir = launch_folder.make(tmp_path / "node"), tmp_path / "run"
    meeting = open_meeting(node, run_dir)
    open_store(meeting).set("settings", "a secret")
    invite(meeting)
    assert meeting.path.parent == run_dir and meeting.path.stat().st_mode & 0o777 == 0o700
    found = join_meeting(node)
    assert found is not None and open_store(found).get("settings") == b"a secret"
    [key] = [key for key in torchruns.list_keys() if "folder" in key]
    assert not [other for other in torchruns.list_keys() if other != key and "maestrale" in other]
    public, elsewhere = tmp_path / "public", launch_folder.make(tmp_path / "elsewhere")
    public.mkdir(0o755)
    (public / launch_folder.LOCK).touch()
    open_store(elsewhere).set("launch", "none/0/1")  # private, of another launch of the same user
    for forged, message in (
        (public, "its mode is 755"), (elsewhere.path, "made for it"), (tmp_path / "none", "made for it"),
    ):  # fmt: skip
        torchruns.set(key, str(forged))
        with pytest.raises(ConfigError, match=message):
            join_meeting(node)
    torchruns.set(key, "")
    assert join_meeting(node) is None
    for folder in (node, meeting, found, elsewhere):
        folder.leave()
    assert list(run_dir.iterdir()) == []
