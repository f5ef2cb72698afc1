from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.process import run_ranks


class Ranks(NamedTuple):
    """What a scene of rank_scene.py left."""

    folder: Path
    name: str

    def of(self, world: int) -> list[dict[str, Any]]:
        """What each rank of a world found."""
        return [torch.load(self.folder / f"{self.name}-{world}-{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="session")
def scene(tmp_path_factory):
    """Worlds of 1, 2 and 4 real gloo ranks, once for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(folder, "steps")
    return Ranks(folder, "steps")
