"""Prompts from a data set of the Hugging Face hub, or from a folder that `datasets` saved. Needs the package `datasets`."""

import functools
import importlib
import os
import re
from pathlib import Path
from typing import Any

from actors.prompts.rows import RowPrompts, TableRows, TextAs
from cluster.contracts.errors import ConfigError

_COMMIT = re.compile(r"[0-9a-f]{40}")


def dataset(
    *,
    path: str,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    column: str | None = None,
    text_as: TextAs = "auto",
    system_prompt: str | None = None,
) -> RowPrompts:
    """The rows of one split, in the data set's order.

    `path` is a folder that `save_to_disk` wrote, or a data set of the hub. For the hub, `config` names its configuration, and `revision`
    pins a commit: a branch moves, and a resumed run would see other prompts. `column`, `text_as` and `system_prompt` as for `file`.

    Raises ConfigError without the package, or if the data set or the split does not exist; DataError for a row that is not a prompt.
    """
    folder = os.path.expanduser(path)
    is_folder = os.path.isdir(folder)
    if is_folder and (config or revision):
        raise ConfigError(f"path={path!r} is a folder: config and revision are of the hub's data sets; leave them out")
    if not is_folder:
        return _of_the_hub(path, config, split, revision, column, text_as, system_prompt)
    return _prompts(_folder(folder, split), path, split, column, text_as, system_prompt)


def _prompts(
    found: Any, path: str, split: str, column: str | None, text_as: TextAs, system_prompt: str | None
) -> RowPrompts:
    rows = TableRows(found.with_format("arrow")[:])
    name = f"dataset/{Path(path).name}/{split}"
    return RowPrompts(rows, path=path, name=name, column=column, text_as=text_as, system_prompt=system_prompt)


def _package() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"a data set needs the package `datasets` ({error}); pip install 'treadwheel[datasets]', or use name: file"
        ) from error


def _folder(path: str, split: str) -> Any:
    try:
        found = _package().load_from_disk(path)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"path={path!r} is no folder of a saved data set: {error}") from error
    if not isinstance(found, dict):
        if found.split is not None and split not in _names(own := str(found.split)):
            raise ConfigError(
                f"path={path!r} holds the split {own!r} alone, not {split!r}; name the folder of {split!r}, or write split: {own!r}"
            )
        return found
    if split not in found:
        raise ConfigError(f"path={path!r} has no split {split!r}; it has: {', '.join(sorted(found))}")
    return found[split]


def _names(split: str) -> list[str]:
    """The split as written, and the splits of which it has parts: `train[:10%]+test`."""
    return [split, *(each.partition("[")[0] for each in split.split("+"))]


@functools.lru_cache(maxsize=8)
def _of_the_hub(
    path: str,
    config: str | None,
    split: str,
    revision: str | None,
    column: str | None,
    text_as: TextAs,
    system_prompt: str | None,
) -> RowPrompts:
    """Kept, since a commit does not change: check, order of prompts and probe of one start open the same rows."""
    if revision is None or not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"path={path!r} is no local folder, so it names a data set of the hub, but revision={revision!r} is no commit; name an "
            "existing folder, or set revision to the 40 hexadecimal digits of a commit on the data set's page: a resumed run must see the "
            "same prompts"
        )
    package = _package()
    try:
        found = package.load_dataset(path, config, split=split, revision=revision)
    # RuntimeError: the data set is a script.
    except (OSError, ValueError, RuntimeError, package.exceptions.DatasetsError) as error:
        raise ConfigError(f"path={path!r} does not load: {type(error).__name__}: {error}") from error
    return _prompts(found, path, split, column, text_as, system_prompt)
