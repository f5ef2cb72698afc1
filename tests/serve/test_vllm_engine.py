"""The engine of the server without the server, on real models: one that lives for most tests here, one that is stopped,
replaced and given newer weights, and one of a quantised model. How engines die: test_engine_deaths.py."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import weakref
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.start import engine_processes
from rollout.vllm_config import THREADS_VARIABLE
from serve.adapters import read_adapter
from serve.engine import Delta, EngineDied, SamplingParameters
from serve.letter_mask import LetterMask, MaskRequest, MaskState, reasoning_mask, scripts_of
from serve.vllm_engine import MINUS_INFINITY, VllmEngine, import_vllm
from shared.chat import Chat
from shared.errors import ModelError
from shared.model import hf
from shared.model.adapter_folder import merged_weights, read_matrices
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder
from shared.model.model_card import CARD
from shared.reasoning_tags import TEXT
from tests.model_folder import load_model
from tests.packed import pack_from
from tests.process import in_fresh_process
from tests.serve.command import untrained_model
from tests.serve.test_adapters import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

PROMPT = [5, 61, 7, 300, 12, 9, 42, 42, 7]
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISED = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**INT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**INT8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip


class Live:
    """An engine, and the loop that it lives in."""

    def __init__(self, model: Path, dtype: str = "float32", max_tokens: int = 512, **more: Any):
        self.runner = asyncio.Runner()
        self.engine = VllmEngine(
            str(model), max_tokens=max_tokens, max_sequences=8, cache_bytes=64 << 20, dtype=dtype, **more
        )

    def __enter__(self) -> Live:
        self.run(self.engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.engine.stop())
        self.runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def sample(self, prompt: list[int], **sampling: Any) -> list[Delta]:
        return [delta async for delta in self.engine.generate(prompt, SamplingParameters(**sampling))]

    def threads(self) -> int:
        """What it computes with."""
        assert self.engine.llm is not None
        [count] = self.run(self.engine.llm.collective_rpc("count_threads"))
        return int(count)


def count_threads(patch: pytest.MonkeyPatch, given: str) -> None:
    """Let engines count their threads, on a machine of two cores; given: what the user gives them."""
    patch.setattr("rollout.vllm_config.CPU_WORKER", "tests.serve.counted_threads.CountedThreads")
    patch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    patch.setenv("OMP_NUM_THREADS", given)
    patch.setenv(THREADS_VARIABLE, "")
    patch.delenv(THREADS_VARIABLE)  # it is not given, and what a start sets is taken back


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The quickstart's model before any training: its texts mean nothing, its tokens are tokens."""
    return untrained_model(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def versions(model, tmp_path_factory):
    """Adapters of the model."""
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), model, rank=3, seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def live(model, versions):
    """One with the first two adapters, for tests that do not end it."""
    adapters = {name: read_adapter(folder, model, "") for name, folder in zip(("one", "two"), versions, strict=False)}
    with pytest.MonkeyPatch.context() as patch:
        count_threads(patch, "1")
        with Live(model, adapters=adapters) as live:
            yield live


def test_closing_the_stream_aborts_the_request_in_the_engine(live):
    async def leave() -> tuple[int, int]:
        assert live.engine.llm is not None
        stream = live.engine.generate([5, 6, 7], SamplingParameters(max_tokens=400, ignore_eos=True))
        first = await anext(stream)
        assert first.token_ids and first.finish_reason is None
        before = live.engine.llm.get_num_unfinished_requests()
        await stream.aclose()
        return before, live.engine.llm.get_num_unfinished_requests()

    assert live.run(leave()) == (1, 0)


def test_deltas_stay_single_where_the_reader_lags(live):
    async def read_slowly() -> list[Delta]:
        slow = []
        async for delta in live.engine.generate([5, 6], SamplingParameters(max_tokens=60, temperature=0, logprobs=1)):
            slow.append(delta._replace(logprobs=[]) if delta.logprobs else delta)
            await asyncio.sleep(0.1 if len(slow) in (1, 5, 20) else 0)
        return slow

    quick, slow = live.run(live.sample([5, 6], max_tokens=60, temperature=0)), live.run(read_slowly())
    assert quick == slow and all(len(delta.token_ids) == 1 for delta in slow) and len(slow) == 60


