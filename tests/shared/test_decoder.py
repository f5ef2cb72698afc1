"""The native decoder against transformers, and the properties that training leans on. Refused configs: test_hf.py."""

import copy

import pytest
import torch
import transformers

from shared.errors import ModelError
from shared.model import hf
from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.model_folder import load_model
from tests.packed import entropy_from_logits, logprobs_from_logits, pack_from

COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
SHORT = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama yarn": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "yarn", **SHORT}}),
    "mistral": ("MistralForCausalLM", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}
SEQUENCES = [[5, 9, 33, 2, 7, 7, 60], [1], [96, 4, 8] * 12]
BATCH = pack_from(SEQUENCES, [1, 1, 1])


def make_pair(name):
    """(transformers model, our decoder with its weights)."""
    architecture, extra = CASES[name]
    torch.manual_seed(3)
    kind = getattr(transformers, architecture)
    theirs = kind(kind.config_class(**(COMMON | extra))).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = Decoder(DecoderConfig.from_hf(theirs.config.to_dict() | {"architectures": [architecture]}))
    state = {key: value for key, value in theirs.state_dict().items() if key in dict(ours.named_parameters())}
    ours.load_state_dict(state, strict=True)
    return theirs, ours


def gradients(decoder):
    return [parameter.grad.clone() for parameter in decoder.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_transformers_and_a_saved_folder_is_read_there_and_here(name, tmp_path):
    theirs, ours = make_pair(name)
    expected = torch.cat([theirs(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])
    actual = ours(BATCH, output="logits")
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)) / 50
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    truth = dict(theirs.named_parameters())
    assert {key for key, _ in ours.named_parameters()} == truth.keys(), "Hugging Face's names"
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, truth[key].grad, atol=2e-5, rtol=1e-4, msg=key)
    weights = [key for key in truth if key.endswith("proj.weight") and ".layers.0." in key]
    ordered = [key for key, _ in ours.named_parameters() if key in weights]
    parts = [key.rsplit(".", 2)[1] for key in ordered]  # in the order in which engines fuse them
    assert parts == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = theirs.config.to_dict() | {"architectures": [CASES[name][0]]}
    hf.save_model(tmp_path / "m", config, ours.named_parameters(), torch.float32, shard_bytes=9000)
    assert (tmp_path / "m" / hf.INDEX).exists()
    assert all(map(torch.equal, load_model(tmp_path / "m").parameters(), ours.parameters()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert type(again) is type(theirs)
    assert all(map(torch.equal, again.state_dict().values(), theirs.state_dict().values()))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_and_entropy_are_those_of_the_logits(temperature):
    _, ours = make_pair("qwen2")
    batch = pack_from(SEQUENCES, [3, 1, 20])
    logprobs, entropy = ours(batch, temperature)
    logits = ours(batch, output="logits")[batch.loss_positions]
    torch.testing.assert_close(logprobs, logprobs_from_logits(logits, batch.targets, temperature), atol=1e-5, rtol=1e-5)
    expected = entropy_from_logits(logits, temperature)
    torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-5)
    actual, truth = (torch.autograd.grad(each.sum(), list(ours.parameters())) for each in (entropy, expected))
    torch.testing.assert_close(actual, truth, atol=3e-5, rtol=1e-4)  # rounding of the plain formula (float64 says)


def test_shared_prompts_change_neither_values_nor_gradients():
    _, ours = make_pair("qwen3")
    prompt, other = [5, 9, 33, 2, 7], [8, 8]
    sequences = [prompt + [7, 60, 3], other + [4], prompt + [1], prompt + [7, 61, 3, 3], prompt, other + [5, 6]]
    results = []
    for share in (False, True):
        ours.zero_grad()
        batch = pack_from(sequences, [5, 2, 5, 5, 5, 2], share_prefixes=share)
        logprobs, _ = ours(batch, 1.0)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        results.append([logprobs.detach(), *gradients(ours)])
    assert batch.tokens < sum(map(len, sequences)) - 10
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_a_batch_without_sequences_reaches_every_parameter_with_zero_gradient():
    _, ours = make_pair("qwen3 tied")
    logprobs, entropy = ours(pack_from([], []))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not any(gradient.any() for gradient in gradients(ours))


def test_recompute_changes_nothing():
    _, ours = make_pair("qwen3")
    results, runs, layers = [], [], ours.model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: runs.append(module))
    for ours.recompute in range(len(layers) + 1):
        ours.zero_grad()
        runs.clear()
        ours(BATCH)[0].sum().backward()
        assert [runs.count(layer) for layer in layers] == [1 + (n < ours.recompute) for n in range(len(layers))]
        results.append(gradients(ours))
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@pytest.mark.parametrize("name", ["qwen3", "qwen3 tied"])
def test_in_place_gradients_are_those_of_autograd(name):
    _, ours = make_pair(name)
    results = []
    for ours.in_place in (False, True):
        for parameter in ours.parameters():
            parameter.grad = torch.zeros_like(parameter)
        memory = [parameter.grad for parameter in ours.parameters()]
        for temperature in (1.0, 0.7):
            logprobs, entropy = ours(BATCH, temperature)
            (logprobs.sum() + 0.1 * entropy.sum()).backward()
        assert all(parameter.grad is kept for parameter, kept in zip(ours.parameters(), memory, strict=True))
        results.append(gradients(ours))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3 tied"])
@pytest.mark.parametrize("recompute", [0, 2])
def test_computing_in_bfloat16_rounds_the_weights_and_not_their_gradients_sum(name, recompute):
    """The same numbers as with weights in bfloat16, except where gradients of one weight meet."""
    _, ours = make_pair(name)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.3 if parameter.dim() == 2 else 1)  # bfloat16 holds these well
    rounded, exact = copy.deepcopy(ours).bfloat16(), ours(BATCH, 0.7)[0]
    ours.compute_dtype, ours.recompute = torch.bfloat16, recompute
    scored = ours(BATCH, 0.7), rounded(BATCH, 0.7)
    assert scored[0][0].dtype == torch.float32 and (exact - scored[0][0]).abs().mean() < 0.02
    assert all(map(torch.equal, *scored))
    assert torch.equal(ours(BATCH, output="logits"), rounded(BATCH, output="logits"))
    for logprobs, entropy in scored:
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    for (key, one), other in zip(ours.named_parameters(), rounded.parameters(), strict=True):
        assert one.grad.dtype == torch.float32
        if "lm_head" in key or "embed" in key:
            assert (one.grad - other.grad).norm() < 2**-6 * one.grad.norm(), key
        else:
            assert torch.equal(one.grad, other.grad.float()), key


def test_a_sequence_beyond_the_sliding_window_is_refused():
    decoder = Decoder(DecoderConfig.from_hf(COMMON | {"architectures": ["MistralForCausalLM"], "sliding_window": 8}))
    decoder(pack_from([[1] * 8], [1]))
    with pytest.raises(ModelError, match="sliding window of 8.*model.max_tokens"):
        decoder(pack_from([[1] * 9], [1]))


def test_initial_weights_depend_on_the_seed_alone():
    config = DecoderConfig.from_hf(COMMON | {"architectures": ["Qwen2ForCausalLM"], "initializer_range": 0.02})
    first, second, other = Decoder(config), Decoder(config), Decoder(config)
    for decoder, seed in ((first, 1), (second, 1), (other, 2)):
        initialise(decoder, seed)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    embedding, layer = first.model.embed_tokens.weight, first.model.layers[0]
    assert not torch.equal(embedding, other.model.embed_tokens.weight)
    assert embedding.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1), "there are 2 layers"
    assert not layer.self_attn.q_proj.bias.any()
