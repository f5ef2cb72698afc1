"""Parquet files and data sets of a Hub as problems, and exports pushed to one: the real clients against a small server
on this machine, which answers as the Hub documents. Not run against the Hub itself."""

import base64
import hashlib
import importlib.util
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import msgspec
import pytest
import torch
from huggingface_hub import constants

from curate.__main__ import main as curate
from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.model.adapter_folder import save_adapter
from shared.model.lora import A, B
from shared.model.model_card import CARD, ModelCard
from tests.published import SETS
from tests.serving import serving
from trainer.check.inspection import Inspected, findings_of
from trainer.data import data_sets
from trainer.data.problem_file import read_problems
from trainer.data.sources import gather_sources
from trainer.evaluation import FILE, Evaluation, EvaluationRecord
from trainer.push import card_text, licence_of, main

needs_datasets = pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="datasets is not installed")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


class Hub(BaseHTTPRequestHandler):
    """Answers what the clients ask for one data set, and takes commits to models; anything else is 404."""

    repo = "openai/gsm8k"
    files: dict[str, bytes] = {}
    pushed: dict[str, bytes] = {}
    created: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        path, repo = self.path.partition("?")[0], f"/api/datasets/{self.repo}"
        if path in (repo, f"{repo}/revision/{COMMIT}", f"{repo}/revision/main"):
            files = [{"rfilename": name} for name in self.files]
            return self.answer({"id": self.repo, "sha": COMMIT, "siblings": files, "private": False, "tags": []})
        if path.startswith(f"{repo}/tree/{COMMIT}"):
            under = path.removeprefix(f"{repo}/tree/{COMMIT}").strip("/").replace("%2F", "/")
            inside = f"{under}/" if under else ""
            names = [name.removeprefix(inside).partition("/") for name in self.files if name.startswith(inside)]
            entries = [self.entry(inside + name) for name, deeper, _ in names if not deeper]
            folders = dict.fromkeys(inside + name for name, deeper, _ in names if deeper)
            entries += [{"type": "directory", "path": name, "oid": COMMIT} for name in folders]
            return self.answer(entries) if entries else self.refuse("EntryNotFound")
        if path.startswith(f"/datasets/{self.repo}/resolve/"):
            name = path.removeprefix(f"/datasets/{self.repo}/resolve/").partition("/")[2]
            if (body := self.files.get(name)) is None:
                return self.refuse("EntryNotFound")
            return self.answer(body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT})
        return self.refuse()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A repository, which files are large (none), a commit, or what lies at some paths."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        model = f"http://{self.headers['Host']}/o/model"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body) | {"token": self.headers.get("Authorization")})
            return self.answer({"url": model, "name": "o/model"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": name, **kinds} for name in names]})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.pushed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{model}/commit/{COMMIT}"
            return self.answer({"commitUrl": url, "commitOid": COMMIT, "hookOutput": "", "success": True})
        if self.path.startswith(f"/api/datasets/{self.repo}/paths-info/"):
            given = json.loads(body) if body.startswith(b"{") else {"paths": []}
            return self.answer([self.entry(name) for name in given["paths"] if name in self.files])
        return self.refuse()

    def entry(self, name: str) -> dict[str, Any]:
        """A file as listings have it."""
        body = self.files[name]
        return {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}

    def refuse(self, code: str = "RepoNotFound") -> None:
        self.answer({"error": "not here"}, {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, 404)

    def answer(self, body: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        """Send bytes, or JSON."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(sent))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of its own, which this process and new ones take for the real one."""
    kind = type("OwnHub", (Hub,), {"files": {}, "pushed": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(tmp_path / "hf"),
                "HF_TOKEN": "hf_own", "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", settings["HF_ENDPOINT"])  # this process has read it
    with serving(server):
        yield kind


def settings(folder: Path, **data: Any) -> Config:
    return Config.model_validate({"runs_dir": str(folder / "runs"), "deadlines": {"start_s": 170}, "data": data})


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


@needs_datasets
@pytest.mark.slow
def test_a_parquet_file_becomes_the_rows_of_a_run(tmp_path, monkeypatch):
    """Once: the rows stay what they were. Another file under the same run's name is another file of rows."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    source = tmp_path / "problems.parquet"
    write_parquet(source, [{"problem": "1 + 1?", "answer": "2", "language": None},
                           {"problem": "Und 2 + 2?", "answer": "4", "language": "de"}])  # fmt: skip
    config = settings(tmp_path, train=str(source))
    path = data_sets.fetch(config, "data.train", str(source))
    assert path == Path(config.locate(str(source))) and path.parent == config.run_dir / "generated"
    problems = read_problems(path, "data.train").problems
    assert [(p.text, p.answer, p.language) for p in problems] == [("1 + 1?", "2", "en"), ("Und 2 + 2?", "4", "de")]
    source.unlink()
    assert data_sets.fetch(config, "data.train", str(source)) == path
    assert config.locate("other.parquet") != config.locate(str(source)) != config.locate(str(source), "data.validation")


@needs_datasets
@pytest.mark.soak  # in make test: a parquet file, and names without a file
def test_the_name_that_the_documentation_shows_is_read_with_its_own_columns(tmp_path, hub):
    """GSM8K as it lies on the Hub: two configurations, question and answer, the number behind ####."""
    rows = [each.row for each in SETS["gsm8k"]]
    body, name = write_parquet(tmp_path / "rows", rows), "hub:openai/gsm8k/main:train"
    hub.files |= {"README.md": GSM8K_CARD.encode()}
    hub.files |= {f"{split}-00000-of-00001.parquet": body for split in ("main/train", "main/test")}
    path = data_sets.fetch(settings(tmp_path, train=name), "data.train", name)
    read = read_problems(path, "data.train")
    numbers = [row["answer"].rpartition("\n")[2] for row in rows]
    assert [f"#### {int(problem.answer):,}" for problem in read.problems] == numbers
    assert read.read_as == "data.train: 20 problems read: 20 as worked solutions (GSM8K, MATH)"
    out = tmp_path / "formatted.jsonl"
    assert curate(["format", name.removesuffix(":train"), "--out", str(out), "--workers=1"]) == 0
    formatted = [json.loads(line)["answer"] for line in out.read_text().splitlines()]
    assert formatted == [problem.answer for problem in read.problems]
    with pytest.raises(DataError, match=r"data\.train: 'hub:o/others' .*DatasetNotFoundError"):
        data_sets.fetch(settings(tmp_path), "data.train", "hub:o/others")
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half"


def test_no_name_no_file_and_no_library_are_told(tmp_path, monkeypatch):
    for name in ("hub:", "hub:problems", "hub:o/problems/a/b", "hub:o/:train", "hub:/problems"):
        with pytest.raises(ConfigError, match="write hub:OWNER/NAME"):
            gather_sources(settings(tmp_path, train=name))
    with pytest.raises(DataError, match=r"gone\.parquet.*no such file"):
        gather_sources(settings(tmp_path, train="gone.parquet"))
    monkeypatch.setattr(data_sets.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install --python \S+ 'datasets<6,>=5'$") as missing:
        gather_sources(settings(tmp_path, train="hub:o/problems"))
    [finding] = findings_of(Inspected("data", error=missing.value))
    assert finding.text.endswith(finding.step.removeprefix("run ")) and "uv pip install" in finding.step


@needs_datasets
@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_told_at_once_with_what_to_do(tmp_path, monkeypatch):
    """Nobody listens at the address, which is known within seconds and not after the library's own attempts."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"cannot be had .*Without a network: name a \.parquet .*copy its cache here"):
        data_sets.fetch(settings(tmp_path), "data.train", "hub:openai/gsm8k/main:train")
    assert time.monotonic() - started < 60


@pytest.fixture
def best(tmp_path):
    """The export `best` of a run, its card and an evaluation."""
    run = tmp_path / "algebra"
    folder = run / "hf" / "step_7"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / CARD).write_bytes(msgspec.json.encode(ModelCard("algebra", 7, "Answer in rhymes.\nBe brief.")))
    (run / "best").symlink_to(Path("hf") / "step_7")
    table = '[model]\npath = "org/base"\n[data]\ntrain = "/home/me/rows.jsonl"\n[objective]\nname = "gspo"\n'
    (run / "config.toml").write_text(table)
    score = Evaluation(50, 0.5, 0.14, consistency=None, temperature=1.0, format=None, reward=0.5, tokens=9.0)
    (run / FILE).write_bytes(msgspec.json.encode(EvaluationRecord(7, 1.0, score)) + b"\n")
    return run / "best"


def test_the_card_tells_where_the_model_is_from_and_no_path_of_this_machine(tmp_path, best, monkeypatch, capsys):
    monkeypatch.setattr("trainer.push.snapshot_download", mock.Mock(side_effect=OSError))
    assert main([str(best)]) == 0
    assert "README.md: license: fill it in; neither" in capsys.readouterr().out
    card = (best / "README.md").read_text()
    assert "\n# license: fill it in; neither" in card.split("---")[1]
    assert huggingface_hub.ModelCard(card).data.to_dict() == {
        "base_model": "org/base", "base_model_relation": "finetune", "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["maestrale", "reinforcement-learning"],
    }  # fmt: skip
    for line in ("\n---\n\n# algebra\n", "| trained from | org/base |", "| steps | 7 |",
                 "| how | reinforcement learning, gspo |", "| problems | rows.jsonl |",
                 "| accuracy, validation of the run | 0.500 ± 0.140 (95 %) |",
                 "    Answer in rhymes.\n    Be brief."):  # fmt: skip
        assert line in card
    assert "/home/me" not in card
    (best / "README.md").write_text("my own")
    assert main([str(best)]) == 0 and (best / "README.md").read_text() == "my own"
    local = Config.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "hub:o/problems"}})
    text = card_text(local, ModelCard("run", 1, ""), adapter=True)
    assert "base_model" not in text and str(tmp_path) not in text and "library_name: peft" in text
    assert "| problems | hub:o/problems |" in text and "datasets:\n- o/problems\n" in text
    assert "python -m serve BASE --adapter NAME=NAME\n" in text and "pipeline(" not in text


def test_a_model_that_the_run_made_is_no_model_of_the_hub(tmp_path):
    (tmp_path / "run" / "made" / "model").mkdir(parents=True)
    config = Config.model_validate({"name": "run", "runs_dir": str(tmp_path), "model": {"path": "made/model"}})
    assert "base_model" not in card_text(config, ModelCard("run", 1, ""), adapter=False)


APACHE = "\n                  Apache License\n            Version 2.0, January 2004\n"


@pytest.mark.parametrize(("files", "expected"), [
    ({"README.md": "---\nlicense: mit\n---\n# base", "LICENSE": APACHE}, {"license": "mit"}),
    ({"README.md": "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n"},
     {"license": "other", "license_name": "qwen", "license_link": "https://huggingface.co/org/base/blob/main/LICENSE"}),
    ({"README.md": "# base", "LICENSE": APACHE}, {"license": "apache-2.0"}), ({"README.md": "---\n[\n---\n"}, {}),
    ({"LICENSE.txt": "MIT License\n\nCopyright"}, {"license": "mit"}), ({"LICENSE": "Terms of ours"}, {}), ({}, {}),
])  # fmt: skip
def test_the_licence_is_what_the_base_model_says_and_no_guess(tmp_path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    fetched = mock.Mock(return_value=str(tmp_path))
    monkeypatch.setattr("trainer.push.snapshot_download", fetched)
    assert licence_of("org/base") == expected and fetched.call_args.args == ("org/base",)
    here = licence_of(str(tmp_path))
    assert here == ({**expected, "license_link": "LICENSE"} if "license_link" in expected else expected)
    config = Config.model_validate({"model": {"path": "org/base"}, "sft": {"demonstrations": "hub:o/shown:train"}})
    text = card_text(config, ModelCard("run", 1, ""), adapter=False, name="me/mine")
    data = huggingface_hub.ModelCard(text).data.to_dict()
    assert {key: value for key, value in data.items() if key.startswith("license")} == expected
    assert data["datasets"] == ["o/shown"] and data["base_model"] == "org/base"
    for line in ("hf download me/mine --local-dir mine\n", "python -m serve mine\n", '"text-generation", "me/mine")'):
        assert line in text


def test_exports_are_pushed_whole(tmp_path, best, hub, capsys):
    assert main([str(best), "o/model"]) == 0, capsys.readouterr().out
    assert hub.pushed == {each.name: each.read_bytes() for each in best.iterdir()} and "README.md" in hub.pushed
    assert hub.created == [{"name": "model", "organization": "o", "visibility": "private", "token": "Bearer hf_own"}]
    folder, layer = tmp_path / "algebra" / "adapters" / "step_7", "model.layers.0.mlp.up_proj"
    save_adapter(folder, {layer + A: torch.ones(2, 4), layer + B: torch.ones(4, 2)}, 2, 4.0, "org/base")
    (folder / CARD).write_bytes(msgspec.json.encode(ModelCard("algebra", 7, "")))
    assert main([str(folder), "o/model", "--public"]) == 0, capsys.readouterr().out
    assert b"library_name: peft" in hub.pushed["README.md"] and "adapter_model.safetensors" in hub.pushed
    assert hub.created[1]["visibility"] == "public"
    hub.do_POST = Hub.refuse
    capsys.readouterr()
    assert main([str(folder), "o/model"]) == 1
    assert "error: the Hub did not take" in capsys.readouterr().out


def test_a_folder_that_no_run_exported_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2 and "is no export of a run" in capsys.readouterr().out
    for arguments in (["a", "b", "--other"], []):
        with pytest.raises(ConfigError, match="--other: unknown option|required: folder"):
            main(arguments)
