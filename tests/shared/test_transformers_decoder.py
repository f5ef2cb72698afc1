"""The module of transformers as the trained model, family by family: against its own plain forward, one sequence at a
time, and the properties that training leans on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.errors import ModelError
from shared.model import hf
from shared.model.config import MeasuredConfig
from shared.model.implementation import make_model, read_shape
from shared.model.language_model import LanguageModel
from shared.model.transformers_decoder import TransformersDecoder
from tests.families import FAMILIES, config_of, reference
from tests.model_folder import load_model
from tests.packed import entropy_from_logits, logprobs_from_logits, pack_from

SEQUENCES = [[5, 9, 33, 2, 7, 7, 60], [1], [96, 4, 8] * 12, list(range(50, 90)), [5, 9, 33, 2, 11, 12]]
FIRSTS = [4, 1, 3, 7, 4]
"""the first and the last share a prompt, which is stored once"""


def make_pair(family: str, recompute: int = 0, **more: Any) -> tuple[Any, LanguageModel]:
    """(module of transformers as it is, ours around another one with the same weights)."""
    config = config_of(family, **more)
    theirs = reference(config)
    ours = make_model(read_shape(config, "transformers"), config, recompute)
    state = theirs.state_dict()
    ours.load_state_dict({name: state[name].clone() for name in ours.state_dict()}, strict=True)
    return theirs, ours


def own_logprobs(theirs: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all targets, each sequence alone."""
    found = []
    for ids, first in zip(SEQUENCES, FIRSTS, strict=True):
        logits = theirs(torch.tensor([ids])).logits[0, first - 1 : -1]
        targets = torch.tensor(ids[first:], dtype=torch.int64)
        found.append((logprobs_from_logits(logits, targets, temperature), entropy_from_logits(logits, temperature)))
    return torch.cat([one for one, _ in found]), torch.cat([other for _, other in found])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(family: str):
    """Packed, with a shared prompt, through our attention and head, with and without recomputed layers: as the plain
    forward of transformers, float32, to 1e-5 (the logits are about 5)."""
    theirs, ours = make_pair(family)
    again = make_pair(family, recompute=2)[1]
    assert isinstance(ours, TransformersDecoder) and ours.packs == (family != "qwen3.5")
    assert sum(parameter.numel() for parameter in ours.parameters()) == ours.config.parameters
    wanted, wanted_entropy = own_logprobs(theirs, 0.7)
    batch = pack_from(SEQUENCES, FIRSTS)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    (wanted * weights + 0.1 * wanted_entropy).sum().backward()
    found = []
    for model in (ours, again):
        logprobs, entropy = model(batch, 0.7)
        torch.testing.assert_close(logprobs, wanted, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, wanted_entropy, atol=2e-5, rtol=1e-5)
        (logprobs * weights + 0.1 * entropy).sum().backward()
        found.append((logprobs, {name: parameter.grad for name, parameter in model.named_parameters()}))
    truth = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert torch.equal(found[0][0], found[1][0]), "recomputing changes nothing"
    for name, gradient in found[0][1].items():
        assert gradient is not None and torch.equal(gradient, found[1][1][name]), f"recomputing changes {name}"
        size = truth[name].norm()
        assert size > 0 and (gradient - truth[name]).norm() <= 1e-4 * size, name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str):
    theirs, ours = make_pair(family)
    with torch.no_grad():
        wanted = torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in SEQUENCES])
        actual = ours(pack_from(SEQUENCES, FIRSTS, share_prefixes=False), output="logits")
    # of the largest logit: processors sum in other orders, and small logits are differences of large products
    torch.testing.assert_close(actual, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)
    assert wanted.std() > 0.3, "flat logits would agree by accident"


def test_a_native_family_gives_the_same_through_either_implementation():
    config = config_of("llama")
    native = make_model(read_shape(config, "native"), config)
    other = make_pair("llama")[1]
    native.load_state_dict(other.state_dict(), strict=True)
    batch = pack_from(SEQUENCES, FIRSTS)
    torch.testing.assert_close(native(batch, 0.7), other(batch, 0.7), atol=1e-5, rtol=1e-5)
    own, counted = read_shape(config), read_shape(config, "transformers")
    assert not isinstance(own, MeasuredConfig) and isinstance(counted, MeasuredConfig)
    for name in ("parameters", "products", "cached_values", "layer_products", "layer_parameters"):
        assert getattr(own, name) == getattr(counted, name), name


def test_auto_takes_what_our_own_decoder_lacks_from_transformers():
    windowed = config_of("mistral window")
    assert isinstance(read_shape(windowed, "auto", max_tokens=17), MeasuredConfig)
    assert not isinstance(read_shape(windowed, "auto", max_tokens=16), MeasuredConfig)
    assert isinstance(read_shape(config_of("phi4")), MeasuredConfig)
    with pytest.raises(ModelError, match="not supported.*LlamaForCausalLM"):
        read_shape(config_of("phi4"), "native")


@pytest.mark.parametrize("family", ["gemma4", "mixtral", "qwen3 moe", "gpt-oss"])
def test_a_folder_of_transformers_is_read_and_written_under_the_same_names(tmp_path: Path, family: str):
    """Experts are stored one by one where transformers stores them so; what is not trained passes through."""
    config = config_of(family)
    theirs = reference(config)
    start, end = tmp_path / "start", tmp_path / "end"
    theirs.save_pretrained(start)
    (start / "tokenizer.json").write_text("{}")
    hf.check_trainable(start)
    model = load_model(start)
    batch = pack_from(SEQUENCES, FIRSTS)
    torch.testing.assert_close(model(batch, 0.7)[0], own_logprobs(theirs, 0.7)[0], atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    hf.save_trained(end, start, model.named_parameters(), torch.float32)
    before, after = load_file(start / "model.safetensors"), load_file(end / "model.safetensors")
    assert before.keys() == after.keys()
    fixed = {name for name in before if torch.equal(before[name], after[name])}
    assert fixed == {name for name in before if name.endswith("layer_scalar")}
    for name in before.keys() - fixed:
        assert torch.equal(before[name] + 1.0, after[name]), name
    assert json.loads((end / "config.json").read_text())["model_type"] == config["model_type"]
