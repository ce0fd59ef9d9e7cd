"""Group advantages of trajectories that arrive in any order and from several workers: a group leaves when it is complete.

The order of arrival changes no number: a group's trajectories are sorted by sample index before anything is summed. A failed trajectory
counts towards completeness, and has no reward. A group with fewer than `min_size` rewards is dropped. `close()` drops incomplete groups;
with `incomplete="release"` it releases those that have `min_size` rewards. A group with more candidates than places waits for another
candidate while no subset lies inside the bounds, and is dropped after the last.
Shapes: G trajectories of a group, S steps of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.advantages.candidates import Strategy, choose, mean_is_inside
from learner.algorithms.advantages.group import grpo

TrajectoryReturn = Literal["sum", "mean", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A finished trajectory, or one that failed."""

    group_id: str
    sample_index: int
    """Its place in the group; fixes the order of sums."""
    trajectory_id: str
    step_rewards: tuple[float, ...] = ()
    """One per step or turn; a reward at the end alone is one step, or zeros before it."""
    has_failed: bool = False
    """It has no reward: it counts towards its group's completeness, and gets no advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedGroup:
    group_id: str
    arrivals: tuple[Arrival, ...]
    """The trajectories that carry advantages, by sample index; where there was a choice, in its order."""
    step_advantages: tuple[Tensor, ...]
    """Per trajectory, one per step."""


class StreamingGroups:
    """Collects arrivals and releases groups.

    `over="trajectories"` gives `advantage` one return per trajectory and its result to each of its steps; `over="steps"` gives it every
    step's reward as a sample of its own, so that long trajectories weigh more (torchrl MCAdvantage's default). Peers: torchrl MCAdvantage
    (`advantage` is `grpo` with a clamp at 1e-6; `trajectory_return`, `keep_return_bounds`; `max_candidates` is its candidate_group_size,
    `min_candidates` its candidate_selection_min_size). `after_release="slide"` never empties a group, as torchrl did in 2025: each further
    arrival releases the last `group_size` again.
    """

    def __init__(
        self,
        *,
        group_size: int,
        advantage: Callable[[Tensor], Tensor] = grpo,
        over: Literal["trajectories", "steps"] = "trajectories",
        trajectory_return: TrajectoryReturn = "sum",
        return_bounds: tuple[float, float] | None = None,
        min_candidates: int | None = None,
        max_candidates: int | None = None,
        strategy: Strategy = "balanced",
        min_size: int = 2,
        incomplete: Literal["drop", "release"] = "drop",
        after_release: Literal["empty", "slide"] = "empty",
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size={group_size} must be at least 1")
        self._group_size = group_size
        self._first_look, self._last_look = min_candidates or group_size, max_candidates or group_size
        if not group_size <= self._first_look <= self._last_look:
            raise ValueError(
                f"group_size={group_size}, min_candidates={min_candidates} and max_candidates={max_candidates} must not descend"
            )
        self._strategy: Strategy = strategy
        self._advantage = advantage
        self._over = over
        self._reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.max}[trajectory_return]
        self._return_bounds = return_bounds
        self._min_size = min(min_size, group_size)
        self._incomplete = incomplete
        self._after_release = after_release
        self._waiting: dict[str, list[Arrival]] = {}
        self._num_dropped = 0

    @property
    def waiting(self) -> dict[str, int]:
        """Arrivals per group that is not complete yet."""
        return {group: len(arrivals) for group, arrivals in self._waiting.items()}

    @property
    def num_dropped(self) -> int:
        """Groups that left without being released."""
        return self._num_dropped

    def add(self, arrival: Arrival) -> ReleasedGroup | None:
        """The group that this arrival completes, if any. Raises ValueError for one that arrives twice, or has no reward."""
        waiting = self._waiting.setdefault(arrival.group_id, [])
        if any(other.trajectory_id == arrival.trajectory_id for other in waiting):
            raise ValueError(f"trajectory {arrival.trajectory_id} of group {arrival.group_id} arrived twice")
        if not arrival.has_failed and not arrival.step_rewards:
            raise ValueError(
                f"trajectory {arrival.trajectory_id} of group {arrival.group_id} has no step_rewards and has not failed"
            )
        waiting.append(arrival)
        if len(waiting) < self._first_look:
            return None
        if self._after_release == "slide":
            self._waiting[arrival.group_id] = waiting[-self._group_size :]
            return self._release(arrival.group_id, self._waiting[arrival.group_id])
        released = self._release(arrival.group_id, waiting)
        if released is None and len(waiting) < self._last_look:
            return None
        del self._waiting[arrival.group_id]
        self._num_dropped += released is None
        return released

    def close(self) -> list[ReleasedGroup]:
        """Nothing arrives any more: releases the incomplete groups that may leave, in the order they began, and drops the others."""
        remaining, self._waiting = self._waiting, {}
        if self._incomplete == "drop":
            self._num_dropped += len(remaining)
            return []
        released = [self._release(group_id, arrivals) for group_id, arrivals in remaining.items()]
        self._num_dropped += released.count(None)
        return [group for group in released if group is not None]

    def _release(self, group_id: str, waiting: list[Arrival]) -> ReleasedGroup | None:
        arrivals = sorted(
            (arrival for arrival in waiting if not arrival.has_failed), key=lambda arrival: arrival.sample_index
        )
        arrivals = self._chosen(arrivals) if len(arrivals) >= self._min_size else None
        if arrivals is None:
            return None
        lengths = [len(arrival.step_rewards) for arrival in arrivals]
        if self._over == "steps":
            rewards_S = torch.tensor([reward for arrival in arrivals for reward in arrival.step_rewards])
            advantages = self._advantage(rewards_S).split(lengths)
        else:
            of_trajectory_G = self._advantage(self._returns(arrivals))
            advantages = tuple(value.expand(length) for value, length in zip(of_trajectory_G, lengths, strict=True))
        return ReleasedGroup(group_id=group_id, arrivals=tuple(arrivals), step_advantages=tuple(advantages))

    def _returns(self, arrivals: list[Arrival]) -> Tensor:
        return torch.stack([self._reduce(torch.tensor(arrival.step_rewards)) for arrival in arrivals])

    def _chosen(self, arrivals: list[Arrival]) -> list[Arrival] | None:
        """Those that train; None when the mean return of no choice is inside the bounds: too easy a group, or too hard."""
        returns = self._returns(arrivals).tolist()
        if len(arrivals) < self._group_size:
            return arrivals if mean_is_inside(returns, self._return_bounds) else None
        size, bounds = self._group_size, self._return_bounds
        places = choose(returns, group_size=size, strategy=self._strategy, return_bounds=bounds)
        return None if places is None else [arrivals[place] for place in places]
