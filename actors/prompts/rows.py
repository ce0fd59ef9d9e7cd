"""Prompts from rows. Opening checks every row.

A row has `prompt` (text, or a list of chat messages) or `messages`. The reward gets its other columns unchanged.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import pyarrow as pa

from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.types import Prompt

Rows = Sequence[Mapping[str, Any]]
"""Rows by index, decoded when they are read."""
TextAs = Literal["auto", "text", "user_message"]


def _as_text(value: Any) -> str:
    """Dates and decimals as text. Raises ValueError for bytes."""
    if isinstance(value, bytes):
        raise ValueError("bytes")
    return str(value)


_TEXT = json.JSONEncoder(default=_as_text, ensure_ascii=False, sort_keys=True, allow_nan=False)


class RowPrompts:
    """Rows as prompts, in their order."""

    def __init__(
        self, rows: Rows, *, path: str, name: str, column: str | None, text_as: TextAs, system_prompt: str | None
    ) -> None:
        """`path` names the rows in errors. Prompt ids are `name`/row. The other arguments as for `file`."""
        if system_prompt is not None and text_as == "text":
            raise ConfigError(
                "system_prompt with text_as: text: a plain text has no place for it; use text_as: user_message"
            )
        self._name = name
        self.path = path
        self._columns = ("messages", "prompt") if column is None else (column,)
        self._text_as = text_as
        self._system_prompt = system_prompt
        self._rows = rows
        if not self._rows:
            raise ConfigError(f"path={path!r} has no rows; give one with at least one prompt")
        self.digest = self._checked()
        """Of all rows with all their columns."""

    def _checked(self) -> str:
        """Reads every row, and returns their digest. Raises DataError for a row that is not a prompt, and for a value that Python cannot
        represent."""
        index, digest = -1, hashlib.blake2b(digest_size=16)
        try:
            for index, row in enumerate(self._rows):
                digest.update(self._json(index, row) + b"\n")
        except (OverflowError, ValueError) as error:  # such as the year 12,000, or a text that is not UTF-8
            raise DataError(
                f"{self.path}, row {index + 1} or later: a value cannot be read: {error}; mend it, or leave its column out"
            ) from error
        return digest.hexdigest()

    def _json(self, index: int, row: Mapping[str, Any]) -> bytes:
        """The row as JSON. Making its prompt would take four times as long, so only a row that may not be one is read like that, for an
        error that names its column."""
        try:
            text = _TEXT.encode(row).encode()
        except ValueError:
            self._prompt(index, row)
            raise
        name = self._named(row)
        try:
            self._text_or_messages(None if name is None else row[name], "")
        except DataError:
            self._prompt(index, row)
        return text

    def _named(self, row: Mapping[str, Any]) -> str | None:
        """The column with the row's prompt."""
        return next((name for name in self._columns if row.get(name) is not None), None)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"prompt {index} is not in [0, {len(self._rows)})")
        return self._prompt(index, self._rows[index])

    def _prompt(self, index: int, row: Mapping[str, Any]) -> Prompt:
        name = self._named(row)
        if name is None:
            wanted = " or ".join(map(repr, self._columns))
            has = ", ".join(name for name, value in row.items() if value is not None) or "nothing"
            raise DataError(
                f"{self.path}, row {index}: no {wanted}; it has: {has}; name the prompt's column with column: NAME, as in "
                "prompts.column=NAME"
            )
        where = {key: f"{self.path}, row {index}, column {key!r}" for key in row}
        columns = {key: _jsonable(value, where[key]) for key, value in row.items()}
        text, messages = self._text_or_messages(columns.pop(name), where[name])
        return Prompt(prompt_id=f"{self._name}/{index}", text=text, messages=messages, columns=columns)

    def _text_or_messages(self, value: Any, where: str) -> tuple[str | None, list[dict[str, Any]] | None]:
        if isinstance(value, str):
            if not value.strip():
                raise DataError(f"{where}: the text is empty")
            if self._text_as == "text":
                return value, None
            is_optional = self._text_as == "auto" and self._system_prompt is None
            return value if is_optional else None, self._with_system_prompt([{"role": "user", "content": value}])
        if not isinstance(value, list) or not value:
            raise DataError(f"{where}: must be a text or a list of messages, got {repr(value)[:80]}")
        messages: list[dict[str, Any]] = []
        for message in _without_absent(value) if isinstance(self._rows, TableRows) else cast(list[Any], value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"{where}: a message must have 'role' and 'content', got {repr(message)[:80]}")
            if why := _wrong_content(found := cast(dict[str, Any], message)):
                raise DataError(f"{where}: {why}")
            messages.append(found)
        if not any(message["content"] for message in messages):
            raise DataError(f"{where}: no message has a content")
        return None, self._with_system_prompt(messages)

    def _with_system_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]


def _wrong_content(message: Mapping[str, Any]) -> str | None:
    """The reason why a template would write the content as Python does, or nothing."""
    content = message["content"]
    if isinstance(content, str | list) or (content is None and message.get("tool_calls")):
        return None
    return (
        f"the content of a message of role {message['role']!r} is {content!r:.80}; write a text or a list of parts (null only with "
        "tool_calls)"
    )


def _without_absent(value: Any) -> Any:
    """Messages of a table without their null values. In a table every message has the keys of all, and templates take an empty key for a
    tool call or an image. A turn without words keeps its null `content`."""
    if isinstance(value, dict):
        found = cast(dict[str, Any], value)
        return {key: _without_absent(each) for key, each in found.items() if each is not None or key == "content"}
    return [_without_absent(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def _jsonable(value: Any, where: str) -> Any:
    """`value` with dates and decimals, which JSON lacks, as text: trajectories carry a prompt's columns as JSON in `info`. Raises DataError
    for bytes, NaN, infinities and text with lone surrogates."""

    def as_text(found: Any) -> str:
        if isinstance(found, bytes):
            raise DataError(f"{where}: bytes cannot travel with a prompt; leave the column out")
        return str(found)

    try:
        text = json.dumps(value, default=as_text, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise DataError(f"{where}: {value!r:.80} has no JSON ({error}); write null, or leave the column out") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text[error.start]!r} is a lone surrogate, which is not text; mend the row, or leave it out"
        ) from error
    return json.loads(text)


class TableRows(Sequence[Mapping[str, Any]]):
    def __init__(self, table: pa.Table) -> None:
        kinds = pa.schema([each.with_type(_in_microseconds(each.type)) for each in table.schema])
        # Nanoseconds of a time are cut off.
        self._table = table if kinds.equals(table.schema) else table.cast(kinds, safe=False)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """The type with microseconds in place of nanoseconds: pandas writes times in nanoseconds, which Python's times lack."""
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_in_microseconds(each.type)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if getattr(kind, "unit", None) != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    return pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")
