"""Worlds of one, two and three gloo ranks that take the same step on models of several families.

    python family_scene.py FOLDER FAMILY...

Rank 0 of each world writes the whole gradients to FOLDER/FAMILY-WORLD.safetensors. Of "FAMILY, adapters" only adapters
are trained; of "FAMILY, experts, adapters" also those of experts, and each rank writes what it sends to
FOLDER/sent-RANK-WORLD.safetensors.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rollout.weights.layout import own_pieces
from shared.config import Config
from shared.model.language_model import LanguageModel
from shared.types import MicroBatch, TrainSequence
from tests.families import config_of, reference
from tests.trainer.rank_data import MAGISTRAL, deal, make_sequences
from tests.trainer.rank_scene import gradients
from trainer.step import fsdp, optimiser
from trainer.step.forward_backward import forward_backward
from trainer.step.fsdp import trained
from trainer.step.rank import build
from trainer.step.reference import fill
from trainer.step.sent_weights import SentWeights

ADAPTERS, EXPERTS = ", adapters", ", experts"
WORLDS = (1, 2, 3)
SETTINGS = Config.model_validate(
    {"model": {"implementation": "transformers"}, "optimiser": {"compute_dtype": "float32"}}
)


def make_folder(folder: Path, family: str) -> None:
    """A model folder of the family as transformers writes it."""
    reference(config_of(family.removesuffix(ADAPTERS).removesuffix(EXPERTS))).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def sequences() -> list[TrainSequence]:
    """Groups that share prompts, of very different lengths."""
    return make_sequences("group_tokens")


def run_rank(folder: Path, families: list[str], rank: int, world: int) -> None:
    """Take the step on every family, then an update, and write what was found."""
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    mesh = fsdp.join(store, rank, world, torch.device("cpu"), timeout_s=600)
    for family in families:
        lora = SETTINGS.lora.model_copy(update={"rank": 3 if family.endswith(ADAPTERS) else 0})
        if EXPERTS in family:
            lora = lora.model_copy(update={"targets": ["all-linear", "experts"]})
        settings = SETTINGS.model_copy(update={"lora": lora})
        decoder, made, _ = build(folder / family, None, settings, mesh, torch.device("cpu"))
        if lora.rank:  # B is zero at first, and so are the gradients of A
            generator = torch.Generator().manual_seed(4)
            fill(decoder, [(name, torch.randn(one.shape, generator=generator) * 0.1) for name, one in trained(decoder)])
        if EXPERTS in family:
            write_sent(decoder, folder / f"sent-{rank}-{world}.safetensors", rank)
            whole = dict(fsdp.gather_full(trained(decoder), torch.float32))
            if rank == 0:
                save_file(whole, folder / f"matrices-{world}.safetensors")
        batches = [MicroBatch(batch.sequences) for batch in deal(sequences(), 6, rank, world)]
        forward_backward(decoder, batches, 1.0, MAGISTRAL)
        fsdp.reshard(decoder)
        found = gradients(decoder)
        if rank == 0:
            save_file(
                {name: tensor.contiguous() for name, tensor in found.items()}, folder / f"{family}-{world}.safetensors"
            )
        forward_backward(decoder, batches, 1.0, MAGISTRAL)
        fsdp.reshard(decoder)
        optimiser.update(decoder, made, 1e-3)
        dist.barrier()
    fsdp.leave()


def write_sent(decoder: LanguageModel, path: Path, rank: int) -> None:
    """The rows that a rank sends, by "name first-row"."""
    sent = SentWeights(decoder)
    sent.gather()
    pieces = [replace(one, change=sent.changes.get(one.name)) for one in own_pieces(sent.named, rank)]
    save_file({f"{one.name} {one.first_row}": one.values.contiguous() for one in pieces}, path)


def main(folder: Path, families: list[str]) -> int:
    """Fork the ranks of one world after the other; returns how many failed."""
    torch.set_num_threads(1)
    for family in families:
        make_folder(folder / family, family)
    failed = 0
    for world in WORLDS:
        children = []
        for rank in range(world):
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    run_rank(folder, families, rank, world)
                    status = 0
                except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's code
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(pid)
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
