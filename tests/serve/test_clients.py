"""Other people's programs against the server, unmodified: SDKs, evaluation harnesses, a fuzzer of OpenAPI.

Each runs in an environment of its own (`make install-clients`), as its user would run it. The engine is scripted, so
that what they must get is known; test_vllm.py has the real one.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.conftest import evaluate
from tests.serve.conftest import eventually
from tests.serve.test_hostile import CHAT, MESSAGES
from tests.serve.test_responses import typed_objects

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

CLIENTS = Path(__file__).with_name("clients")
REASONING = "There are three apples in the basket, we add two more of them, and so there are five apples in all."
ANSWER = "There are five apples: é 苹果."
SAID = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"


def python(environment: str) -> Path:
    """The interpreter of an environment of clients; skips where it is not installed."""
    program = Path(sys.prefix) / "clients" / environment / "bin" / "python"
    if not program.exists():
        pytest.skip(f"the clients in {program.parents[1]} are not installed: make install-clients")
    return program


def run(environment: str, script: str, *arguments: object) -> Any:
    """What a client prints as its last line."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "MAESTRALE_"))}
    return json.loads(execute([python(environment), CLIENTS / f"{script}.py", *arguments], environ).splitlines()[-1])


def execute(command: list[object], environ: dict[str, str], folder: Path | None = None) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=500, env=environ, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


# ---- SDKs --------------------------------------------------------------------------------------------------------


