"""Imports our own packages even if the script's folder has a package of the same name."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

NAMES = ("cluster", "actors", "learner", "deploy")
_HOME = Path(__file__).resolve().parents[1]


def load() -> None:
    """Imports ours, whatever the search path begins with. Raises ImportError if another package of such a name was imported before."""
    for name in NAMES:
        if name in sys.modules:
            _require_ours(name)
        else:
            _load(name)


def _load(name: str) -> None:
    spec = PathFinder.find_spec(name, [str(_HOME)])
    assert spec is not None and spec.loader is not None, f"{name} lies beside treadwheel"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _require_ours(name: str) -> None:
    found = getattr(sys.modules[name], "__file__", None)
    if found is None or Path(found).resolve().parents[1] != _HOME:
        where = found or ", ".join(getattr(sys.modules[name], "__path__", ()))
        raise ImportError(
            f"another package is imported as {name!r} ({where}), which is the name of one of treadwheel's packages: rename it, or do not "
            "import it in programs that import treadwheel"
        )
