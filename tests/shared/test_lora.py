"""Adapters of linear layers: their formula, who has gradients, merging, and the folder that PEFT reads."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from shared.errors import ConfigError, ModelError
from shared.model import hf, lora
from shared.model.adapter_folder import merged_weights, read_matrices, read_settings, save_adapter
from shared.model.decoder import Decoder
from shared.model.implementation import make_model, read_shape
from tests.families import FAMILIES, config_of, reference
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.shared.test_hf import CONFIG, make_decoder
from trainer.memory import adapter_parameters, largest_tensor

BATCH = pack_from([[1, 2, 3, 4, 5], [7, 8, 9]], [2, 1])


def set_values(model: nn.Module, **values: list[Any]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name.replace("__", ".")).copy_(torch.tensor(value))


def set_random(matrices: dict[str, nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in matrices.values():
            each.copy_(torch.randn(each.shape, generator=generator) * 0.1)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def adapted(targets: str | list[str] = lora.ALL) -> Decoder:
    """A decoder with adapters of rank 2 and alpha 6 as training begins with them."""
    decoder = make_decoder()
    lora.attach(decoder, 2, 6.0, targets)
    matrices = trained(decoder)
    with torch.no_grad():
        for name, value in lora.first_values({name: each.shape for name, each in matrices.items()}, seed=3):
            matrices[name].copy_(value)
    return decoder


def test_a_layer_adds_its_scaled_product_by_hand():
    model = nn.Sequential(nn.Linear(3, 3))
    assert lora.attach(model, 1, 4.0) == ["0"] and isinstance(model[0], lora.LoraLinear)
    set_values(model[0], weight=torch.eye(3).tolist(), bias=[0.5] * 3)
    set_values(model[0], lora_A__weight=[[1.0, 2.0, 0.0]], lora_B__weight=[[1.0], [0.0], [-1.0]])
    # x = (1, 1, 0): A x = 3, scale 4 / 1, so 12 B = (12, 0, -12), and x + b = (1.5, 1.5, 0.5)
    assert model(torch.tensor([1.0, 1.0, 0.0])).tolist() == [13.5, 1.5, -11.5]


def test_at_first_the_model_is_the_frozen_one_and_only_adapters_have_gradients():
    decoder = adapted()
    assert torch.equal(decoder(BATCH, output="logits"), make_decoder()(BATCH, output="logits"))
    decoder(BATCH)[0].sum().backward()
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == ("lora_" in name), name
        if name.endswith(lora.A):
            assert not parameter.grad.any() and 0.9 / 4 < parameter.abs().max() <= 1 / 4 or "down" in name
        elif name.endswith(lora.B):
            assert parameter.grad.any() and not parameter.any()


@pytest.mark.parametrize("targets", [lora.ALL, ["q_proj", "down_proj"], ["mlp.up_proj"]])
def test_merged_through_its_folder_it_gives_the_same_logits_and_gradients_are_those_of_the_weights(tmp_path, targets):
    decoder, merged = adapted(targets), make_decoder()
    set_random(trained(decoder))
    matrices, state = trained(decoder), decoder.state_dict()
    plain = {name: value for name, value in state.items() if "lora_" not in name}
    hf.save_model(tmp_path / "base", CONFIG, plain, torch.float32)
    save_adapter(tmp_path / "adapter", matrices, 2, 6.0, "base")
    settings, again = read_settings(tmp_path / "adapter"), read_matrices(tmp_path / "adapter")
    assert (settings.rank, settings.alpha, settings.base) == (2, 6.0, "base") and settings.targets
    assert again.keys() == matrices.keys() and all(torch.equal(again[name], matrices[name]) for name in again)
    merged.load_state_dict(dict(merged_weights(tmp_path / "base", again, 3.0)))
    torch.testing.assert_close(decoder(BATCH, output="logits"), merged(BATCH, output="logits"), rtol=1e-5, atol=1e-5)
    for model in (decoder, merged):
        model(BATCH)[0].sum().backward()
    weights = dict(merged.named_parameters())
    for name, layer in lora.adapters(decoder):  # d B = scale dW A^T, d A = scale B^T dW
        d_weight = weights[name + ".weight"].grad
        d_a, d_b = (matrices[name + end].grad for end in (lora.A, lora.B))
        torch.testing.assert_close(d_b, 3 * d_weight @ layer.lora_A.weight.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(d_a, 3 * layer.lora_B.weight.T @ d_weight, rtol=1e-4, atol=1e-5)


FEW = ("gemma3", "qwen3 moe")
"""a mixture, whose experts stay frozen, and layers of two kinds; the others with --soak"""


@pytest.mark.parametrize(("family", "targets"), [
    *((one, lora.ALL) if one in FEW else pytest.param(one, lora.ALL, marks=pytest.mark.soak) for one in FAMILIES),
    ("qwen3 moe", [lora.ALL, lora.EXPERTS]), pytest.param("mixtral", [lora.EXPERTS], marks=pytest.mark.soak),
])  # fmt: skip
def test_modules_of_transformers_train_adapters_alone_and_merge(tmp_path, family, targets):
    """Every linear layer of every family but the head, and experts. Merged through the folders that a run writes, where
    a mixture's experts lie one by one; with recomputed layers bit for bit the same gradients."""
    config = config_of(family)
    reference(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    base, models = load_model(tmp_path / "base", implementation="transformers"), []
    frozen = base(BATCH, output="logits").detach()
    for recompute in (0, 2):
        model = make_model(read_shape(config, "transformers"), config, recompute)
        model.load_state_dict(dict(base.stored()))
        experts = model.config.expert_linears if lora.EXPERTS in targets else []
        linears = model.config.linears if lora.ALL in targets else []
        assert len(lora.attach(model, 3, 6.0, targets)) == len(linears) + len(experts) > 0
        set_random(matrices := trained(model))
        model(BATCH)[0].sum().backward()
        models.append(model)
    for (name, one), other in zip(model.named_parameters(), models[0].parameters(), strict=True):
        if name in matrices:
            assert one.grad.any() and torch.equal(one.grad, other.grad), f"{name}: not in the forward, or recomputed"
        else:
            assert one.grad is None and "lora_" not in name
    sizes = {name: each.numel() for name, each in matrices.items()}
    assert sum(sizes.values()) == adapter_parameters(model.config, 3, targets)
    assert experts or max(sizes.values()) == largest_tensor(model.config, 3)
    save_adapter(tmp_path / "adapter", matrices, 3, 6.0, str(tmp_path / "base"))
    again = read_matrices(tmp_path / "adapter")
    assert again.keys() == matrices.keys() and all(torch.equal(again[name], matrices[name]) for name in again)
    weights = merged_weights(tmp_path / "base", again, 2.0)
    hf.save_trained(tmp_path / "merged", tmp_path / "base", weights, torch.float32)
    merged, changed = (
        load_model(tmp_path / "merged", implementation="transformers"),
        model(BATCH, output="logits").detach(),
    )
    torch.testing.assert_close(merged(BATCH, output="logits"), changed, rtol=1e-5, atol=1e-5)
    assert float((changed - frozen).abs().max()) > 0.05


@pytest.mark.parametrize(("family", "implementation", "targets"), [
    *((family, "native", targets) for family in ("llama", "qwen2", "qwen3")
      for targets in (lora.ALL, ["v_proj", "down_proj"])),
    *((family, "transformers", lora.ALL) for family in ("qwen3", "gemma3", "olmo3", "qwen3 moe", "phi4", "glm4")),
    *((family, "transformers", [lora.ALL, lora.EXPERTS]) for family in ("qwen3 moe", "mixtral")),
])  # fmt: skip
def test_peft_reads_the_folder_and_gives_the_same_logits(tmp_path, family, implementation, targets):
    """Where it is installed: it is no dependency. A mixture's attention, and layers that a folder fuses, among them."""
    peft = pytest.importorskip("peft")
    base, ids = reference(config_of(family)), [3, 17, 5, 200, 9, 41, 8]
    base.save_pretrained(tmp_path / "model")
    decoder, merged = (load_model(tmp_path / "model", implementation=implementation) for _ in range(2))
    lora.attach(decoder, 4, 12.0, targets)
    set_random(trained(decoder))
    save_adapter(tmp_path / "adapter", trained(decoder), 4, 12.0, str(tmp_path / "model"))
    plain = base(torch.tensor([ids])).logits[0].detach()
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(torch.tensor([ids])).logits[0].detach()
    ours = decoder(pack_from([ids], [1]), output="logits").detach()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max().clamp(min=1)))
    assert float((theirs - plain).abs().max()) > 0.1
    merged.load_state_dict(dict(merged_weights(tmp_path / "model", read_matrices(tmp_path / "adapter"), 3.0)))
    torch.testing.assert_close(merged(pack_from([ids], [1]), output="logits"), ours, rtol=0, atol=1e-4)


