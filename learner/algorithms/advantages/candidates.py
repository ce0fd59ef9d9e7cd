"""Which trajectories of an oversampled group to train on. Plain numbers in, places out."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

Strategy = Literal["first", "spread", "balanced"]
"""The first that came; evenly over the order of returns; or the subset whose mean return is nearest to the middle of the bounds, of
those the one of largest range."""

_MOST_SUBSETS = 100_000


def choose(
    returns: Sequence[float],
    *,
    group_size: int,
    strategy: Strategy = "balanced",
    return_bounds: tuple[float, float] | None = None,
) -> list[int] | None:
    """Places of `group_size` of the candidates, or None when their mean return is not strictly inside the bounds.

    Without a choice to make (as many candidates as places) all are taken. `balanced` without bounds has no middle and is `spread`.
    Raises ValueError for too few candidates, or (`balanced`) more than 100,000 subsets. Peers: torchrl MCAdvantageSelector (`uniform` is
    `spread`; beyond that many subsets it goes on greedily).
    """
    num = len(returns)
    if num < group_size:
        raise ValueError(f"{num} candidates for a group of {group_size}")
    if num == group_size or strategy == "first":
        return _accepted(list(range(group_size)), returns, return_bounds)
    if strategy == "spread" or return_bounds is None:
        return _accepted(_spread(returns, group_size), returns, return_bounds)
    if math.comb(num, group_size) > _MOST_SUBSETS:
        raise ValueError(f"{num} candidates have too many subsets of {group_size} to try; choose strategy 'spread'")
    return _balanced(returns, group_size, return_bounds)


def mean_is_inside(returns: Sequence[float], return_bounds: tuple[float, float] | None) -> bool:
    """True when their mean is strictly inside: bounds of 0 and 1 leave out the group that always fails or always succeeds."""
    return return_bounds is None or return_bounds[0] < sum(returns) / len(returns) < return_bounds[1]


def _accepted(places: list[int], returns: Sequence[float], bounds: tuple[float, float] | None) -> list[int] | None:
    return places if mean_is_inside([returns[place] for place in places], bounds) else None


def _spread(returns: Sequence[float], group_size: int) -> list[int]:
    ordered = sorted(range(len(returns)), key=returns.__getitem__)
    if group_size == 1:
        return [ordered[len(ordered) // 2]]
    step = (len(ordered) - 1) / (group_size - 1)
    return [ordered[round(position * step)] for position in range(group_size)]


def _balanced(returns: Sequence[float], group_size: int, bounds: tuple[float, float]) -> list[int] | None:
    middle = (bounds[0] + bounds[1]) / 2

    def distance(places: tuple[int, ...]) -> tuple[float, float]:
        chosen = [returns[place] for place in places]
        return abs(sum(chosen) / group_size - middle), min(chosen) - max(chosen)

    subsets = combinations(range(len(returns)), group_size)
    inside = (each for each in subsets if mean_is_inside([returns[place] for place in each], bounds))
    best = min(inside, key=distance, default=None)
    return None if best is None else list(best)
