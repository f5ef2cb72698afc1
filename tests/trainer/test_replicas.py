"""Two replicas of two ranks against one of four, through the calls of a launch (see replica_scene.py).

pytest --soak -n 0 tests/trainer/test_replicas.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.weights.checksum import add_parts
from tests.process import run_ranks
from trainer.checkpoint import shard_files

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
CLOSE = 1e-6
"""only the order differs in which ranks are added up"""
MOMENTS_CLOSE = 1e-5
"""the same for AdamW's moments after three steps, of which one holds squares (measured: 3e-6)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("replicas")
    run_ranks(Path(__file__).with_name("replica_scene.py"), made)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(4)]


def test_gradients_losses_and_updates_are_those_of_one_replica(found: list[dict[str, Any]], folder: Path) -> None:
    for rank in found:
        for name in ("gradients 2 True", "gradients 2 False"):
            assert 0 < rank[f"{name} from gradients 1 True"] <= CLOSE
        assert rank["weight/trained 2 from trained 1"] <= CLOSE
        assert rank["trained 2 from trained 1"] <= MOMENTS_CLOSE
        assert rank["steps 2"] == pytest.approx(rank["steps 1"], rel=CLOSE)
        assert rank["head 2"] == pytest.approx(rank["head 1"], rel=CLOSE) and any(rank["head 1"])
    one, two = (load_file(folder / f"exported-{count}" / "model.safetensors") for count in (1, 2))
    assert one.keys() == two.keys()
    assert all(float((two[name] - one[name]).norm()) <= CLOSE * float(one[name].norm()) for name in one)


def test_gradients_pass_between_replicas_once_a_step_however_many_micro_batches(found: list[dict[str, Any]]) -> None:
    modules = 3  # two layers and the root; each rank has two micro-batches
    assert [rank[f"all-reduces 2 {kept}"] for rank in found for kept in (True, False)] == [modules] * 8
    assert [rank[f"all-reduces 1 {kept}"] for rank in found for kept in (True, False)] == [0] * 8


def test_each_row_is_sent_and_saved_once(found: list[dict[str, Any]], folder: Path) -> None:
    for name, headers in (("published", 1.0), ("written", 1.3)):
        one, two = ([rank[f"{name} {count}"][0] for rank in found] for count in (1, 2))
        assert min(two) > 0 and sum(one) / headers <= sum(two) <= sum(one) * headers
    assert all(rank["delivered 1"] and rank["delivered 2"] for rank in found)
    for count in (1, 2):
        whole = dict(shard_files.iterate_weights(folder / f"saved-{count}"))
        exported = load_file(folder / f"exported-{count}" / "model.safetensors")
        assert all(torch.equal(value, exported[name]) for name, value in whole.items()) and len(whole) > 10


def test_each_way_resumes_from_the_other_bit_for_bit_with_the_checksums_of_what_was_saved(
    found: list[dict[str, Any]],
) -> None:
    for way, other in ((1, 2), (2, 1)):
        assert all(rank[f"resumed {way} is trained {other}"] for rank in found)
        assert all(rank[f"resumed step {way} from went on {other}"] <= CLOSE for rank in found)
        for number, rank in enumerate(found):
            file = f"trainer-{number}-of-4.safetensors"
            assert add_parts(one[f"taken {way}"][file] for one in found) == rank[f"saved {other}"]


@pytest.mark.parametrize(
    ("case", "when", "who", "what"),
    [
        ("weight", "after an optimiser step", {1: "1 or 3", 3: "1 or 3"}, "down_proj.weight (1 tensors differ)"),
        ("rate", "after an optimiser step", {1: "1 or 3", 3: "1 or 3"}, "model.embed_tokens.weight, "),
        ("folder", "after the load of ", {0: "0 or 2", 1: "1 or 3", 2: "0 or 2", 3: "1 or 3"}, "q_proj.weight"),
        ("one of four", "after an optimiser step", dict.fromkeys(range(4), "2"), "down_proj.weight (1 tensors differ)"),
    ],
)
def test_a_replica_that_differs_stops_the_run_in_that_step(
    found: list[dict[str, Any]], case: str, when: str, who: dict[int, str], what: str
) -> None:
    assert [rank["none"] for rank in found] == ["equal"] * 4
    for number, rank in enumerate(found):
        if number in who:
            assert rank[case].startswith(when) and ", trainer ranks " in rank[case]
            assert f"trainer rank {who[number]} has other values" in rank[case] and what in rank[case]
        else:
            assert rank[case].startswith("a peer has left")