def check_openai(seen: Any, environment: str) -> None:
    assert seen["version"].startswith(environment.removeprefix("openai")) and seen["models"] == ["tiny"]
    assert seen["text"] == seen["streamed_text"] == ANSWER
    assert seen["reasoning"] == [REASONING, REASONING] and seen["streamed_reasoning"].strip() == REASONING
    assert seen["tokens"][0] == seen["tokens"][1] > seen["thinking_tokens"] > len(REASONING)
    assert seen["finish"] == ["stop"]
    assert seen["response"] == seen["response_streamed"].strip() == ANSWER
    assert seen["response_last"] == ["response.completed", ANSWER]
    assert seen["response_thinking_tokens"] == seen["thinking_tokens"]
    assert seen["completion"] == seen["completion_streamed"] == SAID
    assert (seen["language"]["requested"], seen["language"]["match"]) == ("fr", False)
    assert seen["failures"] == [
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["BadRequestError", 400, "invalid_value", "messages"],
        ["BadRequestError", 400, "invalid_value", "n"],
        ["BadRequestError", 400, "context_length_exceeded", "messages"],
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("environment", ["openai2", "openai3"])
def test_openai(serve, tmp_path, environment):
    rows = typed_objects(serve)
    (tmp_path / "objects.json").write_text(json.dumps(rows))
    seen = run(environment, "openai_client", serve(SAID, max_tokens=3000).url, tmp_path / "objects.json")
    assert seen["retries"] == 0 and seen["typed"] == len(rows)
    check_openai(seen, environment)


def test_openai_comes_back_when_the_server_was_full(serve):
    served = serve(SAID, token_s=0.002, max_sequences=1, queue=0, max_tokens=3000)
    refused = threading.Event()
    admit = served.server.admit

    def watch(*arguments: Any) -> Any:
        try:
            return admit(*arguments)
        except Exception:
            refused.set()
            raise

    served.server.admit = watch  # type: ignore[method-assign]
    seen: list[Any] = []
    client = threading.Thread(target=lambda: seen.append(run("openai3", "openai_client", served.url)))
    with served.client.stream("POST", CHAT, json={"stream": True, "messages": MESSAGES}) as first:
        lines = first.iter_lines()
        next(lines)
        served.engine.token_s = 0.5
        client.start()
        assert refused.wait(120)
        served.engine.token_s = 0.0
    eventually(lambda: served.server.admitted == 0)
    client.join(120)
    assert seen[0]["retries"] >= 1 and seen[0]["text"] == ANSWER


def test_litellm(serve):
    seen = run("openai2", "litellm_client", serve(SAID).url)
    for provider in ("openai", "hosted_vllm"):
        got = seen["found"][provider]
        assert got["text"] == got["streamed_text"] == ANSWER
        assert got["reasoning"] == got["streamed_reasoning"].strip() == REASONING
        assert got["thinking_tokens"] > len(REASONING)
    assert seen["failures"] == ["litellm.exceptions.NotFoundError", "litellm.exceptions.BadRequestError"]


@pytest.mark.soak  # it sends what openai's client sends
def test_langchain(serve):
    seen = run("openai3", "langchain_client", serve(SAID).url)
    assert seen["text"] == seen["streamed_text"] == ANSWER and seen["same_usage"]
    assert seen["thinking_tokens"] > len(REASONING)
    assert seen["inline"] == f"<think>\n{REASONING}\n</think>\n{ANSWER}", "it drops fields that it does not know"


def test_mistral(serve):
    seen = run("openai3", "mistral_client", serve(SAID, reasoning_format="mistral").url)
    assert seen["chunks"] == ["ThinkChunk", "TextChunk"]
    assert seen["whole"] == [part.strip() for part in seen["streamed"]] == [REASONING, ANSWER]
    assert len(REASONING) < seen["tokens"]


# ---- evaluation harnesses ----------------------------------------------------------------------------------------

PROBLEMS = [
    {"problem": f"Tom has {first} apples. Tom buys {first - 1} more. How many apples does Tom have now?",
     "answer": str(2 * first - 1)} for first in range(3, 27, 2)
]  # fmt: skip
"""12 of them"""
WRONG = {1, 6, 10}
NEEDED = ("msgspec", "sympy", "mpmath", "latex2sympy2_extended", "antlr4")
"""packages of the verifier that examples/inspect names, as inspect-ai's own come with it"""


def solve(prompt: str) -> str:
    """The completion of a problem: three of the twelve are wrong by one."""
    number = next(number for number, row in enumerate(PROBLEMS) if row["problem"] in prompt)
    answer = int(PROBLEMS[number]["answer"]) + (number in WRONG)
    first, second = re.findall(r"\d+", PROBLEMS[number]["problem"])
    box = f"\\boxed{{{answer}}}" if number != 2 else "\\boxed{26/2}"  # which a comparison of texts would refuse
    return f"<think>\nTom begins with {first} apples and then he buys {second} more of them.\n</think>\n\nTom has {box}"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.soak  # in make test: openai's client and lm_eval
def test_the_example_of_inspect_finds_the_score_that_ours_finds(serve, tmp_path):
    solver = serve("")
    chat = solver.server.prompts.chat
    solver.engine.script = lambda prompt, sampling, call: solve(chat.tokenizer.decode(prompt))
    file, packages, root = write(tmp_path / "problems.jsonl", PROBLEMS), tmp_path / "packages", CLIENTS.parents[2]
    packages.mkdir()
    for name in NEEDED:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{root}:{packages}",
               "SERVED_BASE_URL": f"{solver.url}/v1", "SERVED_API_KEY": "none"}  # fmt: skip
    execute([
        python("openai3").with_name("inspect"), "eval", "examples/inspect/task.py", "--model", "openai-api/served/tiny",
        "-T", f"file={file}", "-T", "reasoning_language=de", "--log-dir", tmp_path / "logs", "--log-format", "json",
        "--display", "none", "--max-retries", "1",
    ], environ, root)  # fmt: skip
    (log,) = (tmp_path / "logs").glob("*.json")
    seen = json.loads(log.read_text())
    assert seen["status"] == "success" and len(seen["samples"]) == 12
    accuracy = seen["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    results = evaluate(f"{solver.url}/v1", tmp_path / "ours", str(file), "--samples", "1")["benchmarks"]["problems"]
    assert results["pass_at"]["1"] == accuracy == 9 / 12
    assert all("auf Deutsch" in prompt for prompt in solver.engine.prompts[:12]), "what the task sends is asked for"
    for sample in seen["samples"]:
        reasoning, text = sample["output"]["choices"][0]["message"]["content"]
        assert reasoning["reasoning"].startswith("Tom begins with") and text["text"].startswith("Tom has")
    assert sum(usage["reasoning_tokens"] for usage in seen["stats"]["model_usage"].values()) > 12 * 40


@pytest.mark.soak  # in make test: log-probs of prompts, tests/serve/test_completions.py
def test_lm_eval_scores_choices_by_log_likelihood(serve, tmp_path):
    served = serve("x", logprob=-0.25)
    rows = [{"problem": f"{number} apples and 果:", "choices": ["long words", "é"], "answer": number % 2}
            for number in range(4)]  # fmt: skip
    seen = run("openai3", "lm_eval_choices", served.url, write(tmp_path / "problems.jsonl", rows), tmp_path)
    encode = served.server.prompts.chat.encode
    expected = [[-0.25 * len(encode(choice)) for choice in (" long words", " é")] for _ in rows]
    assert seen == {"accuracy": 0.5, "log_likelihoods": expected}


# ---- OpenAPI -----------------------------------------------------------------------------------------------------


@pytest.mark.soak  # in make test: test_bad_requests.py, by hand
def test_schemathesis_finds_no_fault(serve, tmp_path):
    served = serve(SAID)
    execute([
        python("openai3").with_name("schemathesis"), "run", f"{served.url}/openapi.json", "--max-examples", "20",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "20", "--seed", "1", "--no-color", "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "positive_data_acceptance",
    ], {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(CLIENTS)}, tmp_path)  # fmt: skip
    eventually(lambda: served.server.admitted == 0)
