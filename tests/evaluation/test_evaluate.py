"""Whole evaluations of servers whose answers are known: plain OpenAI-shaped ones, and ours with a scripted engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from evaluation.__main__ import main
from evaluation.settings import KEY_VARIABLE, load
from tests.evaluation.conftest import evaluate, figures, prompt_of, records, write_rows

THREE = [{"id": str(number), "problem": f"How much is {number} and two, my friend?", "answer": str(number + 2),
          "language": "en"} for number in (1, 2, 3)]  # fmt: skip
FRENCH = "Il y a trois pommes dans le panier et nous en ajoutons encore deux autres."
ENGLISH = "There are three apples in the basket and we add two more of them today."
WORDS = {"en": "The answer is", "fr": "La réponse est", "de": "Die Antwort ist", "es": "La respuesta es",
         "it": "La risposta è", "ru": "Итак, ответ равен", "zh": "答案是", "uk": "Відповідь", "bg": "Отговорът е",
         "ja": "答えは", "ko": "답은", "ar": "الجواب هو", "hi": "उत्तर है"}  # fmt: skip
REFUSED = {"refused": rf"<think>{ENGLISH}</think>{ENGLISH} \boxed{{3}}", "unextracted": f"<think>{FRENCH}</think>",
           "truncated": f"<think>{FRENCH}</think>"}  # fmt: skip


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path / "sums.jsonl", *THREE)


def right_sum(body: dict[str, Any], _: int = 0) -> str:
    number = int(prompt_of(body).split("How much is ")[1].split()[0])
    return rf"\boxed{{{number + 2}}}"


def fail(url: str, out: Path, file: Path, *arguments: str) -> int:
    return main([str(file), "--url", url, "--out", str(out), "--samples", "1", *arguments])


def test_figures_by_hand(plain, out, file):
    """Four samples each. Problem 1: three right; problem 2: one right, 9 twice in two spellings, one without a box;
    problem 3: none right."""
    script = {
        "1": [r"\boxed{3}", r"\boxed{3.0}", r"\boxed{8}", r"\boxed{3}"],
        "2": [r"\boxed{9}", r"\boxed{4}", r"\boxed{18/2}", "four, so 4"],
        "3": [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}", r"\boxed{4}"],
    }  # fmt: skip
    server = plain(lambda body, _: script[prompt_of(body).split("How much is ")[1][0]].pop())
    sums = figures(server.url, out, file, samples=4)
    assert (sums["problems"], sums["responses"]) == (3, 12)
    # pass@2: 1 - C(1,2)/6 = 1; 1 - C(3,2)/6 = 1/2; 0
    assert sums["pass_at"] == pytest.approx({"1": (3 / 4 + 1 / 4) / 3, "2": 1.5 / 3, "4": 2 / 3}, abs=1e-6)
    # maj@2: problem 1: 3 of 6 pairs both right, 3 a tie: 3/4; problem 2: pairs right+9 twice (tie), right+silent: 2/6
    # maj@4: 1; 0, as 9 has two votes in whatever spelling; 0
    assert sums["majority_at"] == pytest.approx({"1": 1 / 3, "2": (3 / 4 + 2 / 6) / 3, "4": 1 / 3}, abs=1e-6)
    assert sums["unextracted"] == pytest.approx(1 / 12, abs=1e-6) and sums["missed"] == sums["unextracted"]
    assert sums["truncated"] == sums["errors"] == sums["ungraded"] == 0
    assert sums["interval"] == [0.0, 0.75], "of three problems the resampled means reach from none to the best one"
    assert len({body["seed"] for body in server.requests}) == 12
    sampling = {(body["temperature"], body["top_p"], body["max_tokens"]) for body in server.requests}
    assert sampling == {(0.7, 0.95, 40960)}


def test_reasoning_in_tags_and_in_fields(plain, out, tmp_path):
    chunks = [{"type": "thinking", "thinking": [{"type": "text", "text": ENGLISH}]},
              {"type": "text", "text": r"\boxed{3}"}]  # fmt: skip
    shapes: list[tuple[str | dict[str, Any], str, bool]] = [
        (f"<think>{FRENCH} \\boxed{{7}}</think>Voilà : \\boxed{{3}}", f"{FRENCH} \\boxed{{7}}", True),
        (f"{FRENCH}\n</think>\n\\boxed{{3}}", FRENCH, True),
        ({"reasoning": FRENCH, "content": r"\boxed{3}"}, FRENCH, True),
        ({"reasoning_content": ENGLISH, "content": r"\boxed{3}"}, ENGLISH, True),
        ({"content": chunks}, ENGLISH, True),
        ({"content": f"<think>{ENGLISH} \\boxed{{3}}", "finish_reason": "length"}, f"{ENGLISH} \\boxed{{3}}", False),
        (f"[THINK]{ENGLISH}[/THINK]\\boxed{{3}}", ENGLISH, True),
        (r"\boxed{3}", "", True),
    ]
    server = plain(lambda _, call: shapes[call][0])
    file = write_rows(tmp_path / "one.jsonl", THREE[0])
    sums = figures(server.url, out, file, "--concurrency", "1", samples=8)
    rows = sorted(records(out), key=lambda record: record["sample"])
    assert [(record["reasoning"], record["correct"]) for record in rows] == [shape[1:] for shape in shapes]
    assert sums["truncated"] == 1 / 8 and sums["unextracted"] == 0, "what was cut is counted once"
    shares = {"same": 0.5, "other": 0.375, "undetermined": 0, "none": 0.125, "refused": 0}
    assert sums["languages"]["en"]["reasoning"] == shares
    assert any("12.5% of the responses were cut" in line for line in sums["warnings"])


def test_the_wanted_language_is_measured(serve, out, file):
    """On our own server: the parameters arrive, its weights and measurements are recorded."""
    served = serve(lambda *_: f"<think>{FRENCH}</think>\\boxed{{3}}", reasoning_language="auto")
    language = ["--reasoning-language", "fr", "--reasoning-language-enforcement", "retry"]
    scores = evaluate(f"{served.url}/v1", out, file, "--samples", "1", *language)
    assert scores["weights"] == "7" and scores["model"] == "tiny"
    sums = scores["benchmarks"]["sums"]
    assert sums["pass_at"]["1"] == pytest.approx(1 / 3, abs=1e-6)
    assert sums["languages"]["fr"]["reasoning"]["same"] == 1 and sums["languages"]["fr"]["answer"]["undetermined"] == 1
    for record in records(out):
        assert record["server_language"]["requested"] == "fr" and record["server_language"]["enforcement"] == "retry"
        assert record["weights"] == "7" and record["reasoning_tokens"] > 10 and record["prompt_tokens"] > 10
    assert all(sampling.temperature == 0.7 for sampling in served.engine.samplings)


@pytest.mark.parametrize("counted", REFUSED)
def test_a_strict_refusal_is_a_wrong_answer(serve, out, tmp_path, counted):
    served = serve(REFUSED[counted], reasoning_language="auto")
    options = ["--reasoning-language", "fr", "--reasoning-language-enforcement", "strict", "--max-tokens"]
    file = write_rows(tmp_path / "one.jsonl", THREE[0])
    sums = figures(f"{served.url}/v1", out, file, *options, "6" if counted == "truncated" else "900")
    assert sums["pass_at"]["1"] == sums["errors"] == 0
    (record,) = records(out)
    assert record["correct"] is False and record["reason"].startswith("refused: ")
    assert {name for name in REFUSED if sums[name]} == {counted} and sums[counted] == 1, "counted once, for what it was"
    shares = {"same": 0, "other": 0, "undetermined": 0, "none": 0, "refused": 0}
    refused = counted == "refused"
    assert sums["languages"]["fr"]["response"] == {**shares, "refused" if refused else "none": 1}
    assert any("refused for their language" in line for line in sums["warnings"]) is refused


def test_short_answers_are_told_in_every_language(plain, out, tmp_path):
    server = plain(lambda body, _: rf"{WORDS[prompt_of(body)[-2:]]} \boxed{{3}}.")
    rows = [{"id": code, "problem": f"1 + 2 = ? {code}", "answer": "3", "language": code} for code in WORDS]
    scores = figures(server.url, out, write_rows(tmp_path / "short.jsonl", *rows), "--no-ask-form")
    for code, language in scores["languages"].items():
        assert language["answer"]["same"] == language["response"]["same"] == language["measured"][code] == 1, code
    assert "too few words to tell" in (out / "summary.md").read_text(encoding="utf-8")


def test_each_row_asks_for_its_reasoning_language_and_is_measured_against_it(plain, out, tmp_path):
    """The server follows the request on French problems only, and refuses one response for its language."""

    def answer(body: dict[str, Any], _: int) -> str | dict[str, Any] | JSONResponse:
        asked = body.get("reasoning_language", "none")
        if asked == "zh":
            return JSONResponse({"error": {"message": "in en", "code": "reasoning_language_mismatch"}}, 422)
        reasoning = FRENCH if asked == "fr" or "Combien" in prompt_of(body) else ENGLISH
        return {"reasoning": reasoning, "content": r"\boxed{3}"}

    cases = [("How much is 1 and two, my friend?", "en", ""), ("How much is one and two?", "en", "fr"),
             ("Combien font un et deux ?", "fr", "en"), ("Combien font 1 et 2 ?", "fr", "zh")]  # fmt: skip
    rows = [{"id": text, "problem": text, "answer": "3", "language": language, "reasoning_language": asked}
            for text, language, asked in cases]  # fmt: skip
    server, file = plain(answer), write_rows(tmp_path / "asking.jsonl", *rows)
    scores = figures(server.url, out, file, "--concurrency", "1")
    assert [body.get("reasoning_language") for body in server.requests] == [None, "fr", "en", "zh"]
    assert [record["wanted_language"] for record in records(out)] == ["en", "fr", "en", "zh"]
    languages = scores["languages"]
    assert languages["en"]["questions"] == {"en": 1, "fr": 0} and languages["fr"]["questions"] == {"en": 1}
    assert languages["en"]["measured"] == {"en": 0.5, "fr": 0.5} and languages["zh"]["measured"] == {"refused": 1}
    assert scores["errors"] == 0 and scores["refused"] == 0.25
    for name in ("summary.md", "report.html"):
        assert "by the language of the question" in (out / name).read_text(encoding="utf-8")
    write_rows(file, *rows[:2], {**rows[2], "reasoning_language": "de"}, rows[3])
    assert fail(server.url, out, file) == 2, "samples are not mixed"
    server.requests.clear()
    evaluate(server.url, tmp_path / "all", file, "--samples", "1", "--reasoning-language", "it")
    assert {body["reasoning_language"] for body in server.requests} == {"it"}, "the run's setting is stronger"


def test_what_the_server_wrote_is_not_measured(plain, out, tmp_path):
    cases = [
        (f"Bien, je réfléchis. {ENGLISH}", ["Bien, je réfléchis."], False),
        (f"Bien, je réfléchis. {FRENCH}", ["Bien, je réfléchis."], True),
        (f"{ENGLISH} Il est temps de répondre.", " Il est temps de répondre.", False),
        ("Bien, je réfléchis pas à pas.", ["Bien, je réfléchis pas à pas."], None),
        (f"{FRENCH}", [7, None], True),
    ]
    language: dict[str, Any] = {"requested": "fr"}

    def answer(_: dict[str, Any], call: int) -> dict[str, Any]:
        language["prefilled"] = cases[call][1]
        return {"reasoning": cases[call][0], "content": r"\boxed{3}"}

    file = write_rows(tmp_path / "one.jsonl", {**THREE[0], "reasoning_language": "fr"})
    sums = figures(plain(answer, language=language).url, out, file, "--concurrency", "1", samples=5)
    shares = {"same": 0.4, "other": 0.4, "undetermined": 0, "none": 0.2, "refused": 0}
    assert sums["languages"]["fr"]["reasoning"] == shares
    rows = sorted(records(out), key=lambda record: record["sample"])
    assert [(one["reasoning"], one["reasoning_language"]["same"]) for one in rows] == [(a, c) for a, _, c in cases]


def test_busy_servers_are_asked_again(plain, out, tmp_path):
    def answer(body: dict[str, Any], call: int) -> str | JSONResponse:
        busy = JSONResponse({"error": {"message": "full"}}, 503 - 74 * call, {"Retry-After": "0"})
        return busy if call < 2 else right_sum(body)

    server = plain(answer)
    assert figures(server.url, out, write_rows(tmp_path / "one.jsonl", THREE[0]))["pass_at"]["1"] == 1
    assert json.loads((out / "timings.jsonl").read_text())["tries"] == len(server.requests) == 3
    assert len({body["seed"] for body in server.requests}) == 1


def test_errors_are_told_and_asked_again(plain, out, file):
    broken = True

    def answer(body: dict[str, Any], call: int) -> str | JSONResponse:
        if broken and "is 2 and" in prompt_of(body):
            return JSONResponse({"error": {"message": "out of order"}}, 500, {"Retry-After": "0"})
        return right_sum(body)

    server = plain(answer)
    sums = figures(server.url, out, file, "--tries", "2", "--concurrency", "1", samples=2)
    assert sums["errors"] == pytest.approx(1 / 3, abs=1e-6) and sums["problems"] == 2 and sums["pass_at"]["1"] == 1
    assert any("same command asks for them again" in line for line in sums["warnings"])
    failed = [record for record in records(out) if record["error"]]
    assert len(failed) == 2 and "out of order" in failed[0]["error"] and failed[0]["correct"] is None
    broken, before = False, len(server.requests)
    sums = figures(server.url, out, file, "--tries", "2", samples=2)
    assert len(server.requests) == before + 2, "only the two"
    assert sums["errors"] == 0 and sums["problems"] == 3 and sums["pass_at"]["1"] == 1


def test_more_samples_are_added_to_those_that_are_there(plain, out, file):
    """Launches are noted apart from results."""
    server = plain(right_sum)
    for samples, limit, asked, responses in ((1, ["--limit", "2"], 2, 2), (3, [], 9, 9), (1, [], 9, 3)):
        scores = figures(server.url, out, file, *limit, samples=samples)
        assert len(server.requests) == asked and scores["responses"] == responses
    launches = [json.loads(line) for line in (out / "launches.jsonl").read_text().splitlines()]
    assert [launch["missing"] for launch in launches][:2] == [2, 7] and launches[0]["settings"]["url"] == server.url
    assert server.url not in (out / "results.json").read_text()


def test_an_address_may_lack_its_version_and_a_repetition_tells_that_nothing_is_asked(plain, out, file, capsys):
    server = plain(right_sum)
    bare = server.url.removesuffix("/v1")
    for address in (bare, f"{bare}/", server.url, f"{server.url}/chat/completions"):
        assert load(["--url", address]).url == server.url
    assert load(["--url", f"{bare}/openai"]).url == f"{bare}/openai", "a path of a proxy's own"
    for asked in (3, 0):
        before = len(server.requests)
        assert main([str(file), "--url", bare, "--out", str(out), "--samples", "1"]) == 0
        assert len(server.requests) - before == asked
        first = capsys.readouterr().err.splitlines()[0]
        assert ("holds 3 of 3 samples: no request is made" in first) == (not asked)


def test_another_evaluation_in_the_same_folder_is_refused(serve, out, file, capsys):
    """Other settings, a problem whose samples were asked or graded in another way, other weights, an older format."""
    served = serve(r"\boxed{3}")
    evaluate(f"{served.url}/v1", out, file, "--samples", "1")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def check(words: str, *change: str) -> None:
        assert fail(f"{served.url}/v1", out, file, *change) == 2
        assert words in capsys.readouterr().err
        assert all((out / name).read_bytes() == before[name] for name in ("samples.jsonl", "results.json"))

    check("benchmarks.sums.temperature = 0.7, now 1.0", "--temperature", "1")
    check("seed = 0, now 1", "--seed", "1")
    check('reasoning_language = "", now "de"', "--reasoning-language", "de")
    for name, value, told in (("problem", "How much is 1 and two?", "prompt"), ("answer", "4", "answer")):
        write_rows(file, {**THREE[0], name: value}, *THREE[1:])
        check(f"the {told} of 1 (sums) has changed")
    write_rows(file, *THREE)
    served.engine.version = "8"
    check('weights = "7", now "8"')
    identity = json.loads(before["evaluation.json"])
    del identity["format"]  # its records have other names, which would be read as texts that are missing
    (out / "evaluation.json").write_text(json.dumps(identity))
    check("evaluation.json has format 1, this version reads 3: evaluate again")


@pytest.mark.parametrize(("status", "message", "words"), [
    (400, "This model's maximum context length is 4096 tokens", "give a smaller --max-tokens"),
    (401, "no key", KEY_VARIABLE), (404, "no model", "no model"),
])  # fmt: skip
def test_what_the_server_always_refuses_ends_the_run(plain, out, file, capsys, status, message, words):
    server = plain(lambda *_: JSONResponse({"error": {"message": message + "\x1b[31m"}}, status))
    assert fail(server.url, out, file) == 2 and not (out / "results.json").exists()
    told = capsys.readouterr().err
    assert words in told and message in told and "\x1b" not in told


def test_the_key_is_sent_and_written_nowhere(plain, out, file, capsys, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret-9b1")
    slow = JSONResponse({"error": {"message": "secret-9b1 is slow"}}, 429)
    server = plain(lambda body, call: right_sum(body) if call else slow)
    figures(server.url, out, file, "--tries", "1", "--concurrency", "1")
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret-9b1"}
    written, printed = b"".join(path.read_bytes() for path in out.iterdir()), capsys.readouterr()
    assert b"secret-9b1" not in written and "secret-9b1" not in printed.out + printed.err
    assert b"... is slow" in written
    monkeypatch.setenv(KEY_VARIABLE, "sécret\n")
    assert main(["x", "--url", server.url]) == 2


def test_mistakes_are_one_line(out, file, tmp_path, capsys):
    wrong = {"problem": "p", "tests": {"type": "ifeval", "kwargs": []}}
    asking = [{**THREE[0], "reasoning_language": code} for code in ("klingon", "auto")]
    files = {"t": [THREE[0]] * 2, "w": [wrong], "klingon": asking[:1], "auto": asking[1:]}
    twice, odd, *languages = (str(write_rows(tmp_path / f"{name}.jsonl", *rows)) for name, rows in files.items())
    for words, *arguments in (
        ("there is no such file; did you mean gsm8k?", "gsm9k"),
        ("sums.jsonl?", str(file).replace("sums", "sms")),
        ("no benchmark is given",),
        ("make it with `python -m evaluation.download gsm8k`", "gsm8k", "--data", str(tmp_path)),
        ("data = data: there is no such file there as aime24 needs, aime24.jsonl", "aime24"),
        ("nobody answers", str(file), "--url", "http://127.0.0.1:9/v1"),
        ("holds a secret", str(file), "--url", "http://me:word@127.0.0.1:9/v1"),
        ("given twice", str(file), str(file)),
        ("have the id of another row", twice),
        ("klingon.jsonl:1: reasoning_language 'klingon' is no code", languages[0]),
        ("auto.jsonl:1: reasoning_language 'auto' is no code", languages[1]),
        ("w.jsonl:1: its tests are not understood", odd),
        ("samples", str(file), "--samples", "0"),
        ("takes two folders of evaluations: given none, missing BEFORE and AFTER", "--compare"),
        (f"evaluations: given {tmp_path}, missing AFTER", "--compare", str(tmp_path)),
        ("evaluations: given a, b, c, missing nothing", "--compare", "a", "b", "c"),
        (f"{tmp_path} is no evaluation: there is no evaluation.json in it", "--compare", str(tmp_path), str(tmp_path)),
        (
            "x is no evaluation: there is no such folder; evaluations in",
            "--compare",
            str(tmp_path / "x"),
            str(tmp_path),
        ),
    ):
        assert main([*arguments, "--out", str(out)]) == 2
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1 and "word@" not in told, told


def test_a_server_that_is_gone_ends_the_run(plain, out, file, capsys):
    server = plain(lambda *_: JSONResponse({"error": {"message": "gone"}}, 503, {"Retry-After": "0"}))
    assert fail(server.url, out, file, "--samples", "100", "--tries", "1", "--concurrency", "2") == 1
    assert "in a row have no response" in capsys.readouterr().err and len(server.requests) <= 24
    assert not (out / "results.json").exists()


def test_tokens_are_told_before_and_during_and_time_left_meanwhile(plain, out, file, capsys, monkeypatch):
    monkeypatch.setattr("shared.progress_bar.PLAIN_EVERY_S", 0.0)
    server = plain(right_sum)
    server.card["max_model_len"] = 1000
    options = ["--concurrency", "1", "--max-tokens", "5000"]
    figures(server.url, out, file, *options)
    told = capsys.readouterr().err
    assert "max_tokens = 5000, but the model's context is 1000" in told
    assert "to be asked: 3 samples of 3 problems, at most 3,000 completion tokens; " in told
    assert "asked 2 of 3, " in told and "left " in told and "20 prompt tokens, 40 completion tokens\n" in told
    assert "3 samples in " in told and told.endswith("30 prompt tokens, 60 completion tokens\n")
    figures(server.url, out, file, *options, samples=2)
    told = capsys.readouterr().err
    assert "3 samples of 3 problems, at most 3,000 completion tokens, about 60 by the samples that are there" in told
    assert "asked 6 of 6" in told and told.endswith("30 prompt tokens, 60 completion tokens\n"), "of this launch"
