"""Fixtures for all rooms: the checkout, the problem sets beside it, a sandbox for programs."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import quick
from tests.asynchronous import asynchronous
from tests.skipped import summary

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = {f"tests/trainer/test_{name}.py" for name in ("fsdp", "rank")}
"""files whose tests read what one session of trainer ranks found"""

hypothesis.settings.register_profile("unhurried", deadline=None)  # on a busy machine an example takes its time
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def data_folder():
    """Folder of real problem sets (JSONL), which lies beside the checkout and is not part of it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the problem sets (../shared/data) are not on this machine")
    return folder


@pytest.fixture(scope="module")
def sandboxes():
    """One sandbox for programs; skips where the host cannot isolate them."""
    from verify.code import cpp
    from verify.code.runner import describe_isolation
    from verify.code.sandbox.client import SandboxRefused
    from verify.code.sandbox_pool import SandboxPool

    held = SandboxPool(1, shared_folder=cpp.cache_folder())
    try:
        describe_isolation(held)
    except SandboxRefused as error:
        pytest.skip(str(error))
    yield held
    held.close()


@pytest.fixture
def quick_checkers(monkeypatch):
    """Processes of answer checkers load SymPy when they are first asked for."""
    from tests.verify.quick_start import QuickStart
    from verify import answer_checker

    monkeypatch.setattr(answer_checker, "CheckerProcess", QuickStart)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the acceptance tests of many minutes, and only them")
    parser.addoption("--quick", action="store_true", help="tests of a moment, and three cases of each table")
    parser.addoption("--time-tests", action="store_true", help="write down which tests --quick leaves out")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--time-tests") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timer())


class Timer:
    """Adds up what each test takes, its fixtures included, and writes down the slow ones."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        quick.write(self.seconds)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say last what this machine lacks, and what brings it."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    for line in summary(report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process is left with it at the end; `gpu` tests need a GPU, and `soak`
    tests run only with --soak, which also runs all cases of `sampled` ones."""
    refuse_changing_ids(items)
    soak, seed = config.getoption("--soak"), config.getoption("randomly_seed", 0)
    if soak:
        chosen = [item for item in items if item.get_closest_marker("soak") or item.get_closest_marker("sampled")]
    else:
        chosen = quick.sample([item for item in items if not item.get_closest_marker("soak")], seed, config.args)
    if config.getoption("--quick"):
        chosen = quick.choose(chosen, seed)
    if others := set(items) - set(chosen):
        config.hook.pytest_deselected(items=list(others))
        items[:] = chosen
    launches = {item.path for item in items if item.path.is_relative_to(ROOT / "tests" / "system")}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in launches, item.path not in slow))
    skip_without_gpu(items)


def refuse_changing_ids(items: list[pytest.Item]) -> None:
    """An id with a set or an address in it differs from process to process, and xdist would not start."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        sets = [str(value) for value in values if isinstance(value, (set, frozenset)) and len(value) > 1]
        if " at 0x" in item.nodeid or any(text in item.nodeid for text in sets):
            raise pytest.UsageError(f"{item.nodeid}: this id changes from process to process: give ids=[...]")


def pytest_collection_finish() -> None:
    """Thousands of modules and tests stay to the end: no garbage collection and no forked child looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """`async def test_...` runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asynchronous(pyfuncitem.obj)(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one process (they share servers and engines); all launches do (they share a model), and
    what shares a session of trainers."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False

    class Rooms(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "tests/system" if file.startswith("tests/system/") else "trainers" if file in TRAINERS else file

    return Rooms(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_process_group():
    """A test's process joins none (process.py says why)."""

    patch, own = pytest.MonkeyPatch(), os.getpid()
    if distributed := sys.modules.get("torch.distributed"):
        init = distributed.init_process_group

        def guarded(*arguments: Any, **settings: Any) -> None:
            assert os.getpid() != own, "a process group in the tests' own process: use tests.process.in_fresh_process"
            init(*arguments, **settings)  # a forked engine may

        patch.setattr(distributed, "init_process_group", guarded)
    yield
    patch.undo()


def skip_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in marked:
        if (wanted := next((mark.args[0] for mark in item.iter_markers("gpu") if mark.args), 1)) > there:
            reason = f"needs {wanted} NVIDIA GPU{'s' * (wanted > 1)}, this machine has {there or 'none'}"
            item.add_marker(pytest.mark.skip(reason=reason))
