"""Reward for the letter of the right choice."""

import re
from collections.abc import Mapping
from typing import Any

from actors.columns import text_of
from actors.reasoning import after_reasoning
from cluster.contracts.errors import DataError

# Also \boxed{\text{(B)}}. A small letter must be all that is boxed.
_BOXED = re.compile(r"\\boxed\{(?:\s|\\\w{1,9}\{|\(){0,9}([A-Z]\b|[a-z](?=[\s).}]*\}))")
# A small a before another word is an article, and e^x a power.
_CALLED_ANSWER = re.compile(
    r"\banswer(?:(?:\s+is|\s*:)(?:[\s*:($\[]|\\\(|\\[a-z]+\{|(?:the|option|choice|letter)\s)*|[\s*:(]*)"
    r"(?-i:(?!a\s+\w))([A-Z])\b(?![\^'’-])",
    re.IGNORECASE,
)
_ANOTHER_BOXED = re.compile(r"[\s).]{0,9}(?:,|;|&|/|\b(?:or|and)\b)[\s(]{0,9}([A-Z])\b")
_ANOTHER_CALLED = re.compile(r"[\s).*]{0,9}(?:\bor\b|/)[\s(*]{0,9}([A-Z])\b")
_ALONE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
# A large A that begins a sentence is an article, unless a verb follows: "A matches", "A would".
_NO_ARTICLE = re.compile(
    r"(?<![\w'])(?!(?:(?<=[.!?]\s)|(?<![\s\S]))A\s+(?!(?:or|and|also|best|because|correctly|can|cannot|could|may|might|must|should|will|would)\b"
    r"|[a-z]*[a-rt-z]s\b)[a-z])([A-Z])(?![\w'])"
)


def multiple_choice(
    *,
    completion: str,
    columns: Mapping[str, Any],
    prompt: str = "",
    finish_reason: str = "",
    column: str = "answer",
    choices: str = "ABCDE",
) -> float:
    r"""1 if the completion's last letter of `choices` is the prompt's `column`: one in \boxed{}, else one called the answer, else any that
    stands alone, a letter that reads as an article last. `\boxed{A, B}` and "the answer is A or B" are no answer. What stands before a
    `</think>`, or behind a `<think>` that nothing ends, is no answer.

    The column holds the letter, or the place of the choice from 0 as a number. Raises DataError when it holds neither.
    """
    choices = choices.upper()
    wanted = text_of(columns, column).strip("().").upper()
    if wanted.isdecimal() and int(wanted) < len(choices):
        wanted = choices[int(wanted)]
    if len(wanted) != 1 or wanted not in choices:
        raise DataError(
            f"column {column!r} is {columns[column]!r}; it must be one of {choices}, or the place of one from 0"
        )
    said = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason)
    for pattern, another in (
        (_BOXED, _ANOTHER_BOXED),
        (_CALLED_ANSWER, _ANOTHER_CALLED),
        (_NO_ARTICLE, None),
        (_ALONE, None),
    ):
        if found := [match for match in pattern.finditer(said) if match[1].upper() in choices]:
            more = another and another.match(said, found[-1].end())
            is_one_of_several = more is not None and more[1] in choices
            return float(found[-1][1].upper() == wanted and not is_one_of_several)
    return 0.0
