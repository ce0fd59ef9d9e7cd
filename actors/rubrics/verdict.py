"""What a judge's message says: one choice for each criterion, or nothing."""

import json
import re
from collections.abc import Iterator
from typing import Any

from actors.rubrics.rubric import Rubric

_VERDICT = re.compile(r"^\W*verdict\W*:\W*(.+?)\W*$", re.IGNORECASE | re.MULTILINE)


def grades_in(message: str, rubric: Rubric) -> dict[str, float] | None:
    """The number of each criterion, by name. None for a message without a whole and valid answer.

    The answer is the last JSON object after the reasoning; with one criterion and no object, the last line `Verdict: X`.
    """
    answer = _after_reasoning(message)
    if answer is None:
        return None
    said = next(iter([*_objects(answer)][-1:]), None)
    if said is None:
        said = dict(zip([each.name for each in rubric.criteria], _VERDICT.findall(answer)[-1:], strict=False))
    grades = {each.name: value for each in rubric.criteria if (value := each.value_of(said.get(each.name))) is not None}
    return grades if len(grades) == len(rubric.criteria) else None


def _after_reasoning(message: str) -> str | None:
    """None for a message that ends inside its reasoning. A template may have opened it: then only its end is in the message."""
    answer = message.rpartition("</think>")[2]
    return None if "<think>" in answer else answer


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in it, without those inside others."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            yield found
        place = text.find("{", end)
