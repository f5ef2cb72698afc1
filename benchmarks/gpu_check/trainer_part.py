"""Items of the trainer part: one trainer rank on the device, without vLLM. Each yields figures; limits are targets."""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import head_memory
from benchmarks.figures import Figure, NotMeasured
from benchmarks.gpu_check.gradients import (
    FAR,
    GRADIENTS,
    compare,
    distance,
    exact_copy,
    gradients_of,
    score_first,
    some_batches,
)
from benchmarks.gpu_check.place import COPY, MATMUL, Where
from benchmarks.gpu_check.speed import fusion, step_large, step_middle, step_small
from benchmarks.peak import SIZES, Peak
from benchmarks.step import Rank, alone, draw, make_sequences, micro_batches
from lab.plan.scenario import MODELS
from rollout.weights import make_sender
from rollout.weights.checksum import checksum_rows
from rollout.weights.cuda_ipc import DeviceShard
from rollout.weights.layout import read_layout
from rollout.weights.shm import import_handle, open_buffer
from shared.model import lora
from shared.model.attention import attend, plan_attention
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder
from shared.model.implementation import make_model, read_shape
from shared.model.logprobs import chunked_logprobs
from shared.types import MicroBatch
from trainer.objectives.registry import read_objective
from trainer.step import fsdp, optimiser
from trainer.step.flops import peak_of
from trainer.step.forward_backward import forward_backward

__all__ = ["fusion", "step_large", "step_middle", "step_small"]
SAME = 2e-2
"""the same of packed sequences from each alone, both in bfloat16"""
OPTIMISER_BYTES = 4 + 4 + 8 + 4 + 8
"""that AdamW moves for a parameter: weight, gradient, moments read; weight, moments written"""
SMALL = ((256, 256, 256),)
"""product of a try: a CPU may multiply bfloat16 slowly"""
READ_S = 40.0


def peaks(where: Where) -> Iterator[Figure]:
    """Matrix products and copies."""
    rate = Peak(torch.bfloat16, where.device, where.size(SIZES, SMALL), repeats=where.size(3, 1)).measure()
    yield Figure(MATMUL, [rate / 1e12], "TFLOP/s")
    if where.on_card and (sheet := peak_of(torch.cuda.get_device_name(where.device))):
        yield Figure(f"{MATMUL}: share", [rate / sheet], "%", "the data sheet's dense bfloat16 peak")
    count = where.size(1 << 30, 1 << 24)
    source = torch.zeros(count, dtype=torch.uint8, device=where.device)
    target = torch.empty_like(source)
    yield Figure(COPY, [2e-9 * count / where.seconds(lambda: target.copy_(source))], "GB/s")
    if where.on_card:
        host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        yield Figure("copy from pinned host memory", [1e-9 * count / where.seconds(lambda: target.copy_(host))], "GB/s")
        yield Figure("copy to pinned host memory", [1e-9 * count / where.seconds(lambda: host.copy_(source))], "GB/s")


def gradients(where: Where) -> Iterator[Figure]:
    """A whole step's gradients, through the trainer's own objective."""
    batches = some_batches(where, GRADIENTS.vocab_size)
    with alone(where.device) as mesh:
        for dtype in ("bfloat16", "float32"):
            rank = Rank(GRADIENTS, dtype, mesh, where.device)
            exact = exact_copy(rank, Decoder(GRADIENTS, attention="bmm"))
            yield from compare(f"gradients in {dtype}", rank, exact, batches, FAR[dtype])
            del rank, exact


