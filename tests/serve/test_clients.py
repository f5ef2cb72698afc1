"""Other people's programs against the server, unmodified: SDKs, evaluation harnesses, a fuzzer of OpenAPI.

Each runs in an environment of its own (`make install-clients`), as its user would run it. The engine is scripted, so
that what they must get is known; test_vllm.py has the real one.
"""

from __future__ import annotations

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

from serve.engine import SamplingParameters
from shared.types import Verdict
from tests.evaluation.conftest import evaluate
from tests.serve.conftest import Serve, eventually
from tests.serve.test_responses import typed_objects
from verify.reward import score

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

CLIENTS = Path(__file__).with_name("clients")
REASONING = "There are three apples in the basket, we add two more of them, and so there are five apples in all."
ANSWER = "There are five apples: é 苹果."
SAID = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"


def python(environment: str) -> Path:
    """The interpreter of an environment of clients; skips where it is not installed."""
    found = Path(sys.prefix) / "clients" / environment / "bin" / "python"
    if not found.exists():
        pytest.skip(f"the clients in {found.parents[1]} are not installed: make install-clients")
    return found


def run(environment: str, script: str, *arguments: str) -> Any:
    """What a client prints as its last line."""
    command = [str(python(environment)), str(CLIENTS / f"{script}.py"), *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "MAESTRALE_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environ, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---- SDKs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", ["openai2", "openai3"])
def test_openai(serve: Serve, environment: str) -> None:
    found = run(environment, "openai_client", serve(SAID, max_tokens=3000).url)
    assert found["version"].startswith(environment.removeprefix("openai"))
    assert found["models"] == ["tiny"] and found["retries"] == 0
    assert found["text"] == found["streamed_text"] == ANSWER
    assert found["reasoning"] == [REASONING, REASONING] and found["streamed_reasoning"].strip() == REASONING
    assert found["tokens"][0] == found["tokens"][1] > found["thinking_tokens"] > len(REASONING)
    assert found["finish"] == ["stop"]
    assert found["response"] == found["response_streamed"].strip() == ANSWER
    assert found["response_last"] == ["response.completed", ANSWER]
    assert found["response_thinking_tokens"] == found["thinking_tokens"]
    assert found["completion"] == found["completion_streamed"] == SAID
    assert (found["language"]["requested"], found["language"]["match"]) == ("fr", False)
    assert found["failures"] == [
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["BadRequestError", 400, "invalid_value", "messages"],
        ["BadRequestError", 400, "invalid_value", "n"],
        ["BadRequestError", 400, "context_length_exceeded", "messages"],
    ]