def test_log_probs_of_a_prompt_are_those_of_the_model_whatever_the_sampling(model, live):
    """Of our own decoder on the same weights. The last request is one whose keys and values the engine could have kept
    from the first. Over HTTP: tests/trainer/objectives/test_teachers.py."""
    with torch.no_grad():
        logits: Tensor = load_model(model)(pack_from([PROMPT], [1]), output="logits")
    expected = logits.log_softmax(-1)[:-1]  # [prompt tokens - 1, vocabulary] of the tokens from the second on
    best = expected.topk(3).indices.tolist()
    narrow = {"temperature": 0.3, "top_p": 0.9}
    for more in (narrow, {"temperature": 1.7}, {"presence_penalty": 1.5}, narrow):
        deltas = live.run(live.sample(PROMPT, max_tokens=2, prompt_logprobs=3, **more))
        [places] = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
        assert [itself.token_id for itself, *_ in places] == PROMPT[1:]
        assert [[each.token_id for each in ranked] for _, *ranked in places] == best
        for place, candidates in enumerate(places):
            assert all(abs(each.logprob - float(expected[place, each.token_id])) < 1e-4 for each in candidates)
    single = live.run(live.sample([5], max_tokens=2, prompt_logprobs=3))
    assert sum(len(delta.token_ids) for delta in single) == 2
    assert not any(delta.prompt_logprobs for delta in single), "of a first token there is none"


def test_what_cannot_be_sampled_has_a_log_prob_that_json_can_hold(live):
    [[ranked]] = [delta.logprobs for delta in live.run(live.sample(PROMPT, max_tokens=1, top_k=1, logprobs=2))]
    assert [each.logprob for each in ranked] == [0.0, 0.0, MINUS_INFINITY]


def test_adapters_answer_in_one_batch_and_with_newer_versions_at_once(model, versions, live, tmp_path):
    """The log-probs are those of the merged models, also of the model alone while its adapters run."""
    prompt = [5, 6, 7, *range(20, 80)]

    async def sample(name: str, adapter: Path | None) -> list[int]:
        deltas = await live.sample(prompt, max_tokens=20, temperature=0, logprobs=0, adapter=name)
        ids = [token for delta in deltas for token in delta.token_ids]
        decoder = Decoder(DecoderConfig.from_hf(hf.load_config(model)))
        matrices = {} if adapter is None else read_matrices(adapter)
        decoder.load_state_dict(dict(merged_weights(model, matrices, 8.0 / 3)))
        with torch.no_grad():
            expected = decoder.float()(pack_from([prompt + ids], [len(prompt)]))[0]
        logprobs = torch.tensor([ranked[0].logprob for delta in deltas for ranked in delta.logprobs])
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)  # other adapters: whole nats
        return ids

    async def story() -> None:
        folders: dict[str, Path | None] = {"": None, "one": versions[0], "two": versions[1]}
        for _ in range(2):
            answers = await asyncio.gather(*(sample(*each) for each in folders.items()))
            assert answers[0] != answers[1] != answers[2]
            await live.engine.load_adapter("two", versions[2])
            folders["two"] = versions[2]
        with pytest.raises(ModelError, match="cannot serve .* as one"):
            await live.engine.load_adapter("one", tmp_path / "nowhere")
        await sample("one", versions[0])

    live.run(story())


def test_a_mask_keeps_foreign_words_out_of_the_reasoning_alone(model, live):
    """Requests with different masks in one batch with one that has none."""
    chat = Chat(model)
    prompt = chat.render("Tom has 3 apples. How many?", "")
    plain = SamplingParameters(max_tokens=90, seed=3, ignore_eos=True)
    codes = ("ru", "zh", "de")
    masks = {code: reasoning_mask(code, chat, TEXT, opened=True) for code in codes}
    masked = [replace(plain, constraint=masks[code], through=TEXT.close) for code in codes]
    free = replace(plain, constraint=reasoning_mask("ru", chat, TEXT, opened=False))

    async def sample(*samplings: SamplingParameters) -> list[str]:
        async def text_of(sampling: SamplingParameters) -> str:
            return "".join([delta.text async for delta in live.engine.generate(prompt, sampling)])

        return await asyncio.gather(*map(text_of, samplings))

    [alone] = live.run(sample(plain))
    batch, again = (live.run(sample(plain, free, *masked)) for _ in "12")
    assert batch == again, "seeds repeat"
    assert batch[0] == alone == batch[1], "without a mask nothing changes, nor in an answer without reasoning"
    for code, text in zip(codes, batch[2:], strict=True):
        broken = broken_at(code, text.replace(chat.tokenizer.eos_token, "").rstrip("�"))
        assert text and broken is None, (code, broken)
    assert broken_at("ru", alone) is not None, "the model would"


def broken_at(code: str, text: str) -> str | None:
    """The text up to the first character that a language's mask forbids; None without one."""
    mask = LetterMask(MaskRequest(sorted(scripts_of(code)), TEXT, [], [], [], True, True))
    state: MaskState | None = mask.start
    for place, character in enumerate(text):
        assert state is not None
        state = mask.step(state, mask.symbol(character))
        if state is None:
            return text[: place + 1]
    return None


def replaced_twice(model: Path) -> tuple[list[int], bool]:
    """The descriptors of this process with each of three engines, and whether it still has the first."""
    with Live(model, max_tokens=160) as live:
        engine, descriptors = live.engine, [len(os.listdir("/proc/self/fd"))]
        first = weakref.ref(engine.llm)
        for _ in range(2):
            live.run(engine.restart())
            gc.collect()
            descriptors.append(len(os.listdir("/proc/self/fd")))
        return descriptors, first() is not None


