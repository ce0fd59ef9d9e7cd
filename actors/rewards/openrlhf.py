"""Calls an unchanged `reward_func(queries, prompts, labels)` written for OpenRLHF, once a group."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ImportString

from cluster.contracts.errors import DataError


class OpenRlhfReward:
    """The function returns rewards as a tensor or list, or a dict with `rewards`. `scores` become a component, `extra_logs` are ignored.

    Source: OpenRLHF, examples/python/reward_func.py
    """

    def __init__(self, *, function: ImportString[Any], label_column: str = "label") -> None:
        """`function` is an import path, `my_package.rewards:reward_func`. Raises DataError for a prompt without the column."""
        self._function = self.identity = function
        self._label_column = label_column

    def __call__(self, *, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]) -> Any:
        if self._label_column not in columns:
            raise DataError(
                f"label_column={self._label_column!r} is not a column of this prompt; it has: {', '.join(sorted(columns)) or 'none'}"
            )
        queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        # Positional arguments, as in OpenRLHF: the function may name them differently.
        given = self._function(queries, prompts, [columns[self._label_column]] * len(prompts))
        if not isinstance(given, Mapping):
            return given
        rewards, scores = [*given["rewards"]], given.get("scores")
        if scores is None:
            return rewards
        return [{"reward": each, "score": score} for each, score in zip(rewards, scores, strict=True)]


openrlhf = OpenRlhfReward
