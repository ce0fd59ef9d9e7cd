"""Finds tests that cannot judge a program: most of them pass with every program."""

import ast
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from actors.sandbox.roles import words_of_python

_REACH_ALL = {"globals", "locals", "vars", "dir", "eval", "exec"}
"""Functions of Python through which tests reach names that they do not spell out."""
_MAIN_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.lru_cache(maxsize=16)
def use_program(tests: tuple[str, ...]) -> bool:
    """Whether tests that compile read a name that is neither theirs nor Python's, a function's name for example.

    Names in a function or class count if the tests use it. Names below `if __name__ == "__main__"` do not: tests run as a module of another
    name. If the tests have a single name of Python's, it may be the program's. In doubt tests use the program.
    """
    run = _Run()
    try:
        for test in tests:
            run.visit(ast.parse(test))
        read = run.read | _of_reached(run)
    except RecursionError:  # of an expression too deep for Python code to look at
        return True
    of_python = words_of_python(tests)
    return bool(read - of_python or read & _REACH_ALL or (read and len(of_python) == 1))


def unseen_comparison(test: str) -> str | None:
    """A comparison whose result nothing looks at, as of `f(2) == 4` without `assert`. None if there is none outside of functions."""
    unseen = (
        node for node in ast.parse(test).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare)
    )
    return next(map(ast.unparse, unseen), None)


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
        is_skipped = ast.unparse(node.test) in _MAIN_GUARDS
        self._visit_all(node.orelse if is_skipped else [node.test, *node.body, *node.orelse])

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


def _of_reached(run: _Run) -> set[str]:
    """Names read in the functions and classes that the tests use."""
    read: set[str] = set()
    definitions, reached = dict(run.definitions), [*run.reached]
    while reached:
        for definition in definitions.pop(reached.pop(), []):
            names = {
                node.id
                for node in ast.walk(definition)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            }
            reached += names & run.bound
            read |= names - run.bound - _arguments(definition)
    return read


def _arguments(node: _Definition | ast.Lambda) -> frozenset[str]:
    if isinstance(node, ast.ClassDef):
        return frozenset()
    return frozenset(child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg))
