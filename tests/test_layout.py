"""The rules of the house, checked on the source: arrows of import, sizes, words, what may print.

Each rule is one test over all of its files, and yields what is wrong with one."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    "oversight": {"shared", "verify", "serve", "evaluation", "oversight"},
    "curate": {"shared", "verify", "environments", "rollout", "trainer", "curate"},
    "lab": {"shared", "verify", "environments", "rollout", "trainer", "lab"},
    "examples": {"shared", "verify", "environments", "trainer", "oversight", "examples"},
    "maestrale": {"shared", "verify", "environments", "trainer", "maestrale"},
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
FUNCTION_LINES = 60
STARTS = ("subprocess.Popen", "subprocess.run", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell")
OWN_PROCESSES = (
    *("verify/answer_checker.py", "verify/code/sandbox/client.py", "environments/gateway/client.py"),
    *("trainer/trackers.py", "trainer/dashboard.py", "trainer/check/cards.py", "verify/code/cpp.py"),
    *("lab/ablate/runner.py",),
)
"""start programs of this project or the system, which end with their parent or soon, and start nothing that stays"""
WALL_CLOCKS = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now")
AGES = ("shared/launch/launch_folder.py", "dashboard/run_folder.py", "evaluation/client.py")
"""compare the wall clock with times of files, or with a date that another machine has sent"""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    for node in nodes(path):
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


def called(call: ast.Call, function: str) -> bool:
    """Whether a call is one of this function, named as it is here."""
    last = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    return bool(last == function.rpartition(".")[2]) and ast.unparse(call.func) == function


def test_the_house_is_within_its_budgets():
    """`make sizes` prints all of it; tests/sizes.py says when a ceiling may rise."""
    over = {total: now for total, now in sizes.totals().items() if now > sizes.BUDGETS[total]}
    over |= {room: lines for room in sizes.PRODUCT if (lines := sizes.measure(room).lines) > sizes.CEILINGS[room]}
    assert not over, f"ceilings: {sizes.CEILINGS}, budgets: {sizes.BUDGETS}"


def test_all_files_are_in_ruff_s_format():
    command = [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n`ruff format .` writes them"


def test_there_is_something_to_check():
    assert len(SOURCES) > 20


def follow_the_arrows(path: Path) -> Iterator[str]:
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        if module.split(".")[0] in ALLOWED.keys() - ALLOWED[room]:
            yield f"imports {module}: {room} may import {sorted(ALLOWED[room])}"


def are_short(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{node.name} in line {node.lineno} has {length} lines"


def say_what_they_are(path: Path) -> Iterator[str]:
    told = ast.get_docstring(tree(path))
    if not told or re.search(r"Who\s+calls|What\s+(it|this)\s+does\s+not", told):
        yield "does not say what it is, or names its callers, which an editor finds"
    if "util" in path.stem or path.stem in ("helpers", "misc", "common"):
        yield "has a name that says nothing"


def print_in_commands_only(path: Path) -> Iterator[str]:
    if name(path) == "shared/progress.py" or has_main(path):
        return
    calls = [node for node in nodes(path) if isinstance(node, ast.Call) and called(node, "print")]
    for call in calls:  # a rank that died has no progress display: its stack goes to the error stream
        if not any(ast.unparse(keyword.value) == "sys.stderr" for keyword in call.keywords):
            yield f"line {call.lineno} prints"


def pickle_nothing(path: Path) -> Iterator[str]:
    picklers = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    yield from (f"imports {module}" for module in imports(path) if module.split(".")[0] in picklers)
    for node in nodes(path):
        if isinstance(node, ast.Call) and called(node, "torch.load") and "tests" not in path.parts:
            yield f"line {node.lineno}: torch.load unpickles"


def have_no_loose_ends(path: Path) -> Iterator[str]:
    """And name no places of one machine."""
    text = path.read_text(encoding="utf-8")
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X:")
    places = ("/wo" + "rk/", "." + "library", "proto" + "types/", "/ro" + "ot/")
    yield from (f"holds {word}" for word in (*words, *places) if word in text)


def leave_nothing_unwritten(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def load_matplotlib_only_to_draw(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "matplotlib" in ast.unparse(node):
            yield f"line {node.lineno} loads matplotlib with the file"


def run_no_code_of_models(path: Path) -> Iterator[str]:
    """Left out, transformers asks on a terminal whether to run a folder's code."""
    doors = {"from_pretrained", "from_config", "AsyncEngineArgs"}
    for node in nodes(path):
        door = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if door in doors and "trust_remote_code=False" not in map(ast.unparse, node.keywords):
            yield f"line {node.lineno}: {door} without trust_remote_code=False"


def show_texts_clean(path: Path) -> Iterator[str]:
    """rich's own console shows escape sequences of others as they are."""
    if not name(path).startswith("shared/progress"):
        calls = [node for node in nodes(path) if isinstance(node, ast.Call) and called(node, "Console")]
        yield from (f"line {call.lineno}: Console, not CleanConsole" for call in calls)


def start_commands_of_others_under_supervision(path: Path) -> Iterator[str]:
    """What a command starts ends with it only then."""
    if name(path) in OWN_PROCESSES or "shared.supervisor" in imports(path):
        return
    for node in nodes(path):
        if isinstance(node, ast.Call) and any(called(node, start) for start in STARTS):
            yield f"line {node.lineno} starts a process: give it shared.supervisor.supervised(command)"


def measure_time_by_the_monotonic_clock(path: Path) -> Iterator[str]:
    """The wall clock may jump: it is written down, and nothing else."""
    if name(path) in AGES:
        return
    for node in nodes(path):
        assigned = [node.value] if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) else []
        parts = ast.walk(node) if isinstance(node, (ast.BinOp, ast.Compare, ast.AugAssign)) else assigned
        if any(isinstance(part, ast.Call) and any(called(part, clock) for clock in WALL_CLOCKS) for part in parts):
            yield f"line {node.lineno} measures by the wall clock: take time.monotonic()"


