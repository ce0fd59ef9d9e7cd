"""Reward for a completion equal to the answer: a baseline without a verifier."""

from collections.abc import Mapping
from typing import Any

from actors.columns import text_of


def exact_match(
    *, prompt: str, completion: str, columns: Mapping[str, Any], column: str = "answer", ignore_case: bool = False
) -> float:
    """1 if the completion equals the prompt's `column`, apart from white space around it, else 0.

    Numbers in the column are compared as text. Raises DataError if the prompt has no such column.
    """
    said, wanted = completion.strip(), text_of(columns, column)
    if ignore_case:
        said, wanted = said.casefold(), wanted.casefold()
    return float(said == wanted)