@pytest.mark.parametrize("environment", ["openai2", "openai3"])
def test_the_types_of_openai(serve: Serve, tmp_path: Path, environment: str) -> None:
    rows = typed_objects(serve)
    (tmp_path / "objects.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(environment, "openai_types", str(tmp_path / "objects.jsonl")) == len(rows)


def test_openai_comes_back_when_the_server_was_full(serve: Serve) -> None:
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
    found: list[Any] = []
    client = threading.Thread(target=lambda: found.append(run("openai3", "openai_client", served.url)))
    with served.client.stream("POST", "/v1/chat/completions", json={
        "stream": True, "messages": [{"role": "user", "content": "x"}]}) as first:  # fmt: skip
        lines = first.iter_lines()
        next(lines)
        served.engine.token_s = 0.5
        client.start()
        assert refused.wait(60)
        served.engine.token_s = 0.0
    eventually(lambda: served.server.admitted == 0)
    client.join(60)
    assert found[0]["retries"] >= 1 and found[0]["text"] == ANSWER


def test_litellm(serve: Serve) -> None:
    found = run("openai2", "litellm_client", serve(SAID).url)
    for provider in ("openai", "hosted_vllm"):
        one = found["found"][provider]
        assert one["text"] == one["streamed_text"] == ANSWER
        assert one["reasoning"] == one["streamed_reasoning"].strip() == REASONING
        assert one["thinking_tokens"] > len(REASONING)
    assert found["failures"] == ["litellm.exceptions.NotFoundError", "litellm.exceptions.BadRequestError"]


def test_langchain(serve: Serve) -> None:
    found = run("openai3", "langchain_client", serve(SAID).url)
    assert found["text"] == found["streamed_text"] == ANSWER and found["same_usage"]
    assert found["thinking_tokens"] > len(REASONING)
    assert found["inline"] == f"<think>\n{REASONING}\n</think>\n{ANSWER}", "it drops fields that it does not know"


def test_mistral(serve: Serve) -> None:
    found = run("openai3", "mistral_client", serve(SAID, reasoning_format="mistral").url)
    assert found["chunks"] == ["ThinkChunk", "TextChunk"]
    assert found["whole"] == [REASONING, ANSWER] and [part.strip() for part in found["streamed"]] == [REASONING, ANSWER]
    assert len(REASONING) < found["tokens"]


# ---- evaluation harnesses ----------------------------------------------------------------------------------------


PROBLEMS = [
    {"problem": f"Tom has {first} apples. Tom buys {second} more. How many apples does Tom have now?",
     "answer": str(first + second)} for first, second in zip(range(3, 27, 2), range(2, 26, 2), strict=True)
]  # fmt: skip
"""12 of them"""
WRONG = {1, 6, 10}


def say(prompt: str) -> str:
    """The completion of a problem: three of the twelve are wrong by one."""
    number = next(number for number, row in enumerate(PROBLEMS) if row["problem"] in prompt)
    answer = int(PROBLEMS[number]["answer"]) + (number in WRONG)
    first, second = re.findall(r"\d+", PROBLEMS[number]["problem"])
    return (f"<think>\nTom begins with {first} apples and then he buys {second} more of them.\n</think>\n\n"
            f"Tom has \\boxed{{{answer}}}")  # fmt: skip


@pytest.mark.parametrize("harness", ["inspect_client", pytest.param("lm_eval_client", marks=pytest.mark.soak)])
def test_harnesses_find_the_score_that_ours_finds(serve: Serve, tmp_path: Path, harness: str) -> None:
    served = serve("")
    chat = served.server.prompts.chat

    def script(prompt: list[int], sampling: SamplingParameters, call: int) -> str:
        return say(chat.tokenizer.decode(prompt))

    served.engine.script = script
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    found = run("openai3", harness, served.url, str(tmp_path / "problems.jsonl"), str(tmp_path))
    assert found["accuracy"] == 9 / 12
    told = [response if isinstance(response, str) else response[1] for response in found["responses"]]
    ours = [
        score(row, f"<think>\nI add them up.\n</think>\n\n{text}").verdict is Verdict.CORRECT
        for row, text in zip(PROBLEMS, told, strict=True)
    ]  # fmt: skip
    assert [number for number, right in enumerate(ours) if not right] == sorted(WRONG)
    assert sum(ours) / 12 == found["accuracy"]
    own = evaluate(f"{served.url}/v1", tmp_path / "own", str(tmp_path / "problems.jsonl"), "--samples", "1")
    assert own["benchmarks"]["problems"]["pass_at"]["1"] == found["accuracy"]
    if harness == "inspect_client":
        assert all(reasoning.startswith("Tom begins with") for reasoning, _ in found["responses"])
        assert found["thinking_tokens"] > 12 * 40


NEEDED = ("msgspec", "sympy", "mpmath", "latex2sympy2_extended", "antlr4")
"""packages of the verifier that examples/inspect names, as inspect-ai's own come with it"""


def test_the_example_of_inspect_finds_the_score_that_ours_finds(serve: Serve, tmp_path: Path) -> None:
    """With answers that are spelt in other ways, which a comparison of texts would refuse."""
    served = serve("")
    chat = served.server.prompts.chat
    served.engine.script = lambda prompt, sampling, call: say(chat.tokenizer.decode(prompt)).replace("{9}", "{18/2}")
    file, packages, root = tmp_path / "problems.jsonl", tmp_path / "packages", Path(__file__).parents[2]
    file.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    packages.mkdir()
    for name in NEEDED:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    program = python("openai3").with_name("inspect")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{root}:{packages}",
               "SERVED_BASE_URL": f"{served.url}/v1", "SERVED_API_KEY": "none"}  # fmt: skip
    command = [program, "eval", "examples/inspect/task.py", "--model", "openai-api/served/tiny", "-T", f"file={file}",
               "-T", "reasoning_language=de", "--log-dir", tmp_path / "logs", "--log-format", "json", "--display",
               "none", "--max-retries", "1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environ, cwd=root, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (log,) = (tmp_path / "logs").glob("*.json")
    found = json.loads(log.read_text())
    assert found["status"] == "success" and len(found["samples"]) == 12
    accuracy = found["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    own = evaluate(f"{served.url}/v1", tmp_path / "own", str(file), "--samples", "1")["benchmarks"]["problems"]
    assert own["pass_at"]["1"] == accuracy == 9 / 12
    assert all("auf Deutsch" in prompt for prompt in served.engine.prompts[:12]), "what the task sends is asked for"


def test_lm_eval_scores_choices_by_log_likelihood(serve: Serve, tmp_path: Path) -> None:
    served = serve("x", logprob=-0.25)
    rows = [{"problem": f"{number} apples and 果:", "choices": ["long words", "é"], "answer": number % 2}
            for number in range(4)]  # fmt: skip
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run("openai3", "lm_eval_choices", served.url, str(tmp_path / "problems.jsonl"), str(tmp_path))
    encode = served.server.prompts.chat.encode
    expected = [[-0.25 * len(encode(choice)) for choice in (" long words", " é")] for _ in rows]
    assert found == {"accuracy": 0.5, "log_likelihoods": expected}


# ---- OpenAPI -----------------------------------------------------------------------------------------------------


@pytest.mark.soak  # in make test: test_bad_requests.py, by hand
def test_schemathesis_finds_no_fault(serve: Serve, tmp_path: Path) -> None:
    served = serve(SAID)
    command = [
        str(python("openai3").with_name("schemathesis")), "run", f"{served.url}/openapi.json", "--max-examples", "20",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "20", "--seed", "1", "--no-color",
        "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "positive_data_acceptance",
    ]  # fmt: skip
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(CLIENTS)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 0, done.stdout[done.stdout.find("= FAILURES") :][:6000]
    eventually(lambda: served.server.admitted == 0)
