"""Whole launches on two nodes (two torchrun agents), with several trainers and engines that meet in any order.

pytest --soak -n 0 tests/system/test_nodes.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.conftest import Start
from tests.system.launch import Launch, free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("count", "launch"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_as_many_engines_as_trainers_train_over_the_network(start: Start, tmp_path: Path, count: int, launch: int):
    port = free_port()

    def agent(node: int, ranks: int) -> Launch:
        where = [f"--node-rank={node}", f"--nproc-per-node={ranks}", f"--master-port={port}"]
        return start(
            tmp_path, torchrun=("--nnodes=2", "--master-addr=127.0.0.1", *where), steps=3, rollout__transport="network",
            placement__trainers=count, placement__engines=count, deadlines__start_s=900,
        )  # fmt: skip

    agents = [agent(0, 1 + count), agent(1, count)]
    codes = [one.wait(900) for one in agents]
    assert codes == [0, 0], agents[0].output[-6000:] + agents[1].output[-3000:]
    assert agents[0].trained_prompts() == list(range(12))
    assert all(row["sync/logprob_diff_mean"] < 1e-4 for row in agents[0].metrics())
