"""Reward for JSON that matches a schema."""

import json
import math
import re
from collections.abc import Mapping, Sequence
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
    messages: Sequence[Mapping[str, Any]] = (),
    schema: dict[str, Any] | None = None,
    column: str | None = None,
) -> float:
    """1 if the completion, or its last fenced block if it has one, is JSON that matches the schema, else 0. Text before a `</think>` or
    after an unclosed `<think>` does not count.

    `schema` is the same for all prompts; `column` names the column with the prompt's own schema, as a mapping or as JSON text. All
    references must be inside the schema. Raises ConfigError unless exactly one of both is given, and DataError for an invalid schema.
    """
    if (schema is None) == (column is None):
        raise ConfigError(
            "reward json_schema takes one of schema and column; give one schema for all prompts, or name the prompts' column"
        )
    wanted: Any = schema if column is None else columns.get(column)
    try:
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        validator = closed_validator(wanted)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        where = "schema" if column is None else f"column {column!r}"
        raise DataError(
            f"{where} is {str(wanted)[:80]!r}; it must be a JSON schema, without references to outside"
        ) from error
    # Blocks of other languages are matched too, or their closing fence would open a block.
    answer = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)
    blocks = [text for mark, text in _FENCED.findall(answer) if mark.lower() in ("", "json")]
    try:
        value = json.loads(blocks[-1] if blocks else answer, parse_constant=_finite, parse_float=_finite)
        return float(validator.is_valid(value))
    except (ValueError, OverflowError, RecursionError):  # 10^400 overflows if the schema has `multipleOf: 0.1`
        return 0.0


def _finite(text: str) -> float:
    """Raises ValueError for NaN and Infinity, which are not JSON but accepted by Python, and for numbers beyond float64 such as 1e400."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number
