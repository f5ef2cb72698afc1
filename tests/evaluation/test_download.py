"""The command that makes the files of the named benchmarks, from published rows on a local server or in a folder."""

import gzip
import json
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evaluation import download
from evaluation.download import MGSM_LANGUAGES, PUBLISHED, fetch, main, read
from evaluation.settings import EvaluationSettings
from evaluation.tasks import BENCHMARK_FILES, BenchmarkTask, read_benchmark
from shared.errors import DataError
from shared.jsonl import read_rows
from tests.serving import serving
from tests.tables import read_table

ROWS = read_table("evaluation/published")
"""rows of each file of a benchmark, in their published form"""


def publish(folder: Path) -> Path:
    """Write all files as `wget -x` stores them."""
    for name, published in PUBLISHED.items():
        for number, address in enumerate(published.addresses):
            path = folder / address.removeprefix("https://")
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "mgsm":
                text = f"Frage {number}\t1,200\nFrage\t-3\n"
            else:
                rows = [row["row"] for row in ROWS if (row["name"], row["file"]) == (name, number)]
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return folder


def tasks(name: str, data: Path) -> dict[str, BenchmarkTask]:
    found = read_benchmark(name, EvaluationSettings(benchmarks=[name], data=str(data), ask_form=False)).tasks
    return {task.problem.id: task for task in found}


