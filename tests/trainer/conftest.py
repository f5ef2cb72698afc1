import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.process import run_ranks


@dataclass(frozen=True)
class Scene:
    """What the ranks of `rank_scene.py` found."""

    folder: Path
    found: dict[int, list[dict[str, Any]]]
    """world size -> one dictionary a rank"""
    tensors: dict[int, dict[str, Tensor]]
    """world size -> whole tensors by name"""

    def part(self, world: int, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, without it."""
        return {
            name.removeprefix(f"{prefix}/"): value
            for name, value in self.tensors[world].items()
            if name.startswith(f"{prefix}/")
        }


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Runs worlds of 1, 2 and 4 real gloo ranks once for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("rank_scene.py"), folder)
    found = {
        world: [json.loads((folder / f"found-{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in (1, 2, 4)
    }
    return Scene(folder, found, {world: load_file(folder / f"found-{world}.safetensors") for world in (1, 2, 4)})
