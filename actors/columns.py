"""Read a prompt's columns for judges."""

from collections.abc import Mapping
from typing import Any

from cluster.contracts.errors import DataError


def text_of(columns: Mapping[str, Any], column: str) -> str:
    """The column's text or number as text, stripped of white space. Raises DataError for a missing column and any other value, null too."""
    value = value_of(columns, column)
    if not isinstance(value, str | int | float):
        raise DataError(
            f"column {column!r} is {str(value)[:80]!r}, a {type(value).__name__}; it must be a text or a number"
        )
    return str(value).strip()


def value_of(columns: Mapping[str, Any], column: str) -> Any:
    """The value of the judge's `column`. Raises DataError when the prompt has no such column."""
    if column not in columns:
        raise DataError(
            f"reward.judge.column={column!r} is not a column of this prompt; it has: {', '.join(sorted(columns)) or 'none'}"
        )
    return columns[column]
