"""Reads Python test code when its row is read: what no program could be graded by is an error there, not in the run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from shared.errors import DataError
from verify.code.sandbox import assertion_tree
from verify.code.sandbox.assertion_tree import fails, inside, name_of

_PATCHED = ("builtins.input", "builtins.print", "sys.stdin", "sys.stdout", "sys.stderr")
"""names that a test may replace: the program's sandbox replaces them, too"""
_APART = {
    "files": (
        "NamedTemporaryFile",
        "TemporaryDirectory",
        "TemporaryFile",
        "mkdtemp",
        "mkstemp",
        "os.makedirs",
        "os.mkdir",
    ),
    "warnings": ("self.assertWarns", "self.assertWarnsRegex", "pytest.warns", "pytest.deprecated_call"),
    "logs": ("self.assertLogs", "self.assertNoLogs"),
}
"""things that tests and program do not share, with the calls that show that tests need it"""
_PROCESSES = ("multiprocessing", "subprocess")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_assertion_text(code: str, entry_point: str) -> None:
    """Raise DataError for test code that is no Python, cannot fail, or needs what a sandbox does not have."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the test code is not Python ({error}): give Python that asserts, or tests of another kind"
        ) from error
    if entry_point and not _is_expression(entry_point):
        raise DataError(f"`entry_point` is no name of a function: {entry_point[:60]!r}")
    _check_libraries(tree)
    _check_patches(tree)
    _check_apart(tree)
    for function, kind in _tests(tree):
        _check_parameters(function, kind)
    for node in ast.walk(tree):
        fixture = name_of(node.func if isinstance(node, ast.Call) else node) if isinstance(node, ast.expr) else ""
        if fixture in ("fixture", "usefixtures"):
            raise DataError("the tests use a fixture of pytest, which is not run here: call the functions with values")
    known = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    check = known.get("check")
    if check and not entry_point and _required(check) and not _is_used(tree, "check"):
        raise DataError("the tests define check(candidate) and do not call it: name the function in `entry_point`")
    run = ("test", "check", "setUp", "tearDown", "setup", "teardown")
    idle = [name for name in known if not (name.startswith(run) or _is_used(tree, name))]
    reached = [node for node in tree.body if getattr(node, "name", None) not in idle]
    calls = [node.value.func for node in assertion_tree.inside(tree.body)
             if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]  # fmt: skip
    for name in map(name_of, calls):
        if isinstance(known.get(name), ast.AsyncFunctionDef) and not name.startswith("test"):
            raise DataError(f"the tests call {name}(), which is async, and do not await it: it cannot fail")
    judging, outside = assertion_tree.judging(tree), assertion_tree.global_names(code)
    if not any(_decides(node, judging, outside) for statement in reached for node in ast.walk(statement)):
        uncalled = f"; nothing calls {idle[0]}" if idle else ""
        raise DataError(f"the tests cannot fail: no assertion compares what the program does{uncalled}")


def _decides(node: ast.AST, judging: set[str], outside: set[str]) -> bool:
    """Return whether a node may fail a test: it asserts, or runs a function that says whether the program is right."""
    if fails(node):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return (node.name.startswith("test") or node.name == "check") and node.name in judging
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_outside(node.value.func, outside):
        return any(isinstance(each, ast.Name) for each in node.value.args)  # check(f), with `check` in the prefix
    return isinstance(node, ast.Call) and name_of(node.func) in judging


def _is_outside(function: ast.expr, outside: set[str]) -> bool:
    """Return whether the text runs what it does not define: no helper or logger of its own, which only reports."""
    while isinstance(function, ast.Attribute):
        function = function.value
    name = name_of(function)
    return name in outside and (name in ("exec", "eval") or not hasattr(builtins, name))


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True


def _is_used(tree: ast.Module, name: str) -> bool:
    """Return whether a name is read outside of the function of that name."""
    others = [node for node in tree.body if getattr(node, "name", None) != name]
    return any(isinstance(node, ast.Name) and node.id == name for other in others for node in ast.walk(other))


def _check_libraries(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        module, names = (
            getattr(node, "module", ""),
            [each.name for each in getattr(node, "names", []) if isinstance(each, ast.alias)],
        )
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if (
            module in _PROCESSES
            or "ProcessPoolExecutor" in names
            or called.partition(".")[0] in _PROCESSES
            or called in ("os.fork", "os.system")
        ):
            raise DataError("the tests start processes, which a sandbox does not allow: leave such rows out")
    for node in inside(tree.body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.partition(".")[0].lower() in assertion_tree.LIBRARIES and not _may_be_missing(tree, node):
                raise DataError(f"the tests import {name}, which a sandbox does not have: leave such rows out")


def _may_be_missing(tree: ast.Module, node: ast.AST) -> bool:
    """Return whether an import stands in a `try` that says what to do without it."""
    blocks = [block for block in ast.walk(tree) if isinstance(block, ast.Try) and block.handlers]
    return any(each is node for block in blocks for statement in block.body for each in ast.walk(statement))


def _check_patches(tree: ast.Module) -> None:
    """Refuse what replaces a part of the program: `patch("time.sleep")` changes the process of the tests only."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        target = node.args[0]
        if name_of(node.func) == "patch" and isinstance(target, ast.Constant) and isinstance(target.value, str):
            if target.value not in _PATCHED:
                raise DataError(f"the tests patch {target.value}: only {', '.join(_PATCHED)} reach the program")
        elif (
            isinstance(node.func, ast.Attribute)
            and name_of(node.func.value) == "patch"
            and node.func.attr in ("object", "dict")
        ):
            patched = ".".join(
                [ast.unparse(target), *[str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant)]]
            )
            if node.func.attr == "dict" or patched not in _PATCHED:
                raise DataError(f"the tests patch {patched}: only {', '.join(_PATCHED)} reach the program")


