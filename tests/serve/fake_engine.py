"""An engine that says what a test tells it to, token by token, behind the protocol of the real one."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from serve.engine import Candidate, Delta, EngineDied, SamplingParameters
from shared.chat import Chat
from shared.errors import ModelError

Script = Callable[[list[int], SamplingParameters, int], str]
"""(prompt, sampling, number of the call) -> completion"""


class ScriptedEngine:
    """Generates `script(...)`, one token at a time."""

    def __init__(self, chat: Chat, script: Script, token_s: float = 0.0, logprob: float | None = None):
        """token_s: seconds that a token takes. logprob: of every token, where log-probs (of prompts) are asked for."""
        self.chat, self.script, self.token_s, self.logprob = chat, script, token_s, logprob
        self.version = "7"
        self.prompts: list[str] = []
        self.samplings: list[SamplingParameters] = []
        self.running = 0
        self.told = 0
        """tokens, over all completions"""
        self.dead = False
        self.starts = 0
        self.loaded: list[tuple[str, Path]] = []
        self.unloadable: set[Path] = set()
        """folders that no engine can load: to try a model ends the engine, an adapter fails"""
        self.tries: list[Path] = []

    async def start(self) -> None:
        self.dead = False
        self.starts += 1

    async def restart(self) -> None:
        await self.start()

    async def stop(self) -> None:
        pass

    async def is_alive(self) -> bool:
        return not self.dead

    async def reload(self, model_dir: str, patience_s: float) -> None:
        self.tries.append(Path(model_dir))
        if Path(model_dir) in self.unloadable:
            self.dead = True
            raise ModelError("a damaged shard")
        self.version = model_dir

    async def load_adapter(self, name: str, folder: Path) -> None:
        self.tries.append(folder)
        if self.dead or folder in self.unloadable:
            raise ModelError("it cannot be loaded")
        self.loaded.append((name, folder))

    async def generate(self, prompt_ids: list[int], sampling: SamplingParameters) -> AsyncGenerator[Delta, None]:
        call = len(self.prompts)
        self.prompts.append(self.chat.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        self.samplings.append(sampling)
        said = self.script(prompt_ids, sampling, call)
        end, told, stop = self._until_stop(said, sampling)
        ids = self.chat.encode(said)
        if stop is not None:
            texts = (self.chat.tokenizer.decode(ids[:size], skip_special_tokens=False) for size in range(len(ids) + 1))
            ids = ids[: next((size for size, text in enumerate(texts) if text[:end] == said[:end]), len(ids))]
        stops = [text for text in [*sampling.stop, sampling.through] if text]
        unsure = 0 if sampling.include_stop else max(map(len, stops), default=1) - 1
        """last letters that are told late, as vLLM does: they may begin a stop"""
        self.running += 1
        try:
            text = ""
            if not ids:
                yield Delta("", [self.chat.eos_id], [], "stop")
            for number, token in enumerate(ids[: sampling.max_tokens], 1):
                await asyncio.sleep(self.token_s)
                if self.dead:
                    raise EngineDied
                whole = self.chat.tokenizer.decode(ids[:number], skip_special_tokens=False)
                last = number == min(len(ids), sampling.max_tokens)
                until = told if last else max(min(told, len(whole) - unsure), len(text))
                delta = "" if whole.endswith("�") else whole[len(text) : until]
                text += delta
                self.told += 1
                reason = None if not last else "stop" if number == len(ids) else "length"
                ranked = self._ranked([token], sampling.logprobs)
                prompt = self._ranked(prompt_ids[1:], sampling.prompt_logprobs) if number == 1 else []
                yield Delta(delta, [token], ranked, reason, prompt, stop if reason == "stop" else None)
        finally:
            self.running -= 1

    def _until_stop(self, said: str, sampling: SamplingParameters) -> tuple[int, int, str | int | None]:
        """As vLLM stops: where the stop ends, how many letters are told, and what stopped it."""
        stops: list[tuple[str, str | int]] = [(stop, stop) for stop in [*sampling.stop, sampling.through] if stop]
        stops += [(self.chat.tokenizer.decode([token]), token) for token in sampling.stop_token_ids]
        found = [(said.index(text) + len(text), len(text), stop) for text, stop in stops if text in said]
        if not found:
            return len(said), len(said), None
        end, size, stop = min(found, key=lambda one: one[:2])
        told = end if sampling.include_stop or stop == sampling.through else end - size
        return end, told, stop

    def _ranked(self, token_ids: list[int], most: int | None) -> list[list[Candidate]]:
        """[tokens]: each itself, and where `most` are wanted again as the most probable one; none for None."""
        if most is None:
            return []
        texts = [(token, self.chat.tokenizer.decode([token])) for token in token_ids]
        return [[Candidate(token, text, self.logprob or 0.0)] * (1 + min(most, 1)) for token, text in texts]
