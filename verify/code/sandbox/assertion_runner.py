"""The assertion runner: runs trusted test code, and requests whatever it does not define from the candidate's sandbox.

Names of the program become what the candidate answers (`remote.py`): plain values as they are, objects of its own as
stand-ins. So `assert f(2) == 4` is decided in a process in which no line of the candidate ever ran. Test cases of
unittest, functions of pytest and `check(candidate)` are called where the text does not call them; failures count
however the text takes them (`assertion_tree.watched`).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

from verify.code.sandbox import assertion_tree, pytest_stand_in, unasked, unittest_watch
from verify.code.sandbox.codec import FramePipe, fresh_module, message, open_streams
from verify.code.sandbox.remote import Program, ProgramFinder, Unverifiable


def _outside_names(source: str, defined: list[str], given: bool, entry: str) -> set[str]:
    """Return the names that the test code uses and does not define: the program's.

    A built-in name stays Python's own, or `def abs(x): return 0` would pass every tolerance; only where the tests use
    no other name, and none is `given` (`entry`, or an import), is it the function under test.
    """
    loaded = assertion_tree.global_names(source)
    plain = {name for name in loaded if not hasattr(builtins, name)}
    return plain or loaded.intersection([entry] if given else defined)


def _used_as_modules(nodes: list[ast.AST]) -> set[str]:
    """Return names of the standard library before a dot that are never called: math.pi, but not copy([1])."""
    dotted = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (dotted - called).intersection(sys.stdlib_module_names)


def decides(statement: ast.stmt) -> bool:
    """Return whether a top-level statement of test code counts as a test: it asserts, or may (a block, a call like
    check(f)); neither a docstring nor print does."""
    if isinstance(statement, (ast.Assert, ast.For, ast.With, ast.Try, ast.If, ast.While)):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and not (isinstance(call.func, ast.Name) and call.func.id == "print")


def _parse_prefix(prefix: str) -> ast.Module:
    """Parse what stands before a program; it may end in the head of a function without a body."""
    try:
        return ast.parse(prefix)
    except SyntaxError:
        return ast.parse(prefix.rstrip() + "\n    pass\n")


def run_assertions(source: str, prefix: str, entry: str, defined: list[str]) -> int:
    """Run test code against stand-ins; report each top-level assertion, call or block, and each test, as passed or not.

    `prefix`: trusted code that stands before the program; all of it but the function `entry` is run here too, so that
    no program replaces a helper of the tests. `defined`: names that the candidate says it defines.
    """
    line = FramePipe(3, 4)
    open_streams()
    names = fresh_module("__main__")
    try:
        before, tree = _parse_prefix(prefix), ast.parse(source)
        before.body = [node for node in before.body if not (isinstance(node, ast.FunctionDef) and node.name == entry)]
        exec(compile(before, "tests.py", "exec", dont_inherit=True), names)
    except Exception as error:  # noqa: BLE001 - the tests are at fault, whatever it is
        line.send(b"U", f"the tests cannot be run: {type(error).__name__}: {message(error)}"[:300])
        return 0
    run = _Run(line, names, source, tree)
    try:
        run.read_names(entry, defined)
        if run.run_statements():
            run.run_what_was_not_called(entry)
            run.end_threads()
    except Unverifiable:
        pass
    if run.failed and run.clash and not run.program.refused:
        line.send(b"U", f"the tests assign {run.clash}, which the program rebinds: they do not share it")
    elif run.program.refused and not run.failed:
        line.send(b"U", run.program.refused[:300])
    else:
        line.send(b"D", [run.passed, run.reason])
    return 0


class _Run:
    """One run of test code: its names, and what passed so far."""

    def __init__(self, line: FramePipe, names: dict[str, Any], source: str, tree: ast.Module) -> None:
        self.program = Program(line, self.swallowed_by_program)
        self.names, self.source, self.tree = names, source, tree
        self.program.names = names
        self.nodes = list(ast.walk(self.tree))
        self.modules = assertion_tree.program_modules(self.nodes)
        self.asserting = {name for name, node in assertion_tree.functions(self.nodes).items()
                          if any(map(assertion_tree.fails, assertion_tree.inside(node.body)))}  # fmt: skip
        self.unasked = unasked.Failures(self.refuse_cut_off)
        self.passed: list[bool] = []
        self.reason = self.failure = ""
        self.entered: set[str] = set()
        self.cases: set[str] = set()
        """ids of unittest's cases that were run"""
        self.clash = ""
        """a global of the tests that the program has, too, and rebinds in a function"""
        self.judged = False
        """the tests judged the program outside of statements that count: a function returned True, or they ran what
        stands below `if __name__ == "__main__"`"""

    @property
    def failed(self) -> bool:
        """Whether something failed before the tests asked for what nobody can carry out."""
        return not all(self.passed)

    def read_names(self, entry: str, defined: list[str]) -> None:
        """Give the tests the names of the program that they use, its modules, and what reports to this run."""
        names, program = self.names, self.program
        names["__file__"], names["__builtins__"] = "tests.py", builtins
        modules = _used_as_modules(self.nodes)
        for name in sorted(_outside_names(self.source, defined, bool(entry or self.modules), entry) - names.keys()):
            if name in modules:  # the tests lean on an import of the program's: it is the true module
                names[name] = __import__(name)
                continue
            try:
                names[name] = program.read(name)
                program.live.add(name)
            except KeyError:  # the program does not define it: a NameError where it is used
                if name == "candidate" and entry:
                    names[name] = self.candidate(entry)
        own = [node.id for node in assertion_tree.inside(self.tree.body)
               if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]  # fmt: skip
        if own and not self.modules:
            self.clash = min(set(own).intersection(map(str, program.ask([0, "rebound"]))), default="")
        if "pytest" in self.source:
            sys.modules["pytest"] = pytest_stand_in.module()
        sys.meta_path.append(ProgramFinder(program, self.modules | {"solution"}))
        self.unasked.watch(self.source)
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        for node in imports:
            if node.module in self.modules and node.names[0].name == "*":  # the names are the program's anyway
                node.module, node.names = "sys", [ast.alias("path", "__path__")]
        seed = random.seed
        random.seed = lambda *given: (seed(*given), program.ask([0, "seed"], given))[0]
        names[assertion_tree.SWALLOWED], names[assertion_tree.ENTERED] = self.swallowed, self.entered.add
        names[assertion_tree.RETURNED] = self.returned
        if any(isinstance(node, (ast.Import, ast.ImportFrom)) and _imports_unittest(node) for node in self.nodes):
            unittest_watch.watch(self.report_case, self.run_cases)

    def candidate(self, entry: str) -> Any:
        """Return the function under test: a name of the program's, or an expression such as `Solution().f`."""
        for node in ast.walk(ast.parse(entry, mode="eval")):
            if isinstance(node, ast.Name) and node.id not in self.names:
                self.names[node.id] = self.program.read(node.id)
        return eval(entry, self.names)

    def watched(self) -> ast.Module:
        """Return the tests with handlers that report, where they have any, or functions."""
        changed = (ast.FunctionDef, ast.AsyncFunctionDef, ast.With, ast.Try)
        return assertion_tree.watched(self.tree) if any(isinstance(node, changed) for node in self.nodes) else self.tree

    def run_statements(self) -> bool:
        """Run the statements of the tests one after another; return whether they came to their end."""
        for statement in self.watched().body:
            code = compile(ast.Module([statement], []), "tests.py", "exec", dont_inherit=True)
            before, counts = len(self.passed), decides(statement)
            if counts and isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
                counts, self.judged = False, self.judged or not _starts_a_runner(statement)
            try:
                passed, ends = self.run(lambda code=code: exec(code, self.names))  # type: ignore[misc]
            except pytest_stand_in.SkippedTest:
                return False
            if not passed or (counts and len(self.passed) == before):
                self.passed.append(passed)
            if ends:
                return True
            if not passed and not isinstance(statement, ast.Assert):
                return False
        return True

    def run(self, work: Callable[[], object]) -> tuple[bool, bool]:
        """Do a piece of the tests; return whether nothing failed in it, and whether it said to end the tests."""
        self.failure, ends = "", False
        try:
            result = work()
            if inspect.iscoroutine(result):
                import asyncio

                asyncio.run(result)
        except (Unverifiable, pytest_stand_in.SkippedTest):
            raise
        except SystemExit as end:
            ends = True
            if end.code not in (None, 0, False) or isinstance(end.__context__, AssertionError):
                self.fail(end.__context__ or end)
        except BaseException as error:  # noqa: BLE001 - a failed assertion, or whatever the program's answer caused
            if _skips(error):
                raise pytest_stand_in.SkippedTest from None
            self.refuse_import(error)
            self.fail(error)
        if self.program.refused:  # a bare `except` caught it
            raise Unverifiable
        self.reason = self.reason or self.failure
        return not self.failure, ends

    def refuse_import(self, error: BaseException) -> None:
        """Blame the tests for a module that the sandbox does not have."""
        if isinstance(error, ImportError) and error.name not in self.modules and not hasattr(error, "_from_program"):
            self.program.refuse(f"the tests cannot be run: {message(error)}")

    def fail(self, error: BaseException | str) -> None:
        """Count what runs now as failed."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {message(error)}"
        self.failure = self.failure or text[:300]

    def swallowed(self, lines: tuple[tuple[int, int], ...] | None, asserts: bool) -> None:
        """Judge what a handler of the tests has caught; `assertion_tree` says when it asks."""
        error = sys.exc_info()[1]
        trace = error.__traceback__ if error is not None else None
        if error is None or trace is None:
            return
        if isinstance(error, Unverifiable):
            raise error
        if lines is not None:
            counts = any(first <= trace.tb_lineno <= last for first, last in lines)
        else:
            counts = asserts
            while trace.tb_next is not None and not counts:
                trace = trace.tb_next
                code = trace.tb_frame.f_code
                counts = code.co_filename == "tests.py" and code.co_name in self.asserting
        if counts:
            self.fail(error)

    def swallowed_by_program(self, error: BaseException) -> None:
        """Count a failed assertion in a function of the tests that the program calls."""
        if isinstance(error, AssertionError) and not getattr(error, "_from_program", False):
            self.fail(error)

    def returned(self, value: Any, name: str) -> Any:
        """Judge what a function of the tests returns that says whether the program is right."""
        if value is False:
            self.fail(f"{name}() returned False")
        self.judged = self.judged or value is True
        return value

    def run_what_was_not_called(self, entry: str) -> None:
        """Run the tests that the text defines and does not call itself."""
        if not self.run(self.run_cases)[0]:
            self.passed.append(False)
        entered, defined = frozenset(self.entered), assertion_tree.functions(self.nodes)
        _set_up(self.names.get("setup_module"), sys.modules["__main__"])
        for name, value in list(self.names.items()):
            if isinstance(value, types.FunctionType) and name in defined and name not in entered:
                if name.startswith("test"):
                    self.run_function(value, [])
                elif name == "check":
                    self.unit(lambda value=value: self.returned(self.check(value, entry), "check"))  # type: ignore[misc]
            elif _is_test_class(value) and name.startswith("Test"):
                self.run_class(value, entered)
        asserted = self.asserting.intersection(name.rpartition(".")[2] for name in entered)
        if not self.passed and (self.judged or asserted):
            self.passed.append(True)

    def end_threads(self) -> None:
        """Wait for the threads of the tests, and count what failed in a thread, future or task that nobody asked."""

        def end() -> None:
            for error in self.unasked.wait():
                self.fail(error)

        if not self.run(end)[0]:
            self.passed.append(False)

    def refuse_cut_off(self, name: str) -> None:
        """Refuse tests that leave a task of theirs before it asserts."""
        if name in self.asserting:
            self.program.refuse(f"the tests end before their task {name} does: await it")

    def check(self, function: Any, entry: str) -> Any:
        """Call `check(candidate)` of the tests with the function under test."""
        if not inspect.signature(function).parameters:
            return function()
        if not entry:
            self.program.refuse("the tests define check(candidate): name the function in `entry_point`")
        return function(self.candidate(entry))

    def unit(self, work: Callable[[], object]) -> None:
        """Run one test and count it, unless it is skipped."""
        try:
            passed = self.run(work)[0]
        except pytest_stand_in.SkippedTest:
            return
        self.passed.append(passed)

    def run_function(self, function: Any, more: list[list[dict[str, Any]]]) -> None:
        """Run a test function with each combination of its parameters."""
        if getattr(function, pytest_stand_in.LEFT_OUT, False):
            return
        sets = [*more, *getattr(function, pytest_stand_in.PARAMETERS, [])]
        for combination in itertools.product(*sets):
            values = {name: value for chosen in combination for name, value in chosen.items()}

            def call(values: dict[str, Any] = values) -> Any:
                _set_up(self.names.get("setup_function"), function)
                return self.returned(function(**values), function.__name__)

            self.unit(call)

    def run_class(self, kind: Any, entered: frozenset[str]) -> None:
        """Run the methods of a class of pytest's kind, each with a new object."""
        if getattr(kind, pytest_stand_in.LEFT_OUT, False):
            return
        _set_up(getattr(kind, "setup_class", None))
        for name in dir(kind):
            method = getattr(kind, name)
            if not (name.startswith("test") and callable(method)) or f"{kind.__name__}.{name}" in entered:
                continue

            def call(name: str = name, **values: Any) -> Any:
                made = kind()
                _set_up(getattr(made, "setup_method", None), name)
                try:
                    return getattr(made, name)(**values)
                finally:
                    _set_up(getattr(made, "teardown_method", None), name)

            for mark in (pytest_stand_in.PARAMETERS, pytest_stand_in.LEFT_OUT):
                if hasattr(method, mark):
                    setattr(call, mark, getattr(method, mark))
            self.run_function(call, getattr(kind, pytest_stand_in.PARAMETERS, []))

    def run_cases(self) -> Any:
        """Run the cases of unittest that were not run yet; return unittest's result, None without unittest."""
        unittest: Any = sys.modules.get("unittest")
        if unittest is None:
            return None
        result, suite = unittest.TestResult(), unittest.TestSuite()
        for kind in list(self.names.values()):
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == "__main__":
                cases = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
                suite.addTests(case for case in cases if case.id() not in self.cases)
        suite.run(result)
        if self.program.refused:
            raise Unverifiable
        return result

    def report_case(self, case: Any, passed: bool | None, error: Any) -> None:
        """Count one case of unittest; `passed` None: it was skipped."""
        self.cases.add(case.id())
        if passed is None or self.program.refused:
            return
        if isinstance(error, tuple):
            if isinstance(error[1], pytest_stand_in.SkippedTest):
                return
            self.refuse_import(error[1])
        if passed and self.failure:  # swallowed inside of it
            passed = False
        self.passed.append(passed)
        if not passed:
            detail = (
                f"{error[0].__name__}: {message(error[1])}" if isinstance(error, tuple) else "a failure was expected"
            )
            self.reason = self.reason or (self.failure or f"{case.id().removeprefix('__main__.')}: {detail}")[:300]
        self.failure = ""


def _set_up(function: Any, *values: Any) -> None:
    """Call a function that prepares tests, where there is one; pytest's take what they prepare, or nothing."""
    if function is not None:
        function(*values[: len(inspect.signature(function).parameters)])


def _is_test_class(value: Any) -> bool:
    """Return whether a value is a class of the tests that is no case of unittest."""
    case: Any = sys.modules["unittest"].TestCase if "unittest" in sys.modules else ()
    return isinstance(value, type) and value.__module__ == "__main__" and not issubclass(value, case)


def _starts_a_runner(statement: ast.If) -> bool:
    """Return whether a block calls `unittest.main` or `pytest.main`, whose tests are run anyway."""
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(isinstance(function, ast.Attribute) and function.attr == "main" for function in calls)


def _skips(error: BaseException) -> bool:
    """Return whether a test ended itself without a result."""
    return "unittest" in sys.modules and isinstance(error, sys.modules["unittest"].SkipTest)


def _imports_unittest(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(name.partition(".")[0] == "unittest" for name in names)
