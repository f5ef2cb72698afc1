"""The rules of the house, checked on the source: arrows of import, sizes, words, what may print."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shared.metrics import METRICS
from tests import sizes

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "shared": {"shared"},
    "verify": {"shared", "verify"},
    "rollout": {"shared", "rollout"},
    "environments": {"shared", "verify", "environments"},
    "trainer": {"shared", "verify", "environments", "rollout", "trainer"},
    "serve": {"shared", "verify", "environments", "rollout", "serve"},
    "dashboard": {"shared", "verify", "serve", "dashboard"},
    "evaluation": {"shared", "verify", "environments", "serve", "evaluation"},
    "curate": {"shared", "verify", "environments", "rollout", "trainer", "curate"},
    "lab": {"shared", "verify", "environments", "rollout", "trainer", "lab"},
    "examples": {"shared", "verify", "environments", "trainer", "examples"},
}
SOURCES = sorted(path for room in ALLOWED for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
TEXTS = [
    path
    for pattern in (
        *("*.md", "*.toml", "*.txt", "Makefile", "Dockerfile", ".ci/run"),
        *("configs/**/*.toml", "docs/**/*.md", "examples/**/*.toml", "examples/**/*.md"),
    )
    for path in ROOT.glob(pattern)
    if path.is_file()
]
FILE_LINES, FUNCTION_LINES = 400, 60


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            yield node.module or ""


def has_main(path: Path) -> bool:
    """Whether a file is a command: it ends in `if __name__ == "__main__":`."""
    return path.name == "__main__.py" or any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree(path).body
    )


def test_the_house_is_within_its_budgets() -> None:
    """`make sizes` prints all of it; tests/sizes.py says who may raise a budget."""
    over = {total: now for total, now in sizes.totals().items() if now > sizes.BUDGETS[total]}
    assert not over, f"budgets: {sizes.BUDGETS}"


def test_all_files_are_in_ruff_s_format() -> None:
    command = [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n`ruff format .` writes them"


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_follow_the_arrows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    wrong = {module for module in imports(path) if module.split(".")[0] in ALLOWED.keys() - ALLOWED[room]}
    assert not wrong, f"{room} may import {sorted(ALLOWED[room])}"


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} in line {node.lineno} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_say_what_they_are(path: Path) -> None:
    told = ast.get_docstring(tree(path))
    assert told and not re.search(r"Who\s+calls|What\s+(it|this)\s+does\s+not", told), "an editor finds the callers"
    assert "util" not in path.stem and path.stem not in ("helpers", "misc", "common")


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_only_progress_and_commands_print(path: Path) -> None:
    if name(path) == "shared/progress.py" or has_main(path):
        return
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"]
    # a rank that died has no progress display: its stack goes to the error stream
    loud = [call.lineno for call in calls if not any(ast.unparse(k.value) == "sys.stderr" for k in call.keywords)]
    assert not loud


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name)
def test_nothing_is_pickled(path: Path) -> None:
    picklers = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not {module.split(".")[0] for module in imports(path)} & picklers
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and path in SOURCES:
            pytest.fail(f"line {node.lineno}: torch.load unpickles")


@pytest.mark.parametrize("path", [*SOURCES, *TESTS, *TEXTS], ids=name)
def test_no_loose_ends_and_no_places_of_one_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X:"):
        assert word not in text
    for place in ("/wo" + "rk/", "." + "library", "proto" + "types/", "/ro" + "ot/"):
        assert place not in text


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_is_left_unwritten(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc):
            pytest.fail(f"line {node.lineno}: {ast.unparse(node)}")


def test_every_metric_that_is_written_is_defined() -> None:
    """A name that shared/metrics.py lacks would end a run at its first step."""
    written = set()
    for file in ("step_metrics.py", "run_log.py"):
        for node in ast.walk(tree(ROOT / "trainer" / file)):
            keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
            written |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    named = {key for key in written if "/" in key or key in METRICS}
    assert len(named) > 30 and not named - METRICS.keys()


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_matplotlib_is_loaded_only_to_draw(path: Path) -> None:
    for node in tree(path).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert "matplotlib" not in ast.unparse(node)


TORCH_FREE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "verify"] + [
    ROOT / "shared" / file
    for file in (
        "config.py",
        "sections.py",
        "settings_file.py",
        "types.py",
        "messages.py",
        "metrics.py",
        "progress.py",
        "errors.py",
    )
]


@pytest.mark.parametrize("path", TORCH_FREE, ids=name)
def test_torch_is_not_named_where_it_must_not_be_loaded(path: Path) -> None:
    assert not {module.split(".")[0] for module in imports(path)} & {"torch", "vllm", "transformers"}


@pytest.mark.slow
def test_torch_is_not_loaded_by_verifiers_and_settings() -> None:
    """Not through others either: verifier processes start in a fraction of a second and stay small."""
    modules = [re.sub(r"/__init__$", "", name(path).removesuffix(".py")).replace("/", ".") for path in TORCH_FREE]
    # reasoning_gym_checkers is a plug-in file: a process that imports it is confined and can load no more of them
    modules = [module for module in modules if not module.endswith(("__main__", ".reasoning_gym_checkers"))]
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr or "torch was loaded"


@pytest.mark.slow
def test_the_controller_loads_no_sharding() -> None:
    """FSDP and the tensors of several ranks are the trainers': a second of the start, and 40 MB."""
    program = "import sys, trainer.launch; print([m for m in sys.modules if m in ('torch.distributed.fsdp', 'sympy')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
