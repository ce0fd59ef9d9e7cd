"""The number of rollout workers that a run should have. Decisions are pure; the pool starts and retires workers, Ray's autoscaler finds
nodes.

The aim: sampling a step's groups takes as long as learning from them. If n workers are idle for a share i of a step and the learner waits
for a share w of it, sampling costs n * (1 - i) workers' time and learning a share 1 - w, so that n * (1 - i) / (1 - w) workers are needed.
If workers are never idle, that is n / (1 - w).

One worker samples a whole group. With more workers than groups under way the wait gets no shorter, though the formula would go on adding
workers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.contracts.config import ElasticConfig

_WINDOW = 3
"""Growth is decided by the mean of this many steps: one slow step is not a trend."""
_PAYBACK = 3.0
"""A new worker must serve this many times as long as workers take to join."""
_ROUNDING = 1e-6
"""Tolerance for floating-point division, in workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """How one step used its time."""

    step_seconds: float
    wait_seconds: float
    """Part of `step_seconds` in which the learner waited for groups."""
    num_workers: float
    """Mean number of serving workers."""
    idle_share: float
    """Share of their time in which they had nothing to sample."""
    is_buffer_full: bool
    """Every group that the staleness bound allows was finished when the step was taken: sampling waits for the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The rollout workers now, and estimates for new ones."""

    num_workers: int
    """Wanted workers."""
    num_coming: int
    """Wanted workers that do not serve yet."""
    join_seconds: float | None = None
    """From the request for a worker until it served; None while none has joined."""
    num_steps_left: int | None = None
    """None: unknown."""
    most_useful: int | None = None
    """Groups that may be under way at once. One worker samples each, so further workers have nothing to do. None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The wanted number of workers, and the measurements that decided it."""

    num_workers: int
    wait_share: float | None = None
    """None if no measurement decided: the bounds did, or nothing changes."""
    idle_share: float | None = None


def most_loads(config: ElasticConfig) -> int:
    """Loads that `decide` looks at; older ones need not be kept."""
    return max(_WINDOW, config.scale_down_full_steps)


def most_workers(config: ElasticConfig, most_useful: int | None) -> int | None:
    """Upper bound of the workers: `elastic.max_workers`, or as many as have work. None: the run does not scale by itself."""
    if config.max_workers is None or most_useful is None:
        return config.max_workers
    return max(min(config.max_workers, most_useful), config.min_workers)


def decide(loads: Sequence[StepLoad], fleet: Fleet, config: ElasticConfig) -> Decision:
    """The number of workers to have, given the loads since the wanted number last changed; the present one by default.

    Workers that are coming count towards the wanted number, and only those that serve allow more of them: nodes take minutes, steps do
    not. A fleet on spot nodes grows even if some lost worker is always being replaced.
    """
    upper = most_workers(config, fleet.most_useful)
    if upper is None:
        return Decision(num_workers=fleet.num_workers)
    bounded = min(max(fleet.num_workers, config.min_workers), upper)
    if bounded != fleet.num_workers:
        return Decision(num_workers=bounded)
    num_serving = fleet.num_workers - fleet.num_coming
    if len(loads) >= _WINDOW:
        recent = list(loads)[-_WINDOW:]
        if _wait_share(recent) > config.scale_up_wait_share and _pays_back(recent, fleet):
            # Bounded before it is rounded: an infinite product has no floor.
            most = math.floor(min(num_serving * config.max_step_factor, upper))
            most = most if fleet.num_coming else max(most, fleet.num_workers + 1)
            wanted = min(math.ceil(min(_num_needed(recent), most) - _ROUNDING), upper)
            if wanted > fleet.num_workers:
                return _measured(wanted, recent)
    full = list(loads)[-config.scale_down_full_steps :]
    if len(full) == config.scale_down_full_steps and all(load.is_buffer_full for load in full):
        # Rounded up: with one worker too few the learner would wait, and the fleet would grow again.
        wanted = max(math.ceil(_num_needed(full) - _ROUNDING), config.min_workers)
        if wanted < fleet.num_workers:
            return _measured(wanted, full)
    return Decision(num_workers=fleet.num_workers)


def _num_needed(loads: Sequence[StepLoad]) -> float:
    """Number of workers, not rounded. Steps of different numbers of workers count together: their work is the same."""
    busy_s = sum(load.num_workers * (1 - load.idle_share) * load.step_seconds for load in loads)
    return busy_s / _seconds(loads) / max(1 - _wait_share(loads), _ROUNDING)


def _pays_back(loads: Sequence[StepLoad], fleet: Fleet) -> bool:
    """Whether a worker that is requested now serves long enough before the run ends. True while that is unknown."""
    if fleet.join_seconds is None or fleet.num_steps_left is None:
        return True
    left_s = fleet.num_steps_left * _seconds(loads) / len(loads)
    return left_s - fleet.join_seconds >= _PAYBACK * fleet.join_seconds


def _measured(num_workers: int, loads: Sequence[StepLoad]) -> Decision:
    return Decision(num_workers=num_workers, wait_share=_wait_share(loads), idle_share=_idle_share(loads))


def _wait_share(loads: Sequence[StepLoad]) -> float:
    return sum(load.wait_seconds for load in loads) / _seconds(loads)


def _idle_share(loads: Sequence[StepLoad]) -> float:
    return sum(load.idle_share * load.step_seconds for load in loads) / _seconds(loads)


def _seconds(loads: Sequence[StepLoad]) -> float:
    return max(sum(load.step_seconds for load in loads), 1e-9)
