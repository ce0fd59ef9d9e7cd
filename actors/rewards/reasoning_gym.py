"""Reward by reasoning_gym's own verifier of the prompt's task (`actors.prompts.reasoning_gym`)."""

import ast
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from actors.gym import extract_answer
from actors.prompts.reasoning_gym import make_task
from actors.reasoning import after_reasoning
from actors.too_large import is_too_large
from cluster.contracts.errors import DataError

_NEEDED = ("answer", "metadata", "task", "task_config")
_TUPLE_TASKS = frozenset({"arc_agi", "rearc"})
"""Their verifiers compare with tuples, which JSON turned into lists."""
LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their verifiers read a list with Python's `eval`, which is replaced by `ast.literal_eval` here."""
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Their verifiers read a formula with sympy's `parse_expr`, which uses `eval`, and evaluates a text inside the formula once more."""
_FUNCTION = re.compile(
    "a?(?:sin|cos|tan|cot|sec|csc)h?|[aA]bs|exp|ln|log|[pP]ow|root|cbrt|sqrt|sign|factorial|Rational|Integral"
)
_BEFORE_A_GROUP = frozenset("+-*/%^,=<>|&~")
"""A parenthesis after one of these is not a call."""
_NO_FORMULA = re.compile(r"[^-+*/%^,=<>|&~().!\w\s]|_|for|\.\s*[a-z]", re.ASCII | re.IGNORECASE)
"""No formula has a text, comment, list, loop or attribute. With one of them, an answer can call any function by a permitted name."""
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Raised by verifiers that do not check the form of an answer, such as that of `prime_factorization` for words."""


def reasoning_gym(
    *,
    prompt: str,
    completion: str,
    columns: Mapping[str, Any],
    finish_reason: str = "",
    messages: Sequence[Mapping[str, Any]] = (),
    answer_tag: str | None = None,
) -> float:
    """The verifier's score, usually in [0, 1]. Many tasks give a part of it for a right answer with other text around it.

    Without `answer_tag` the answer is the whole completion after its reasoning, stripped. With `answer_tag: answer` it is the text in the
    last `<answer>...</answer>`; a completion without the tag has no answer. Raises DataError if the prompt lacks a column.
    """
    said = after_reasoning(completion, prompt=prompt, finish_reason=finish_reason, messages=messages)
    return score_of(answer_of(said, answer_tag=answer_tag), columns, setting="reward.judge")


def answer_of(completion: str, *, answer_tag: str | None) -> str | None:
    """None if the tag is missing."""
    return completion.strip() if answer_tag is None else extract_answer(completion, tag_name=answer_tag)


def score_of(answer: str | None, columns: Mapping[str, Any], *, setting: str) -> float:
    """Score by the verifier of the task in `columns`. 0 for an answer that it cannot read. An answer that the verifier would run as a
    program, or never end to compute, counts as none. Raises DataError, naming `setting`, if a column is missing."""
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise DataError(
            f"{setting}=reasoning_gym needs the column {missing[0]!r}; use it with prompts: {{name: reasoning_gym, task: ...}}"
        )
    metadata = _tuples(columns["metadata"]) if columns["task"] in _TUPLE_TASKS else columns["metadata"]
    entry = {"answer": columns["answer"], "metadata": metadata}
    task = _task(columns["task"], json.dumps(columns["task_config"], sort_keys=True))
    if answer is not None and (_runs(answer, columns["task"]) or _takes_for_ever(answer, columns["task"])):
        answer = None
    try:
        return float(task.score_answer(answer, entry))
    except _UNREADABLE:
        task.score_answer(columns["answer"], entry)  # raises if the prompt is at fault
        return 0.0


def _runs(answer: str, task: str) -> bool:
    """Whether the verifier, which runs outside any sandbox, might call anything but mathematical functions."""
    if task not in FORMULAS:
        return False
    before = [piece.rstrip() for piece in answer.split("(")[:-1]]
    called = {re.split(r"\W", piece)[-1] for piece in before if piece and piece[-1] not in _BEFORE_A_GROUP}
    return _NO_FORMULA.search(answer) is not None or not all(map(_FUNCTION.fullmatch, called))


def _takes_for_ever(answer: str, task: str) -> bool:
    return task in FORMULAS and is_too_large(answer)


@functools.lru_cache(maxsize=128)
def _task(task: str, config: str) -> Any:
    made = make_task(task, size=1, seed=0, config=json.loads(config))
    if task in LISTS:
        vars(sys.modules[type(made).__module__])["eval"] = ast.literal_eval
    return made


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
