"""PEFT itself reads our adapter folder, where it is installed (it is no dependency): the same logits by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.model import lora
from shared.model.adapter_folder import merged_weights, read_matrices, save_adapter
from shared.model.decoder import Decoder
from shared.model.language_model import LanguageModel
from tests.families import config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.rollout.test_agreement import FAMILIES, make_folder

FEW = ("qwen3", "gemma3", "olmo3", "qwen3 moe", "phi4", "glm4")
"""trained by the module of transformers: a mixture's attention, and layers that are fused in the folder, among them"""
IDS = [3, 17, 5, 200, 9, 41, 8]
peft: Any = pytest.importorskip("peft")


@pytest.mark.parametrize("targets", [lora.ALL, ["v_proj", "down_proj"]])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_folder_and_gives_the_same_logits(tmp_path: Path, family: str, targets: str | list[str]) -> None:
    decoder = make_folder(tmp_path / "model", family)
    compare(tmp_path, decoder, Decoder(decoder.config), targets)


@pytest.mark.parametrize(
    ("family", "targets"),
    [*((one, lora.ALL) for one in FEW), *((one, [lora.ALL, lora.EXPERTS]) for one in ("qwen3 moe", "mixtral"))],
)
def test_peft_gives_the_same_logits_as_modules_of_transformers(
    tmp_path: Path, family: str, targets: str | list[str]
) -> None:
    reference(config_of(family)).save_pretrained(tmp_path / "model")
    decoder, merged = (load_model(tmp_path / "model", implementation="transformers") for _ in range(2))
    compare(tmp_path, decoder, merged, targets)


def compare(tmp_path: Path, decoder: LanguageModel, merged: LanguageModel, targets: str | list[str]) -> None:
    """Adapters of the decoder in tmp_path / "model", written, read by PEFT, and merged into another module of it."""
    from transformers import AutoModelForCausalLM

    lora.attach(decoder, 4, 12.0, targets)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in decoder.parameters():
            if each.requires_grad:
                each.copy_(torch.randn(each.shape, generator=generator) * 0.1)
    matrices = {name: each for name, each in decoder.state_dict().items() if name.endswith((lora.A, lora.B))}
    save_adapter(tmp_path / "adapter", matrices, 4, 12.0, str(tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    plain = base(torch.tensor([IDS])).logits[0].detach()
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(torch.tensor([IDS])).logits[0].detach()
    ours = decoder(pack_from([IDS], [1]), output="logits").detach()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max().clamp(min=1)))
    assert float((theirs - plain).abs().max()) > 0.1
    merged.load_state_dict(dict(merged_weights(tmp_path / "model", read_matrices(tmp_path / "adapter"), 3.0)))
    torch.testing.assert_close(merged(pack_from([IDS], [1]), output="logits"), ours, rtol=0, atol=1e-4)