class Experts(nn.Module):
    """Two experts of sides 1 and 2, without a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.tensor([[[1.0], [0.0]], [[2.0], [1.0]]]))
        self.down_proj = nn.Parameter(torch.tensor([[[1.0, 1.0]], [[0.0, 3.0]]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ up.T @ down.T for up, down in zip(self.gate_up_proj, self.down_proj, strict=True)])


def test_experts_compute_with_merged_weights_by_hand():
    model = nn.ModuleDict({"experts": Experts()})
    names = ["experts.lora_gate_up_proj", "experts.lora_down_proj"]
    assert lora.attach(model, 1, 2.0, ["experts"]) == names == [name for name, _ in lora.adapters(model)]
    (_, up), (_, down) = lora.adapters(model)
    set_values(up, lora_A__weight=[[[1.0]], [[0.5]]], lora_B__weight=[[[1.0], [2.0]], [[0.0], [1.0]]])
    set_values(down, lora_A__weight=[[[1.0, 0.0]], [[0.0, 1.0]]], lora_B__weight=[[[0.5]], [[-1.0]]])
    # scale 2. Expert 0: up (1, 0) + 2 (1, 2) = (3, 4), down (1, 1) + 2 (.5, 0) = (2, 1): 3 * 2 + 4 * 1 = 10.
    # Expert 1: up (2, 1) + 2 (0, .5) = (2, 2), down (0, 3) + 2 (0, -1) = (0, 1): 2
    output = model["experts"](torch.tensor([[1.0]]))
    assert output.flatten().tolist() == [10.0, 2.0]
    output.sum().backward()
    assert model["experts"].gate_up_proj.grad is None and model["experts"].gate_up_proj[0].flatten().tolist() == [1, 0]
    # d up of expert 0 is its down (2, 1): d A = 2 B^T d = 2 (1 * 2 + 2 * 1) = 8, d B = 2 d A^T = (4, 2)
    assert up.lora_A.weight.grad[0].item() == 8 and up.lora_B.weight.grad[0].flatten().tolist() == [4, 2]


def test_no_layer_keeps_merged_weights_for_the_backward_pass():
    """Adapters of experts: merged tensors of all layers would be a second model."""
    config = config_of("qwen3 moe")
    model = make_model(read_shape(config, "transformers"), config)
    lora.attach(model, 3, 6.0, [lora.ALL, lora.EXPERTS])
    ours = {each.untyped_storage().data_ptr() for each in model.parameters()}
    experts = next(each for name, each in model.named_parameters() if name.endswith("experts.gate_up_proj"))
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(BATCH)[0].sum().backward()
    assert kept and max(kept) < experts.numel() * 4


def test_targets_name_layers_by_the_end_of_their_names_and_what_names_nothing_is_refused():
    every = {name.rpartition(".")[2] for name, _ in lora.adapters(adapted())}
    assert every == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    some = [name for name, _ in lora.adapters(adapted(["mlp.up_proj"]))]
    assert some == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    for target in ("k_pro", lora.EXPERTS):
        with pytest.raises(ConfigError, match=rf'"{target}" names no layer .*\(these can: down_proj, .*q_proj'):
            adapted(["q_proj", target])
    model = nn.ModuleDict({"experts": Experts(), "q_proj": nn.Linear(1, 1)})
    model["experts"].is_transposed = True
    with pytest.raises(ConfigError, match=r'"experts" names no layer .*\(these can: q_proj\)'):
        lora.attach(model, 1, 2.0, ["experts"])


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q"]}


@pytest.mark.parametrize(("settings", "message"), [
    (ADAPTER | {"use_dora": True}, "use_dora is not"), ({"peft_type": "IA3"}, "peft_type IA3"),
    (ADAPTER | {"r": "two"}, "lacks r, lora_alpha"), (ADAPTER | {"lora_alpha": float("nan")}, "are no sizes"),
    (ADAPTER | {"lora_alpha": 10**400}, "are no sizes"),
    (ADAPTER | {"target_parameters": ["experts.down_proj"]}, "adapts down_proj: adapters of experts are those of"),
    ([], "is not a JSON object"),
])  # fmt: skip
def test_a_foreign_folder_is_refused_in_one_line(tmp_path, settings, message):
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message) as error:
        read_settings(tmp_path)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_refused(tmp_path):
    save_adapter(tmp_path / "a", {"q_proj" + lora.A: torch.ones(3, 4), "q_proj" + lora.B: torch.ones(4, 3)}, 2, 4.0, "")
    with pytest.raises(ModelError, match=r"of shape \(3, 4\) is no matrix of an adapter of rank 2"):
        read_matrices(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ModelError, match="cannot be read"):
        read_matrices(tmp_path / "a")
