"""A `compute_score(data_source, solution_str, ground_truth, extra_info)` of verl's, unchanged, on the columns of verl's data sets."""

import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from pydantic import ImportString

from cluster.contracts.errors import DataError


class VerlReward:
    """A number, or a dict with `score`, whose other numbers are components of the reward; what is no number there is left out.

    Source: verl, "Implement Reward Function for Dataset"
    """

    def __init__(self, *, function: ImportString[Any], ground_truth: str | None = None) -> None:
        """`function` is an import path, `my_package.rewards:compute_score`. `ground_truth` names the column of the answer; None reads
        `reward_model: {ground_truth: ...}`, as verl does. Raises DataError for a prompt without it."""
        self._function = self.identity = function
        self._ground_truth = ground_truth

    def __call__(self, *, completion: str, columns: Mapping[str, Any]) -> Any:
        place, name = (
            (columns, self._ground_truth) if self._ground_truth else (columns.get("reward_model"), "ground_truth")
        )
        if not isinstance(place, Mapping) or name not in place:
            raise DataError(
                f"the prompt has no {name!r}{'' if self._ground_truth else ' below reward_model'}; name the column of the answer: "
                f"ground_truth: NAME; it has: {', '.join(sorted(columns)) or 'none'}"
            )
        score = self._function(
            data_source=columns.get("data_source"),
            solution_str=completion,
            ground_truth=place[name],
            extra_info=columns.get("extra_info") or {},  # never None there
        )
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
    """One of NumPy or torch too, as the mean of an array is. An array that has one number is none."""
    if isinstance(value, str | bytes) or getattr(value, "ndim", 0):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    except OverflowError:
        return True  # an integer that no reward can hold, as is said of it
    return True


verl = VerlReward
