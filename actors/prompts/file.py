"""Prompts from a file: JSON, JSONL, Parquet or Arrow, local or by URL. Opening the file checks every row.

A row has `prompt` (text, or a list of chat messages) or `messages`; its other columns go to the reward untouched.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.ipc
import pyarrow.parquet

from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt
from cluster.record.storage import filesystem_of

Rows = Sequence[Mapping[str, Any]]
"""Rows by index, decoded as they are asked for."""


class FilePrompts:
    """The rows of one file, in the file's order."""

    def __init__(
        self,
        *,
        path: str,
        column: str | None = None,
        text_as: Literal["auto", "text", "user_message"] = "auto",
        system_prompt: str | None = None,
    ) -> None:
        """`column` holds the prompt; None takes `messages` where a row has it, else `prompt`.

        `text_as` decides what a text is: `user_message` is the user's message, to which the model's chat template applies; `text`
        is sent as it is; `auto` is the first where the model has a chat template, else the second. `system_prompt` goes before
        the messages of rows that bring none of their own, and makes every text a user's message.

        Raises ConfigError for a file that is missing, empty, or of unknown suffix, and DataError naming file, row and column for
        a row that is not a prompt.
        """
        if system_prompt is not None and text_as == "text":
            raise ConfigError(
                "system_prompt with text_as: text: a plain text has no place for it; use text_as: user_message"
            )
        self._name = PurePosixPath(path).name
        self._path = path
        self._columns = ("messages", "prompt") if column is None else (column,)
        self._text_as = text_as
        self._system_prompt = system_prompt
        self._rows = _read(path)
        if not self._rows:
            raise ConfigError(f"path={path!r} has no rows; give a file with at least one prompt")
        for index, row in enumerate(self._rows):
            self._prompt(index, row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"prompt {index} is not in [0, {len(self._rows)})")
        return self._prompt(index, self._rows[index])

    def _prompt(self, index: int, row: Mapping[str, Any]) -> Prompt:
        name = next((name for name in self._columns if row.get(name) is not None), None)
        if name is None:
            wanted = " or ".join(map(repr, self._columns))
            has = ", ".join(name for name, value in row.items() if value is not None) or "nothing"
            raise DataError(
                f"{self._path}, row {index}: no {wanted}; it has: {has}; name the prompt's column with column: NAME"
            )
        columns = self._jsonable({key: value for key, value in row.items() if key != name}, index)
        text, messages = self._text_or_messages(row[name], f"{self._path}, row {index}, column {name!r}")
        return Prompt(prompt_id=f"file/{self._name}/{index}", text=text, messages=messages, columns=columns)

    def _text_or_messages(self, value: Any, where: str) -> tuple[str | None, list[dict[str, Any]] | None]:
        if isinstance(value, str):
            if not value.strip():
                raise DataError(f"{where}: the text is empty")
            if self._text_as == "text":
                return value, None
            is_optional = self._text_as == "auto" and self._system_prompt is None
            return value if is_optional else None, self._with_system_prompt([{"role": "user", "content": value}])
        if not isinstance(value, list) or not value:
            raise DataError(f"{where}: must be a text or a list of messages, got {str(value)[:80]!r}")
        messages: list[dict[str, Any]] = []
        for message in cast(list[Any], value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"{where}: a message must have 'role' and 'content', got {str(message)[:80]!r}")
            messages.append(cast(dict[str, Any], message))
        return None, self._with_system_prompt(messages)

    def _with_system_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _jsonable(self, columns: dict[str, Any], index: int) -> dict[str, Any]:
        """Dates and decimals, which Parquet has and JSON has not, as text: columns travel in the trajectory's `info`."""
        for name, value in columns.items():
            if isinstance(value, bytes):
                raise DataError(
                    f"{self._path}, row {index}, column {name!r}: bytes cannot travel with a prompt; leave the column out"
                )
        return json.loads(json.dumps(columns, default=str))


file = FilePrompts


class _TableRows(Sequence[Mapping[str, Any]]):
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def _read(path: str) -> Rows:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in _READERS:
        raise ConfigError(f"path={path!r} has the suffix {suffix or 'none'}; use one of {', '.join(_READERS)}")
    files, inner = _filesystem(path)
    try:
        with files.open_input_file(inner) as source:
            return _READERS[suffix](source, path)
    except OSError as error:
        raise ConfigError(f"path={path!r} cannot be read: {error}; name a file that is there") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a whole {suffix} file: {error}") from error


def _read_jsonl(source: pa.NativeFile, path: str) -> Rows:
    lines = enumerate(source.read().splitlines(), start=1)
    located = [(f"{path}, line {number}", line) for number, line in lines if line.strip()]
    return [_object(_parsed(line, where), where) for where, line in located]


def _read_json(source: pa.NativeFile, path: str) -> Rows:
    try:
        rows = _parsed(source.read(), path)
    except DataError as error:
        raise DataError(f"{error}; a file of one object a line is named .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: must be a list of rows, got {type(rows).__name__}")
    return [_object(row, f"{path}, row {index}") for index, row in enumerate(cast(list[Any], rows))]


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be an object, got {type(value).__name__}")
    return cast(dict[str, Any], value)


def _read_parquet(source: pa.NativeFile, path: str) -> Rows:
    return _TableRows(pyarrow.parquet.read_table(source))


def _read_arrow(source: pa.NativeFile, path: str) -> Rows:
    """Both of Arrow's forms: the file with a footer, and the stream, which is what data set libraries write."""
    if source.read(6) == b"ARROW1":
        source.seek(0)
        return _TableRows(pyarrow.ipc.open_file(source).read_all())
    source.seek(0)
    return _TableRows(pyarrow.ipc.open_stream(source).read_all())


_READERS: dict[str, Callable[[pa.NativeFile, str], Rows]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}


def _filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    try:
        return filesystem_of(path)
    except pa.ArrowInvalid:  # not one of pyarrow's own: https, hf and others are fsspec's
        import fsspec

        try:
            files, inner = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"path={path!r} cannot be opened: {error}") from error
        return pafs.PyFileSystem(pafs.FSSpecHandler(files)), inner
    except OSError as error:
        raise ConfigError(f"path={path!r} cannot be opened: {error}") from error
