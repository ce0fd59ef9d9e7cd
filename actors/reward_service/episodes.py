"""Combines the rewards of environments with the verdicts of judges.

An episode's reward is the sum of the rewards earned on its way, the weighted value that its environment returned, and the judges' reward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.reward_service.judgement import failed
from cluster.contracts.errors import DataError
from cluster.contracts.segments import episodes
from cluster.contracts.types import Reward, RewardStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The environment's part of one trajectory's reward."""

    failure: Reward | None
    """Set if the trajectory failed during sampling. Then no judge sees it."""
    is_episode: bool
    """An environment played it. False: a single turn."""
    returned: float | None
    """By the environment. None: it left the reward to the judges."""
    earned: float
    components: dict[str, float | None]


def own_of(trajectories: pa.RecordBatch) -> list[Own]:
    """For a group of whole trajectories. If one of them earned rewards on its way, all have the component `earned`, which may be 0."""
    names = ("reward", "reward_status", "reward_message", "reward_components", "episode", "token_rewards")
    rows = trajectories.select(names).to_pylist()
    has_earned = any(row["token_rewards"] is not None for row in rows)
    return [_own(row, has_earned=has_earned) for row in rows]


def total(own: Own, judged: Reward | None, *, weight: float) -> Reward:
    """`judged` is None if no judge scores the episode. `weight` applies to the value that the environment returned."""
    if own.failure is not None:
        return own.failure
    if not own.is_episode:
        assert judged is not None, "a single turn is judged"
        return judged
    if judged is None and own.returned is None:
        return failed(
            DataError(
                "the environment returned no reward, and no judge is named: return one, or set reward.judge or reward.parts"
            )
        )
    if judged is not None and judged.value is None:
        return judged
    value = own.earned + (weight * own.returned if own.returned is not None else 0.0)
    if judged is None:
        return _finite(value, components=own.components)
    assert judged.value is not None, "a verdict without a value has failed"
    components = {**judged.components, **own.components}
    return _finite(value + judged.value, components=components, message=judged.message)


def _finite(value: float, **told: Any) -> Reward:
    if not math.isfinite(value):
        return failed(
            DataError(f"the reward of the episode is {value}; see reward.environment_weight and its earned rewards")
        )
    return Reward(value=value, **told)


def credited(batch: pa.RecordBatch, rewards: Sequence[Reward]) -> list[list[float] | None] | None:
    """Token rewards of each row. If a trajectory earned some, its last sampled token gets the rest, so that they sum to its reward. None if
    no trajectory earned any."""
    column = batch["token_rewards"]
    if column.null_count == batch.num_rows:
        return None
    credit: list[list[float] | None] = column.to_pylist()
    for rows, reward in zip(episodes(batch), rewards, strict=True):
        of_rows = [credit[row] or [] for row in rows]
        if credit[rows.start] is None or reward.value is None:
            continue
        last = of_rows[-1]
        sampled = [place for place, is_sampled in enumerate(batch["loss_mask"][rows.stop - 1].as_py()) if is_sampled]
        last[sampled[-1]] += reward.value - sum(map(sum, of_rows))
    return credit


def _own(row: dict[str, Any], *, has_earned: bool) -> Own:
    failure, status = None, row["reward_status"]
    if status in (RewardStatus.ERROR, RewardStatus.TIMEOUT):
        failure = Reward(value=None, status=RewardStatus(status), message=row["reward_message"])
    earned = math.fsum(row["token_rewards"] or ())
    return Own(
        failure=failure,
        is_episode=row["episode"] is not None,
        returned=row["reward"],
        earned=earned,
        components={**dict(row["reward_components"]), **({"earned": earned} if has_earned else {})},
    )
