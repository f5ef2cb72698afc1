"""Ranks to roles and devices. placements.jsonl: settings, GPUs of a node, and the ranks' devices, or why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shared.config import Config
from shared.errors import ConfigError
from shared.launch import launch_folder, ranks
from shared.launch.deaths import REPORTS, deaths_file
from shared.launch.meeting_store import MeetingServer
from tests.tables import read_table


def placed(trainers: int = 1, engines: int = 1, tensor_parallel: int = 1, **more: Any) -> Config:
    placement = {"trainers": trainers, "engines": engines, **more}
    return Config.model_validate({"placement": placement, "rollout": {"tensor_parallel": tensor_parallel}})


def rows(kind: str) -> Any:
    """Those of the table that have this outcome: its value, the number of GPUs, and the settings."""
    for row in read_table("shared/placements"):
        if kind in row:
            name = row.pop("name")
            yield pytest.param(row.pop(kind), row.pop("gpus", 0), placed(**row), id=name)


def test_rank_0_controls_the_next_train_the_rest_roll_out_on_gpus_in_their_order():
    assert [ranks.kind_of(rank, 2) for rank in range(5)] == ["controller", "trainer", "trainer", "engine", "engine"]
    config, first, second = placed(4, 6, 2), range(7), range(7, 11)
    # node 0: controller, 4 trainers, engines with 2 GPUs each; node 1 has engines only
    assert [ranks.gpus_of(rank, first, config, 8).start for rank in first] == [0, 0, 1, 2, 3, 4, 6]
    assert len(ranks.gpus_of(0, first, config, 8)) == 0
    assert [list(ranks.gpus_of(rank, second, config, 8)) for rank in second] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("sizes", "gpus", "config"), rows("sizes"))
def test_ranks_are_spread_by_the_gpus_that_they_need(sizes, gpus, config):
    for number, size in enumerate(sizes):
        node, first = ranks.Nodes(len(sizes), number, "10.0.0.1", 1234), sum(sizes[:number])
        assert node.ranks(config) == range(first, first + size)
        variables = node.variables(config)
        assert variables["LOCAL_WORLD_SIZE"] == str(size) and variables["WORLD_SIZE"] == str(sum(sizes))
    assert sum(sizes) == config.world_size
    with pytest.raises(ConfigError, match=r"--nnodes=99: placement\.trainers = "):
        ranks.Nodes(99).ranks(config)


def set_launch(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, node: range | None = None) -> None:
    node = node or range(world)
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank - node.start,
                        "LOCAL_WORLD_SIZE": len(node), "MASTER_ADDR": "127.0.0.1"}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)


def role_of(monkeypatch: pytest.MonkeyPatch, config: Config, rank: int, node: range) -> ranks.Role:
    set_launch(monkeypatch, rank, config.world_size, node)
    return ranks.read_role(config, dist.HashStore(), Path())


def devices(monkeypatch: pytest.MonkeyPatch, config: Config, node: range) -> str:
    """Of the ranks of a node."""
    roles = (role_of(monkeypatch, config, rank, node).device for rank in node)
    return " ".join("cpu" if device.type == "cpu" else str(device.index) for device in roles)


@pytest.mark.parametrize(("expected", "gpus", "config"), rows("devices"))
def test_devices_of_a_launch_on_one_node(monkeypatch, expected, gpus, config):
    see_gpus(monkeypatch, gpus)
    assert devices(monkeypatch, config, range(config.world_size)) == expected


@pytest.mark.parametrize(("message", "gpus", "config"), rows("refused"))
def test_too_few_gpus_are_refused_with_the_repair(monkeypatch, message, gpus, config):
    """By every rank of the node, the controller included, which tells the user."""
    see_gpus(monkeypatch, gpus)
    for rank in range(config.world_size):
        with pytest.raises(ConfigError, match=message):
            role_of(monkeypatch, config, rank, range(config.world_size))


def test_on_several_nodes_every_rank_has_a_gpu_of_its_own(monkeypatch):
    see_gpus(monkeypatch, 8)
    assert devices(monkeypatch, placed(16, 16), range(9)) == "cpu 0 1 2 3 4 5 6 7"
    for node in (range(9, 17), range(17, 25), range(25, 33)):
        assert devices(monkeypatch, placed(16, 16), node) == "0 1 2 3 4 5 6 7"
    see_gpus(monkeypatch, 3)
    assert devices(monkeypatch, placed(2, 2), range(3, 5)) == "0 1", "the first ones: none are shared"
    see_gpus(monkeypatch, 1)
    assert [devices(monkeypatch, placed(2, 2), range(rank, rank + 1)) for rank in (2, 3, 4)] == ["0", "0", "0"]
    with pytest.raises(ConfigError, match=r"trainer rank 2 needs GPU 1.* has 1 .*on more nodes \(--nnodes"):
        devices(monkeypatch, placed(2, 2), range(3))


def test_a_gpu_that_torch_cannot_use_is_no_accident(monkeypatch):
    see_gpus(monkeypatch, 0)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([Path("/dev/nvidia0")] if str(path) == "/dev" else []))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"/dev/nvidia0 is there: .*EXTRA=cuda.*placement\.device = \"cpu\""):
        ranks.count_gpus("auto")
    assert ranks.count_gpus("cpu") == 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"driver new enough"):
        ranks.count_gpus("auto")
    with pytest.raises(ConfigError, match=r'placement\.device = "cpu" needs the CPU builds.*make install EXTRA=cpu'):
        ranks.count_gpus("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert ranks.count_gpus("auto") == 0


def test_a_role_knows_its_place_and_a_launch_of_another_size_names_both_settings(monkeypatch):
    role = role_of(monkeypatch, placed(2), 3, range(4))
    assert (role.kind, role.rank, role.rank_in_role, role.one_node) == ("engine", 3, 0, True)
    set_launch(monkeypatch, 0, 5)
    message = r"5 ranks.*placement\.trainers = 1.*placement\.engines = 1.*--nproc-per-node=3"
    with pytest.raises(ConfigError, match=message):
        ranks.read_role(Config(), dist.HashStore(), Path())


def test_on_several_nodes_ranks_meet_in_the_runs_folder_and_take_no_other(monkeypatch, tmp_path):
    """Torchrun's store says no more than where, and whoever changes that gets nobody to follow."""
    torchruns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_launch(monkeypatch, 0, 3, range(2))
    for name, value in {"MASTER_PORT": str(torchruns.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "reachable_address", lambda *_: "127.0.0.1")
    node, run_dir = launch_folder.make(tmp_path / "node"), tmp_path / "run"
    meeting = ranks.open_meeting(node, run_dir)
    ranks.open_store(meeting).set("settings", "a secret")
    ranks.invite(meeting)
    assert meeting.path.parent == run_dir and meeting.path.stat().st_mode & 0o777 == 0o700
    assert not (node.path / REPORTS).exists(), "the controller does not listen yet"
    (meeting.path / deaths_file(0)).touch()
    assert (node.path / REPORTS).resolve() == meeting.path / deaths_file(0)
    second = launch_folder.make(tmp_path / "second")
    set_launch(monkeypatch, 2, 3, range(2, 3))
    joined = ranks.join_meeting(second)
    assert ranks.open_store(joined).get("settings") == b"a secret"
    assert (second.path / REPORTS).resolve() == meeting.path / deaths_file(2)
    [key] = [key for key in torchruns.list_keys() if "maestrale" in key]
    public, elsewhere = tmp_path / "public", launch_folder.make(tmp_path / "elsewhere")
    public.mkdir(0o755)
    (public / launch_folder.LOCK).touch()
    MeetingServer(elsewhere.path, "127.0.0.1").start()
    ranks.open_store(elsewhere).set("launch", "none/0/1")  # private, of another launch of the same user
    forgeries = {public: "its mode is 755", elsewhere.path: "made for it", tmp_path / "none": "made for it"}
    for forged, message in forgeries.items():
        torchruns.set(key, str(forged))
        with pytest.raises(ConfigError, match=message):
            ranks.join_meeting(node)
    torchruns.set(key, "")
    assert ranks.join_meeting(node) is None
    for folder in (node, second, meeting, joined, elsewhere):
        folder.leave()
    assert list(run_dir.iterdir()) == []
