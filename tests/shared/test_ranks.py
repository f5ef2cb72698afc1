"""Ranks to roles and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shared.config import Config
from shared.errors import ConfigError
from shared.launch import launch_folder
from shared.launch.deaths import REPORTS, deaths_file
from shared.launch.ranks import (
    Nodes,
    count_gpus,
    gpus_of,
    invite,
    join_meeting,
    kind_of,
    open_meeting,
    open_store,
    read_role,
)


def placed(trainers: int = 1, engines: int = 1, tensor_parallel: int = 1, **more: Any) -> Config:
    placement = {"trainers": trainers, "engines": engines, **more}
    return Config.model_validate({"placement": placement, "rollout": {"tensor_parallel": tensor_parallel}})


def test_rank_0_controls_the_next_train_the_rest_roll_out() -> None:
    assert [kind_of(rank, 2) for rank in range(5)] == ["controller", "trainer", "trainer", "engine", "engine"]


def test_gpus_are_taken_in_order_and_the_controller_takes_none() -> None:
    config, first, second = placed(4, 6, 2), range(7), range(7, 11)
    # node 0: controller, 4 trainers, engines with 2 GPUs each; node 1 has engines only
    assert [gpus_of(rank, first, config, 8).start for rank in first] == [0, 0, 1, 2, 3, 4, 6]
    assert len(gpus_of(0, first, config, 8)) == 0
    assert [list(gpus_of(rank, second, config, 8)) for rank in second] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (placed(), [3]),
        (placed(), [2, 1]),
        (placed(16, 16), [9, 8, 8, 8]),
        (placed(8, 2, 4), [9, 2]),
        (placed(4, 3), [4, 3, 1]),
        (placed(3, 2), [4, 2]),
    ],
)
def test_ranks_are_spread_by_the_gpus_that_they_need(config: Config, sizes: list[int]) -> None:
    first = 0
    for number, size in enumerate(sizes):
        node = Nodes(len(sizes), number, "10.0.0.1", 1234)
        assert node.ranks(config) == range(first, first + size)
        assert node.variables(config)["LOCAL_WORLD_SIZE"] == str(size)
        first += size
    assert first == config.world_size == int(node.variables(config)["WORLD_SIZE"])


def test_more_nodes_than_ranks_can_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--nnodes=5: placement\.trainers = 1.* fill only 2 of them"):
        Nodes(5).ranks(Config())


def set_launch(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, node: range | None = None) -> None:
    node = node or range(world)
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank - node.start,
                        "LOCAL_WORLD_SIZE": len(node), "MASTER_ADDR": "127.0.0.1"}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)


def devices(monkeypatch: pytest.MonkeyPatch, config: Config, node: range) -> str:
    """Of the ranks of a node."""
    names = []
    for rank in node:
        set_launch(monkeypatch, rank, config.world_size, node)
        device = read_role(config, dist.HashStore(), Path()).device
        names.append("cpu" if device.type == "cpu" else str(device.index))
    return " ".join(names)


@pytest.mark.parametrize(
    ("gpus", "config", "expected"),
    [
        (0, placed(), "cpu cpu cpu"),
        (1, placed(), "cpu 0 0"),
        (2, placed(), "cpu 0 1"),
        (2, placed(2, 2), "cpu 0 1 0 1"),
        (2, placed(1, 2), "cpu 0 0 1"),
        (8, placed(4, 4), "cpu 0 1 2 3 4 5 6 7"),
        (8, placed(8, 8), "cpu 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7"),
        (8, placed(6, 4), "cpu 0 1 2 3 4 5 4 5 6 7"),  # the fewest GPUs are shared
        (8, placed(device="cpu"), "cpu cpu cpu"),
    ],
)
def test_devices_of_a_launch_on_one_node(
    monkeypatch: pytest.MonkeyPatch, gpus: int, config: Config, expected: str
) -> None:
    see_gpus(monkeypatch, gpus)
    assert devices(monkeypatch, config, range(config.world_size)) == expected


def test_on_several_nodes_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("gpus", "config", "message"),
    [
        (1, placed(colocate="never"), r"engine rank 2 needs GPU 1 .*has 1.*placement\.colocate other than"),
        (1, placed(2), r"trainer rank 2 needs GPU 1.*placement\.trainers = 2.*at most 1.*lower them"),
        (2, placed(2, 3), r"engine rank 3 needs GPU 2.*tensor_parallel = 3 may each be at most 2"),
        (0, placed(device="cuda"), r'placement\.device = "cuda", but torch can use no GPU.*placement\.device = "cpu"'),
    ],
)
def test_too_few_gpus_are_refused_with_the_repair(
    monkeypatch: pytest.MonkeyPatch, gpus: int, config: Config, message: str
) -> None:
    """By every rank of the node, the controller included, which tells the user."""
    see_gpus(monkeypatch, gpus)
    for rank in range(config.world_size):
        set_launch(monkeypatch, rank, config.world_size)
        with pytest.raises(ConfigError, match=message):
            read_role(config, dist.HashStore(), Path())


def test_a_gpu_that_torch_cannot_use_is_no_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 0)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter([Path("/dev/nvidia0")] if str(path) == "/dev" else []))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"/dev/nvidia0 is there: .*EXTRA=cuda.*placement\.device = \"cpu\""):
        count_gpus("auto")
    assert count_gpus("cpu") == 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"driver new enough"):
        count_gpus("auto")
    with pytest.raises(ConfigError, match=r'placement\.device = "cpu" needs the CPU builds.*make install EXTRA=cpu'):
        count_gpus("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert count_gpus("auto") == 0


def test_a_launch_of_another_size_names_both_settings_and_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch, 0, 5)
    message = r"5 ranks.*placement\.trainers = 1.*placement\.engines = 1.*--nproc-per-node=3"
    with pytest.raises(ConfigError, match=message):
        read_role(Config(), dist.HashStore(), Path())


def test_a_role_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch, 3, 4)
    role = read_role(placed(2), dist.HashStore(), Path())
    assert (role.kind, role.rank, role.rank_in_role, role.one_node) == ("engine", 3, 0, True)


def test_on_several_nodes_ranks_meet_in_the_runs_folder_and_take_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torchrun's store says no more than where, and whoever changes that gets nobody to follow."""
    torchruns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_launch(monkeypatch, 0, 3, range(2))
    for name, value in {"MASTER_PORT": str(torchruns.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "TORCHELASTIC_RUN_ID": "none"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    node, run_dir = launch_folder.make(tmp_path / "node"), tmp_path / "run"
    meeting = open_meeting(node, run_dir)
    open_store(meeting).set("settings", "a secret")
    invite(meeting)
    assert meeting.path.parent == run_dir and meeting.path.stat().st_mode & 0o777 == 0o700
    assert not (node.path / REPORTS).exists(), "the controller does not listen yet"
    (meeting.path / deaths_file(0)).touch()
    assert (node.path / REPORTS).resolve() == meeting.path / deaths_file(0)
    second = launch_folder.make(tmp_path / "second")
    set_launch(monkeypatch, 2, 3, range(2, 3))
    joined = join_meeting(second)
    assert joined is not None and open_store(joined).get("settings") == b"a secret"
    assert (second.path / REPORTS).resolve() == meeting.path / deaths_file(2)
    [key] = [key for key in torchruns.list_keys() if "maestrale" in key]
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
    for folder in (node, second, meeting, joined, elsewhere):
        folder.leave()
    assert list(run_dir.iterdir()) == []
