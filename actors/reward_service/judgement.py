"""One trajectory's judgement: what a judge returns becomes a `Reward`, and what it raises becomes a status, never a zero."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from cluster.contracts.errors import DataError
from cluster.contracts.plugins import REWARDS, Plugin, resolve
from cluster.contracts.types import Reward, RewardStatus

_MAX_MESSAGE = 500
"""Characters of an error kept per trajectory: a message goes into every row that failed."""


def find_judge(judge: Plugin) -> Callable[..., Any]:
    """The judge with its parameters bound. Raises ConfigError naming `reward.judge` if it does not import or its parameters do not fit."""
    return resolve(judge, home=REWARDS, field="reward.judge")


def is_async(judge: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await; looks through bound parameters and callable objects."""
    inner = inspect.unwrap(getattr(judge, "func", judge))
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def judge_now(judge: Callable[..., Any], *, prompt: str, completion: str, columns: Mapping[str, Any]) -> Reward:
    """Calls a synchronous judge."""
    try:
        return to_reward(judge(prompt=prompt, completion=completion, columns=columns))
    except Exception as error:  # noqa: BLE001 - a judge is foreign code, and this is one trajectory
        return failed(error)


async def judge_async(judge: Callable[..., Any], *, prompt: str, completion: str, columns: Mapping[str, Any]) -> Reward:
    """Awaits an asynchronous judge."""
    try:
        return to_reward(await judge(prompt=prompt, completion=completion, columns=columns))
    except Exception as error:  # noqa: BLE001 - a judge is foreign code, and this is one trajectory
        return failed(error)


def to_reward(value: Any) -> Reward:
    """A number, a dict of components with `reward` among them, or a Reward. Raises DataError for anything else, NaN and infinity."""
    if isinstance(value, Reward):
        number = _finite(value.value, "reward") if value.status is RewardStatus.OK else None
        return dataclasses.replace(value, value=number, components=_components(value.components))
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise DataError(
                f"the judge returned a dict without 'reward', with: {', '.join(map(str, value)) or 'nothing'}"
            )
        rest = {str(name): item for name, item in value.items() if name != "reward"}
        return Reward(value=_finite(value["reward"], "reward"), components=_components(rest))
    return Reward(value=_finite(value, "reward"))


def failed(error: BaseException) -> Reward:
    return Reward(value=None, status=RewardStatus.ERROR, message=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])


def timed_out(timeout_s: float) -> Reward:
    message = f"no reward within reward.timeout_s={timeout_s:g}; raise it, or make the judge faster"
    return Reward(value=None, status=RewardStatus.TIMEOUT, message=message)


def _components(values: Mapping[str, Any]) -> dict[str, float | None]:
    """None stays None: a component that this trajectory does not have."""
    return {
        str(name): None if value is None else _finite(value, f"component {name!r}") for name, value in values.items()
    }


def _finite(value: Any, what: str) -> float:
    # Numbers of NumPy and torch are taken too: they convert, strings and None do not count as numbers.
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise DataError(f"the judge returned a {what} of type {type(value).__name__}; it must be a number")
    number = float(value)
    if not math.isfinite(number):
        raise DataError(f"the judge returned a {what} that is not finite: {number}")
    return number
