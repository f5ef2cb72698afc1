"""Commands of pages: the words of each, and whether it could start, by the parser of the program that it names."""

import argparse
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from benchmarks.__main__ import choose, declared
from curate.__main__ import COMMANDS as STAGES
from curate.__main__ import parse as parse_curate
from evaluation.settings import load as load_evaluation
from lab.ablate.__main__ import parse as parse_ablation
from lab.plan import __main__ as plan
from maestrale.__main__ import COMMANDS as MAESTRALE
from oversight.settings import load as load_oversight
from serve.settings import load as load_server
from shared.settings_file import DASHBOARD
from trainer import __main__ as trainer
from trainer.objectives.registry import find
from verify.__main__ import parse as parse_verify

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHON, SERVING = ".venv/bin/python", "examples/while_serving.sh"
QUICKSTART = "configs/quickstart.toml"
YOURS = "my_run.toml"
"""a file that pages let the reader write; the quickstart's stands for it"""
BENCHMARKS = declared()
OTHERS = ("pytest", "venv")
"""modules that are not ours"""


OF_PATHS = ("trainer.report", "trainer.export", "environments.search", "benchmarks.easy_problems")
"""programs that take paths and nothing else"""


class _Read(Exception):
    """A parser took the arguments."""


def blocks(text: str) -> list[str]:
    """The blocks of commands of a page or of a part of it: those whose fence names no language. A block behind longer
    fences may show fences itself."""
    found = re.findall(r"^(`{3,})(.*?)\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE)
    return [block for _, language, block in found if not language]


def lines(text: str) -> Iterator[list[str]]:
    """The words of each command of a block or script."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.strip().removesuffix("&"), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words


def check(words: list[str]) -> None:
    """Refuse a command that could not start: by its own parser, or by its files."""
    program = words[0].rpartition("/")[2]
    if program == "make":
        check_target(words[1], words[2:])
    elif program == "bash":
        script = ROOT / words[1]
        subprocess.run(["bash", "-n", script], check=True, timeout=30)
        if words[1] == SERVING:
            load_server(["--model", words[2]])
            check(words[3:])
        else:
            for inner in lines(script.read_text(encoding="utf-8")):
                if inner[0] == PYTHON:
                    check([word for word in inner if "$" not in word])
    elif program == "pip":
        assert words[1] == "install", words
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = {extra for word in words for extra in re.findall(r"^\.\[(.+)\]$", word)}
        assert extras <= project["optional-dependencies"].keys(), words
    elif program == "maestrale":
        if words[1:] and not words[1].startswith("-"):
            command = MAESTRALE[words[1]]
            check_module(command.module, [*command.first, *words[2:]])
    elif program == "hf":
        assert words[1] == "download", words
    elif program == "torchrun":
        start = words.index("-m")
        assert all(word.startswith("--") for word in words[1:start]), words
        check_module(words[start + 1], words[start + 2 :])
    else:
        assert re.fullmatch(r"python[\d.]*", program), f"{words}: this test knows no such command"
        check_module(words[2], words[3:]) if words[1] == "-m" else check_file(words[1])


def check_target(name: str, variables: list[str]) -> None:
    """Let the program that a target of make runs read what the command gives it in ARGS."""
    found = re.search(rf"^{name}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    assert found, f"make {name}"
    [given] = [word.removeprefix("ARGS=") for word in variables if word.startswith("ARGS=")] or [""]
    runs = re.findall(r"-m ([\w.]+)(.*)\$\(ARGS\)", found[1])
    assert runs or not given, f"make {name} takes no ARGS"
    for module, first in runs:
        check_module(module, [*first.replace("$(CONFIG)", QUICKSTART).split(), *shlex.split(given)])


def check_file(path: str) -> None:
    assert (ROOT / path).is_file(), path


def read_run(arguments: list[str]) -> None:
    """Read what a launch is given; `check` needs no file, `objectives` names of objectives."""
    if arguments[:1] == ["objectives"]:
        for name in arguments[1:]:
            find(name)
        return
    left = [one for one in arguments if one not in ("check", "--dry-run", DASHBOARD)]
    if left:
        _, (path, *overrides) = trainer.take_nodes(left)
        trainer.load(QUICKSTART if path == YOURS else path, overrides)


def read_stage(arguments: list[str]) -> None:
    """Read what `python -m curate` is given; within sentences it may be the name of a stage alone."""
    if arguments[0] not in STAGES or len(arguments) > 1:
        parse_curate(arguments)


def read_ablation(arguments: list[str]) -> None:
    for file in parse_ablation(arguments).files:
        check_file(str(file))


READERS: dict[str, Callable[[list[str]], object]] = {
    "trainer": read_run, "lab.replay": read_run, "serve": load_server, "evaluation": load_evaluation,
    "oversight": load_oversight, "curate": read_stage, "verify": parse_verify, "lab.plan": plan.read,
    "lab.ablate": read_ablation, "benchmarks": lambda given: choose(given[:1], BENCHMARKS),
}  # fmt: skip
"""module -> what reads its arguments; the others that take any read them in their `main`, by argparse"""


def check_module(name: str, arguments: list[str]) -> None:
    """Let a module's own parser read the arguments."""
    if name in OTHERS:
        return
    path = ROOT / name.replace(".", "/")
    main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert main.is_file() and "__name__" in main.read_text(encoding="utf-8"), f"{name} is no program"
    arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
    if not arguments or "--help" in arguments:
        return
    if name in READERS:
        READERS[name](arguments)
    elif re.search("argparse|CommandParser", main.read_text(encoding="utf-8")):
        program = importlib.import_module(f"{name}.__main__" if path.is_dir() else name)
        parse = argparse.ArgumentParser.parse_args

        def read(*given: object) -> None:
            parse(*given)  # type: ignore[arg-type]
            raise _Read

        with mock.patch.object(argparse.ArgumentParser, "parse_args", read):
            try:
                program.main(arguments)
            except _Read:
                return
        raise AssertionError(f"{name} did not read its arguments by argparse")
    elif name in OF_PATHS:
        assert not any(word.startswith("-") for word in arguments), f"{name} takes paths, not {arguments}"
    else:
        raise AssertionError(f"{name}: this test does not know what reads {arguments}")
