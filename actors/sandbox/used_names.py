"""Finds tests that cannot judge a program, because every program passes or none."""

import ast
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.sandbox.roles import words_of_python

_REACH_ALL = {"globals", "locals", "vars", "dir", "eval", "exec"}
"""Functions of Python through which tests reach names that they do not spell out."""
_MAIN_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")
_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_ASSERTION_ERRORS = {"AssertionError", "Exception", "BaseException"}
_FAILING_CALLS = re.compile(r"_?(?:assert\w*|raises|fail\w*|exit|quit|abort|eval|exec)", re.IGNORECASE)
_RESULTS_OF_UNITTEST = {"wasSuccessful", "failures", "errors"}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def unseen_comparison(test: str) -> str | None:
    """A comparison whose result nothing looks at, as of `f(2) == 4` without `assert`. None if there is none outside of functions."""
    unseen = (
        node for node in ast.parse(test).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare)
    )
    return next(map(ast.unparse, unseen), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Findings about tests, where they run. In doubt tests can judge a program."""

    use_program: bool = True
    """Whether they read a name that is neither theirs nor Python's, a function's name for example. Names in a function or class count if
    the tests use it. Names below `if __name__ == "__main__"` do not: tests run as a module of another name. If the tests have a single name
    of Python's, it may be the program's."""
    can_fail: bool = True
    """Whether they have an `assert` or the like, and do not catch its error."""
    imported: frozenset[str] = frozenset()
    """The modules that they import, without imports that may fail."""
    asserted_tuple: str | None = None
    """An assertion that always holds, as of `assert (f(2) == 4, "wrong")`. None if there is none."""
    unmet_need: str | None = None
    """A need that no sandbox meets, in words. None if none is known."""


@functools.lru_cache(maxsize=16)
def look_at(tests: tuple[str, ...]) -> Look:
    """Of tests that compile. An expression too deep for Python code to look at leaves everything in doubt."""
    run = _Run()
    try:
        whole = ast.Module(body=[each for test in tests for each in ast.parse(test).body], type_ignores=[])
        run.visit(whole)
        definitions = _reached(run)
        read = run.read.union(*(_read(definition) - run.bound for definition in definitions))
        statements = [each for each in whole.body if not isinstance(each, _Definition)]
        parts = [*statements, *definitions]
        modules = {
            name for part in parts for node in _nodes(part, unless_caught=_IMPORT_ERRORS) for name in _modules(node)
        }
        names = {name for part in parts for node in ast.walk(part) for name in _names(node)}
        return Look(
            use_program=_is_of_program(read, words_of_python(tests)),
            can_fail=bool(read & _REACH_ALL) or _fails(parts, names),
            imported=frozenset(modules),
            unmet_need=_unmet_need(modules, names, parts),
            asserted_tuple=next((ast.unparse(node) for node in ast.walk(whole) if _holds_always(node)), None),
        )
    except RecursionError:
        return Look()


def _is_of_program(read: set[str], of_python: set[str]) -> bool:
    return bool(read - of_python or read & _REACH_ALL or (read and len(of_python) == 1))


def _unmet_need(modules: set[str], names: set[str], parts: list[ast.stmt]) -> str | None:
    written = "\n".join(map(ast.unparse, parts)) if "asyncio" in modules else ""
    if "asyncio.run(" in written or ".run_until_complete(" in written:
        return "an event loop, which the sandbox lacks: give the program a function that is not asynchronous"
    stored = {ast.unparse(node) for part in parts for node in ast.walk(part) if _is_stored(node)}
    is_captured = "getvalue" in names and ("redirect_stdout" in names or "sys.stdout" in stored)
    if is_captured and "print" not in names:
        return "the program's output, which they cannot read: compare it with code_stdin"
    return None


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _fails(parts: list[ast.stmt], names: set[str]) -> bool:
    if "TextTestRunner" in names and names.isdisjoint(_RESULTS_OF_UNITTEST):
        # A runner catches all errors of its test cases.
        parts = [part for part in parts if not isinstance(part, ast.ClassDef)]
    return any(_is_failing(node) for part in parts for node in _nodes(part, unless_caught=_ASSERTION_ERRORS))


def _is_failing(node: ast.AST) -> bool:
    called = _names(node.func) if isinstance(node, ast.Call) else []
    return isinstance(node, ast.Assert | ast.Raise) or any(map(_FAILING_CALLS.fullmatch, called))


def _names(node: ast.AST) -> list[str]:
    return [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [] if node.level or not node.module else [node.module.partition(".")[0]]
    return [alias.name.partition(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []


def _nodes(node: ast.AST, *, unless_caught: set[str]) -> Iterator[ast.AST]:
    """The node and all below it that may run, without what a `try` catches errors of."""
    yield node
    children: list[ast.AST] = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.Try) and any(_catches(handler, unless_caught) for handler in node.handlers):
        children = [*node.handlers, *node.orelse, *node.finalbody]
    elif isinstance(node, ast.If) and _is_main_guard(node):
        children = [*node.orelse]
    for child in children:
        yield from _nodes(child, unless_caught=unless_caught)


def _catches(handler: ast.ExceptHandler, errors: set[str]) -> bool:
    return handler.type is None or any(not errors.isdisjoint(_names(each)) for each in ast.walk(handler.type))


def _is_main_guard(node: ast.If) -> bool:
    return ast.unparse(node.test) in _MAIN_GUARDS


def _holds_always(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and bool(node.test.elts)


class _Run(ast.NodeVisitor):
    """Goes through statements in the order in which they run, without the bodies of functions."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        """Names that the tests have bound so far."""
        self.read: set[str] = set()
        """Names read before they were bound."""
        self.reached: set[str] = set()
        """Names read after they were bound."""
        self.definitions: dict[str, list[_Definition]] = {}

    def generic_visit(self, node: ast.AST) -> None:
        # Values are read before names are bound.
        first = [name for name in ("generators", "iter", "value") if name in node._fields]
        for name in (*first, *(name for name in node._fields if name not in first)):
            self._visit_all(getattr(node, name, None))

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)
        elif node.id in self.bound:
            self.reached.add(node.id)
        else:
            self.read.add(node.id)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).partition(".")[0])

    def visit_If(self, node: ast.If) -> None:
        self._visit_all(node.orelse if _is_main_guard(node) else [node.test, *node.body, *node.orelse])

    def visit_Try(self, node: ast.Try) -> None:
        # An import that fails binds nothing.
        with self._scope():
            self._visit_all(node.body)
        self._visit_all([*node.handlers, *node.orelse, *node.finalbody])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all([*node.decorator_list, node.args, node.returns])
        self._define(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._scope():
            self._visit_all(node.body)
        self._define(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        with self._scope():
            self.bound |= _arguments(node)
            self.visit(node.body)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        with self._scope():
            self.generic_visit(node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def _define(self, node: _Definition) -> None:
        self.bound.add(node.name)
        self.definitions.setdefault(node.name, []).append(node)
        if node.decorator_list:
            self.reached.add(node.name)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        outside = set(self.bound)
        yield
        self.bound = outside

    def _visit_all(self, value: object) -> None:
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                self.visit(node)


def _reached(run: _Run) -> list[_Definition]:
    """The functions and classes that the tests use."""
    found: list[_Definition] = []
    definitions, reached = dict(run.definitions), [*run.reached]
    while reached:
        for definition in definitions.pop(reached.pop(), []):
            found.append(definition)
            reached += _read(definition) & run.bound
    return found


def _read(definition: _Definition) -> set[str]:
    """The names that it reads, without its arguments."""
    nodes = (node for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return {node.id for node in nodes} - _arguments(definition)


def _arguments(node: _Definition | ast.Lambda) -> frozenset[str]:
    if isinstance(node, ast.ClassDef):
        return frozenset()
    return frozenset(child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg))