def _check_apart(tree: ast.Module) -> None:
    """Refuse tests that need what is not shared with the program, which runs in a sandbox of its own."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name for alias in imports} - {"sys", "unittest", "pytest", "builtins"}
    for node in ast.walk(tree):
        needs = ""
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("tempfile.")
            needs = next((what for what, calls in _APART.items() if name in calls), "")
            if name == "open" and _writes(node):
                needs = "files"
            if name_of(node.func) == "catch_warnings" and any(each.arg == "record" for each in node.keywords):
                needs = "warnings"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            if node.value.id in modules or ast.unparse(node) == "sys.argv":
                needs = ast.unparse(node)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "os.environ"
        ):
            needs = "os.environ"
        if needs:
            raise DataError(
                f"the tests share {needs} with the program, which runs in a sandbox of its own: leave such rows out"
            )


def _writes(call: ast.Call) -> bool:
    """Return whether a call of `open` writes."""
    modes = [*call.args[1:2], *[each.value for each in call.keywords if each.arg == "mode"]]
    return any(isinstance(mode, ast.Constant) and not set("wax+").isdisjoint(str(mode.value)) for mode in modes)


def _tests(tree: ast.Module) -> Iterator[tuple[_Function, ast.ClassDef | None]]:
    """Yield the test functions that pytest would call, with their class; those that the text calls are left out."""
    for node in tree.body:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and node.name.startswith("test") and not _is_used(tree, node.name):
            yield node, None
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not _is_case(node):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name.startswith("test"):
                    yield each, node


def _is_case(node: ast.ClassDef) -> bool:
    return any(name_of(base).endswith("TestCase") for base in node.bases)


def _required(function: _Function) -> list[str]:
    """Return the parameters without a default."""
    given = function.args
    plain = [each.arg for each in [*given.posonlyargs, *given.args]]
    plain = plain[: len(plain) - len(given.defaults)]
    return plain + [
        each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
    ]


def _check_parameters(function: _Function, kind: ast.ClassDef | None) -> None:
    """Refuse a parameter that neither parametrize nor patch gives: it is a fixture."""
    missing = _required(function)[(kind is not None and not _is_static(function)) :]
    for decorator in [*function.decorator_list, *(kind.decorator_list if kind is not None else [])]:
        call = decorator if isinstance(decorator, ast.Call) else None
        name = name_of(decorator.func) if call is not None and isinstance(decorator, ast.Call) else name_of(decorator)
        if call is None:
            continue
        if name == "parametrize":
            names = _parameter_names(call)
            if names is None:
                return
            missing = [each for each in missing if each not in names]
        elif name == "patch" and len(call.args) == 1 and not any(each.arg == "new" for each in call.keywords):
            missing = missing[1:]
    if missing:
        raise DataError(
            f"{function.name} of the tests takes {missing[0]}, a fixture of pytest, which is not run here: "
            "call the function with values, or use parametrize"
        )


def _is_static(function: _Function) -> bool:
    return any(name_of(decorator) == "staticmethod" for decorator in function.decorator_list)


def _parameter_names(call: ast.Call) -> list[str] | None:
    """Return the names that `parametrize` gives, None where they are not written out."""
    if not call.args:
        return None
    try:
        names = ast.literal_eval(call.args[0])
    except ValueError:
        return None
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else [str(name) for name in names]
