"""Reward for JSON of a given schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema

from actors.reasoning import after_reasoning
from actors.schema_tools import closed_validator
from cluster.contracts.errors import ConfigError, DataError

_FENCED = re.compile(r"```([\w+#-]*)[ \t]*\r?\n(.*?)```", re.DOTALL)


def json_schema(
    *,
    completion: str,
    columns: Mapping[str, Any],
    prompt: str = "",
    finish_reason: str = "",
    schema: dict[str, Any] | None = None,
    column: str | None = None,
) -> float:
    """1 if the completion, or its last fenced block where it has one, is JSON that the schema allows. What stands before a `</think>`, or
    behind a `<think>` that nothing ends, does not count.

    The schema is the run's, or the prompt's own in `column`, as a mapping or as JSON; what it refers to must be in it. Raises ConfigError
    unless one of them is given, and DataError for what is no schema.
    """
    if (schema is None) == (column is None):
        raise ConfigError(
            "reward json_schema takes one of schema and column; give the run's schema, or name the prompts' column"
        )
    wanted: Any = schema if column is None else columns.get(column)
    try:
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        validator = closed_validator(wanted)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        where = "schema" if column is None else f"column {column!r}"
        raise DataError(
            f"{where} is {str(wanted)[:80]!r}; it must be a JSON schema, with all that it refers to"
        ) from error
    # Fences of other languages count too, or the end of one would begin a block.
    answer = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason)
    blocks = [text for mark, text in _FENCED.findall(answer) if mark.lower() in ("", "json")]
    try:
        said = json.loads(blocks[-1] if blocks else answer, parse_constant=_refuse)
        return float(validator.is_valid(said))
    except (ValueError, OverflowError, RecursionError):  # 1e400 is infinity, which is a multiple of nothing
        return 0.0


def _refuse(constant: str) -> None:
    """JSON has no NaN and no Infinity, which Python's parser takes. Raises ValueError."""
    raise ValueError(f"{constant} is not JSON")
