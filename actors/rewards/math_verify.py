"""Reward for a mathematically equal answer, by the math-verify package: LaTeX, fractions, sets, intervals, units."""

import functools
import logging
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import math_verify as package

from actors.columns import text_of
from actors.reasoning import after_reasoning
from cluster.contracts.errors import DataError

# It warns of deadlines that are off, once in each process; why they are, stands below.
logging.getLogger(package.__name__).setLevel(logging.ERROR)


def math_verify(*, prompt: str, completion: str, columns: Mapping[str, Any], column: str = "answer") -> float:
    r"""1 if an answer found in the completion (\boxed{...} first, then LaTeX, then a plain expression) equals the prompt's `column`.
    What stands before a `</think>` is no answer.

    Raises DataError when the prompt has no such column, or what it holds does not parse: the completion is not to blame.
    """
    text = text_of(columns, column)
    gold = _gold(text)
    if isinstance(columns[column], float) and "e" in text:
        # Python writes 0.00001 as 1e-05, which is read as Euler's number minus 5.
        gold = _gold(f"{Decimal(text):f}") + gold
    # The package's own deadlines are alarm signals, which exist on main threads alone: the reward service has the deadline.
    said = package.parse(after_reasoning(completion), parsing_timeout=0)
    return float(package.verify(gold, said, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _gold(text: str) -> list[Any]:
    # Data sets write answers bare ("\frac{1}{2}"), which parses as LaTeX only between dollars.
    is_marked = "$" in text or "\\boxed" in text
    # In "\$18.90" the dollar is money and marks nothing.
    parsed = (is_marked and package.parse(text, parsing_timeout=0)) or package.parse(f"${text}$", parsing_timeout=0)
    if not parsed:
        raise DataError(
            f"the answer {text[:80]!r} is not a mathematical expression; compare it with the reward exact_match"
        )
    return parsed
