"""The module of transformers as the trained model, family by family: against its own plain forward, one sequence at a
time, and the properties that training leans on; replayed routes of mixtures; text parts of vision-language models."""

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelError, RunError
from shared.model import hf
from shared.model.config import MeasuredConfig
from shared.model.implementation import make_model, read_shape
from shared.model.language_model import LanguageModel
from shared.model.packing import PackedBatch
from shared.model.routing import MISSING, Routing
from shared.model.transformers_decoder import TransformersDecoder, lay_out_rows
from tests.families import FAMILIES, VISION_LANGUAGE, classes_of, config_of, reference
from tests.model_folder import load_model
from tests.packed import entropy_from_logits, logprobs_from_logits, pack_from

SEQUENCES = [[5, 9, 33, 2, 7, 7, 60], [1], [96, 4, 8] * 12, list(range(50, 90)), [5, 9, 33, 2, 11, 12]]
FIRSTS = [4, 1, 3, 7, 4]
"""the first and the last share a prompt, which is stored once"""
APART = pack_from(SEQUENCES, FIRSTS, share_prefixes=False)


def make_pair(family: str, recompute: int = 0, **more: Any) -> tuple[Any, LanguageModel]:
    """(module of transformers as it is, ours around another one with the same weights)."""
    config = config_of(family, **more)
    theirs = reference(config)
    ours = make_model(read_shape(config, "transformers"), config, recompute)
    state = theirs.state_dict()
    ours.load_state_dict({name: state[name].clone() for name in ours.state_dict()}, strict=True)
    return theirs, ours


def logits_of(theirs: Any) -> list[Tensor]:
    """[tokens, vocab] of each sequence alone, without an image."""
    return [theirs(input_ids=torch.tensor([ids])).logits[0] for ids in SEQUENCES]


def assert_near(actual: Tensor, wanted: Tensor) -> None:
    """To 2e-5 of the largest logit: processors sum in other orders, and small logits are differences of large products.
    Flat logits would agree by accident."""
    torch.testing.assert_close(actual, wanted, atol=2e-5 * max(1.0, float(wanted.abs().max())), rtol=0)
    assert wanted.std() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(family):
    """Packed, with a shared prompt, through our attention and head, with and without recomputed layers: as the plain
    forward of transformers, float32, to 1e-5 (the logits are about 5)."""
    theirs, ours = make_pair(family)
    again = make_pair(family, recompute=2)[1]
    assert isinstance(ours, TransformersDecoder) and ours.packs == (family != "qwen3.5")
    assert sum(parameter.numel() for parameter in ours.parameters()) == ours.config.parameters
    logits = logits_of(theirs)
    here = torch.cat([each[first - 1 : -1] for each, first in zip(logits, FIRSTS, strict=True)])
    targets = torch.tensor([token for ids, first in zip(SEQUENCES, FIRSTS, strict=True) for token in ids[first:]])
    expected, wanted_entropy = logprobs_from_logits(here, targets, 0.7), entropy_from_logits(here, 0.7)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weights + 0.1 * wanted_entropy).sum().backward()
    results = []
    for model in (ours, again):
        logprobs, entropy = model(pack_from(SEQUENCES, FIRSTS), 0.7)
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, wanted_entropy, atol=2e-5, rtol=1e-5)
        (logprobs * weights + 0.1 * entropy).sum().backward()
        results.append((logprobs, {name: parameter.grad for name, parameter in model.named_parameters()}))
    truth = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert torch.equal(results[0][0], results[1][0]), "recomputing changes nothing"
    for name, gradient in results[0][1].items():
        assert gradient is not None and torch.equal(gradient, results[1][1][name]), f"recomputing changes {name}"
        size = truth[name].norm()
        assert size > 0 and (gradient - truth[name]).norm() <= 1e-4 * size, name
    with torch.no_grad():
        assert_near(ours(APART, output="logits"), torch.cat(logits))


