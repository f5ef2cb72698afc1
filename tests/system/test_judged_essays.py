"""A launch that learns prose from a judge: no ground truth, no box; a reward of the group beside it."""

import re
import threading
from statistics import fmean
from typing import Any

import pytest

from tests.system.launch import Launch
from tests.verify.test_judges import Server, asked

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
SEA = ["The waves come and go.", "The water is blue.", "The tide is high.", "The fish swim deep.",
       "Salt is in the wind."]  # fmt: skip
OTHER = ["The train is late.", "The bread is warm.", "The clock is slow.", "The road is long.", "The hill is green."]
PREPARE = f"""
import json, random
from pathlib import Path
from examples.quickstart.tiny_model import build, train_tokenizer

SENTENCES = {SEA + OTHER!r}


def prepare(folder, options, seed):
    rng = random.Random(seed)
    text = "Write about the sea."
    thought = "<think>I choose four sentences.</think>"
    def essay():
        return thought + " ".join(rng.choices(SENTENCES, k=4))
    rows = [{{"id": str(n), "problem": text, "domain": "open", "answer_form": "response"}} for n in range(64)]
    Path(folder, "train.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    shown = [{{"problem": text, "completion": essay()}} for _ in range(256)]
    Path(folder, "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in shown))
    words = [text, "<think>I choose four sentences.", "</think>", *SENTENCES, *(" " + one for one in SENTENCES)]
    build(Path(folder, "model"), seed, train_tokenizer(words * 20, 400), 96)
"""
SETTINGS: dict[str, Any] = {
    "steps": 25, "model__path": "made/model", "model__dtype": "float32", "model__max_tokens": 96,
    "data__train": "made/train.jsonl", "data__system_prompt": "", "sft__demonstrations": "made/demonstrations.jsonl",
    "sft__steps": 60, "sft__batch": 32, "sft__learning_rate": 3e-3, "rollout__prompts_per_step": 8,
    "rollout__group_size": 8, "rollout__max_completion_tokens": 48, "rollout__max_sequences": 64,
    "rollout__cache_bytes": 64 << 20, "optimiser__learning_rate": 1e-3, "optimiser__compute_dtype": "float32",
    "checkpoint__every": 0,
}  # fmt: skip
REWARD = """
[reward]
length = 0
language = 0
correctness = 0
refuse = []
extra = { sea = 1.0, novelty = 0.05 }
[reward.judges.sea]
url = "URL"
model = "scripted"
instructions = "Grade how much of the text is about the sea."
deadline_s = 60
"""


def sea_share(body: dict[str, Any]) -> str:
    """A judge who knows what is about the sea."""
    sentences = re.findall(r"[^.]+\.", asked(body)[1][0])
    return f"SCORE: {10 * fmean(one.strip() in SEA for one in sentences) if sentences else 0:.1f}"


def test_an_essay_task_trains_on_a_judge_without_a_box(tmp_path):
    server = Server()
    server.decide = sea_share
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "prepare.py").write_text(PREPARE)
    (tmp_path / "essays.toml").write_text(REWARD.replace("URL", server.url))
    prepare = str(tmp_path / "prepare.py")
    launch = Launch(
        tmp_path, "essays", file=str(tmp_path / "essays.toml"), prepare__script=prepare, **SETTINGS
    ).finish()
    server.shutdown()
    rows = launch.metrics()
    gained = [fmean(row["reward/extra"] for row in part) for part in (rows[:5], rows[-5:])]
    print(f"mean of the judge's score and novelty: {gained[0]:.3f} in steps 1 to 5, {gained[1]:.3f} in the last 5")
    assert gained[1] > gained[0] + 0.2 and gained[1] > 0.75
    for row in rows:
        verdicts = sum(value for name, value in row.items() if name.startswith("verify/"))
        assert row["verify/no_answer"] + row["verify/open"] == verdicts and "accuracy" not in row
    # a response may have the word, which is one of the tokenizer's; what is asked for has not
    told = ["".join(one["content"] for one in body["messages"]).partition("SOLUTION")[0] for body in server.seen]
    assert not any("boxed" in text for text in told)
    rewards = [reward for group in launch.groups() for reward in group["rewards"]]
    assert {"sea", "novelty"} == set(rewards[-1]["extra"]), "the group's reward counts too"
