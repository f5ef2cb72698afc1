"""Reads the text of Python tests as a tree: what decides, what is caught without deciding, which modules it imports.

A `try` whose handler only prints makes a failed test look like a passed one. `watched` changes such handlers so that
they report what they catch. Handlers that fail themselves, that set what is asserted later, and blocks that expect an
error (`f(-1)`, then `assert False`) keep Python's meaning.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import symtable
import sys
from collections.abc import Iterable, Iterator
from typing import Any

SWALLOWED, ENTERED, RETURNED = "__swallowed__", "__entered__", "__returned__"
"""names of the functions that changed tests call: (lines of the statements that always fail where the block expects an
error, else None; whether the block asserts), (name of a function of the tests), (what one returned, its name)"""
_BROAD = ("Exception", "BaseException", "AssertionError", "failureException")
_EXITS = ("exit", "_exit", "quit", "abort")
_FAILS = ("fail", "xfail", "raises", "warns", *_EXITS)
_CHANGES = ("add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LIBRARIES = frozenset((
    "aiohttp", "bs4", "click", "cryptography", "cv2", "dateutil", "django", "faker", "fastapi", "flask",
    "freezegun", "geopandas", "hypothesis", "jax", "keras", "librosa", "lxml", "matplotlib", "mock", "mpmath",
    "networkx", "nltk", "nose", "numba", "numpy", "openpyxl", "pandas", "parameterized", "pil", "polars", "psutil",
    "pydantic", "pytz", "requests", "scipy", "seaborn", "shapely", "skimage", "sklearn", "sortedcontainers",
    "sqlalchemy", "statsmodels", "sympy", "tensorflow", "textblob", "torch", "tqdm", "transformers", "wordcloud",
    "xgboost", "yaml",
))  # fmt: skip
"""packages of others, which no sandbox has; a module of another unknown name is the program's"""


def name_of(node: ast.expr) -> str:
    """Return the last name of `a` or `a.b.c`, "" for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def inside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes in and under `nodes`, without the bodies of functions and classes that are defined there."""
    for node in nodes:
        yield node
        if not isinstance(node, _DEFINITIONS):
            yield from inside(ast.iter_child_nodes(node))


def is_constant(test: ast.expr) -> bool:
    """Return whether an asserted expression names nothing of the program or the tests: `False`, `1 == 1`."""
    return not any(isinstance(node, (ast.Name, ast.Await)) for node in ast.walk(test))


def fails(node: ast.AST) -> bool:
    """Return whether a node may end a test as failed: an assertion, a raise, an exit with a status."""
    if isinstance(node, ast.Assert):
        return not always_holds(node.test)
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if raised is None or name_of(raised) != "SystemExit":
            return True
        node = node.exc if isinstance(node.exc, ast.Call) else ast.Call(raised, [], [])
    if not isinstance(node, ast.Call):
        return False
    name = name_of(node.func)
    if name in (*_EXITS, "SystemExit"):
        return bool(node.args) and not (isinstance(node.args[0], ast.Constant) and node.args[0].value in (0, None))
    if name in ("assertTrue", "assert_") and node.args:
        return not always_holds(node.args[0])
    return name in _FAILS or name.lower().startswith(("assert", "_assert"))


def _truth(test: ast.expr) -> bool:
    """Return the truth of a constant expression."""
    try:
        return bool(eval(compile(ast.Expression(test), "tests.py", "eval"), {"__builtins__": {}}))
    except Exception:  # noqa: BLE001 - whatever it is, it does not hold
        return False


def always_holds(test: ast.expr) -> bool:
    """Return whether an asserted expression is true whatever the program does: `(f(3) == 6, "message")`."""
    if isinstance(test, (ast.Tuple, ast.List, ast.Set)):
        return any(not isinstance(item, ast.Starred) for item in test.elts)
    if isinstance(test, ast.Dict):
        return any(key is not None for key in test.keys)
    if isinstance(test, ast.JoinedStr):
        return any(isinstance(text, ast.Constant) and text.value for text in test.values)
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, ast.Or) else all)(map(always_holds, test.values))
    return isinstance(test, (ast.Lambda, ast.GeneratorExp)) or (is_constant(test) and _truth(test))


def always_fails(statement: ast.stmt) -> bool:
    """Return whether a statement fails whenever it is reached: `assert False`, `raise`, `self.fail()`."""
    if isinstance(statement, ast.Assert):
        return is_constant(statement.test) and not _truth(statement.test)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return name_of(statement.value.func) in ("fail", *_EXITS) and fails(statement.value)
    return isinstance(statement, ast.Raise)


