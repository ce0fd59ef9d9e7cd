"""Prompts from a file: JSON, JSONL, Parquet or Arrow, local or by URL. Opening the file checks every row."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from actors.prompts.rows import RowPrompts, Rows, TableRows, TextAs
from cluster.contracts.errors import ConfigError, DataError, StorageError
from cluster.record.object_store import OBJECT_STORES
from cluster.record.storage import Storage

_LARGE_BYTES = 2**24
"""Reading and checking smaller files again takes less than a second."""


class _TwiceError(Exception):
    """An object has this key twice."""


def file(
    *, path: str, column: str | None = None, text_as: TextAs = "auto", system_prompt: str | None = None
) -> RowPrompts:
    """The rows of one file, in the file's order.

    `column`: the column with the prompt. None: `messages` if the row has it, else `prompt`.

    `text_as` decides how a text is sent. `user_message`: as the user's message, through the model's chat template. `text`: as it is.
    `auto`: `user_message` if the model has a chat template, else `text`. `system_prompt` is put before the messages of rows without a
    system message of their own, and makes every text a user's message.

    Raises ConfigError for a file that is missing, empty, or of unknown suffix, and DataError naming file, row and column for a row that is
    not a prompt.
    """
    stamp = _stamp(path)
    return (_prompts if stamp is None else _kept)(stamp, path, column, text_as, system_prompt)


def _stamp(path: str) -> tuple[int, ...] | None:
    """Tells a large local file from its other versions. None: the file is small, or elsewhere."""
    try:
        found = os.stat(os.path.expanduser(path))
    except (OSError, ValueError):
        return None
    is_large = found.st_size >= _LARGE_BYTES
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if is_large else None


def _prompts(
    stamp: tuple[int, ...] | None, path: str, column: str | None, text_as: TextAs, system_prompt: str | None
) -> RowPrompts:
    name = f"file/{PurePosixPath(path).name}"
    return RowPrompts(_read(path), path=path, name=name, column=column, text_as=text_as, system_prompt=system_prompt)


_kept = functools.lru_cache(maxsize=8)(_prompts)
"""Check, order of prompts and probe of one start open the same files."""


def _read(path: str) -> Rows:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in _READERS:
        raise ConfigError(f"path={path!r} has the suffix {suffix or 'none'}; use one of {', '.join(_READERS)}")
    try:
        with _opened(path) as source:
            return _READERS[suffix](source, path)
    except FileNotFoundError as error:
        if error.__cause__ is not None:  # fsspec raises this error for every failed request
            raise ConfigError(
                f"path={path!r} cannot be read: {error.__cause__}; mend that, or name another file"
            ) from error
        begins = "" if os.path.isabs(path) or "://" in path else f"; the command runs in {os.getcwd()}"
        raise ConfigError(
            f"path={path!r} cannot be read: it is not there{begins}; name a file that is there"
        ) from error
    except (OSError, StorageError) as error:
        raise ConfigError(f"path={path!r} cannot be read: {error}; name a file that is there") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a whole {suffix} file: {error}") from error


def _read_jsonl(source: pa.NativeFile, path: str) -> Rows:
    lines = enumerate(source.read().splitlines(), start=1)
    located = ((f"{path}, line {number}", line) for number, line in lines if line.strip())
    return [_object(_parsed(line, where), where) for where, line in located]


def _read_json(source: pa.NativeFile, path: str) -> Rows:
    rows = _parsed(source.read(), path, way_out="; a file of one object a line is named .jsonl")
    if not isinstance(rows, list):
        raise DataError(f"{path}: must be a list of rows, got {type(rows).__name__}")
    return [_object(row, f"{path}, row {index}") for index, row in enumerate(cast(list[Any], rows))]


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once_each)
"""Made once: making it takes longer than reading a row."""


def _parsed(text: bytes, where: str, *, way_out: str = "") -> Any:
    try:
        return _JSON.decode(text.decode(json.detect_encoding(text), "surrogatepass"))
    except _TwiceError as error:
        raise DataError(f"{where}: {error.args[0]!r} is given twice in one object; leave one out") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}{way_out}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be an object, got {type(value).__name__}")
    return cast(dict[str, Any], value)


def _read_parquet(source: pa.NativeFile, path: str) -> Rows:
    return TableRows(pyarrow.parquet.read_table(source))


def _read_arrow(source: pa.NativeFile, path: str) -> Rows:
    """Both of Arrow's formats: the file with a footer, and the stream, which data set libraries write."""
    if source.read(6) == b"ARROW1":
        source.seek(0)
        return TableRows(pyarrow.ipc.open_file(source).read_all())
    source.seek(0)
    return TableRows(pyarrow.ipc.open_stream(source).read_all())


_READERS: dict[str, Callable[[pa.NativeFile, str], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}


def _opened(path: str) -> pa.NativeFile:
    scheme, _, _ = path.partition("://")
    if scheme == path:
        return pa.OSFile(os.path.expanduser(path))
    if scheme in OBJECT_STORES:
        folder, _, name = path.rpartition("/")
        return pa.BufferReader(Storage(folder).read_file(name))
    import fsspec

    try:
        files, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"path={path!r} cannot be opened: {error}") from error
    return pa.PythonFile(files.open(inner, "rb"), mode="r")
