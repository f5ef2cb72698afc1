"""The command against scripted models behind HTTP, and a real one: figures, files, resumption, refusals."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from oversight.__main__ import main
from tests.evaluation.conftest import write_rows
from tests.oversight.scripted import ARTICLE, scripted_reply
from tests.serve.command import Command, untrained_model

QUESTIONS = 6


@pytest.fixture
def rows(tmp_path):
    """Questions about articles."""
    answers = {"article": ARTICLE.format("nine geese"), "answers": ["two mules", "nine geese"], "right": 2}
    questions = [{"id": str(n), "question": f"What does Tove keep in barn {n}?", **answers} for n in range(QUESTIONS)]
    return write_rows(tmp_path / "valley.jsonl", *questions)


def evaluate(url: str, out: Path, rows: Path, *more: str, **options: Any) -> int:
    """The exit code of an evaluation. `more` comes after the options, which may be given several times or be empty."""
    options = {"agents": f"plain@{url}", "judges": f"plain@{url}", "rounds": 1, "concurrency": 1, "tries": 1, **options}
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value]
    return main([str(rows), "--out", str(out), *named, *more])


def results(out: Path) -> dict[str, dict[str, Any]]:
    """protocol -> figures."""
    return {row["protocol"]: row for row in json.loads((out / "results.json").read_text())["contests"]}


def test_an_evaluation_to_the_page_and_a_stopped_one_goes_on_to_the_same_bytes(plain, rows, tmp_path):
    server, out, broken = plain(scripted_reply), tmp_path / "out", tmp_path / "broken"
    assert evaluate(server.url, out, rows) == 0
    contests = results(out)
    assert set(contests) == {"qa", "qa_article", "votes", "consultancy", "debate", "open consultancy", "open debate"}
    assert contests["debate"]["games"] == 2 * QUESTIONS and contests["consultancy"]["games"] == 4 * QUESTIONS
    assert contests["debate"]["accuracy"] >= contests["qa"]["accuracy"]
    assert (
        contests["open debate"]["questions"] <= QUESTIONS
        and contests["votes"]["tokens"] >= contests["debate"]["tokens"]
    )
    page, lines = (out / "report.html").read_text(), (out / "games.jsonl").read_bytes().splitlines(keepends=True)
    assert "<script" not in page and page.count("<details>") == len(lines)
    assert "v_passage" in page and "# Scalable oversight" in (out / "summary.md").read_text()
    assert b"I must lie" in b"".join(lines) and "I must lie" not in json.dumps(server.requests), "thinking stays hidden"
    marks = [set(re.findall(r"Texts between two marks (\w{16})", json.dumps(body))) for body in server.requests]
    assert len(set.union(*marks)) == len(marks), "a mark is used once"

    broken.mkdir()
    (broken / "oversight.json").write_bytes((out / "oversight.json").read_bytes())  # with the same secret
    (broken / "games.jsonl").write_bytes(b"".join(lines[:17]) + lines[17][:40])
    second = plain(scripted_reply)
    assert evaluate(second.url, broken, rows) == 0 and 0 < len(second.requests) < len(server.requests)
    for name in ("games.jsonl", "results.json", "summary.md", "report.html"):
        assert (broken / name).read_bytes() == (out / name).read_bytes(), name
    again = plain(scripted_reply)
    assert evaluate(again.url, broken, rows) == 0 and not again.requests


def test_a_second_judge_hears_the_same_debates(plain, rows, tmp_path):
    server, other, out = plain(scripted_reply), plain(scripted_reply), tmp_path / "out"
    assert evaluate(server.url, out, rows, protocols="debate") == 0
    before, both = len(server.requests), [f"--judges=plain@{server.url}", f"--judges=other@{other.url}"]
    assert evaluate(server.url, out, rows, *both, judges="", protocols="debate") == 0
    assert len(server.requests) == before and len(other.requests) == 2 * QUESTIONS
    games = [json.loads(line) for line in (out / "games.jsonl").read_text().splitlines()]
    heard = {(*game["key"][1:3], game["key"][7]): game["speeches"] for game in games if game["key"][3] == "debate"}
    assert all(heard[id, order, "plain"] == heard[id, order, "other"] for id, order, _ in heard)


def test_failures_are_played_again(plain, rows, tmp_path):
    def failing(body: dict[str, Any], number: int) -> str | JSONResponse:
        return JSONResponse({"error": "broken"}, 500) if number % 5 == 4 else scripted_reply(body, number)

    assert evaluate(plain(failing).url, tmp_path / "out", rows) == 1
    server = plain(scripted_reply)
    assert evaluate(server.url, tmp_path / "out", rows) == 0 and server.requests
    assert results(tmp_path / "out")["qa"]["games"] == 2 * QUESTIONS


def test_mistakes_are_one_line(plain, rows, tmp_path, capsys):
    server, out = plain(scripted_reply), tmp_path / "out"
    assert evaluate(server.url, out, rows, protocols="qa") == 0
    for change, words in (
        ({"rounds": 2}, "rounds = 1"), ({"agents": "plain"}, "MODEL@URL"), ({"protocols": "votes"}, "debate"),
        ({"agents": "m@http://h/v1@NO_SUCH"}, "NO_SUCH"), ({"judges": "m@http://127.0.0.1:9/v1"}, "127.0.0.1:9"),
    ):  # fmt: skip
        capsys.readouterr()
        assert evaluate(server.url, out, rows, **change) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error


@pytest.mark.parametrize("row, words", [
    ({"question": "a?", "answers": ["x"], "right": 1}, "right"), ({"question": "a?", "right": 1}, "answers"),
    ({"question": "a?", "answers": ["x", "y"], "right": 3}, "right"), ({"answers": ["x", "y"], "right": 1}, "problem"),
])  # fmt: skip
def test_wrong_rows(tmp_path, capsys, row, words):
    assert evaluate("http://127.0.0.1:9/v1", tmp_path / "out", write_rows(tmp_path / "rows.jsonl", row)) == 2
    assert words in capsys.readouterr().err


def test_two_agents_are_rated(plain, rows, tmp_path):
    server, out = plain(scripted_reply), tmp_path / "out"
    agents = [f"--agents={name}@{server.url}" for name in ("plain", "second")]
    assert evaluate(server.url, out, rows, *agents, agents="", elo_games=40, protocols="qa") == 0
    ratings = json.loads((out / "results.json").read_text())["elo"]["plain"]
    players = {f"{name} {side}" for name in ("plain", "second") for side in ("right", "wrong")}
    assert {row["player"] for row in ratings} == players
    assert ratings[0]["player"].endswith("right") and ratings[0]["elo"] > ratings[-1]["elo"]


def launch(url: str, out: Path) -> subprocess.Popen[bytes]:
    """The evaluation in a process of its own."""
    player = f"tiny@{url}/v1"
    command = [sys.executable, "-m", "oversight", "stories", "logic", "--agents", player, "--judges", player,
               "--out", str(out), "--questions", "2", "--facts", "3", "--rounds", "2", "--best-of", "2",
               "--max-tokens", "60", "--judge-tokens", "16", "--concurrency", "1"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def lines(out: Path) -> int:
    """Games on the disk."""
    file = out / "games.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_and_the_same_bytes(tmp_path):
    """A real server's model, untrained, as agent and judge; killed at random moments."""
    model = untrained_model(tmp_path / "runs", max_position_embeddings=8192)
    command = Command(model, tmp_path / "log")
    try:
        whole, killed, rng, kills = tmp_path / "whole", tmp_path / "killed", random.Random(0), 3
        process = launch(command.url, whole)
        assert process.wait() == 0, process.communicate()[1].decode()[-2000:]
        killed.mkdir()
        (killed / "oversight.json").write_bytes((whole / "oversight.json").read_bytes())  # the same secret
        for number in range(kills):
            process = launch(command.url, killed)
            kills_at = rng.randint(lines(killed) + 1, lines(whole) * (number + 1) // (kills + 1))
            while lines(killed) < kills_at and process.poll() is None:
                time.sleep(0.002)
            process.kill()
            process.wait()
        assert launch(command.url, killed).wait() == 0
        for name in ("games.jsonl", "results.json", "summary.md", "report.html"):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    finally:
        command.close()
    contests = json.loads((whole / "results.json").read_text())["contests"]
    assert {row["protocol"] for row in contests} >= {"qa", "votes", "consultancy", "debate"}
    assert "<details>" in (whole / "report.html").read_text()
