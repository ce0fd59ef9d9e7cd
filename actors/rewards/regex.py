"""Reward for a match of a pattern in the completion: for a format, or for an answer inside a format."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from actors.columns import text_of
from cluster.contracts.errors import ConfigError


def regex(
    *, prompt: str, completion: str, columns: Mapping[str, Any], pattern: str, column: str | None = None
) -> float:
    """Without `column`, 1 if the pattern matches anywhere in the completion. With `column`, 1 if the text of the last non-empty match
    equals the column's text. Else 0.

    A match's text is its first group, or the whole match if the pattern has no group. `.` also matches line ends. Raises ConfigError for
    an invalid pattern and DataError for a missing column. The service's deadline ends a pattern that backtracks for ever.
    """
    matches = list(_compiled(pattern).finditer(completion))
    if column is None:
        return float(bool(matches))
    wanted = text_of(columns, column)
    if not matches:
        return 0.0
    last = next((match for match in reversed(matches) if match.group()), matches[-1])
    found = (last.group(1) if last.re.groups else last.group()) or ""
    return float(found.strip() == wanted)


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.judge.pattern={pattern!r} is not a regular expression: {error}") from error
