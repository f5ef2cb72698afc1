"""Replayed routes of tiny random mixtures: the own ones change no bit, others are seen, and gradients reach routers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.errors import RunError
from shared.model.implementation import make_model, read_shape
from shared.model.language_model import LanguageModel
from shared.model.packing import PackedBatch
from shared.model.routing import MISSING, Routing
from shared.model.transformers_decoder import TransformersDecoder, lay_out_rows
from tests.families import config_of, reference
from tests.packed import pack_from

SEQUENCES = [[5, 9, 33, 2, 7, 7, 60], [96, 4, 8] * 12, [5, 9, 33, 2, 11, 12]]
FIRSTS = [4, 3, 4]
"""the first and the last share a prompt, which is stored once"""
MIXTURES = {
    "qwen3 moe": {"num_experts": 8, "num_local_experts": 8},
    "mixtral": {"num_local_experts": 300},
    "gpt-oss": {},
    "qwen3.5": {"model_type": "qwen3_5_moe_text", "num_experts": 8, "shared_expert_intermediate_size": 32},
}
"""family -> what its config has otherwise: ids of two bytes, and rows that are padded, among them"""


def mixture(family: str, recompute: int = 0) -> LanguageModel:
    config = config_of(family, **{"num_experts_per_tok": 2, "moe_intermediate_size": 64} | MIXTURES[family])
    model = make_model(read_shape(config, "transformers"), config, recompute)
    state = reference(config).state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()}, strict=True)
    return model


def own_routes(model: LanguageModel, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[tokens, layers, 2] what the model's routers choose by themselves, as the batch packs it."""
    chosen: dict[int, Tensor] = {}
    choose = Routing.choose

    def look(self: Routing, layer: int, scores: Tensor, best: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        chosen[layer] = best[1]
        return choose(self, layer, scores, best)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Routing, "choose", look)
        model(batch)
    assert isinstance(model, TransformersDecoder)
    routes = torch.stack([chosen[layer] for layer in range(len(model.layers))], 1)
    return routes[: batch.tokens] if model.packs else routes[lay_out_rows(batch).places[: batch.tokens]]


def as_bytes(model: LanguageModel, routes: Tensor) -> Tensor:
    """[tokens, bytes] of [tokens, layers, 2]."""
    small = torch.uint8 if model.config.experts <= 256 else torch.uint16
    return routes.flatten(1).to(small).view(torch.uint8)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("recompute", [0, 2])
def test_own_routes_change_no_bit(family: str, recompute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed, a model's own routes give the same bits, log-probs and gradients; and so does no route at all."""
    model, batch = mixture(family, recompute), pack_from(SEQUENCES, FIRSTS)
    assert model.expert_counts is not None
    routes = as_bytes(model, own_routes(model, batch, monkeypatch))
    found = []
    for given in (None, routes, torch.full_like(routes, MISSING)):
        model.zero_grad()
        logprobs, entropy = model(replace(batch, routes=given), 0.7)
        (logprobs.sum() + entropy.sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((logprobs, entropy, gradients, model.expert_counts.take()))
    for logprobs, entropy, gradients, counts in found[1:]:
        assert torch.equal(logprobs, found[0][0]) and torch.equal(entropy, found[0][1])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][2][name], rtol=0, atol=0, msg=name)
        assert counts["experts/max_load"] == found[0][3]["experts/max_load"] > 1
    assert [counts.get("experts/differing") for *_, counts in found] == [None, 0.0, None]


@pytest.mark.parametrize("family", MIXTURES)
def test_another_route_is_taken_and_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the last sequence goes elsewhere in the first layer: targets before it stay, it and those behind it
    do not; the gates of the planted experts, computed by the router, send gradients to its weights."""
    model, batch = mixture(family), pack_from(SEQUENCES, FIRSTS, share_prefixes=False)
    assert model.expert_counts is not None
    routes = own_routes(model, batch, monkeypatch)
    token = len(routes) - 3
    other = [expert for expert in range(model.config.experts) if expert not in routes[token, 0]][:2]
    routes[token, 0] = torch.tensor(other)
    own, _ = model(batch)
    model.expert_counts.take()
    model.zero_grad()
    planted, _ = model(replace(batch, routes=as_bytes(model, routes)))
    far = (planted - own).abs()
    assert far[:-2].amax() < 2e-6 and far[-2:].amin() > 1e-3  # an expert with more tokens may round otherwise
    routers = [name for name, _ in model.named_parameters() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == 3
    planted[-2].backward()
    gradient = dict(model.named_parameters())[routers[0]].grad
    assert gradient is not None and gradient[other].abs().amin() > 0
    assert model.expert_counts.take()["experts/differing"] >= 2 / routes.numel()


def test_routes_of_another_model_are_refused() -> None:
    model, batch = mixture("qwen3 moe"), pack_from(SEQUENCES, FIRSTS)
    for width, value in ((6, 8), (4, 0), (12, 1)):
        routes = torch.full((batch.tokens, width), value, dtype=torch.uint8)
        with pytest.raises(RunError, match=f"{width} bytes a token are none of 3 layers with 8 experts"):
            model(replace(batch, routes=routes))