RULES: dict[Callable[[Path], Iterator[str]], list[Path]] = {
    follow_the_arrows: SOURCES,
    are_short: SOURCES + TESTS,
    say_what_they_are: SOURCES,
    print_in_commands_only: SOURCES,
    pickle_nothing: SOURCES + TESTS,
    have_no_loose_ends: [*SOURCES, *TESTS, *TEXTS],
    leave_nothing_unwritten: SOURCES,
    load_matplotlib_only_to_draw: SOURCES,
    show_texts_clean: SOURCES,
    run_no_code_of_models: SOURCES + sorted((ROOT / "benchmarks").rglob("*.py")),
    measure_time_by_the_monotonic_clock: SOURCES,
    start_commands_of_others_under_supervision: SOURCES,
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_files(rule):
    found = [f"{name(path)} {fault}" for path in RULES[rule] for fault in rule(path)]
    assert not found, "\n".join(found)


FAULTS = {
    follow_the_arrows: "import trainer\n",
    are_short: "def long():\n" + "    pass\n" * FUNCTION_LINES,
    say_what_they_are: "x = 1\n",
    print_in_commands_only: "print(1)\n",
    pickle_nothing: "import pickle\n",
    have_no_loose_ends: "# TO" + "DO\n",
    leave_nothing_unwritten: "raise NotImplementedError\n",
    load_matplotlib_only_to_draw: "import matplotlib\n",
    show_texts_clean: "Console().print('x')\n",
    run_no_code_of_models: "AutoTokenizer.from_pretrained(folder)\n",
    start_commands_of_others_under_supervision: "import subprocess\nsubprocess.run(command)\n",
    measure_time_by_the_monotonic_clock: "import time\nuntil = time.time() + 5\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_finds_its_fault(rule, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "shared" / "planted.py"
    path.parent.mkdir()
    path.write_text(FAULTS[rule], encoding="utf-8")
    assert list(rule(path))


def test_every_metric_that_is_written_is_defined():
    """A name that shared/metrics.py lacks would end a run at its first step."""
    written = set()
    for file in ("step_metrics.py", "run_log.py"):
        for node in nodes(ROOT / "trainer" / file):
            keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
            written |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    named = {key for key in written if "/" in key or key in METRICS}
    assert len(named) > 30 and not named - METRICS.keys()


TORCH_FREE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "verify"] + [
    ROOT / file
    for file in (
        "shared/config.py",
        "shared/sections.py",
        "shared/settings_file.py",
        "shared/types.py",
        "shared/launch/messages.py",
        "shared/metrics.py",
        "shared/progress.py",
        "shared/errors.py",
        "oversight/judge.py",
    )
]


def test_torch_is_not_named_where_it_must_not_be_loaded():
    heavy = {"torch", "vllm", "transformers"}
    assert not [name(path) for path in TORCH_FREE if {module.split(".")[0] for module in imports(path)} & heavy]


@pytest.mark.slow
def test_torch_is_not_loaded_by_verifiers_and_settings():
    """Not through others either: verifier processes start in a fraction of a second and stay small."""
    modules = [re.sub(r"/__init__$", "", name(path).removesuffix(".py")).replace("/", ".") for path in TORCH_FREE]
    # reasoning_gym_checkers is a plug-in file: a process that imports it is confined and can load no more of them
    modules = [module for module in modules if not module.endswith(("__main__", ".reasoning_gym_checkers"))]
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr or "torch was loaded"


@pytest.mark.slow
def test_the_controller_loads_no_sharding():
    """FSDP and the tensors of several ranks are the trainers': a second of the start, and 40 MB."""
    program = "import sys, trainer.launch; print([m for m in sys.modules if m in ('torch.distributed.fsdp', 'sympy')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "elsewhere"), [("cpu", {"torch"}), ("cuda", set())])  # torch+cpu is not on PyPI
def test_locks_have_what_the_project_asks_for(kind, elsewhere):
    """`make lock` after a change of pyproject.toml; every package has a hash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = ("evaluation", "train", kind, "dev", "smollm2")
    texts = project["dependencies"] + [text for name in names for text in extras[name]]
    wanted = [Requirement(text) for text in texts if not text.startswith("maestrale[")]
    entries = re.split(r"\n(?=\S)", (ROOT / "locks" / f"{kind}.txt").read_text(encoding="utf-8").partition("\n")[2])
    assert len(entries) > 200 and not [entry for entry in entries if "==" in entry and "--hash=sha256:" not in entry]
    found: dict[str, list[str]] = {}
    for entry in entries:
        if locked := re.match(r"([\w.-]+)==([\w.+!]+)", entry):
            found.setdefault(canonicalize_name(locked[1]), []).append(locked[2])
    wrong = []
    for want in wanted:
        versions = found.get(canonicalize_name(want.name), ["0"])
        if want.name not in elsewhere and not all(want.specifier.contains(version) for version in versions):
            wrong.append(str(want))
    assert not wrong, f"locks/{kind}.txt lacks {wrong}: `make lock`"


@pytest.mark.parametrize("arguments", [["--help"], ["configs/quickstart.toml", "--rollout.grop_size=3"]])
def test_help_and_a_typing_error_need_no_torch(arguments):
    """It takes seconds to import, in which a user waits for a text."""
    program = (
        f"import sys; from trainer.__main__ import main; code = main({arguments}); "
        "loaded = {'torch', 'vllm', 'transformers', 'sympy'} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
