"""Checkpoints whose weights lie in a plane that is known beforehand, written as trainer ranks and exports are."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.record_file import Written
from trainer.checkpoint import ledger_file, writer
from trainer.checkpoint.origin import Origin
from trainer.ledger import LedgerState

SHAPES = {"big.weight": (6, 4), "small.weight": (3,)}
FIRST = (-6.0, -2.0, 2.0, 6.0)
SECOND = (-1.0, 3.0, -3.0, 1.0)
"""coordinates of four snapshots: uncorrelated, of mean 0, with sums of squares 80 and 20"""


def unflatten(flat: Tensor) -> dict[str, Tensor]:
    """27 numbers as the two tensors."""
    return {"big.weight": flat[:24].reshape(6, 4), "small.weight": flat[24:]}


def basis() -> tuple[Tensor, Tensor, Tensor]:
    """A centre and two orthonormal directions over both tensors, [27] each."""
    generator = torch.Generator().manual_seed(3)
    orthonormal = torch.linalg.qr(torch.randn(27, 2, generator=generator, dtype=torch.float64))[0]
    return 5 * torch.randn(27, generator=generator, dtype=torch.float64), orthonormal[:, 0], orthonormal[:, 1]


def write_checkpoint(run_dir: Path, step: int, weights: dict[str, Tensor], world: int = 2) -> Path:
    """What `world` trainer ranks would leave, moments included; returns the folder."""
    partial, files = writer.begin(run_dir, step), {}
    for rank in range(world):
        tensors, rows = {}, {}
        for name, whole in weights.items():
            each = -(-whole.shape[0] // world)
            own = whole[rank * each : (rank + 1) * each].float().contiguous()
            if len(own):
                rows[name] = [rank * each, list(whole.shape)]
                tensors |= {f"{part}/{name}": own.clone() for part in ("weight", "exp_avg", "exp_avg_sq")}
        index = {"format": 2, "version": step, "rank": rank, "world": world, "step": step, "rows": rows}
        path = partial / f"trainer-{rank}-of-{world}.safetensors"
        save_file(tensors, path, {"index": json.dumps(index)})
        files[path.name] = Written(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    files[ledger_file.LEDGER] = ledger_file.write(partial, LedgerState(step, step * 4, step * 4, 0, 0, [], []))
    return writer.finish(partial, step, files, {}, Origin({}, {}), 1.5, keep=99)


def write_export(run_dir: Path, step: int, weights: dict[str, Tensor]) -> None:
    """A model folder."""
    folder = run_dir / "hf" / f"step_{step}"
    folder.mkdir(parents=True)
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def flatten(direction: dict[str, Tensor]) -> Tensor:
    return torch.cat([direction[name].double().flatten() for name in SHAPES])