@contextmanager
def mirrored(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.mark.parametrize("by_http", [False, True])
def test_all_files_are_made(tmp_path, capsys, by_http):
    mirror, data = publish(tmp_path / "mirror"), tmp_path / "data"
    assert PUBLISHED.keys() == BENCHMARK_FILES.keys()
    with mirrored(mirror) if by_http else nullcontext(str(mirror)) as source:
        assert main([*PUBLISHED, "--data", str(data), "--mirror", source]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{data / 'gsm8k_test.jsonl'}: 1 problems" and len(lines) == len(PUBLISHED)
    assert tasks("gsm8k", data)["gsm8k/test/0"].problem.answer == "1200"
    assert tasks("gsm8k", data)["gsm8k/test/0"].prompt == "How many\u2028apples?"
    trained = json.loads((data / "gsm8k_train.jsonl").read_text())
    assert trained["id"] == "gsm8k/train/0" and trained["solution"] == "Six: 2 * 3 = 6" and trained["answer"] == "6"
    assert tasks("math500", data)["math500/test/algebra/7"].problem.answer == "2"
    assert tasks("aime24", data)["aime24/1"].problem.answer == "204"
    languages = {task.problem.language for task in tasks("mgsm", data).values()}
    assert languages == set(MGSM_LANGUAGES) and tasks("mgsm", data)["mgsm/de/0"].problem.answer == "1200"
    assert tasks("mbpp", data).keys() == {"mbpp/11", "mbpp/510"}
    assert tasks("mbpp", data)["mbpp/11"].problem.tests["code"] == "assert f() == 1\nassert f() != 2"
    assert tasks("humaneval", data)["humaneval/3"].problem.tests["code"].endswith("assert candidate() == 1\n\ncheck(f)")
    assert tasks("humaneval_cpp", data).keys() == {"humaneval_cpp/0"}
    assert tasks("ifeval", data)["ifeval/en/1000"].kind == "instructions"
    calls = {id: task.problem.tests["ground_truth"] for id, task in tasks("function_call", data).items()}
    assert calls == {"bfcl/simple_python_0": [{"area": {}}], "bfcl/irrelevance_0": []}


@pytest.mark.parametrize("name", ["ifeval", "mbpp", "mgsm"])
def test_rows_are_those_of_the_problem_sets_beside_the_checkout(data_folder, tmp_path, name):
    """Published rows that are taken back from our own have the same problems and tests when they are converted."""
    path = BENCHMARK_FILES[name].find(data_folder)
    assert path is not None
    ours = [row.fields for row in read_rows(path)]
    if name == "ifeval":
        files = [[{"key": row["id"].split("/")[2], "prompt": row["problem"], **row["tests"]} for row in ours]]
    elif name == "mbpp":
        ours = [row for row in ours if row["split"] == "test" and row["tests"]["code"].startswith("assert")]
        files = [[{"task_id": int(row["id"].split("/")[1]), "text": row["problem"].partition("\n\n")[0],
                   "test_setup_code": "", "test_list": re.split(r"\n(?=assert )", row["tests"]["code"])}
                  for row in ours]]  # fmt: skip
    else:
        files = [[{"cells": [row["problem"], row["answer"]]} for row in ours if row["language"] == language]
                 for language in MGSM_LANGUAGES]  # fmt: skip
    made = {row["id"]: row for row in PUBLISHED[name].convert(*files)}
    assert made.keys() == {row["id"] for row in ours}
    for row in ours:
        assert made[row["id"]]["problem"] == row["problem"] and made[row["id"]].get("answer") == row.get("answer")
        kept = {key: value for key, value in row.get("tests", {}).items() if key != "challenge"}
        assert made[row["id"]].get("tests", {}) == kept


def test_a_file_that_cannot_be_had_or_read_is_one_line(tmp_path, capsys):
    mirror, data = publish(tmp_path / "mirror"), tmp_path / "data"
    address = PUBLISHED["gsm8k"].addresses[0]
    for given in (str(tmp_path / "nothing"), "http://127.0.0.1:9"):
        assert main(["gsm8k", "--data", str(data), "--mirror", given]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {address} cannot be had from {given} (") and said.count("\n") == 1
        assert f"wget -x {address}" in said and "--mirror" in said
    (mirror / address.removeprefix("https://")).write_text('{"question": "How many?"}\n')
    assert main(["gsm8k", "--data", str(data), "--mirror", str(mirror)]) == 2
    said = capsys.readouterr().err
    assert "has another form than this version knows (KeyError: 'answer')" in said and "gsm8k_test.jsonl" in said
    assert not (data / "gsm8k_test.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "content"), [("gsm8k", b"0" * (4 << 20)), ("humaneval", gzip.compress(b"0" * (4 << 20)))]
)
def test_a_file_that_is_far_too_large_is_refused_packed_or_not(tmp_path, capsys, monkeypatch, name, content):
    """A mirror may hold anything: 4 MiB of zeros are 4 KB when packed."""
    monkeypatch.setattr(download, "MOST_BYTES", 1 << 20)
    mirror = publish(tmp_path / name)
    (mirror / PUBLISHED[name].addresses[0].removeprefix("https://")).write_bytes(content)
    with mirrored(mirror) as address:
        for source in (str(mirror), address):
            assert main([name, "--data", str(tmp_path / "data"), "--mirror", source]) == 2
            assert "more than 1 MiB, which no published file has" in capsys.readouterr().err


def test_rows_end_at_line_feeds_only():
    assert read("a.jsonl", '{"a": "x\u2028y"}\r\n\n{"a": "z"}'.encode()) == [{"a": "x\u2028y"}, {"a": "z"}]


@pytest.mark.parametrize(
    ("path", "told"),
    [("packed", "Content-Encoding"), ("endless", "more than 64 MiB"), ("/", "more than 5 redirects")],
)
def test_a_hostile_mirror_is_cut_off(path, told, monkeypatch):
    """It unpacks nothing, reads no body of a redirect, and stops."""
    monkeypatch.setattr(download, "MOST_BYTES", 1 << 20)
    packed = gzip.compress(gzip.compress(bytes(1 << 28)))

    class Hostile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if path == "packed":
                self.send_response(200)
                self.send_header("Content-Encoding", "gzip, gzip")
            else:
                self.send_response(200 if path == "endless" else 302)
                self.send_header("Location", "/again")
            self.end_headers()
            with suppress(OSError):
                for _ in range(1 if path == "packed" else 128):
                    self.wfile.write(packed if path == "packed" else bytes(1 << 20))

        def log_message(self, *told: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    with serving(server):
        tracemalloc.start()
        with pytest.raises(DataError, match=told.replace("64 MiB", "1 MiB")):
            fetch("https://published.invalid/file", f"http://127.0.0.1:{server.server_address[1]}")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 << 20
