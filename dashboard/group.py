"""One group of a rollout file as the page shows it: its completions with their rewards, tokens with their numbers.

The line is read as plain JSON: what is missing in it or of another type is left out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dashboard.run_folder import MOST_TEXT, RunFolder, number
from shared.json_reader import decode_json
from shared.types import GRADED

PARTS = ("format", "correctness", "length", "language")
MOST_TOKENS = 2_000
"""tokens that are sent at once"""
MOST_TOKENIZER_BYTES = 40 << 20


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any, most: int = MOST_TEXT) -> str:
    text = value if isinstance(value, str) else ""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def read_group(run: RunFolder, step: int, line: int) -> dict[str, Any]:
    """A line of a file of rollouts as it is. Raises LookupError where there is none that can be read."""
    try:
        return _table(decode_json(run.rollouts.raw(step, line), object))
    except ValueError as error:
        raise LookupError(f"group {line + 1} of step {step} cannot be read: {str(error)[:200]}") from error


def show_group(run: RunFolder, step: int, line: int) -> dict[str, Any]:
    """A whole group for the page. Raises LookupError."""
    group = read_group(run, step, line)
    problem = _table(_table(group.get("prompt")).get("problem"))
    completions = _list(group.get("completions"))
    rewards, texts, turns = (_list(group.get(name)) for name in ("rewards", "texts", "turns"))
    parts = list(itertools.islice(itertools.zip_longest(completions, rewards, texts, turns), len(completions)))
    return {
        "run": run.name, "step": step, "line": line, "groups": len(run.rollouts.index(step)),
        "problem": {
            name: _text(problem.get(name), 20_000) for name in ("id", "text", "answer", "language", "domain", "source",
                                                                "environment")
        },
        "prompt_tokens": len(_list(_table(group.get("prompt")).get("token_ids"))),
        "completions": [_show_completion(*part) for part in parts],
    }  # fmt: skip


def _show_completion(record: Any, graded: Any, text: Any, turns: Any) -> dict[str, Any]:
    completion, reward = _table(record), _table(graded)
    verdict = _text(reward.get("verdict"), 100)
    parts = {name: value for name in PARTS if (value := number(reward.get(name))) is not None}
    extra = {
        _text(name, 100): value for name, found in _table(reward.get("extra")).items()
        if (value := number(found)) is not None
    }  # fmt: skip
    finish = _text(completion.get("finish_reason"), 100)
    return {
        "text": _text(text), "tokens": len(_list(completion.get("token_ids"))), "finish": finish,
        "total": number(reward.get("total")), "parts": parts | extra, "verdict": verdict or "none",
        "masked": verdict not in GRADED or finish in ("abort", "crash", "timeout"),
        "reason": _text(reward.get("reason"), 2000), "answer": _text(reward.get("answer"), 2000),
        "consistent": reward.get("consistent") if isinstance(reward.get("consistent"), bool) else None,
        "languages": [_text(one, 20) for one in _list(reward.get("languages"))][:3],
        "versions": sorted({span["version"] for span in _spans(completion)}),
        "turns": [
            {"role": _text(turn.get("role"), 40), "text": _text(turn.get("text"), 20_000),
             "reward": number(turn.get("reward")), "failure": _text(turn.get("failure"), 500)}
            for turn in map(_table, _list(turns)[:500])
        ],
    }  # fmt: skip


def _spans(completion: dict[str, Any]) -> list[dict[str, int]]:
    spans = map(_table, _list(completion.get("spans")))
    return [one for one in spans if all(isinstance(one.get(key), int) for key in ("version", "start", "end"))]


# ---- tokens ------------------------------------------------------------------------------------------------------


class TokenDecoder:
    """Turns the token ids of runs into text, where the tokenizer of the run's model is on this machine."""

    def __init__(self) -> None:
        self._kept: tuple[Path, Tokenizer] | None = None

    def pieces(self, run: RunFolder, ids: list[int]) -> list[str] | None:
        """[tokens] what each token adds to the text, special tokens included; None without a tokenizer."""
        tokenizer = self._tokenizer(run)
        if tokenizer is None:
            return None
        stream = DecodeStream(skip_special_tokens=False)
        try:
            return [stream.step(tokenizer, one) or "" for one in ids]
        except Exception:  # noqa: BLE001 - ids of another vocabulary; the library raises Exception itself
            return [tokenizer.id_to_token(one) or "" for one in ids]

    def _tokenizer(self, run: RunFolder) -> Tokenizer | None:
        for path in _places(run):
            if self._kept is not None and self._kept[0] == path:
                return self._kept[1]
            try:
                if path.stat().st_size <= MOST_TOKENIZER_BYTES:
                    self._kept = path, Tokenizer.from_file(str(path))
                    return self._kept[1]
            except Exception:  # noqa: BLE001 - missing or damaged: the library raises Exception itself
                continue
        return None


def _places(run: RunFolder) -> list[Path]:
    """Where the tokenizer of a run may be: its exports, the model that it made, the one that it started from."""
    model = run.settings().get("model.path")
    folders = [run.folder / "latest", *sorted((run.folder / "hf").glob("step_*"))[-1:], run.folder / "made" / "model"]
    if isinstance(model, str) and model:
        folders += [run.folder / model, Path(model)]
    return [path for folder in folders if (path := folder / "tokenizer.json").is_file()]


def show_tokens(run: RunFolder, decoder: TokenDecoder, step: int, line: int, sample: int, start: int) -> dict[str, Any]:
    """Tokens of a completion from `start`: {"tokens", "pieces": their texts or None, "ids", "version": of each, None
    where it was not sampled, "columns": name -> numbers of each}. Columns are all lists of numbers of the record that
    have one for each token, such as "logprobs" and "teacher". Raises LookupError."""
    completions = _list(read_group(run, step, line).get("completions"))
    if not 0 <= sample < len(completions):
        raise LookupError(f"the group has {len(completions)} completions")
    completion = _table(completions[sample])
    ids = [one if isinstance(one, int) and 0 <= one < 1 << 32 else 0 for one in _list(completion.get("token_ids"))]
    window = slice(max(start, 0), max(start, 0) + MOST_TOKENS)
    version: list[int | None] = [None] * len(ids)
    for span in _spans(completion):
        low, high = max(span["start"], 0), min(span["end"], len(ids))
        version[low:high] = [span["version"]] * max(high - low, 0)
    columns = {
        _text(name, 60): [number(one) for one in values[window]]
        for name, values in completion.items()
        if name != "token_ids" and isinstance(values, list) and values and len(values) == len(ids)
        and number(values[0]) is not None
    }  # fmt: skip
    pieces = decoder.pieces(run, ids[: window.stop])
    return {
        "tokens": len(ids), "start": window.start, "ids": ids[window], "pieces": pieces and pieces[window],
        "version": version[window], "columns": columns,
    }  # fmt: skip
