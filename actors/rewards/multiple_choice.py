"""Reward for the letter of the right choice."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from actors.columns import text_of
from actors.reasoning import after_reasoning
from actors.scripts import WORD as _WORD
from cluster.contracts.errors import DataError

# Also \boxed{\text{(B)}}. A lower-case letter must be the only content of the box.
_BOXED = re.compile(rf"\\boxed\{{(?:\s|\\\w{{1,9}}\{{|\(){{0,9}}([A-Z](?!{_WORD})|[a-z](?=[\s).}}]*\}}))")
# A lower-case a before another word is an article, and e^x is a power.
_CALLED_ANSWER = re.compile(
    rf"(?<!{_WORD})answer(?:(?:\s+(?:choice|option|letter))?(?:\s+(?:is|(?:would|must|should|will)\s+be)|[\"'*]*\s*:)"
    rf"(?:[\s*:($\[\"'“‘`]|\\\(|\\[a-z]+\{{|(?:the|option|choice|letter|clearly|definitely|therefore|thus)\s)*|[\s*:(]*)"
    rf"(?-i:(?!a\s+\w))([A-Z])(?!{_WORD}|[\^-]|['’]\w)",
    re.IGNORECASE,
)
_CALLED_ANSWER_OTHERWISE = re.compile(
    r"(?:答案|答え|正解|정답)(?:应该|应当|应|就)?(?:是|为|選|选|は|은|는)?[\s*:：(（\[$]{0,9}(?:选项|選項)?([A-Z])"
    rf"(?!{_WORD})"
)
"""In Chinese, Japanese and Korean."""
_ANOTHER_BOXED = re.compile(rf"[\s).]{{0,9}}(?:,|;|&|/|\b(?:or|and)\b)[\s(]{{0,9}}([A-Z])(?!{_WORD})")
_ANOTHER_CALLED = re.compile(
    rf"[\s).*）\"'”’`]{{0,9}}(?:\bor\b|/|或|または|또는)[\s(*（\"'“‘`]{{0,9}}([A-Z])(?!{_WORD})"
)
_ALONE = re.compile(rf"(?<!{_WORD})(?<!')([A-Z])(?!{_WORD}|')")
# An upper-case A at the start of a sentence is an article, unless a verb follows: "A matches", "A would".
_NO_ARTICLE = re.compile(
    rf"(?<!{_WORD})(?<!')(?!(?:(?<=[.!?]\s)|(?<![\s\S]))A\s+(?!(?:or|and|also|best|because|correctly|can|cannot|could|may|might|must|should"
    rf"|will|would)\b|[a-z]*[a-rt-z]s\b)[a-z])([A-Z])(?!{_WORD}|')"
)


def multiple_choice(
    *,
    completion: str,
    columns: Mapping[str, Any],
    prompt: str = "",
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    column: str = "answer",
    choices: str = "ABCDE",
) -> float:
    r"""1 if the completion's chosen letter equals the prompt's `column`, else 0. The chosen letter is the last one of `choices` in
    \boxed{}, else the last one called the answer, else the last one that stands alone; an `A` that looks like an article is taken only if
    there is no other. `\boxed{A, B}` and "the answer is A or B" are not answers, nor is text before a `</think>` or after an unclosed
    `<think>`.

    The column holds the letter, or the index of the choice from 0. Raises DataError if it holds neither.
    """
    choices = choices.upper()
    wanted = text_of(columns, column).strip("().").upper()
    if wanted.isdecimal() and int(wanted) < len(choices):
        wanted = choices[int(wanted)]
    if len(wanted) != 1 or wanted not in choices:
        raise DataError(f"column {column!r} is {columns[column]!r}; it must be one of {choices}, or its index from 0")
    said = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)
    for pattern, another in (
        (_BOXED, _ANOTHER_BOXED),
        (_CALLED_ANSWER, _ANOTHER_CALLED),
        (_CALLED_ANSWER_OTHERWISE, _ANOTHER_CALLED),
        (_NO_ARTICLE, None),
        (_ALONE, None),
    ):
        if found := [match for match in pattern.finditer(said) if match[1].upper() in choices]:
            more = another and another.match(said, found[-1].end())
            is_one_of_several = more is not None and more[1] in choices
            return float(found[-1][1].upper() == wanted and not is_one_of_several)
    return 0.0
