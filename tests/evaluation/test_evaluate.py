"""Whole evaluations of servers whose answers are known: plain OpenAI-shaped ones, and ours with a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from evaluation.__main__ import main
from evaluation.settings import KEY_VARIABLE
from tests.evaluation.conftest import Plain, evaluate, prompt_of, records, write_rows
from tests.serve.conftest import Serve

THREE = [{"id": str(number), "problem": f"How much is {number} and two, my friend?", "answer": str(number + 2),
          "language": "en"} for number in (1, 2, 3)]  # fmt: skip
FRENCH = "Il y a trois pommes dans le panier et nous en ajoutons encore deux autres."
ENGLISH = "There are three apples in the basket and we add two more of them today."


def right_sum(body: dict[str, Any]) -> str:
    number = int(prompt_of(body).split("How much is ")[1].split()[0])
    return rf"\boxed{{{number + 2}}}"


def test_figures_by_hand(plain: Plain, tmp_path: Path) -> None:
    """Four samples each. Problem 1: three right; problem 2: one right, 9 twice in two spellings, one without a box;
    problem 3: none right."""
    script = {
        "1": [r"\boxed{3}", r"\boxed{3.0}", r"\boxed{8}", r"\boxed{3}"],
        "2": [r"\boxed{9}", r"\boxed{4}", r"\boxed{18/2}", "four, so 4"],
        "3": [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}", r"\boxed{4}"],
    }  # fmt: skip

    def answer(body: dict[str, Any], call: int) -> str:
        return script[prompt_of(body).split("How much is ")[1][0]].pop()

    server = plain(answer)
    found = evaluate(server.url, tmp_path / "out", write_rows(tmp_path / "sums.jsonl", *THREE), "--samples", "4")
    (name, sums), = found["benchmarks"].items()  # fmt: skip
    assert name == "sums" and (sums["problems"], sums["responses"]) == (3, 12)
    # pass@2: 1 - C(1,2)/6 = 1; 1 - C(3,2)/6 = 1/2; 0
    assert sums["pass_at"] == pytest.approx({"1": (3 / 4 + 1 / 4) / 3, "2": 1.5 / 3, "4": 2 / 3}, abs=1e-6)
    # maj@2: problem 1: 3 of 6 pairs both right, 3 a tie: 3/4; problem 2: pairs right+9 twice (tie), right+silent: 2/6
    # maj@4: 1; 0, as 9 has two votes in whatever spelling; 0
    assert sums["majority_at"] == pytest.approx({"1": 1 / 3, "2": (3 / 4 + 2 / 6) / 3, "4": 1 / 3}, abs=1e-6)
    assert sums["unextracted"] == pytest.approx(1 / 12, abs=1e-6) and sums["missed"] == sums["unextracted"]
    assert sums["truncated"] == sums["errors"] == sums["ungraded"] == 0
    low, high = sums["interval"]
    assert (low, high) == (0.0, 0.75), "of three problems the resampled means reach from none to the best one"
    assert {body["temperature"] for body in server.requests} == {0.7}
    assert len({body["seed"] for body in server.requests}) == 12
    assert all(body["top_p"] == 0.95 and body["max_tokens"] == 40960 for body in server.requests)


def test_reasoning_in_tags_and_in_fields(plain: Plain, tmp_path: Path) -> None:
    shapes: list[str | dict[str, Any]] = [
        f"<think>{FRENCH} \\boxed{{7}}</think>Voilà : \\boxed{{3}}",
        f"{FRENCH}\n</think>\n\\boxed{{3}}",
        {"reasoning": FRENCH, "content": r"\boxed{3}"},
        {"reasoning_content": ENGLISH, "content": r"\boxed{3}"},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": ENGLISH}]},
                     {"type": "text", "text": r"\boxed{3}"}]},
        {"content": f"<think>{ENGLISH} \\boxed{{3}}", "finish_reason": "length"},
        f"[THINK]{ENGLISH}[/THINK]\\boxed{{3}}",
        r"\boxed{3}",
    ]  # fmt: skip
    server = plain(lambda _, call: shapes[call])
    found = evaluate(server.url, tmp_path / "out", write_rows(tmp_path / "sums.jsonl", THREE[0]), "--samples", "8",
                     "--concurrency", "1")  # fmt: skip
    told = {record["sample"]: record for record in records(tmp_path / "out")}
    assert [told[i]["reasoning"] for i in range(8)] == [
        f"{FRENCH} \\boxed{{7}}", FRENCH, FRENCH, ENGLISH, ENGLISH, f"{ENGLISH} \\boxed{{3}}", ENGLISH, ""]  # fmt: skip
    assert [told[i]["correct"] for i in range(8)] == [True] * 5 + [False, True, True]
    sums = found["benchmarks"]["sums"]
    assert sums["truncated"] == 1 / 8 and sums["unextracted"] == 0, "what was cut is counted once"
    assert sums["languages"]["en"]["reasoning"] == {
        "same": 0.5, "other": 0.375, "undetermined": 0, "none": 0.125, "refused": 0}  # fmt: skip
    assert any("12.5% of the responses were cut" in line for line in sums["warnings"])


def test_the_wanted_language_is_measured(serve: Serve, tmp_path: Path) -> None:
    """On our own server: the parameters arrive, its weights and measurements are recorded."""
    served = serve(lambda *_: f"<think>{FRENCH}</think>\\boxed{{3}}", reasoning_language="auto")
    out = tmp_path / "out"
    found = evaluate(f"{served.url}/v1", out, write_rows(tmp_path / "sums.jsonl", *THREE), "--samples", "1",
                     "--reasoning-language", "fr", "--reasoning-language-enforcement", "retry")  # fmt: skip
    assert found["weights"] == "7" and found["model"] == "tiny"
    sums = found["benchmarks"]["sums"]
    assert sums["pass_at"]["1"] == pytest.approx(1 / 3, abs=1e-6)
    assert sums["languages"]["fr"]["reasoning"]["same"] == 1 and sums["languages"]["fr"]["answer"]["undetermined"] == 1
    for record in records(out):
        assert record["server_language"]["requested"] == "fr" and record["server_language"]["enforcement"] == "retry"
        assert record["weights"] == "7" and record["reasoning_tokens"] > 10 and record["prompt_tokens"] > 10
    assert all(sampling.temperature == 0.7 for sampling in served.engine.samplings)


REFUSED = {"refused": rf"<think>{ENGLISH}</think>{ENGLISH} \boxed{{3}}", "unextracted": f"<think>{FRENCH}</think>",
           "truncated": f"<think>{FRENCH}</think>"}  # fmt: skip


@pytest.mark.parametrize("counted", REFUSED)
def test_a_strict_refusal_is_a_wrong_answer(serve: Serve, tmp_path: Path, counted: str) -> None:
    served = serve(REFUSED[counted], reasoning_language="auto")
    found = evaluate(f"{served.url}/v1", tmp_path / "out", write_rows(tmp_path / "sums.jsonl", THREE[0]), "--samples",
                     "1", "--reasoning-language", "fr", "--reasoning-language-enforcement", "strict", "--max-tokens",
                     "6" if counted == "truncated" else "900")  # fmt: skip
    assert found["benchmarks"]["sums"]["pass_at"]["1"] == 0 and found["benchmarks"]["sums"]["errors"] == 0
    (record,) = records(tmp_path / "out")
    assert record["correct"] is False and record["reason"].startswith("refused: ")
    sums = found["benchmarks"]["sums"]
    figures = {name: sums[name] for name in ("refused", "unextracted", "truncated")}
    assert figures == {**dict.fromkeys(figures, 0), counted: 1}, "counted once, for what it was"
    shares = {"same": 0, "other": 0, "undetermined": 0, "none": 0, "refused": 0}
    refused = counted == "refused"
    assert sums["languages"]["fr"]["response"] == {**shares, "refused" if refused else "none": 1}
    assert any("refused for their language" in line for line in sums["warnings"]) is refused


WORDS = {"en": "The answer is", "fr": "La réponse est", "de": "Die Antwort ist", "es": "La respuesta es",
         "it": "La risposta è", "ru": "Итак, ответ равен", "zh": "答案是", "uk": "Відповідь", "bg": "Отговорът е",
         "ja": "答えは", "ko": "답은", "ar": "الجواب هو", "hi": "उत्तर है"}  # fmt: skip


def test_short_answers_are_told_in_every_language(plain: Plain, tmp_path: Path) -> None:
    server = plain(lambda body, _: rf"{WORDS[prompt_of(body)[-2:]]} \boxed{{3}}.")
    rows = [{"id": code, "problem": f"1 + 2 = ? {code}", "answer": "3", "language": code} for code in WORDS]
    out = tmp_path / "out"
    found = evaluate(server.url, out, write_rows(tmp_path / "s.jsonl", *rows), "--samples", "1", "--no-ask-form")
    for code, one in found["benchmarks"]["s"]["languages"].items():
        assert one["answer"]["same"] == one["response"]["same"] == one["measured"][code] == 1, code
    assert "too few words to tell" in (out / "summary.md").read_text(encoding="utf-8")


def test_each_row_asks_for_its_reasoning_language_and_is_measured_against_it(plain: Plain, tmp_path: Path) -> None:
    """The server follows the request on French problems only, and refuses one response for its language."""

    def answer(body: dict[str, Any], _: int) -> str | dict[str, Any] | JSONResponse:
        asked = body.get("reasoning_language", "none")
        if asked == "zh":
            return JSONResponse({"error": {"message": "in en", "code": "reasoning_language_mismatch"}}, 422)
        said = FRENCH if asked == "fr" or "Combien" in prompt_of(body) else ENGLISH
        return {"reasoning": said, "content": r"\boxed{3}"}

    rows = [{"id": str(number), "problem": text, "answer": "3", "language": language, "reasoning_language": asked}
            for number, (text, language, asked) in enumerate([
                ("How much is 1 and two, my friend?", "en", ""), ("How much is one and two?", "en", "fr"),
                ("Combien font un et deux ?", "fr", "en"), ("Combien font 1 et 2 ?", "fr", "zh")])]  # fmt: skip
    server, out = plain(answer), tmp_path / "out"
    file = write_rows(tmp_path / "s.jsonl", *rows)
    found = evaluate(server.url, out, file, "--samples", "1", "--concurrency", "1")["benchmarks"]["s"]
    assert [body.get("reasoning_language") for body in server.requests] == [None, "fr", "en", "zh"]
    assert [record["wanted_language"] for record in records(out)] == ["en", "fr", "en", "zh"]
    languages = found["languages"]
    assert languages["en"]["questions"] == {"en": 1, "fr": 0} and languages["fr"]["questions"] == {"en": 1}
    assert languages["en"]["measured"] == {"en": 0.5, "fr": 0.5} and languages["zh"]["measured"] == {"refused": 1}
    assert found["errors"] == 0 and found["refused"] == 0.25
    for name in ("summary.md", "report.html"):
        assert "by the language of the question" in (out / name).read_text(encoding="utf-8")
    write_rows(file, *rows[:2], {**rows[2], "reasoning_language": "de"}, rows[3])
    assert main([str(file), "--url", server.url, "--out", str(out), "--samples", "1"]) == 2, "samples are not mixed"
    server.requests.clear()
    evaluate(server.url, tmp_path / "all", file, "--samples", "1", "--reasoning-language", "it")
    assert {body["reasoning_language"] for body in server.requests} == {"it"}, "the run's setting is stronger"


@pytest.mark.parametrize(("reasoning", "prefilled", "part", "same"), [
    (f"Bien, je réfléchis. {ENGLISH}", ["Bien, je réfléchis."], "other", False),
    (f"Bien, je réfléchis. {FRENCH}", ["Bien, je réfléchis."], "same", True),
    (f"{ENGLISH} Il est temps de répondre.", " Il est temps de répondre.", "other", False),
    ("Bien, je réfléchis pas à pas.", ["Bien, je réfléchis pas à pas."], "none", None),
    (f"{FRENCH}", [7, None], "same", True),
])  # fmt: skip
def test_what_the_server_wrote_is_not_measured(
    plain: Plain, tmp_path: Path, reasoning: str, prefilled: Any, part: str, same: bool | None
) -> None:
    choice = {"reasoning": reasoning, "content": r"\boxed{3}"}
    server = plain(lambda *_: choice, language={"requested": "fr", "prefilled": prefilled})
    row = {"problem": "How much is 1 and two, my friend?", "answer": "3", "reasoning_language": "fr"}
    found = evaluate(server.url, tmp_path / "out", write_rows(tmp_path / "s.jsonl", row), "--samples", "1")
    assert found["benchmarks"]["s"]["languages"]["fr"]["reasoning"][part] == 1
    (record,) = records(tmp_path / "out")
    assert record["reasoning_language"]["same"] is same and record["reasoning"] == reasoning


def test_busy_servers_are_asked_again(plain: Plain, tmp_path: Path) -> None:
    def answer(body: dict[str, Any], call: int) -> str | JSONResponse:
        if call < 2:
            return JSONResponse({"error": {"message": "full"}}, 503 - 74 * call, {"Retry-After": "0"})
        return right_sum(body)

    server = plain(answer)
    found = evaluate(server.url, tmp_path / "out", write_rows(tmp_path / "sums.jsonl", THREE[0]), "--samples", "1")
    assert found["benchmarks"]["sums"]["pass_at"]["1"] == 1 and len(server.requests) == 3
    assert json.loads((tmp_path / "out" / "timings.jsonl").read_text())["tries"] == 3
    assert len({body["seed"] for body in server.requests}) == 1


def test_errors_are_told_and_asked_again(plain: Plain, tmp_path: Path) -> None:
    broken = True

    def answer(body: dict[str, Any], call: int) -> str | JSONResponse:
        if broken and "is 2 and" in prompt_of(body):
            return JSONResponse({"error": {"message": "out of order"}}, 500, {"Retry-After": "0"})
        return right_sum(body)

    server, out, file = plain(answer), tmp_path / "out", write_rows(tmp_path / "sums.jsonl", *THREE)
    sums = evaluate(server.url, out, file, "--samples", "2", "--tries", "2", "--concurrency", "1")["benchmarks"]["sums"]
    assert sums["errors"] == pytest.approx(1 / 3, abs=1e-6) and sums["problems"] == 2 and sums["pass_at"]["1"] == 1
    assert any("same command asks for them again" in line for line in sums["warnings"])
    failed = [record for record in records(out) if record["error"]]
    assert len(failed) == 2 and "out of order" in failed[0]["error"] and failed[0]["correct"] is None
    broken, before = False, len(server.requests)
    sums = evaluate(server.url, out, file, "--samples", "2", "--tries", "2")["benchmarks"]["sums"]
    assert len(server.requests) == before + 2, "only the two"
    assert sums["errors"] == 0 and sums["problems"] == 3 and sums["pass_at"]["1"] == 1


def test_more_samples_are_added_to_those_that_are_there(plain: Plain, tmp_path: Path) -> None:
    server, out = plain(lambda body, _: right_sum(body)), tmp_path / "out"
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    evaluate(server.url, out, file, "--samples", "1", "--limit", "2")
    found = evaluate(server.url, out, file, "--samples", "3")
    assert len(server.requests) == 9 and found["benchmarks"]["s"]["responses"] == 9
    again = evaluate(server.url, out, file, "--samples", "1")
    assert len(server.requests) == 9 and again["benchmarks"]["s"]["responses"] == 3


@pytest.mark.parametrize(("change", "words"), [
    (["--temperature", "1"], "benchmarks.s.temperature = 0.7, now 1.0"),
    (["--seed", "1"], "seed = 0, now 1"),
    (["--reasoning-language", "de"], 'reasoning_language = "", now "de"'),
])  # fmt: skip
def test_other_settings_in_the_same_folder_are_refused(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], words: str
) -> None:
    server, out = plain(lambda body, _: right_sum(body)), tmp_path / "out"
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    evaluate(server.url, out, file, "--samples", "1")
    before = (out / "samples.jsonl").read_bytes(), (out / "results.json").read_bytes()
    assert main([str(file), "--url", server.url, "--out", str(out), "--samples", "1", *change]) == 2
    told = capsys.readouterr().err
    assert words in told and "another --out" in told
    assert before == ((out / "samples.jsonl").read_bytes(), (out / "results.json").read_bytes())


def test_a_folder_of_an_older_format_is_refused(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its records have other names, which would be read as texts that are missing."""
    server, out = plain(lambda body, _: right_sum(body)), tmp_path / "out"
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    evaluate(server.url, out, file, "--samples", "1")
    identity = json.loads((out / "evaluation.json").read_text())
    del identity["format"]
    (out / "evaluation.json").write_text(json.dumps(identity))
    assert main([str(file), "--url", server.url, "--out", str(out), "--samples", "1"]) == 2
    assert "evaluation.json has format 1, this version reads 3: evaluate again" in capsys.readouterr().err