def test_auto_takes_what_our_own_decoder_lacks_from_transformers_and_either_counts_the_same():
    windowed, config = config_of("mistral window"), config_of("llama")
    assert isinstance(read_shape(windowed, "auto", max_tokens=17), MeasuredConfig)
    assert not isinstance(read_shape(windowed, "auto", max_tokens=16), MeasuredConfig)
    assert isinstance(read_shape(config_of("phi4")), MeasuredConfig)
    with pytest.raises(ModelError, match="not supported.*LlamaForCausalLM"):
        read_shape(config_of("phi4"), "native")
    shape, counted = read_shape(config), read_shape(config, "transformers")
    assert not isinstance(shape, MeasuredConfig) and isinstance(counted, MeasuredConfig)
    for name in ("parameters", "products", "cached_values", "layer_products", "layer_parameters"):
        assert getattr(shape, name) == getattr(counted, name), name


@pytest.mark.parametrize("family", ["gemma4", "mixtral", "qwen3 moe", "gpt-oss", *VISION_LANGUAGE])
def test_a_folder_of_transformers_is_trained_and_the_export_is_the_whole_model(tmp_path, family):
    """Logits as the whole model's, within 1e-5 in float32; after a change of every trained weight the export is of the
    same class, computes the new logits, and holds what was not trained bit for bit, in the type that it had. Experts
    are stored one by one where transformers stores them so."""
    start, end, half = tmp_path / "start", tmp_path / "end", tmp_path / "half"
    theirs = reference(config_of(family))
    theirs.save_pretrained(start)
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (start / name).write_text("{}")
    hf.check_trainable(start)
    model = load_model(start)
    assert isinstance(model.config, MeasuredConfig) == (family not in ("mistral3", "qwen2.5-vl", "qwen3-vl"))
    torch.manual_seed(1)
    with torch.no_grad():
        expected = torch.cat(logits_of(theirs))
        assert_near(model(APART, output="logits"), expected)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        changed = model(APART, output="logits")
        assert (changed - expected).abs().max() > 0.1
        hf.save_trained(end, start, model.named_parameters(), torch.float32)
        again = classes_of(config_of(family)).from_pretrained(end, attn_implementation="eager").eval()
        assert type(again) is type(theirs)
        assert_near(torch.cat(logits_of(again)), changed)
    assert (end / "preprocessor_config.json").is_file()
    hf.save_trained(half, start, model.named_parameters(), torch.bfloat16)
    before, after = load_file(start / "model.safetensors"), load_file(half / "model.safetensors")
    assert before.keys() == after.keys()
    kept = {name for name in before if before[name].dtype == after[name].dtype}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    tower = {name for name in before if "vision" in name or "visual" in name or "projector" in name}
    assert bool(tower) == (family in VISION_LANGUAGE)
    assert kept == tower | {name for name in before if name.endswith("layer_scalar")}


def test_the_flat_config_of_older_qwen_folders_means_the_same():
    config = config_of("qwen2.5-vl")
    text = config["text_config"]
    flat = {key: text[key] for key in text if key not in ("rope_parameters", "model_type", "layer_types")}
    flat |= {key: config[key] for key in ("model_type", "architectures", "tie_word_embeddings", "vision_config")}
    flat |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    shape, expected = read_shape(flat), read_shape(config)
    assert shape.rope["rope_type"] == "default" and shape.rope["rope_theta"] == 1e4
    assert dataclasses.replace(shape, rope=expected.rope) == expected


def test_a_foreign_tensor_in_the_text_part_is_told_and_one_beside_it_is_not(tmp_path):
    reference(config_of("mistral3")).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "vision_tower.more": torch.zeros(2)}, file)
    hf.check_trainable(tmp_path)
    save_file({**weights, "language_model.model.more": torch.zeros(2)}, file)
    with pytest.raises(ModelError, match=r"has unknown language_model\.model\.more$"):
        hf.check_trainable(tmp_path)
    del weights["language_model.model.norm.weight"]
    save_file(weights, file)
    with pytest.raises(ModelError, match="lacks model.norm.weight"):
        hf.check_trainable(tmp_path)


