"""Converts an environment's return value or exception to the end of its episode. A failure is a status and a stage, never a zero."""

from typing import Any

from actors.returned import MAX_MESSAGE, to_reward
from actors.writable import writable
from cluster.contracts.episodes import EpisodeEnd
from cluster.contracts.errors import EpisodeOver
from cluster.contracts.foreign import described
from cluster.contracts.hiding import hidden
from cluster.contracts.types import RewardStatus

ENVIRONMENT = "environment"
"""The stage of every failure outside a tool."""


def returned(value: Any) -> EpisodeEnd:
    """Raises DataError, naming the value, for anything but a reward or None."""
    if value is None:
        return EpisodeEnd()
    reward = to_reward(value, by="the environment")
    if reward.status is RewardStatus.OK:
        return EpisodeEnd(reward=reward.value, components=reward.components)
    return failure(reward.message or "no message", status=reward.status)


def raised(error: BaseException) -> EpisodeEnd:
    """A limit that the policy caused is not a failure."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:  # from a TaskGroup whose task asks
        error = error.exceptions[0]
    if isinstance(error, EpisodeOver) and error.limit.is_policys_doing:
        return EpisodeEnd(limit=error.limit)
    return failure(described(error))


def failure(message: str, *, status: RewardStatus = RewardStatus.ERROR, stage: str = ENVIRONMENT) -> EpisodeEnd:
    return EpisodeEnd(status=status, failed_stage=writable(stage), message=writable(hidden(message))[:MAX_MESSAGE])
