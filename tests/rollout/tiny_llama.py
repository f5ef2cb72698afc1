"""A tiny random Llama on disk, a stand-in for the trainer ranks, and the settings of an engine that serves it."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rollout.weights import WeightSender, make_sender
from shared.config import Config
from shared.launch.messages import GenerateRequest
from shared.model.language_model import LanguageModel
from shared.types import Completion
from tests.packed import pack_from

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY, STOP = 64, 3, 2, 1, 160, 512, 511


def tiny_shapes(tied: bool = True) -> list[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of the tiny Llama, in named_parameters order."""
    head = HIDDEN // HEADS
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes += [
            (f"{prefix}.self_attn.q_proj.weight", (HEADS * head, HIDDEN)),
            (f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * head, HIDDEN)),
            (f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * head, HIDDEN)),
            (f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * head)),
            (f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)),
            (f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)),
            (f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)),
            (f"{prefix}.input_layernorm.weight", (HIDDEN,)),
            (f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)),
        ]
    shapes.append(("model.norm.weight", (HIDDEN,)))
    return shapes if tied else [*shapes, ("lm_head.weight", (VOCABULARY, HIDDEN))]


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """fp32 weights large enough that other weights give other greedy tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tiny_shapes():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * (0.4 if "embed" in name else shape[1] ** -0.5)
    return weights


def write_model(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Path:
    """Write a Hugging Face folder without tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": STOP,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: w.to(dtype).contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


class Trainers:
    """One trainer rank without training: holds master weights and publishes them."""

    def __init__(self, seed: int, store: dist.Store, transport: str = "shm"):
        device = "cuda" if transport == "cuda_ipc" else "cpu"
        self.parameters = {name: torch.nn.Parameter(value.to(device)) for name, value in random_weights(seed).items()}
        self.sender: WeightSender = make_sender(
            transport, list(self.parameters.items()), torch.float32, rank=0, world=1, store=store, engines=1
        )

    def become(self, seed: int) -> None:
        """An "optimiser step": the weights of another seed, in place."""
        with torch.no_grad():
            for name, value in random_weights(seed).items():
                self.parameters[name].copy_(value)


def request(
    index: int, max_tokens: int = 40, temperature: float = 0.0, *, group: int = 0, seed: int | None = None
) -> GenerateRequest:
    """A completion to sample after a prompt of 150 tokens, longer than a block of the prefix cache."""
    prompt = [1] + [(7 * index + 3 * position) % 500 for position in range(149)]
    completion = Completion(group=group, index=index, seed=index if seed is None else seed)
    return GenerateRequest(prompt, completion, max_tokens, temperature)


def largest_gap(left: list[float], right: list[float]) -> float:
    """max |difference|."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def assert_computed_with(
    truth: LanguageModel, found: list[tuple[list[int], Completion]], within: float = 2e-4, greedy: bool = False
) -> None:
    """Prompts and completions have the log-probs of the trainers' model at temperature 1, greedy ones its best."""
    for prompt, completion in found:
        batch = pack_from([prompt + completion.token_ids], [len(prompt)])
        with torch.no_grad():
            assert largest_gap(truth(batch)[0].tolist(), completion.logprobs) < within
            if greedy:
                logits = truth(batch, output="logits")[-len(completion.token_ids) - 1 : -1]
                best = logits.log_softmax(-1).max(-1).values.tolist()
                assert largest_gap(best, completion.logprobs) < within


def engine_config(deadlines: dict[str, float] | None = None, **rollout: object) -> Config:
    """Settings of a small fp32 engine."""
    sizes = {"cache_bytes": 32 << 20, "max_completion_tokens": 512, "max_sequences": 64, **rollout}
    model = {"dtype": "float32", "max_tokens": 640}
    return Config.model_validate({"model": model, "rollout": sizes, "deadlines": deadlines or {}})