MIXTURES = {
    "qwen3 moe": {"num_experts": 8, "num_local_experts": 8},
    "mixtral": {"num_local_experts": 300},
    "gpt-oss": {},
    "qwen3.5": {"model_type": "qwen3_5_moe_text", "num_experts": 8, "shared_expert_intermediate_size": 32},
}
"""family -> what its config has otherwise: ids of two bytes, and rows that are padded, among them"""
ROUTED = SEQUENCES[::2]
ROUTED_APART = pack_from(ROUTED, [4, 3, 4], share_prefixes=False)


def mixture(family: str, recompute: int = 0) -> LanguageModel:
    more = {"num_experts_per_tok": 2, "moe_intermediate_size": 64} | MIXTURES[family]
    return make_pair(family, recompute, **more)[1]


def chosen_routes(model: LanguageModel, batch: PackedBatch) -> Tensor:
    """[tokens, layers, 2] what the model's routers choose by themselves, as the batch packs it."""
    chosen: dict[int, Tensor] = {}
    choose = Routing.choose

    def look(self: Routing, layer: int, scores: Tensor, best: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        chosen[layer] = best[1]
        return choose(self, layer, scores, best)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Routing, "choose", look)
        model(batch)
    routes = torch.stack([chosen[layer] for layer in range(len(model.layers))], 1)
    return routes[: batch.tokens] if model.packs else routes[lay_out_rows(batch).places[: batch.tokens]]


def as_bytes(model: LanguageModel, routes: Tensor) -> Tensor:
    """[tokens, bytes] of [tokens, layers, 2]."""
    small = torch.uint8 if model.config.experts <= 256 else torch.uint16
    return routes.flatten(1).to(small).view(torch.uint8)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("recompute", [0, 2])
def test_replayed_a_models_routes_change_no_bit_and_no_route_does_not_either(family, recompute):
    model, batch = mixture(family, recompute), pack_from(ROUTED, [4, 3, 4])
    routes, results = as_bytes(model, chosen_routes(model, batch)), []
    for given in (None, routes, torch.full_like(routes, MISSING)):
        model.zero_grad()
        logprobs, entropy = model(dataclasses.replace(batch, routes=given), 0.7)
        (logprobs.sum() + entropy.sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append(([logprobs, entropy, *gradients], model.expert_counts.take()))
    for numbers, counts in results[1:]:
        torch.testing.assert_close(numbers, results[0][0], rtol=0, atol=0)
        assert counts["experts/max_load"] == results[0][1]["experts/max_load"] > 1
    assert [counts.get("experts/differing") for _, counts in results] == [None, 0.0, None]


@pytest.mark.parametrize("family", MIXTURES)
def test_another_route_is_taken_and_seen(family):
    """One token of the last sequence goes elsewhere in the first layer: targets before it stay, it and those behind it
    do not; the gates of the planted experts, computed by the router, send gradients to its weights."""
    model = mixture(family)
    routes = chosen_routes(model, ROUTED_APART)
    other = [expert for expert in range(model.config.experts) if expert not in routes[-3, 0]][:2]
    routes[-3, 0] = torch.tensor(other)
    usual, _ = model(ROUTED_APART)
    model.expert_counts.take()
    planted, _ = model(dataclasses.replace(ROUTED_APART, routes=as_bytes(model, routes)))
    far = (planted - usual).abs()
    assert far[:-2].amax() < 2e-6 and far[-2:].amin() > 1e-3  # an expert with more tokens may round otherwise
    routers = [name for name, _ in model.named_parameters() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == 3
    planted[-2].backward()
    assert dict(model.named_parameters())[routers[0]].grad[other].abs().amin() > 0
    assert model.expert_counts.take()["experts/differing"] >= 2 / routes.numel()


def test_routes_of_another_model_are_refused():
    model = mixture("qwen3 moe")
    for width, value in ((6, 8), (4, 0), (12, 1)):
        routes = torch.full((ROUTED_APART.tokens, width), value, dtype=torch.uint8)
        with pytest.raises(RunError, match=f"{width} bytes a token are none of 3 layers with 8 experts"):
            model(dataclasses.replace(ROUTED_APART, routes=routes))
