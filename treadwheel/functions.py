"""Names a script's function as a run file would: processes on other machines import it by that name."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from cluster.contracts.errors import ConfigError
from treadwheel.own_packages import NAMES

Variant = str | Mapping[str, Any] | Callable[..., Any]
"""A name or mapping as in a run file, or a function or class, alone or with parameters: `functools.partial(judge, weight=2)`."""

_importing: list[str] = []
"""Modules being imported to check that this works."""


def refuse_import_time(called: str) -> None:
    """Raises ConfigError while a script is imported for one of its functions: every actor imports it, and would start the run again."""
    if _importing:
        raise ConfigError(
            f"{_importing[-1]!r} calls treadwheel.{called} when it is imported, and actors import it for its functions; "
            'put the call below `if __name__ == "__main__":`'
        )


def named(variant: Variant, *, argument: str) -> str | dict[str, Any]:
    """The variant as a run file writes it. Raises ConfigError for a function that other processes could not import, and for a parameter
    that JSON cannot represent."""
    if isinstance(variant, str):
        return variant
    if isinstance(variant, Mapping):
        return _as_json(variant, argument=argument)
    function, params = variant, {}
    while isinstance(function, partial):
        if function.args:
            raise ConfigError(f"{argument}={variant!r} binds parameters without their names; bind them by name")
        function, params = function.func, {**function.keywords, **params}
    name = _import_path(function, argument=argument)
    return {"name": name, **_as_json(params, argument=argument)} if params else name


def _as_json(params: Mapping[str, Any], *, argument: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in params.items():
        try:
            found[name] = json.loads(json.dumps(value, default=plain))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{argument}.{name}: {error}") from error
    return found


def plain(value: Any) -> Any:
    """The JSON value of a path (its text) and of numpy's numbers and arrays."""
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}; give a text, a number, a list or a mapping")


def _import_path(function: Any, *, argument: str) -> str:
    qualified = getattr(function, "__qualname__", None)
    if qualified is None:
        raise ConfigError(f"{argument}={function!r} is no function or class; give one, or a name as in a run file")
    shown = f"{argument}={qualified!r}"
    if not qualified.isidentifier():
        raise ConfigError(
            f"{shown} is a lambda, or is defined inside another function or class, where no other process finds it; "
            "give a function that is defined at the top of a module, and bind its parameters with functools.partial"
        )
    module = _module_of(function, shown=shown)
    _require_import(module, qualified, shown=shown)
    return f"{module}:{qualified}"


def _module_of(function: Any, *, shown: str) -> str:
    module: str = function.__module__
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m my_package.my_script
        return spec.name
    if file is None or file.startswith("<"):
        raise ConfigError(
            f"{shown} is defined in a notebook or an interactive session, which no other process can import; write it into a file, in a "
            "notebook by `%%writefile my_functions.py` at the top of its cell, and import it from there"
        )
    stem = Path(file).stem
    if not stem.isidentifier() or stem in NAMES:
        raise ConfigError(
            f"{shown}: its script {file!r} cannot be imported by that name; rename it, as in my_script.py"
        )
    return stem


def _require_import(module: str, name: str, *, shown: str) -> None:
    """Imports it as an actor will. The running script is imported a second time, under its own name."""
    _importing.append(module)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ConfigError:
        raise
    except Exception as error:  # foreign code
        raise ConfigError(f"{shown}: {module!r} does not import: {type(error).__name__}: {error}") from error
    finally:
        _importing.pop()
    if found is None:
        raise ConfigError(f"{shown} is not in {module!r} when that is imported; define it outside of any condition")
