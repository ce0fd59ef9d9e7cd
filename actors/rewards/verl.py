"""Calls an unchanged `compute_score(data_source, solution_str, ground_truth, extra_info)` written for verl, on verl's columns."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import ImportString

from cluster.contracts.errors import DataError

_OF_THE_ROLLOUT: Mapping[str, Any] = {"num_turns": 2, "rollout_reward_scores": {}}
"""Entries that verl's reward manager adds to `extra_info` for a single turn: question and answer are 2."""


class VerlReward:
    """The function returns a number, or a dict with `score`. Other numbers in the dict become components, other values are ignored.

    Source: verl, "Implement Reward Function for Dataset"
    """

    def __init__(
        self,
        *,
        function: ImportString[Callable[..., Any]],
        ground_truth: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`function` is an import path, `my_package.rewards:compute_score`. `ground_truth` names the column with the answer. None reads
        `reward_model: {ground_truth: ...}`, as verl does. `kwargs` are more arguments of the function, verl's `reward_kwargs`. Raises
        DataError for a prompt without the answer."""
        self._function = self.identity = function
        self._ground_truth = ground_truth
        self._kwargs = kwargs or {}

    def __call__(self, *, completion: str, columns: Mapping[str, Any]) -> Any:
        place, name = (
            (columns, self._ground_truth) if self._ground_truth else (columns.get("reward_model"), "ground_truth")
        )
        if not isinstance(place, Mapping) or name not in place:
            raise DataError(
                f"the prompt has no {name!r}{'' if self._ground_truth else ' below reward_model'}; name the column of the answer: "
                f"ground_truth: NAME; it has: {', '.join(sorted(columns)) or 'none'}"
            )
        given = {
            "data_source": columns.get("data_source"),
            "solution_str": completion,
            "ground_truth": place[name],
            "extra_info": {**(columns.get("extra_info") or {}), **_OF_THE_ROLLOUT},  # verl never passes None
        }
        score = self._function(**{**given, **self._kwargs})
        return _later(score) if inspect.isawaitable(score) else _reward(score)


async def _later(score: Awaitable[Any]) -> Any:
    return _reward(await score)


def _reward(score: Any) -> Any:
    if not isinstance(score, Mapping) or "score" not in score:
        return score
    return {"reward": score["score"]} | {
        key: value for key, value in score.items() if key not in ("score", "reward") and _is_number(value)
    }


def _is_number(value: Any) -> bool:
    """True also for a scalar of NumPy or torch, such as the mean of an array. False for an array with one number."""
    if isinstance(value, str | bytes) or getattr(value, "ndim", 0):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    except OverflowError:
        return True  # too large for a reward: it is refused later, with a message
    return True


verl = VerlReward
