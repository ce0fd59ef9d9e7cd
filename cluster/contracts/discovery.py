"""Finds the callables of a package in its source code. Nothing is imported, so a typo does not start torch or vllm."""

import ast
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Takes(NamedTuple):
    """The names of a callable's parameters."""

    names: tuple[str, ...]
    """In order, without `self`."""
    accepts_any: bool
    """Whether it takes `**keywords`."""


def callables(home: str) -> dict[str, tuple[str, Takes]]:
    """Name to module and parameters, for the public callables in `home`, a module or a package.

    In a package, a file with a callable of the file's name (`rewards/regex.py`) holds only that variant; the rest of the file is private to
    it. Any other file offers all that it defines. Names of variants are lower case, so a class needs an alias.

    A file that is not valid Python offers its own name: importing that variant shows the error.
    """
    found: dict[str, tuple[str, Takes]] = {}
    for module, path in _files(home):
        own = module.rpartition(".")[2]
        try:
            defined = _defined(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError):
            defined = {own: Takes((), accepts_any=True)}
        for name in [own] if own in defined else defined:
            found[name] = (module, defined[name])
    return found


def _files(home: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(home)
    if spec is None or spec.origin is None:
        return
    if spec.submodule_search_locations is None:
        yield home, Path(spec.origin)
        return
    for info in sorted(pkgutil.iter_modules(spec.submodule_search_locations), key=lambda info: info.name):
        inner = importlib.util.find_spec(f"{home}.{info.name}")
        if inner is not None and inner.origin is not None:
            yield inner.name, Path(inner.origin)


def _defined(module: ast.Module) -> dict[str, Takes]:
    defined: dict[str, Takes] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined[node.name] = _takes(node.args)
        elif isinstance(node, ast.ClassDef):
            defined[node.name] = _takes_of_class(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in defined:
            aliases = [target.id for target in node.targets if isinstance(target, ast.Name)]
            defined |= dict.fromkeys(aliases, defined[node.value.id])
    return {name: takes for name, takes in defined.items() if name == name.lower() and not name.startswith("_")}


def _takes(arguments: ast.arguments, *, skip: int = 0) -> Takes:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return Takes(tuple(each.arg for each in every[skip:]), arguments.kwarg is not None)


def _takes_of_class(node: ast.ClassDef) -> Takes:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _takes(item.args, skip=1)
    return Takes((), accepts_any=True)