def test_a_changed_problem_is_refused(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, out = plain(lambda body, _: right_sum(body)), tmp_path / "out"
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    evaluate(server.url, out, file, "--samples", "1")
    write_rows(file, {**THREE[0], "problem": "How much is 1 and two?"}, *THREE[1:])
    assert main([str(file), "--url", server.url, "--out", str(out), "--samples", "1"]) == 2
    assert "the prompt of 1 (s) has changed" in capsys.readouterr().err
    write_rows(file, {**THREE[0], "answer": "4"}, *THREE[1:])
    assert main([str(file), "--url", server.url, "--out", str(out), "--samples", "1"]) == 2
    assert "the answer of 1 (s) has changed" in capsys.readouterr().err, "its samples were graded by another"


def test_other_weights_are_refused(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served, out, file = serve(r"\boxed{3}"), tmp_path / "out", write_rows(tmp_path / "s.jsonl", THREE[0])
    evaluate(f"{served.url}/v1", out, file, "--samples", "1")
    served.engine.version = "8"
    assert main([str(file), "--url", f"{served.url}/v1", "--out", str(out), "--samples", "2"]) == 2
    assert 'weights = "7", now "8"' in capsys.readouterr().err


@pytest.mark.parametrize(("status", "message", "words"), [
    (400, "This model's maximum context length is 4096 tokens", "give a smaller --max-tokens"),
    (401, "no key", KEY_VARIABLE),
    (404, "no model", "no model"),
])  # fmt: skip
def test_what_the_server_always_refuses_ends_the_run(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, message: str, words: str
) -> None:
    server = plain(lambda *_: JSONResponse({"error": {"message": message + "\x1b[31m"}}, status))
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    assert main([str(file), "--url", server.url, "--out", str(tmp_path / "out"), "--samples", "1"]) == 2
    told = capsys.readouterr().err
    assert words in told and message in told and "\x1b" not in told
    assert not (tmp_path / "out" / "results.json").exists()


def test_the_key_is_sent_and_written_nowhere(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret-9b1")

    def answer(body: dict[str, Any], call: int) -> str | JSONResponse:
        return right_sum(body) if call else JSONResponse({"error": {"message": "secret-9b1 is slow"}}, 429)

    server, out = plain(answer), tmp_path / "out"
    evaluate(server.url, out, write_rows(tmp_path / "s.jsonl", *THREE), "--samples", "1", "--tries", "1",
             "--concurrency", "1")  # fmt: skip
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret-9b1"}
    written = b"".join(path.read_bytes() for path in out.iterdir())
    printed = capsys.readouterr()
    assert b"secret-9b1" not in written and "secret-9b1" not in printed.out + printed.err
    assert b"... is slow" in written
    monkeypatch.setenv(KEY_VARIABLE, "sécret\n")
    assert main(["x", "--url", server.url]) == 2


def test_mistakes_are_one_line(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    twice = write_rows(tmp_path / "t.jsonl", THREE[0], THREE[0])
    wrong = write_rows(tmp_path / "w.jsonl", {"problem": "p", "tests": {"type": "ifeval", "kwargs": []}})
    unknown = write_rows(tmp_path / "l.jsonl", {**THREE[0], "reasoning_language": "klingon"})
    auto = write_rows(tmp_path / "l2.jsonl", {**THREE[0], "reasoning_language": "auto"})
    for arguments, words in (
        (["gsm9k"], '"gsm9k" is neither a file nor a benchmark'),
        ([], "no benchmark is given"),
        (["gsm8k", "--data", str(tmp_path)], "make it with `python -m evaluation.download gsm8k`"),
        (["aime24"], "data = data: there is no such file there as aime24 needs, aime24.jsonl"),
        ([str(file), "--url", "http://127.0.0.1:9/v1"], "nobody answers"),
        ([str(file), "--url", "http://me:word@127.0.0.1:9/v1"], "holds a secret"),
        ([str(file), str(file)], "given twice"),
        ([str(twice)], "have the id of another row"),
        ([str(unknown)], "l.jsonl:1: reasoning_language 'klingon' is no code that the language detector knows"),
        ([str(auto)], "l2.jsonl:1: reasoning_language 'auto' is no code that the language detector knows"),
        ([str(wrong)], "w.jsonl:1: its tests are not understood"),
        ([str(file), "--samples", "0"], "samples"),
        (["--compare", str(tmp_path)], "two evaluations"),
        (["--compare", str(tmp_path), str(tmp_path)], "is no evaluation"),
    ):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1 and "word@" not in told, told


def test_a_server_that_is_gone_ends_the_run(plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = plain(lambda *_: JSONResponse({"error": {"message": "gone"}}, 503, {"Retry-After": "0"}))
    file = write_rows(tmp_path / "s.jsonl", THREE[0])
    out = tmp_path / "out"
    arguments = [str(file), "--url", server.url, "--out", str(out), "--samples", "100", "--tries", "1"]
    assert main([*arguments, "--concurrency", "2"]) == 1
    assert "in a row have no response" in capsys.readouterr().err and len(server.requests) <= 24
    assert not (out / "results.json").exists()


def test_a_context_that_is_too_small_is_told_before(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = plain(lambda body, _: right_sum(body))
    server.card["max_model_len"] = 4096
    evaluate(server.url, tmp_path / "out", write_rows(tmp_path / "s.jsonl", *THREE), "--samples", "1")
    assert "max_tokens = 40960, but the model's context is 4096" in capsys.readouterr().err


def test_tokens_are_told_before_and_during_and_time_left_meanwhile(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.progress_bar.PLAIN_EVERY_S", 0.0)
    server = plain(lambda body, _: right_sum(body))
    server.card["max_model_len"] = 1000
    file, out = write_rows(tmp_path / "s.jsonl", *THREE), tmp_path / "out"
    evaluate(server.url, out, file, "--samples", "1", "--concurrency", "1", "--max-tokens", "5000")
    told = capsys.readouterr().err
    assert "to be asked: 3 samples of 3 problems, at most 3,000 completion tokens; " in told
    assert "asked 2 of 3, " in told and "left " in told and "20 prompt tokens, 40 completion tokens\n" in told
    assert "3 samples in " in told and told.endswith("30 prompt tokens, 60 completion tokens\n")
    evaluate(server.url, out, file, "--samples", "2", "--concurrency", "1", "--max-tokens", "5000")
    told = capsys.readouterr().err
    assert "3 samples of 3 problems, at most 3,000 completion tokens, about 60 by the samples that are there" in told
    assert "asked 6 of 6" in told and told.endswith("30 prompt tokens, 60 completion tokens\n"), "of this launch"


def test_launches_are_noted_apart_from_results(plain: Plain, tmp_path: Path) -> None:
    server, out = plain(lambda body, _: right_sum(body)), tmp_path / "out"
    file = write_rows(tmp_path / "s.jsonl", *THREE)
    evaluate(server.url, out, file, "--samples", "1")
    (launch,) = map(json.loads, (out / "launches.jsonl").read_text().splitlines())
    assert launch["settings"]["url"] == server.url and launch["missing"] == 3
    assert server.url not in (out / "results.json").read_text()
