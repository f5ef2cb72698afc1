"""The pages of examples: every command's files, options and settings are right, and with --soak each command runs."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_steps import STEPS
from examples.quickstart.prepare import Options, make_tiny_model, prepare
from tests.commands import PYTHON, SERVING, blocks, check, lines
from tests.system.launch import free_port
from tests.test_readme import stand_in
from trainer import __main__ as trainer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
INDEX = (EXAMPLES / "README.md").read_text(encoding="utf-8")
PAGES = {
    name: (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"\]\((\w+)/README\.md\)", INDEX)
}
"""folder -> its page; those that the index lists"""
HEADINGS = ("## Run", "## What to expect", "## What to change next")
STANDS_FOR = ("models/smollm2-135m-instruct", "Qwen/Qwen3-0.6B")
"""models of which the tiny form has a tiny one in their place"""


def run_block(page: str) -> str:
    """What a page asks to be run: the block behind its heading "Run" that starts a training, alone."""
    return next(block for block in blocks(page.partition("## Run\n")[2]) if settings_of(block))


def settings_of(text: str) -> list[str]:
    if "magistral/run.sh" in text:
        return ["examples/magistral/settings.toml"]
    return re.findall(r"-m trainer ([\w/.-]+\.toml)", text)


@cache
def tables(example: str) -> list[dict[str, Any]]:
    return [tomllib.loads((ROOT / file).read_text(encoding="utf-8")) for file in settings_of(run_block(PAGES[example]))]


def tiny(example: str) -> dict[str, str]:
    """Variables that make an example small enough for a test, by what all of its settings files have."""
    values: dict[str, object] = {
        "steps": 2, "rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_sequences": 32,
        "rollout.cache_bytes": 64 << 20, "objective.filter_groups_by": "off", "checkpoint.every": 1,
        "evaluate.problems": 4, "evaluate.samples": 1, "evaluate.greedy": "false", "deadlines.start_s": 900,
        "stages": "[]",
    }  # fmt: skip
    if not any("environment" in table for table in tables(example)):
        values |= {"rollout.max_completion_tokens": 40, "reward.overlong_buffer": 8}
    if all("sft" in table for table in tables(example)):
        values |= {"sft.steps": 2, "sft.batch": 4}
    options = [table.get("prepare", {}).get("options", {}) for table in tables(example)]
    for key, small in (("problems", 64), ("validation", 8)):
        if all(key in one for one in options):
            values[f"prepare.options.{key}"] = small
    return {f"MAESTRALE_TRAIN_{key.replace('.', '__').upper()}": str(value) for key, value in values.items()}


def test_the_index_names_the_steps_of_the_path_that_is_measured(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(PAGES) >= 12
    table = re.findall(r"\| `([^`]+)` \|", INDEX.partition("<!-- first steps -->")[2])
    assert len(table) == len(STEPS)
    for command, step in zip(table, STEPS, strict=True):
        assert command.startswith(step.command), "written by python -m benchmarks first_steps"
        check(shlex.split(command))


@pytest.mark.parametrize("example", PAGES)
def test_a_page_has_its_parts_and_every_command_is_one_that_starts(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    page, settings = PAGES[example], settings_of(run_block(PAGES[example]))
    places = [page.find(heading) for heading in HEADINGS]
    assert -1 not in places and places == sorted(places) and len(page.splitlines()) < 100
    assert re.search(r"20\d\d-\d\d-\d\d|not run|README\.md, \"", page, re.IGNORECASE), "figures, or that there are none"
    has_settings = (EXAMPLES / example / "settings.toml").is_file()
    assert has_settings or settings[0].startswith(("configs/", f"examples/{example}/"))
    for words in (words for block in blocks(page) for words in lines(block)):
        check(words)
    for change in re.findall(r"`(--[^`]+)`", page.partition(HEADINGS[2])[2]):
        trainer.load(settings[0], shlex.split(change))
    for key, value in tiny(example).items():
        monkeypatch.setenv(key, value)
    assert all(trainer.load(file, []).rollout.group_size == 4 for file in settings)


def test_a_model_is_served_as_long_as_the_command_runs(tmp_path):
    port = free_port()
    (tmp_path / "ready").touch()
    stand_in(
        tmp_path / PYTHON,
        f'[ "$2" = serve ] || exec {sys.executable} "$@"\n[ "$4" != broken ] || exit 3\n'
        f"exec {sys.executable} -m http.server {port} --bind 127.0.0.1",
    )

    def run(model: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / SERVING), model, "bash", "-c", "echo ran; exit 7"]
        environment = {**os.environ, "MAESTRALE_PORT": str(port)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    served, broken = run("good"), run("broken")
    assert served.returncode == 7 and "ran" in served.stdout
    assert broken.returncode == 1 and "ran" not in broken.stdout
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder that looks like this checkout, with a tiny model and word problems where an example fetches others."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("runs", "models", "data", ".git"):
            (folder / path.name).symlink_to(path)
    options = {"problems": 64, "validation": 8, "languages": ["en"], "operations": [2, 2]}
    for model in STANDS_FOR:
        (folder / model).parent.mkdir(parents=True, exist_ok=True)
        make_tiny_model(folder / model, Options.model_validate({**options, "max_tokens": 4096}), 0)
    made, data = folder / "made", folder / "data"
    for path in (made, data):
        path.mkdir()
    prepare(made, options, 0)
    for source, target in (("train", "train"), ("validation", "test")):
        rows = [json.loads(line) for line in (made / f"{source}.jsonl").read_text().splitlines()]
        text = "".join(json.dumps({**row, "source": "gsm8k", "solution": "I calculate."}) + "\n" for row in rows)
        (data / f"gsm8k_{target}.jsonl").write_text(text)
    run_tiny("quickstart", folder)
    return folder


def run_tiny(example: str, folder: Path) -> None:
    """Run what a page says, in its tiny form, until it ends; what it left running ends then, too."""
    port = free_port()
    environment = {
        **os.environ, **tiny(example), "OMP_NUM_THREADS": "1", "MAESTRALE_PORT": str(port),
        "MAESTRALE_CACHE_BYTES": str(64 << 20), "MAESTRALE_EVALUATE_URL": f"http://127.0.0.1:{port}/v1",
        "MAESTRALE_EVALUATE_LIMIT": "4", "MAESTRALE_EVALUATE_SAMPLES": "1", "MAESTRALE_EVALUATE_MAX_TOKENS": "32",
    }  # fmt: skip
    if example == "distill":
        environment["MAESTRALE_TRAIN_OBJECTIVE__TEACHER"] = f"http://127.0.0.1:{port}/v1"
    script = run_block(PAGES[example])
    if example == "cold_start":  # the problems that its page has made before
        script = f"{PYTHON} -m benchmarks.easy_problems runs/recipe/data\n{script}"
    log = folder / f"{example}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment,
                                   stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            code = process.wait(3000)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # what it has begun with &
    assert code == 0, log.read_text(errors="replace")[-6000:]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("example", [name for name in PAGES if name != "quickstart"])
def test_what_a_page_says_runs_in_its_tiny_form(example, checkout):
    run_tiny(example, checkout)
    for table in tables(example):
        run = checkout / table.get("runs_dir", "runs") / table["name"]
        assert (run / "latest").is_dir(), "the run exports a model"
        kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert kinds.count("sft" if table.get("mode") == "sft" else "train") >= 2