def adapters(where: Where) -> Iterator[Figure]:
    """Gradients of low-rank adapters, and their step beside that of all weights: one of 8,192 packed tokens."""
    batches = some_batches(where, GRADIENTS.vocab_size)
    config = where.size(MODELS["0.6b"], GRADIENTS)
    length, count = where.size((1024, 8), (32, 2))
    together = micro_batches(make_sequences([length] * count, config.vocab_size, length // 4), length * count)
    with alone(where.device) as mesh:
        for dtype in ("bfloat16", "float32"):
            rank = Rank(GRADIENTS, dtype, mesh, where.device, adapters=8)
            exact = Decoder(GRADIENTS, attention="bmm")
            lora.attach(exact, 8, 16.0)
            yield from compare(f"adapters' gradients in {dtype}", rank, exact_copy(rank, exact), batches, FAR[dtype])
            del rank, exact
        seconds, peaks = [], []
        for rank_of in (0, 16):
            rank = Rank(config, "bfloat16", mesh, where.device, adapters=rank_of)
            if where.on_card:
                torch.cuda.reset_peak_memory_stats()
            rank.step(together)
            seconds.append(statistics.median(rank.step(together) for _ in range(3)))
            peaks.append(torch.cuda.max_memory_allocated() if where.on_card else 0)
            del rank
    yield Figure(f"step of {length * count:,} tokens with adapters of rank 16: time", [seconds[1] / seconds[0]], "",
                 "that of all weights")  # fmt: skip
    if where.on_card:
        yield Figure("step with adapters: largest memory", [peaks[1] / peaks[0]], "", "that of all weights")


def described(name: str, **more: Any) -> dict[str, Any]:
    """The config.json of a small model that the module of transformers trains."""
    return {
        "model_type": name, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, **more,
    }  # fmt: skip


EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
WINDOWS = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {
    "phi4": described("phi3", partial_rotary_factor=0.75),
    "gemma3": described("gemma3_text", **WINDOWS, query_pre_attn_scalar=64),
    "qwen3 moe": described("qwen3_moe", norm_topk_prob=True, **EXPERTS),
    "gpt-oss": described("gpt_oss", **WINDOWS, **EXPERTS),
}
"""partial rotation, windows, experts, windows with sinks and experts"""


def families(where: Where) -> Iterator[Figure]:
    """Models that the module of transformers trains: gradients beside those of a CPU in float32, and a step of 8,192
    packed tokens beside that of our own decoder."""
    if importlib.util.find_spec("transformers") is None:
        raise NotMeasured("transformers is not installed")
    objective = read_objective({})
    with alone(where.device) as mesh:
        for family, config in FAMILIES.items():
            shape = read_shape(config, "transformers")
            batches = some_batches(where, shape.vocab_size)
            for dtype in ("bfloat16", "float32"):
                rank = Rank(shape, dtype, mesh, where.device, described=config)
                exact = make_model(shape, config)
                with torch.no_grad():
                    for one, other in zip(exact.parameters(), rank.decoder.parameters(), strict=True):
                        one.copy_(fsdp.local(other))
                score_first(exact, batches)
                found = []
                for model in (rank.decoder, exact):
                    forward_backward(model, batches, 1.0, objective)
                    found.append(gradients_of(model))
                fsdp.reshard(rank.decoder)
                # bfloat16 sends tokens to other experts and sharpens no two families' scores alike: told, not limited
                yield Figure(f"{family}, gradients in {dtype}: distance from a CPU's in float32", [distance(*found)],
                             "", "their norm", "lower", FAR[dtype] if dtype == "float32" else None)  # fmt: skip
                del rank, exact, found
        config = where.size(MODELS["0.6b"], GRADIENTS)
        length, count = where.size((1024, 8), (32, 2))
        together = micro_batches(make_sequences([length] * count, config.vocab_size, length // 4), length * count)
        seconds = []
        for theirs in (False, True):
            rank = Rank(config, "bfloat16", mesh, where.device, described=as_qwen3(config) if theirs else None)
            rank.step(together)
            seconds.append(statistics.median(rank.step(together) for _ in range(3)))
            del rank
    yield Figure(f"step of {length * count:,} tokens through the module of transformers: speed",
                 [seconds[0] / seconds[1]], "", "our own decoder", "higher",
                 0.8 if where.on_card else None)  # fmt: skip


def as_qwen3(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of that shape."""
    return described(
        "qwen3", vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.key_heads, head_dim=config.head_dim, tie_word_embeddings=config.tied,
        rms_norm_eps=config.norm_epsilon, use_sliding_window=False,
    )  # fmt: skip


def attention(where: Where) -> Iterator[Figure]:
    """Forward and backward of one layer's attention, 32 heads on 8 of 128 channels."""
    heads, key_heads, width = where.size((32, 8, 128), (4, 2, 16))
    dtype = torch.bfloat16 if where.on_card else torch.float32
    ratios = {}
    for tokens in where.size((4096, 8192, 16_384, 32_768), (64, 256)):
        piece = tokens // 8
        for name, lengths, prefixes in (
            (f"one sequence of {tokens:,} tokens", [tokens], [-1]),
            (f"7 completions of a prompt, {tokens:,} tokens", [piece] * 8, [-1, *[0] * 7]),
        ):
            plan = plan_attention(lengths, prefixes, heads, key_heads, where.device, dtype)
            joined = torch.randn(tokens, heads + 2 * key_heads, width, device=where.device, dtype=dtype)
            joined.requires_grad_()
            out_gradient = torch.randn(tokens, heads, width, device=where.device, dtype=dtype)

            def both(joined=joined, plan=plan, out_gradient=out_gradient) -> None:  # type: ignore[no-untyped-def]
                attend(joined, plan).backward(out_gradient)
                joined.grad = None

            extra, seconds = where.extra_bytes(both), where.seconds(both)
            before = [lengths[prefix] if prefix >= 0 else 0 for prefix in prefixes]
            squares = sum(own * (own + 2 * more) for own, more in zip(lengths, before, strict=True))
            flops = 6.0 * heads * width * squares
            yield from shares(where, f"attention, {name}", flops, seconds)
            taken = extra / (joined.numel() * joined.element_size())
            yield Figure(f"attention, {name}: extra memory", [taken], "", "queries, keys and values")
            if len(lengths) == 1:
                ratios[tokens] = taken
    first, *_, last = ratios
    if where.on_card:
        yield Figure(f"extra memory of a token, {last:,} tokens", [ratios[last] / ratios[first]], "",
                     f"that of {first:,}", "lower", 1.2)  # fmt: skip


def shares(where: Where, name: str, flops: float, seconds: float) -> Iterator[Figure]:
    """Yield the speed of an amount of work, and its share of the fastest product where that is known."""
    yield Figure(f"{name}: speed", [1e-12 * flops / seconds], "TFLOP/s")
    if where.peak:
        yield Figure(f"{name}: share", [flops / seconds / where.peak], "%", MATMUL)


def head(where: Where) -> Iterator[Figure]:
    """Log-probs of a large vocabulary, forward and backward."""
    tokens, vocabulary, hidden = where.size((8192, 131_072, 2048), (128, 512, 32))
    dtype = torch.bfloat16 if where.on_card else torch.float32
    states = (hidden**-0.5 * torch.randn(tokens, hidden, device=where.device)).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=where.device).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=where.device)

    def both() -> None:
        logprobs, _ = chunked_logprobs(states, weight, targets, 1.0)
        logprobs.sum().backward()
        states.grad = weight.grad = None

    name = f"head, {tokens:,} tokens, {vocabulary:,} words"
    yield from shares(where, name, 6.0 * tokens * vocabulary * hidden, where.seconds(both))
    exact = torch.log_softmax(states[:64].double() @ weight.double().T, -1)
    exact = exact.gather(-1, targets[:64, None]).squeeze(-1)
    off = float((chunked_logprobs(states[:64], weight, targets[:64], 1.0)[0].double() - exact).abs().max())
    yield Figure(f"{name}: largest error of a log-prob", [off], "nats", "", "lower", 1e-4)
    if where.on_card:
        torch.cuda.empty_cache()
    if not where.tiny:  # resident memory of a small head is what the allocator keeps
        _, growing = head_memory.beside_logits(tokens, vocabulary)
        yield Figure(f"{name}: memory that grows with tokens x words", [growing], "", "float32 logits", "lower", 0.02)
    else:
        yield Figure("extra memory of the head", [float(head_memory.measured(tokens, vocabulary))], "bytes")


def packing(where: Where) -> Iterator[Figure]:
    """The same sequences packed into micro-batches, and each in one of its own."""
    config = where.size(replace(MODELS["0.6b"], layers=8, vocab_size=32_768), GRADIENTS)
    tokens = where.size(16_384, 512)
    sequences = draw(tokens, 0, config.vocab_size)
    objective, dtype = read_objective({}), "bfloat16"
    with alone(where.device) as mesh:
        rank = Rank(config, dtype, mesh, where.device)
        together, singles = micro_batches(sequences, tokens), [MicroBatch([one]) for one in sequences]
        found = []
        for batches in (together, singles):
            forward_backward(rank.decoder, batches, 1.0, objective)
            found.append(gradients_of(rank.decoder))
            fsdp.reshard(rank.decoder)
        off = distance(found[0], found[1])
        yield Figure("gradients, packed", [off], "", "their distance from each alone", "lower", SAME)
        rank.step(together)
        packed = statistics.median(rank.step(together) for _ in range(3))
        rank.step(singles)
        single = statistics.median(rank.step(singles) for _ in range(3))
    yield Figure(f"step of {len(sequences)} sequences, packed", [packed / single], "", "each alone", "lower",
                 1.0 if where.on_card else None)  # fmt: skip


def adamw(
    weight: torch.Tensor, gradients: Sequence[torch.Tensor], rate: float, decay: float, betas: tuple[float, float],
    epsilon: float,
) -> torch.Tensor:  # fmt: skip
    """Steps of AdamW in float64, in its own words."""
    w, first, second = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for step, gradient in enumerate(gradients, 1):
        g, (one, two) = gradient.double(), betas
        w = w * (1 - rate * decay)
        first, second = one * first + (1 - one) * g, two * second + (1 - two) * g * g
        w = w - rate * (first / (1 - one**step)) / ((second / (1 - two**step)).sqrt() + epsilon)
    return w


def adamw_step(where: Where) -> Iterator[Figure]:
    """AdamW over float32 master weights."""
    from shared.sections import Optimiser

    rows = where.size(1 << 16, 64)
    model = torch.nn.Linear(4096 if not where.tiny else 32, rows, bias=False, device=where.device)
    settings = Optimiser.model_validate({"weight_decay": 0.1})
    made, start = optimiser.make_optimiser(model, settings), model.weight.detach().clone()
    torch.manual_seed(0)
    gradients = [torch.randn_like(start[:256]) for _ in range(3)]
    for gradient in gradients:
        model.weight.grad = torch.zeros_like(start)
        model.weight.grad[:256] = gradient
        optimiser.update(model, made, 1e-2)
    moved = model.weight.detach()[:256].double() - start[:256].double()
    exact = adamw(start[:256], gradients, 1e-2, 0.1, settings.betas, settings.epsilon) - start[:256].double()
    far = float((moved - exact).abs().max() / exact.abs().max())
    yield Figure("three AdamW steps: largest distance from float64", [far], "", "the largest move", "lower", 1e-5)
    kept = torch.randn_like(start)

    def step() -> None:
        model.weight.grad = kept
        optimiser.update(model, made, 1e-6)

    moved_bytes = OPTIMISER_BYTES * start.numel()
    rate = moved_bytes / where.seconds(step)
    yield Figure(f"AdamW of {start.numel() / 1e6:,.0f} M parameters", [rate / 1e9], "GB/s")
    if where.copy:
        yield Figure("AdamW: share", [rate / where.copy], "%", COPY)


def read_elsewhere(kind: str, description: dict[str, Any], answers: Any) -> None:
    """The engine's process: opens the buffers, reads version 1 and sums it up."""
    layout = read_layout(description["layout"])
    rows = [(str(name), int(first), int(count)) for name, first, count in description["rows"]]
    if kind == "cuda_ipc":
        shard = DeviceShard(layout, rows, import_handle(description["handle"]))
        views = [shard.rows_view(1, number) for number in range(len(rows))]
        version = int(shard.version_flag(1).item())
    else:
        buffer = open_buffer(description["path"], layout)
        views, version = [buffer.tensor(1, name) for name, _, _ in rows], buffer.version_flags(1)[0]
    sums = {name: checksum_rows(view, first, layout.dtype) for (name, first, _), view in zip(rows, views, strict=True)}
    target = [torch.empty_like(view) for view in views]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for own, view in zip(target, views, strict=True):
            own.copy_(view)
        if kind == "cuda_ipc":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    answers.put((version, sums, statistics.median(seconds)))


def transfer(where: Where) -> Iterator[Figure]:
    """A version written into the transfer buffers, and another process that reads it."""
    config = where.size(MODELS["0.6b"], GRADIENTS)
    with torch.device(where.device):
        decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_()
    kind = "cuda_ipc" if where.on_card else "shm"
    named = list(decoder.named_parameters())
    sender = make_sender(kind, named, torch.bfloat16, rank=0, world=1, store=dist.HashStore(), engines=1)
    seconds = []
    for version in (1, 3, 5, 1):  # odd ones share a buffer
        written, taken = sender.write(version)
        seconds.append(taken)
    moved = 3 * written  # 4 bytes read and 2 written for each parameter
    rate = moved / statistics.median(seconds[1:])
    yield Figure(f"write of {written / 1e9:.2f} GB for the engines", [1e-9 * rate], "GB/s")
    if where.copy:
        yield Figure("write for the engines: share", [rate / where.copy], "%", COPY)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=read_elsewhere, args=(kind, sender.describe(), answers), daemon=True)
    process.start()
    version, sums, took = answers.get(timeout=READ_S)
    process.join(READ_S)
    wrong = sum(sums.get(name) != own for name, own in sender.checksums().items()) + (version != 1)
    yield Figure("tensors and versions that another process reads otherwise", [float(wrong)], "", "", "lower", 0.0)
    yield Figure("copy by another process", [2e-9 * written / took], "GB/s")
    if where.copy:
        yield Figure("copy by another process: share", [2 * written / took / where.copy], "%", COPY)
    sender.close()
