"""What episodes bring from their environments, and what it comes to with the verdicts of judges.

The reward of an episode is what it earned on its way, the weighted value that its environment returned, and what judges add.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from actors.reward_service.judgement import failed
from cluster.contracts.errors import DataError
from cluster.contracts.segments import episodes
from cluster.contracts.types import Reward, RewardStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Of one trajectory, before any judge."""

    failure: Reward | None
    """It failed while it was sampled: no judge sees it."""
    is_episode: bool
    """An environment played it; else it is a single turn."""
    returned: float | None
    earned: float
    components: dict[str, float | None] = field(default_factory=dict[str, float | None])


def own_of(trajectories: pa.RecordBatch) -> list[Own]:
    """Of the whole trajectories of a group. Where one earned on its way, all have the component `earned`, 0 where they did not."""
    names = ("reward", "reward_status", "reward_message", "reward_components", "episode", "token_rewards")
    rows = trajectories.select(names).to_pylist()
    has_earned = any(row["token_rewards"] is not None for row in rows)
    return [_own(row, has_earned=has_earned) for row in rows]


def total(own: Own, judged: Reward | None, *, weight: float) -> Reward:
    """`judged` is None where no judge adds to what the environment says; `weight` is that of what it returned."""
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
            DataError(f"the reward of the episode comes to {value}; see reward.environment_weight and what it earned")
        )
    return Reward(value=value, **told)


def credited(batch: pa.RecordBatch, rewards: Sequence[Reward]) -> list[list[float] | None] | None:
    """Token rewards of the rows of each trajectory that earned some: what its reward has beyond them stands at its last sampled token, so
    that they sum to it. None where none did."""
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
