import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor


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
    script = Path(__file__).with_name("rank_scene.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = {
        world: [json.loads((folder / f"found-{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in (1, 2, 4)
    }
    return Scene(folder, found, {world: load_file(folder / f"found-{world}.safetensors") for world in (1, 2, 4)})
