"""Results of a user's function for a trajectory. Numbers become a `Reward`; any other value is refused with its name."""

import math
from collections.abc import Mapping
from typing import Any

from actors.writable import writable
from cluster.contracts.errors import DataError
from cluster.contracts.types import Reward, RewardStatus

MAX_MESSAGE = 500
"""Characters kept of an error. Every failed row stores its message."""


def to_reward(value: Any, *, by: str = "the judge") -> Reward:
    """`value`, which `by` returned: a number, a dict of components that includes `reward`, or a Reward.

    Raises DataError for any other type, NaN and infinity.
    """
    if isinstance(value, Reward):
        components = _components(value.components, by=by)
        if value.status == RewardStatus.OK:
            return Reward(value=finite(value.value, "reward", by=by), components=components)
        message = None if value.message is None else writable(str(value.message))[:MAX_MESSAGE]
        return Reward(value=None, status=RewardStatus(value.status), components=components, message=message)
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise DataError(f"{by} returned a dict without 'reward', with: {', '.join(map(str, value)) or 'nothing'}")
        rest = {str(name): item for name, item in value.items() if name != "reward"}
        return Reward(value=finite(value["reward"], "reward", by=by), components=_components(rest, by=by))
    return Reward(value=finite(value, "reward", by=by))


def finite(value: Any, what: str, *, by: str) -> float:
    """`value` as a float. Raises DataError for any other type, NaN and infinity."""
    # Numbers of NumPy and torch are accepted too.
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise DataError(f"{by} returned a {what} of type {type(value).__name__}; it must be a number")
    try:
        number = float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        # A whole number of 400 digits, an array of two.
        raise DataError(f"{by} returned a {what} that is no number: {error}") from error
    if not math.isfinite(number):
        raise DataError(f"{by} returned a {what} that is not finite: {number}")
    return number


def _components(values: Mapping[str, Any], *, by: str) -> dict[str, float | None]:
    """None stays None: this trajectory does not have the component."""
    return {
        writable(str(name)): None if value is None else finite(value, f"component {name!r}", by=by)
        for name, value in values.items()
    }