def functions(nodes: Iterable[ast.AST]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions among the nodes of a text, by name; methods too."""
    return {node.name: node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def returns_truth(function: ast.AST) -> bool:
    """Return whether a function returns a comparison, True or False."""
    kinds = (ast.Compare, ast.BoolOp)
    for node in inside(getattr(function, "body", [])):
        value = node.value if isinstance(node, ast.Return) else None
        if isinstance(value, ast.Call) and name_of(value.func) in ("all", "any", "bool"):
            return True
        if isinstance(value, kinds) or (isinstance(value, ast.Constant) and isinstance(value.value, bool)):
            return True
        if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
            return True
    return False


def program_modules(nodes: list[ast.AST]) -> set[str]:
    """Return the modules that can only be the program: `from solution import f` of a module that nobody has."""
    if not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes):
        return set()
    dotted = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    for node in nodes:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names if (alias.asname or alias.name) in dotted}
    unknown = {name for name in named if name != "pytest" and name.partition(".")[0].lower() not in LIBRARIES}
    return {name for name in unknown if not _exists(name.partition(".")[0])}


def _exists(module: str) -> bool:
    if module == "solution" or module not in sys.stdlib_module_names:
        return False
    return importlib.util.find_spec(module) is not None


def _imported_from_program(tree: ast.Module) -> set[str]:
    nodes = list(ast.walk(tree))
    modules = program_modules(nodes)
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in modules]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def stored_names(tree: ast.AST) -> set[str]:
    """Return the names that a text defines anywhere: assigned, imported, parameters, functions, classes."""
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    stored |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return stored | {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def global_names(source: str) -> set[str]:
    """Return the names that a text uses as the module's and does not define there."""
    top = symtable.symtable(source, "tests.py", "exec")
    loaded: set[str] = set()
    stored: set[str] = set()

    def read(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            outer = table is top or symbol.is_global()
            if outer and symbol.is_referenced():
                loaded.add(symbol.get_name())
            if outer and (symbol.is_assigned() or symbol.is_imported()):
                stored.add(symbol.get_name())
        for child in table.get_children():
            read(child)

    read(top)
    return loaded - stored


def judging(tree: ast.Module) -> set[str]:
    """Return the functions that call the program and return a truth value that no assertion looks at."""
    known = functions(ast.walk(tree))
    return _Deciding(tree, known).judging if known else set()


def watched(tree: ast.Module) -> ast.Module:
    """Change the tests so that a failure that nobody hears of is reported; see the names above."""
    _Watch(tree).visit(tree)
    return ast.fix_missing_locations(tree)


class _Watch(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.functions = functions(ast.walk(tree))
        self.deciding = _Deciding(tree, self.functions)
        self.judging = self.deciding.judging
        self.quiet = {getattr(node, "name", "") for node in ast.walk(tree) if _swallows(node)}
        self.function = self.kind = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Remember whose methods these are."""
        outer, self.kind = self.kind, f"{node.name}."
        self.generic_visit(node)
        self.kind = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Let a test function say that it was entered."""
        outer, self.function = self.function, node.name
        self.generic_visit(node)
        self.function = outer
        if node.name.startswith("test") or node.name == "check" or any(map(fails, inside(node.body))):
            node.body.insert(0, ast.Expr(_call(ENTERED, ast.Constant(f"{self.kind}{node.name}"))))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Look at what a function returns that says whether the program is right, where nothing else does."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.judging:
            return _call(RETURNED, node, ast.Constant(node.func.id))
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Report what a handler swallows."""
        self.generic_visit(node)
        expected = [statement for statement in node.body if always_fails(statement)]
        expects = bool(expected) or any(map(fails, inside(node.orelse)))
        ranges: Any = tuple((statement.lineno, statement.end_lineno) for statement in expected) if expects else None
        lines = ast.Constant(ranges)
        for handler in node.handlers:
            if _is_broad(handler.type) and not self.deciding.decides(node, handler, self.function):
                handler.body.insert(0, ast.Expr(_call(SWALLOWED, lines, ast.Constant(_asserts(node.body)))))
        if any(map(_leaves, inside(node.finalbody))):
            whole: list[ast.stmt] = [ast.Try(node.body, node.handlers, node.orelse, [])] if node.handlers else node.body
            node.body, node.handlers, node.orelse = [_reporting(whole, node)], [], []
        return node

    visit_TryStar = visit_Try  # type: ignore[assignment]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Let asyncio.gather raise where nobody looks at the errors that it would return."""
        self.generic_visit(node)
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and name_of(call.func) == "gather":
                call.keywords = [each for each in call.keywords if each.arg != "return_exceptions"]
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        """Report what contextlib.suppress or a context manager of the tests swallows."""
        self.generic_visit(node)
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        quiet = [name_of(call.func) in self.quiet for call in calls]
        broad = any(quiet) or any(name_of(call.func) == "suppress" and any(map(_is_broad, call.args)) for call in calls)
        if broad and not any(map(always_fails, node.body)):
            node.body = [_reporting(node.body, node)]
        return node


def _leaves(node: ast.AST) -> bool:
    """Return whether a node in a `finally` drops the exception that is on its way."""
    exits = isinstance(node, ast.Call) and name_of(node.func) in _EXITS
    return exits or isinstance(node, (ast.Return, ast.Break, ast.Continue, ast.Raise))


def _swallows(node: ast.AST) -> bool:
    """Return whether a node is a context manager that drops failed assertions."""
    if isinstance(node, ast.ClassDef) and (leave := functions(node.body).get("__exit__")):
        values = [each.value for each in inside(leave.body) if isinstance(each, ast.Return) and each.value]
        return any(not isinstance(value, ast.Constant) or bool(value.value) for value in values)
    if not isinstance(node, ast.FunctionDef):
        return False
    around = [each for each in inside(node.body) if isinstance(each, ast.Try) and "yield" in ast.unparse(each)]
    handlers = [handler for block in around for handler in block.handlers if _is_broad(handler.type)]
    return any(not _asserts(handler.body) for handler in handlers)


def _asserts(body: list[ast.stmt]) -> bool:
    return any(map(fails, inside(body)))


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _reporting(body: list[ast.stmt], origin: ast.stmt) -> ast.stmt:
    """Return statements in a `try` that reports an exception and raises it again."""
    asserts = ast.Constant(_asserts(body))
    report: list[ast.stmt] = [ast.Expr(_call(SWALLOWED, ast.Constant(None), asserts)), ast.Raise()]
    handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, report)
    return ast.copy_location(ast.Try(body, [handler], [], []), origin)


def _is_broad(kind: ast.expr | None) -> bool:
    """Return whether a handler catches a failed assertion."""
    if isinstance(kind, ast.Tuple):
        return any(map(_is_broad, kind.elts))
    return kind is None or name_of(kind) in _BROAD


class _Deciding:
    """The expressions that decide tests, with their place: `ok` in `assert ok`, what a function returns that is run."""

    def __init__(self, tree: ast.Module, known: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> None:
        self.places: list[tuple[str, ast.AST]] = []
        """scope and expression"""
        self.assigned = [
            node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        ]
        scopes = [("", list(inside(tree.body))), *((name, list(inside(node.body))) for name, node in known.items())]
        for scope, nodes in scopes:
            for node in nodes:
                if fails(node):
                    self.places.append((scope, node))
                elif isinstance(node, (ast.If, ast.While)) and any(map(fails, inside([*node.body, *node.orelse]))):
                    self.places.append((scope, node.test))
        self.names = self._names(node for _, node in self.places)
        """all that an assertion looks at, or what was assigned to that"""
        self.known, self.stored = known, stored_names(tree) - _imported_from_program(tree)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        self.variables = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        truths = {name for name, function in known.items() if returns_truth(function)}
        self.judging = {name for name in truths - self.names if self.calls_program(name, set())}
        self.looked_at = self.names & known.keys() | self.judging
        for name in self.looked_at:
            returns = [node for node in inside(known[name].body) if isinstance(node, ast.Return)]
            self.places += [(name, node.value) for node in returns if node.value is not None]

    def _names(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Return the names in expressions, and in what is assigned to these."""
        names: set[str] = set()

        def add(node: ast.AST) -> None:
            names.update(ast.unparse(each) for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))

        for node in nodes:
            add(node)
        for _ in range(2):
            for statement in self.assigned:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if statement.value is not None and not names.isdisjoint(map(ast.unparse, targets)):
                    add(statement.value)
        return names

    def calls_program(self, name: str, seen: set[str]) -> bool:
        """Return whether a function calls the program, or what it was given, or another that does."""
        function = self.known[name]
        parameters = {each.arg for each in function.args.args}
        for node in inside(function.body):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called in self.known:
                if called not in seen and self.calls_program(called, seen | {name, called}):
                    return True
            elif (
                called in parameters | self.variables
                or called
                and not (called in self.stored or hasattr(builtins, called))
            ):
                return True
        return False

    def decides(self, block: ast.Try, handler: ast.ExceptHandler, function: str) -> bool:
        """Return whether a handler fails itself, returns what is looked at, or the block stores what decides later."""
        nodes = list(inside(handler.body))
        if any(map(fails, nodes)):
            return True
        if function in self.looked_at and any(isinstance(node, ast.Return) for node in nodes):
            return True
        failing = [number for number, statement in enumerate(block.body) if any(map(fails, inside([statement])))]
        behind = block.body[failing[0] + 1 :] if failing else []
        stored = list(_stored([*nodes, *inside([*behind, *block.orelse])]))
        others = [(scope, node) for scope, node in self.places if not _contains(block, node)]
        later = [node for scope, node in others if scope == function and getattr(node, "lineno", 0) > block.lineno]
        if not self._names(later).isdisjoint(name for name, plain in stored if plain):
            return True
        return not self._names(node for _, node in others).isdisjoint(name for name, plain in stored if not plain)


def _contains(block: ast.Try, node: ast.AST) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return block.lineno <= first and last <= (block.end_lineno or 0)


def _stored(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield the names that statements assign to (True), and what they change in another way (False)."""
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node.value if isinstance(node, ast.Subscript) else node), isinstance(node, ast.Name)
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
        ):
            yield ast.unparse(node.value.func.value), False
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield from ((name, False) for name in node.names)
