"""Shared by the code judges: finds the program in a completion, reads the cases in a column, and turns verdicts into rewards."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from actors.columns import value_of
from actors.reasoning import after_reasoning
from actors.sandbox.sandbox import Verdict
from cluster.contracts.errors import DataError

Score = Literal["all", "share"]
"""`all`: 1 if every case passes, else 0; `share`: the share of cases that pass."""
_FENCE = "```"
PYTHON = ("python", "py", "python3")
"""Names of Python at a fence."""
_CLOSED = re.compile(r"(?P<code>[^`]*)(?P<fence>```+)\s*(?:</\w+>\s*)*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def program_of(
    completion: str,
    *,
    prompt: str = "",
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    marks: Sequence[str] = PYTHON,
) -> str | None:
    """The last fenced block after the reasoning that is marked with one of `marks`, in any case. If none is marked, the last unmarked one,
    since an unmarked block after a program is often its output. A fence of at least as many backticks closes a block, also at the end of
    its last line and before tags such as `</answer>`. An unclosed block does not count: it was cut off."""
    answer = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)
    found, unmarked, block, fence, mark, margin = None, None, None, "", "", ""
    for line in answer.replace("\r\n", "\n").split("\n"):
        stripped = line.strip()
        # A line with more backticks is inline code.
        if block is None and stripped.startswith(_FENCE) and "`" not in stripped.lstrip("`"):
            words = stripped.lstrip("`")
            block, mark, fence = [], next(iter(words.lower().split()), ""), stripped.removesuffix(words)
            margin = line[: len(line) - len(line.lstrip())]  # of a block in a list
        elif block is not None and (closed := _CLOSED.fullmatch(line)) and closed["fence"].startswith(fence):
            last = closed["code"].removeprefix(margin)
            text, block = "\n".join([*block, last] if last.strip() else block) + "\n", None
            found, unmarked = (text if mark in marks else found), (unmarked if mark else text)
        elif block is not None:
            block.append(line.removeprefix(margin))
    return unmarked if found is None else found


def cases_of(columns: Mapping[str, Any], column: str) -> list[tuple[Any, Any]]:
    """(input, expected output) of each case in a column, which holds JSON or its text.

    Either a list of `{input, output}`, or `{inputs: [...], outputs: [...]}` as in APPS. Raises DataError naming the column otherwise.
    """
    cases = json_of(columns, column)
    try:
        if isinstance(cases, dict):
            if isinstance(cases["inputs"], str) or isinstance(cases["outputs"], str):
                raise TypeError("a text in place of a list")
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
    """As `cases_of`, with texts. Numbers become text. Raises DataError for any other input or output."""
    cases = cases_of(columns, column)
    for value in (value for case in cases for value in case):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(
                f"an input or output in the column {column!r} is {value!r:.100}; it must be a text or a number"
            )
    return [(str(given), str(expected)) for given, expected in cases]


def json_of(columns: Mapping[str, Any], column: str) -> Any:
    """The column's value. A text is parsed as JSON if it is JSON. Raises DataError if the prompt lacks the column."""
    value = value_of(columns, column)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def same_output(said: str, expected: str, *, tolerance: float | None) -> bool:
    """Compares word by word, ignoring white space. Numbers may differ by `tolerance`, absolutely or relatively."""
    ours, theirs = said.split(), expected.split()
    return len(ours) == len(theirs) and all(
        our == their or (_NUMBER.fullmatch(our) and _NUMBER.fullmatch(their) and _close(our, their, tolerance))
        for our, their in zip(ours, theirs, strict=True)
    )


def same_value(said: Any, expected: Any, *, tolerance: float | None) -> bool:
    """Compares as JSON values: a tuple equals a list, and keys of dicts are text. Numbers as in `same_output`."""
    if isinstance(said, list | tuple) and isinstance(expected, list):
        pairs = list(zip(said, expected, strict=False))
        return len(said) == len(expected) and all(same_value(*pair, tolerance=tolerance) for pair in pairs)
    if isinstance(said, dict) and isinstance(expected, dict):
        try:
            named = {str(key): value for key, value in said.items()}
        except ValueError:  # a number with more digits than Python converts to text
            return False
        return named.keys() == expected.keys() and all(
            same_value(value, expected[key], tolerance=tolerance) for key, value in named.items()
        )
    are_numbers = isinstance(said, int | float | Decimal | Fraction) and isinstance(expected, int | float)
    return said == expected or (are_numbers and _close(said, expected, tolerance))


def each_in_time(cases: Sequence[Any], judge: Callable[..., Verdict], *, score: Score, total_s: float) -> list[Verdict]:
    """Verdicts of `judge(case, wall_s=remaining seconds)`, one case after another. With `all` it stops after the first failed case."""
    until = time.monotonic() + total_s
    verdicts: list[Verdict] = []
    for case in cases:
        left_s = until - time.monotonic()
        verdicts.append(judge(case, wall_s=left_s) if left_s > 0 else Verdict.OUT_OF_TIME)
        if score == "all" and verdicts[-1] is not Verdict.OK:
            break
    return verdicts


def reward_of(verdicts: Sequence[Verdict] | None, *, score: Score) -> dict[str, float]:
    """The reward, with the reason of the first failed case as components. None: the completion has no program."""
    verdicts = verdicts or []
    failed = next((verdict for verdict in verdicts if verdict is not Verdict.OK), None)
    passed = sum(verdict is Verdict.OK for verdict in verdicts) / max(len(verdicts), 1)
    reasons = {str(verdict): float(verdict is failed) for verdict in Verdict if verdict is not Verdict.OK}
    return {"reward": passed if score == "share" else float(passed == 1), "no_program": float(not verdicts), **reasons}


def _close(said: Any, expected: Any, tolerance: float | None) -> bool:
    """False without a tolerance, and for numbers beyond float64: two of them would be infinite and equal."""
    if tolerance is None:
        return False
    try:
        number = float(said)
        return math.isfinite(number) and math.isclose(number, float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False
