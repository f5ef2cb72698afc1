"""The server's engine without the server: a request that ends, an engine that stops, threads, newer weights."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.vllm_config import THREADS_VARIABLE
from serve.engine import EngineDied, SamplingParameters
from serve.letter_mask import LetterMask, MaskRequest, MaskState, reasoning_mask, scripts_of
from serve.vllm_engine import VllmEngine
from shared.chat import Chat
from shared.model.model_card import CARD
from shared.reasoning_tags import TEXT
from tests.process import in_fresh_process
from tests.serve.command import untrained_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model before any training: its texts mean nothing, its tokens are tokens."""
    return untrained_model(tmp_path_factory.mktemp("runs"))


def test_closing_the_stream_aborts_the_request_in_the_engine(model: Path) -> None:
    async def leave() -> tuple[int, int]:
        engine = VllmEngine(str(model), max_tokens=512, max_sequences=4, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        try:
            assert engine.llm is not None
            stream = engine.generate([5, 6, 7], SamplingParameters(max_tokens=400))
            first = await anext(stream)
            assert first.token_ids and first.finish_reason is None
            before = engine.llm.get_num_unfinished_requests()
            await stream.aclose()
            return before, engine.llm.get_num_unfinished_requests()
        finally:
            await engine.stop()

    assert asyncio.run(leave()) == (1, 0)


def test_what_is_under_way_when_the_engine_is_stopped_is_no_response(model: Path) -> None:
    async def stop_it() -> None:
        engine = VllmEngine(str(model), max_tokens=160, max_sequences=4, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        stream = engine.generate([5, 6, 7], SamplingParameters(max_tokens=150))
        try:
            await anext(stream)
        finally:
            await engine.stop()
        async for _ in stream:
            pass

    with pytest.raises(EngineDied):
        asyncio.run(stop_it())


def replaced_twice(model: Path) -> tuple[list[int], bool]:
    """The descriptors of this process with each of three engines, and whether it still has the first."""

    async def play() -> tuple[list[int], bool]:
        engine = VllmEngine(str(model), max_tokens=160, max_sequences=4, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        first, descriptors = weakref.ref(engine.llm), [len(os.listdir("/proc/self/fd"))]
        try:
            for _ in range(2):
                await engine.restart()
                gc.collect()
                descriptors.append(len(os.listdir("/proc/self/fd")))
            return descriptors, first() is not None
        finally:
            await engine.stop()

    return asyncio.run(play())


def test_an_engine_that_was_replaced_leaves_nothing(model: Path) -> None:
    descriptors, kept = in_fresh_process(replaced_twice, model)
    assert not kept and descriptors[2] == descriptors[1] <= descriptors[0] + 2


@pytest.mark.parametrize(("given", "threads"), [("", 3), ("2", 2)])
def test_the_engine_of_a_server_has_every_core_or_what_the_user_gives(
    given: str, threads: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "")
    monkeypatch.delenv(THREADS_VARIABLE)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("rollout.vllm_config.CPU_WORKER", "tests.serve.counted_threads.CountedThreads")

    async def count() -> list[int]:
        engine = VllmEngine(str(model), max_tokens=64, max_sequences=4, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        try:
            assert engine.llm is not None
            return list(await engine.llm.collective_rpc("count_threads"))
        finally:
            await engine.stop()

    assert asyncio.run(count()) == [threads]


TOKENS = 120


def test_newer_weights_are_those_of_a_fresh_engine(model: Path, tmp_path: Path) -> None:
    """Requests run all the time; none fails, and afterwards the tokens are those of an engine with the new export."""
    other = change_weights(model, tmp_path / "other")

    async def whole(engine: VllmEngine, prompt: list[int], begun: asyncio.Event | None = None) -> list[int]:
        ids: list[int] = []
        async for delta in engine.generate(prompt, SamplingParameters(max_tokens=TOKENS, temperature=0)):
            ids += delta.token_ids
            if begun is not None:
                begun.set()
        return ids

    async def both() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        engine = VllmEngine(str(model), max_tokens=160, max_sequences=8, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        try:
            prompts = [[5, 6, 7], [9, 8, 7, 6], [30, 31]]
            old = [await whole(engine, prompt) for prompt in prompts]
            each_begun = [asyncio.Event() for _ in prompts]
            under_way = [
                asyncio.create_task(whole(engine, prompt, begun))
                for prompt, begun in zip(prompts, each_begun, strict=True)
            ]
            for begun in each_begun:
                await begun.wait()
            reload = asyncio.create_task(engine.reload(str(other), 30))
            await asyncio.sleep(0.02)
            late = [asyncio.create_task(whole(engine, prompt)) for prompt in prompts]
            await reload
            assert await asyncio.gather(*under_way) == old, "each ends under the weights it began with"
            new = [await whole(engine, prompt) for prompt in prompts]
            assert await asyncio.gather(*late) == new and "step 1" in engine.version
            begun = asyncio.Event()
            hurried = asyncio.create_task(whole(engine, prompts[0], begun))
            await begun.wait()
            await engine.reload(str(model), 0.0)
            mixed = await hurried
            assert len(mixed) == TOKENS and mixed not in (old[0], new[0]), "it goes on under the other weights"
            assert [await whole(engine, prompt) for prompt in prompts] == old
        finally:
            await engine.stop()
        fresh = VllmEngine(str(other), max_tokens=160, max_sequences=8, cache_bytes=64 << 20, dtype="float32")
        await fresh.start()
        try:
            return old, new, [await whole(fresh, prompt) for prompt in prompts]
        finally:
            await fresh.stop()

    old, new, fresh = asyncio.run(both())
    assert new == fresh and new != old


def change_weights(model: Path, folder: Path) -> Path:
    """A copy of an export with other weights, of step 1."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: torch.randn(one.shape, generator=generator).to(one.dtype) * 0.2 for name, one in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, "version": 1}))
    return folder


def test_a_mask_keeps_foreign_words_out_of_the_reasoning_alone(model: Path) -> None:
    """Requests with different masks in one batch with one that has none."""
    chat = Chat(model)
    prompt = chat.render("Tom has 3 apples. How many?", "")
    plain = SamplingParameters(max_tokens=90, seed=3, ignore_eos=True)
    codes = ("ru", "zh", "de")
    masks = {code: reasoning_mask(code, chat, TEXT, opened=True) for code in codes}
    masked = [replace(plain, constraint=masks[code], through=TEXT.close) for code in codes]
    free = replace(plain, constraint=reasoning_mask("ru", chat, TEXT, opened=False))

    async def sample(engine: VllmEngine, sampling: SamplingParameters) -> str:
        return "".join([delta.text async for delta in engine.generate(prompt, sampling)])

    async def together() -> tuple[str, list[str], list[str]]:
        engine = VllmEngine(str(model), max_tokens=256, max_sequences=8, cache_bytes=64 << 20, dtype="float32")
        await engine.start()
        try:
            alone = await sample(engine, plain)
            batch, again = [
                await asyncio.gather(*(sample(engine, each) for each in (plain, free, *masked))) for _ in "12"
            ]
            return alone, batch, again
        finally:
            await engine.stop()

    alone, batch, again = asyncio.run(together())
    assert batch == again, "seeds repeat"
    assert batch[0] == alone == batch[1], "without a mask nothing changes, nor in an answer without reasoning"
    for code, text in zip(codes, batch[2:], strict=True):
        mask = LetterMask(MaskRequest(sorted(scripts_of(code)), TEXT, [], [], [], True, True))
        broken = broken_at(mask, text.replace(chat.tokenizer.eos_token, "").rstrip("�"))
        assert text and broken is None, (code, broken)
    mask = LetterMask(MaskRequest(["Cyrl"], TEXT, [], [], [], True, True))
    assert broken_at(mask, alone) is not None, "the model would"


def broken_at(mask: LetterMask, text: str) -> str | None:
    """The text up to the first character that the mask forbids; None without one."""
    state: MaskState | None = mask.start
    for place, character in enumerate(text):
        assert state is not None
        state = mask.step(state, mask.symbol(character))
        if state is None:
            return text[: place + 1]
    return None
