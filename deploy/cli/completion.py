"""Shell completion: files, run directories, settings, kinds of variants. Never raises, and imports nothing heavy."""

import os
from collections.abc import Callable, Iterator

_RUN_YAML = "run.yaml"
_DEFAULT_RUNS = "runs"
_MOST_LEVELS = 8
"""Levels of folders with a single entry that one Tab descends at most."""


def run_files(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to them."""
    return _paths(incomplete, lambda path: path.endswith((".yaml", ".yml")) and os.path.isfile(path))


def run_directories(incomplete: str) -> list[str]:
    """Run directories, and folders on the way to them. For an empty word, those below runs/ come first."""
    here = _paths(incomplete, is_run)
    below = _paths(f"{_DEFAULT_RUNS}/", is_run) if not incomplete else []
    return list(dict.fromkeys([*below, *here]))


def run_files_and_directories(incomplete: str) -> list[str]:
    return list(dict.fromkeys([*run_directories(incomplete), *run_files(incomplete)]))


def settings(incomplete: str) -> list[str]:
    """Names of settings that begin with `incomplete`, at all levels. For an empty word, only the first level."""
    from cluster.contracts.config import RunConfig
    from cluster.contracts.settings import fields

    names = [name for name, _ in fields(RunConfig)]
    return [name for name in names if name.startswith(incomplete) and (incomplete or "." not in name)]


def variant_kinds(incomplete: str) -> list[str]:
    from deploy.listing import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def is_run(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _RUN_YAML))


def _paths(incomplete: str, wanted: Callable[[str], bool]) -> list[str]:
    found = list(_entries(incomplete, wanted))
    for _ in range(_MOST_LEVELS):
        # A shell takes a single suggestion as the end of the word: descend into the folder instead.
        if len(found) != 1 or not found[0].endswith("/"):
            break
        found = list(_entries(found[0], wanted))
    return found


def _entries(incomplete: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    folder, name = os.path.split(incomplete)
    try:
        inside = sorted(os.scandir(os.path.expanduser(folder or ".")), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in inside:
        if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
            continue
        path = os.path.join(folder, entry.name)
        if wanted(os.path.expanduser(path)):
            yield path
        elif entry.is_dir() and not is_run(os.path.expanduser(path)):
            yield f"{path}/"
