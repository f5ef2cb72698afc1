"""Translations through a real HTTP endpoint, what is checked of them, and sets that people translated."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from curate.__main__ import main
from curate.languages import (
    HumanStage,
    TranslateStage,
    assign_languages,
    formulas,
    is_english_math,
    key_of,
    numbers,
    plain_reply,
    why_unfaithful,
)  # fmt: skip
from curate.stage import Kept, Rejected
from shared.errors import DataError, RunError
from shared.jsonl import Row
from tests.curate.deciding import decide_rows
from tests.serving import reply as answer
from tests.serving import serving

ENGLISH = "A baker sells $12$ loaves of bread every day and earns $x=3$ coins for each. How many coins in 10 days?"
GERMAN = "Ein Bäcker verkauft jeden Tag $12$ Brote und verdient $x=3$ Münzen für jedes. Wie viele Münzen in 10 Tagen?"
FRENCH = "Un boulanger vend $12$ pains chaque jour et gagne $x=3$ pièces pour chacun. Combien de pièces en 10 jours ?"


class Api(ThreadingHTTPServer):
    """Answers with `replies` in turn, the last again and again: a text or a status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Any] = [GERMAN]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        api, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with api.lock:
            api.requests.append(body)
            api.keys.append(self.headers["Authorization"])
            reply = api.replies.pop(0) if len(api.replies) > 1 else api.replies[0]
        data = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        answer(self, reply if isinstance(reply, int) else 200, data)


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    server = Api()
    with serving(server):
        yield server


def translate(api: Api, **options: Any) -> TranslateStage:
    return TranslateStage(api.url, "translator", **{"languages": ["de"], "share": 1.0, "deadline_s": 10.0, **options})


def test_problem_is_translated(api):
    row = {"id": "a", "problem": ENGLISH, "answer": "360", "language": "en"}
    api.replies = [f"<think>bread is Brot</think>\n{GERMAN}\n"]
    decision = decide_rows(translate(api), [row])[0]
    changed = {**row, "id": "a/de", "problem": GERMAN, "language": "de", "translated_by": "translator"}
    assert decision == Kept([changed], {"translated into de": 1})
    assert decide_rows(translate(api, add=True), [row])[0] == Kept([row, changed], {"translated into de": 1})
    sent = api.requests[0]
    assert sent["model"] == "translator" and sent["messages"][1]["content"] == ENGLISH
    assert "German" in sent["messages"][0]["content"]


def test_unfaithful_translations_are_asked_for_again_and_then_left_out(api):
    row = {"problem": ENGLISH, "answer": "360"}
    api.replies = [GERMAN.replace("10", "11"), GERMAN]
    assert decide_rows(translate(api), [row])[0].counts == {"translated into de": 1}
    assert [request["temperature"] for request in api.requests] == [0, 0.5]
    api.replies = [FRENCH]
    assert decide_rows(translate(api), [row])[0] == Kept([row], {"original kept: another language": 1})
    assert len(api.requests) == 5
    api.replies = [400]
    assert decide_rows(translate(api), [row])[0] == Kept([row], {"original kept: refused by the endpoint": 1})


def test_endpoint_that_fails_stops_the_stage(api, monkeypatch):
    monkeypatch.setattr("curate.languages.PAUSE_S", 0.01)
    api.replies = [500]
    with pytest.raises(RunError, match=r"status 500.*the same command goes on"):
        decide_rows(translate(api), [{"problem": ENGLISH, "answer": "360"}])


def test_only_a_share_of_english_mathematics(api):
    rows = [{"problem": ENGLISH, "answer": "1"} for _ in range(40)]
    rows += [{"problem": FRENCH, "answer": "1", "language": "fr"}, {"problem": ENGLISH, "domain": "code", "tests": [1]}]
    decisions = decide_rows(translate(api, share=0.25), rows)
    assert sum("translated into de" in decision.counts for decision in decisions) == 10 == len(api.requests)
    assert decisions[40] == Kept([rows[40]]) and decisions[41] == Kept([rows[41]])


def test_command_sends_the_key_and_keeps_it_out_of_files(api, tmp_path, monkeypatch, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"problem": ENGLISH, "answer": "360"}) + "\n")
    arguments = ["translate", str(source), "--out", str(tmp_path / "out.jsonl"), "--url", api.url, "--model", "m"]
    arguments += ["--key-variable", "MY_KEY", "--share", "1", "--languages", "de"]
    monkeypatch.delenv("MY_KEY", raising=False)
    assert main(arguments) == 2 and "MY_KEY" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert main(arguments) == 0 and api.keys == ["Bearer s3cret"]
    shown = capsys.readouterr()
    texts = [path.read_text() for path in tmp_path.iterdir()] + [shown.out, shown.err]
    assert len(texts) > 4 and not any("s3cret" in text for text in texts)
    assert main([*arguments[:-1], "tlh"]) == 2 and "'tlh'" in capsys.readouterr().err