@pytest.mark.soak  # in make test: engines that are replaced in test_engine_deaths.py and test_vllm.py
def test_an_engine_that_was_replaced_leaves_nothing(model):
    descriptors, kept = in_fresh_process(replaced_twice, model)
    assert not kept and descriptors[2] == descriptors[1] <= descriptors[0] + 2


@pytest.mark.soak  # in make test: weights are replaced in place and back, tests/rollout/test_local_engine.py
def test_newer_weights_are_those_of_a_fresh_engine(model, tmp_path):
    """Requests run all the time; none fails. Then a fresh engine of the other export replaces this one."""
    other, prompts = change_weights(model, tmp_path / "other"), [[5, 6, 7], [9, 8, 7, 6], [30, 31]]
    live = Live(model, max_tokens=160)
    engine = live.engine

    async def whole(prompt: list[int], begun: asyncio.Event | None = None) -> list[int]:
        ids: list[int] = []
        async for delta in engine.generate(prompt, SamplingParameters(max_tokens=60, temperature=0)):
            ids += delta.token_ids
            if begun is not None:
                begun.set()
        return ids

    async def all_begun() -> list[asyncio.Task[list[int]]]:
        events = [asyncio.Event() for _ in prompts]
        tasks = [asyncio.create_task(whole(*each)) for each in zip(prompts, events, strict=True)]
        await asyncio.gather(*(event.wait() for event in events))
        return tasks

    async def reload() -> list[list[int]]:
        old = [await whole(prompt) for prompt in prompts]
        under_way = await all_begun()
        loading = asyncio.create_task(engine.reload(str(other), 300))
        await asyncio.sleep(0.02)
        late = [asyncio.create_task(whole(prompt)) for prompt in prompts]
        await loading
        assert await asyncio.gather(*under_way) == old, "each ends under the weights it began with"
        new = [await whole(prompt) for prompt in prompts]
        assert await asyncio.gather(*late) == new != old and "step 1" in engine.version
        hurried, *_ = await all_begun()
        await engine.reload(str(model), 0.0)
        mixed = await hurried
        assert len(mixed) == 60 and mixed not in (old[0], new[0]), "it goes on under the other weights"
        assert [await whole(prompt) for prompt in prompts] == old
        return new

    async def replace(new: list[list[int]]) -> None:
        engine.model_dir = str(other)
        await engine.restart()
        assert [await whole(prompt) for prompt in prompts] == new

    async def stop() -> None:
        stream = engine.generate([5, 6, 7], SamplingParameters(max_tokens=150, ignore_eos=True))
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineDied):  # what was under way is no response
            async for _ in stream:
                pass

    with live:
        live.run(replace(live.run(reload())))
        live.run(stop())


def change_weights(model: Path, folder: Path) -> Path:
    """A copy of an export with other weights, of step 1."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: torch.randn(old.shape, generator=generator).to(old.dtype) * 0.2 for name, old in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, "version": 1}))
    return folder


def test_a_start_that_is_cancelled_or_fails_leaves_no_engine_process(model):
    async def cancel() -> None:
        start = asyncio.create_task(Live(model).engine.start())
        while engine_processes() == before:
            await asyncio.sleep(0.01)
        start.cancel()
        await start

    import_vllm()
    before = engine_processes()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())  # which waits for the thread that starts it
    with pytest.raises(ModelError, match=r"max_model_len \(100000\)"):
        asyncio.run(Live(model, max_tokens=100_000).engine.start())
    assert engine_processes() <= before


@pytest.mark.soak
def test_a_quantised_checkpoint_is_served_as_it_is_with_every_core(model, live, tmp_path, monkeypatch):
    """Its log-probs are those of the weights that it was made from, but for the rounding, also of bfloat16."""
    folder, weights = shutil.copytree(model, tmp_path / "quantised"), {}
    for name, weight in load_file(model / "model.safetensors").items():
        weights[name] = weight
        if "proj" in name:  # a matrix as 8-bit integers, with a scale for each row
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))
    hf.check(folder)  # as the server does before it starts one
    count_threads(monkeypatch, "")
    with Live(folder, "bfloat16", 64) as quantised:
        kept = os.environ[THREADS_VARIABLE]
        assert kept in ("1", "2") and quantised.threads() == int(kept), "what is fastest, also after another start"
        assert live.threads() == 1, "what the user gives"
        deltas = quantised.run(quantised.sample(PROMPT, max_tokens=1, prompt_logprobs=0))
    with torch.no_grad():
        expected = load_model(model)(pack_from([PROMPT], [1]))[0]
    [places] = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    differences = (torch.tensor([ranked[0].logprob for ranked in places]) - expected).abs()
    assert 0 < differences.max() < 0.3
