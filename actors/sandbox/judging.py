"""What judges of code have in common: the program in a completion, the cases in a column, and what verdicts earn."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from actors.columns import value_of
from actors.sandbox.sandbox import Verdict
from cluster.contracts.errors import DataError

Score = Literal["all", "share"]
"""`all`: 1 if every case passes, else 0; `share`: the share of cases that pass."""
_FENCE = "```"
_PYTHON = ("python", "py", "python3")


def program_of(answer: str, *, language: str = "python") -> str | None:
    """The last fenced block that is marked with the language; where there is none, the last unmarked one: after a program it is often
    what that prints. A block that is not closed is none: it was cut."""
    marks = _PYTHON if language == "python" else (language.lower(),)
    found, unmarked, block, mark = None, None, None, ""
    for line in answer.replace("\r\n", "\n").split("\n"):
        stripped = line.strip()
        # With another backtick in the line it is code within a sentence.
        if block is None and stripped.startswith(_FENCE) and "`" not in stripped.lstrip("`"):
            block, mark = [], next(iter(stripped.strip("`").lower().split()), "")
        elif block is not None and stripped == _FENCE:
            text, block = "\n".join(block) + "\n", None
            found, unmarked = (text if mark in marks else found), (unmarked if mark else text)
        elif block is not None:
            block.append(line)
    return unmarked if found is None else found


def cases_of(columns: Mapping[str, Any], column: str) -> list[tuple[Any, Any]]:
    """(input, expected output) of each case in a column, which is JSON or the text of it.

    It is a list of `{input, output}`, or `{inputs: [...], outputs: [...]}` as in APPS. Raises DataError naming the column otherwise.
    """
    cases = json_of(columns, column)
    try:
        if isinstance(cases, dict):
            if isinstance(cases["inputs"], str) or isinstance(cases["outputs"], str):
                raise TypeError("a text stands where a list must be")
            pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))
        else:
            pairs = [(case["input"], case["output"]) for case in cases]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the column {column!r} is neither a list of {{input, output}} nor {{inputs, outputs}} of equal lengths: {error!r}"
        ) from None
    if not pairs:
        raise DataError(f"the column {column!r} has no cases; give each prompt at least one")
    return pairs


def texts_of(columns: Mapping[str, Any], column: str) -> list[tuple[str, str]]:
    """As `cases_of`, of texts; a number is the text of it. Raises DataError for any other input or output."""
    cases = cases_of(columns, column)
    for value in (value for case in cases for value in case):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(
                f"an input or output in the column {column!r} is {value!r:.100}; what a script reads and prints must be a text or a number"
            )
    return [(str(given), str(expected)) for given, expected in cases]


def json_of(columns: Mapping[str, Any], column: str) -> Any:
    """What a column holds; where that is text, the JSON in it, or the text. Raises DataError for a prompt without the column."""
    value = value_of(columns, column)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def same_output(said: str, expected: str, *, tolerance: float | None) -> bool:
    """Word by word, whatever the white space between them. With a tolerance, numbers may differ by so much, absolutely or relatively."""
    ours, theirs = said.split(), expected.split()
    return len(ours) == len(theirs) and all(
        our == their or (tolerance is not None and _close(our, their, tolerance))
        for our, their in zip(ours, theirs, strict=True)
    )


def same_value(said: Any, expected: Any, *, tolerance: float | None) -> bool:
    """As JSON knows values: a tuple equals a list, and a dict's keys are text. Numbers as in `same_output`."""
    if isinstance(said, list | tuple) and isinstance(expected, list):
        pairs = list(zip(said, expected, strict=False))
        return len(said) == len(expected) and all(same_value(*pair, tolerance=tolerance) for pair in pairs)
    if isinstance(said, dict) and isinstance(expected, dict):
        try:
            named = {str(key): value for key, value in said.items()}
        except ValueError:  # a number of more digits than Python writes
            return False
        return named.keys() == expected.keys() and all(
            same_value(value, expected[key], tolerance=tolerance) for key, value in named.items()
        )
    if (
        tolerance is not None
        and isinstance(said, int | float | Decimal | Fraction)
        and isinstance(expected, int | float)
    ):
        return _close(said, expected, tolerance)
    return said == expected


def each_in_time(cases: Sequence[Any], judge: Callable[..., Verdict], *, score: Score, total_s: float) -> list[Verdict]:
    """`judge(case, wall_s=what is left)` of one case after another; with `all`, up to the first that fails."""
    until = time.monotonic() + total_s
    verdicts: list[Verdict] = []
    for case in cases:
        left_s = until - time.monotonic()
        verdicts.append(judge(case, wall_s=left_s) if left_s > 0 else Verdict.OUT_OF_TIME)
        if score == "all" and verdicts[-1] is not Verdict.OK:
            break
    return verdicts


def reward_of(verdicts: Sequence[Verdict] | None, *, score: Score) -> dict[str, float]:
    """The reward; and as components, why the first case that failed did. None: the completion has no program."""
    verdicts = verdicts or []
    failed = next((verdict for verdict in verdicts if verdict is not Verdict.OK), None)
    passed = sum(verdict is Verdict.OK for verdict in verdicts) / max(len(verdicts), 1)
    reasons = {str(verdict): float(verdict is failed) for verdict in Verdict if verdict is not Verdict.OK}
    return {"reward": passed if score == "share" else float(passed == 1), "no_program": float(not verdicts), **reasons}


def _close(said: Any, expected: Any, tolerance: float) -> bool:
    try:
        return math.isclose(float(said), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except (ValueError, OverflowError):
        return False
