"""The command against scripted models behind HTTP: figures, files, resumption, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from oversight.__main__ import main
from tests.evaluation.conftest import Plain, write_rows
from tests.oversight.conftest import scripted_reply

QUESTIONS = 6


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Questions about articles."""
    article = "In the valley of Orm the miller Tove keeps nine geese in a barn beside the old mill."
    found = [{"id": str(n), "question": f"What does Tove keep in barn {n}?", "article": article,
              "answers": ["two mules", "nine geese"], "right": 2} for n in range(QUESTIONS)]  # fmt: skip
    return write_rows(tmp_path / "valley.jsonl", *found)


def command(url: str, out: Path, *tasks: str | Path, **options: Any) -> list[str]:
    """Arguments of an evaluation."""
    options = {"agents": f"plain@{url}", "judges": f"plain@{url}", "rounds": 1, "concurrency": 1, "tries": 1, **options}
    return [
        *map(str, tasks),
        "--out",
        str(out),
        *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()),
    ]


def results(out: Path) -> dict[str, dict[str, Any]]:
    """protocol -> figures."""
    return {one["protocol"]: one for one in json.loads((out / "results.json").read_text())["contests"]}


def test_an_evaluation_from_the_first_request_to_the_page(plain: Plain, rows: Path, tmp_path: Path) -> None:
    server = plain(scripted_reply)
    out = tmp_path / "out"
    assert main(command(server.url, out, rows)) == 0
    found = results(out)
    assert set(found) == {"qa", "qa_article", "votes", "consultancy", "debate", "open consultancy", "open debate"}
    assert found["debate"]["games"] == 2 * QUESTIONS and found["consultancy"]["games"] == 4 * QUESTIONS
    assert found["debate"]["accuracy"] >= found["qa"]["accuracy"]
    assert found["open debate"]["questions"] <= QUESTIONS and found["votes"]["tokens"] >= found["debate"]["tokens"]
    page = (out / "report.html").read_text()
    assert "<script" not in page and page.count("<details>") == sum(1 for _ in (out / "games.jsonl").open())
    assert "v_passage" in page and "# Scalable oversight" in (out / "summary.md").read_text()
    bodies = json.dumps(server.requests)
    assert "I must lie" in (out / "games.jsonl").read_text() and "I must lie" not in bodies, "thinking stays hidden"
    marks = [set(re.findall(r"Texts between two marks (\w{16})", json.dumps(body))) for body in server.requests]
    assert len(set.union(*marks)) == len(marks), "a mark is used once"


def test_a_stopped_run_goes_on_to_the_same_bytes(plain: Plain, rows: Path, tmp_path: Path) -> None:
    whole = plain(scripted_reply)
    assert main(command(whole.url, tmp_path / "whole", rows)) == 0
    broken = tmp_path / "broken"
    broken.mkdir()
    identity = (tmp_path / "whole" / "oversight.json").read_text()
    (broken / "oversight.json").write_text(identity)  # with the same secret
    lines = (tmp_path / "whole" / "games.jsonl").read_bytes().splitlines(keepends=True)
    (broken / "games.jsonl").write_bytes(b"".join(lines[:17]) + lines[17][:40])
    server = plain(scripted_reply)
    assert main(command(server.url, broken, rows)) == 0
    assert 0 < len(server.requests) < len(whole.requests)
    for name in ("games.jsonl", "results.json", "summary.md", "report.html"):
        assert (broken / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    again = plain(scripted_reply)
    assert main(command(again.url, broken, rows)) == 0 and not again.requests


def test_a_second_judge_hears_the_same_debates(plain: Plain, rows: Path, tmp_path: Path) -> None:
    server, out = plain(scripted_reply), tmp_path / "out"
    only = ["--protocols=debate"]
    assert main([*command(server.url, out, rows), *only]) == 0
    before = len(server.requests)
    other = plain(scripted_reply)
    both = [f"--judges=plain@{server.url}", f"--judges=other@{other.url}"]
    assert main([*(one for one in command(server.url, out, rows) if "--judges" not in one), *both, *only]) == 0
    assert len(server.requests) == before and len(other.requests) == 2 * QUESTIONS
    found = [json.loads(line) for line in (out / "games.jsonl").read_text().splitlines()]
    held = {
        (one["key"][1], one["key"][2], one["key"][7]): one["speeches"] for one in found if one["key"][3] == "debate"
    }
    assert all(held[id, order, "plain"] == held[id, order, "other"] for id, order, _ in held)


def test_failures_are_played_again(plain: Plain, rows: Path, tmp_path: Path) -> None:
    def failing(body: dict[str, Any], number: int) -> str | JSONResponse:
        return JSONResponse({"error": "broken"}, 500) if number % 5 == 4 else scripted_reply(body, number)

    out = tmp_path / "out"
    assert main(command(plain(failing).url, out, rows)) == 1
    server = plain(scripted_reply)
    assert main(command(server.url, out, rows)) == 0 and server.requests
    assert results(out)["qa"]["games"] == 2 * QUESTIONS


@pytest.mark.parametrize("change, words", [
    ({"rounds": 2}, "rounds = 1"), ({"agents": "plain"}, "MODEL@URL"), ({"agents": "m@http://h/v1@NO_SUCH"}, "NO_SUCH"),
    ({"judges": "m@http://127.0.0.1:9/v1"}, "127.0.0.1:9"), ({"protocols": "votes"}, "debate"),
])  # fmt: skip
def test_mistakes_are_one_line(
    plain: Plain, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    server, out = plain(scripted_reply), tmp_path / "out"
    assert main([*command(server.url, out, rows), "--protocols=qa"]) == 0
    capsys.readouterr()
    assert main(command(server.url, out, rows, **change)) == 2
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told


@pytest.mark.parametrize("row, words", [
    ({"question": "a?", "answers": ["x"], "right": 1}, "right"), ({"question": "a?", "right": 1}, "answers"),
    ({"question": "a?", "answers": ["x", "y"], "right": 3}, "right"), ({"answers": ["x", "y"], "right": 1}, "problem"),
])  # fmt: skip
def test_wrong_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], words: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", row)
    assert main(command("http://127.0.0.1:9/v1", tmp_path / "out", file)) == 2
    assert words in capsys.readouterr().err


def test_two_agents_are_rated(plain: Plain, rows: Path, tmp_path: Path) -> None:
    server, out = plain(scripted_reply), tmp_path / "out"
    arguments = [one for one in command(server.url, out, rows, elo_games=40) if "--agents" not in one]
    agents = [f"--agents=plain@{server.url}", f"--agents=second@{server.url}"]
    assert main([*arguments, *agents, "--protocols=qa"]) == 0
    ratings = json.loads((out / "results.json").read_text())["elo"]["plain"]
    assert {one["player"] for one in ratings} == {
        f"{name} {side}" for name in ("plain", "second") for side in ("right", "wrong")
    }
    assert ratings[0]["player"].endswith("right") and ratings[0]["elo"] > ratings[-1]["elo"]