@pytest.mark.parametrize(("translation", "why"), [
    (GERMAN, ""), (GERMAN.replace("$12$", "\\(12\\)"), ""), (GERMAN.replace("10", "zehn"), "other numbers"),
    (GERMAN.replace("x=3", "y=3"), "other formulas"), (GERMAN.replace("$12$", "12"), "other formulas"),
    (FRENCH, "another language"), (ENGLISH, "another language"),
    ("$12$ $x=3$ 10", "too few words to tell its language"), (GERMAN + " Lösung: \\boxed{}", "it answers the problem"),
    (GERMAN + " Jeder Tag ist wie der andere, und so rechnen wir alle zusammen. " * 4, "too short or too long"),
    ("", "empty"),
])  # fmt: skip
def test_what_speaks_against_a_translation(translation, why):
    assert why_unfaithful(ENGLISH, translation, "de") == why


def test_formulas_are_compared_without_spacing_and_words():
    english = "Let $x \\, = 3$ and \\[ y=2 \\text{ if odd}. \\] Then \\begin{align} a&=b \\end{align} holds."
    other = "Sei $x=3$ und $$y=2\\text{ falls ungerade}$$. Dann gilt \\begin{align}a&=b\\end{align}."
    assert formulas(english) == formulas(other) and sum(formulas(english).values()) == 3
    assert formulas("$x$ and $x$") == Counter({"x": 2})


def test_prices_are_no_formulas_and_numbers_are_compared_by_value():
    assert not formulas("She pays $5 for the cake and $6 for the rest.")
    english = "He pays 80,000 and 1.50 for .5 litres, twice 3, 4."
    other = "Er zahlt 80.000 und 1,5 für 0,5 Liter, zweimal 3, 4."
    assert numbers(english) == numbers(other) and numbers("80 000") == numbers("80000") != numbers("8000")
    assert numbers("1, 2") != numbers("1.2")


def test_an_open_answer_is_not_left_behind_in_another_language():
    row = {"problem": "Prove that ice floats on water.", "answer": "It is less dense than water.", "domain": "open"}
    assert not is_english_math(Row("file:1", 1, row)) and is_english_math(Row("file:1", 1, {**row, "domain": "math"}))


def test_reply_without_reasoning_and_fences():
    assert plain_reply("<think>a</think>\n```markdown\nHallo\nWelt\n```") == "Hallo\nWelt" and plain_reply(" a ") == "a"


def test_draw_is_even_and_does_not_depend_on_the_order():
    names = {f"p{number}": ["de", "fr", "ru"] for number in range(100)}
    drawn = assign_languages(names, 0.3, seed=1)
    assert len(drawn) == 30 and set(Counter(drawn.values()).values()) == {10}
    assert assign_languages(dict(reversed(names.items())), 0.3, seed=1) == drawn
    assert assign_languages(names, 0.3, seed=2) != drawn
    assert assign_languages({"a": [], "b": ["de"]}, 1.0, seed=0) == {"b": "de"}


def human_rows() -> list[dict[str, Any]]:
    texts = {"en": ENGLISH, "de": GERMAN, "fr": FRENCH}
    return [
        {"id": f"set/{language}/{number}", "language": language, "problem": texts[language], "answer": "360"}
        for language in texts
        for number in range(10)
    ]


def test_one_language_a_problem():
    rows = human_rows()
    rows[13]["answer"] = "361"  # set/de/3
    rows[24]["problem"] = GERMAN  # set/fr/4
    del rows[5]  # set/en/5
    decisions = decide_rows(HumanStage(["de", "fr"], share=0.5), rows)
    reasons = Counter(decision.reason for decision in decisions if isinstance(decision, Rejected))
    assert reasons == {"translations with different answers": 3, "text in another language": 1}
    written = [row for decision in decisions if isinstance(decision, Kept) for row in decision.rows]
    numbers = sorted(row["id"][-1] for row in written)
    assert numbers == ["0", "1", "2", "4", "5", "6", "7", "8", "9"]
    languages = Counter(row["language"] for row in written)
    assert languages["de"] + languages["fr"] in (4, 5) and abs(languages["de"] - languages["fr"]) <= 1


def test_rows_that_cannot_be_paired():
    row = {"id": "de/set/de", "language": "de", "problem": GERMAN, "answer": "1", "group": "7"}
    with pytest.raises(DataError, match="--key"):
        key_of(Row("file:1", 1, row))
    assert key_of(Row("file:1", 1, row), "group") == "7"
    assert key_of(Row("file:1", 1, {**row, "id": "set_de.7"})) == "set_*.7"
    with pytest.raises(DataError, match="twice in 'de'"):
        decide_rows(HumanStage(["de"], 1.0, key="group"), [row, row])
