"""Selections choose which trajectories of an over-sampled group train. `rollout.extra_trajectories` more are sampled and judged; the
trajectories that are not chosen leave the group before any other part sees it.

A selection gets the rewards of all candidates, shaped as for filters of groups, and returns the places of `group_size` of them.
Shapes: G candidates of a group.
"""

import math
from functools import lru_cache
from itertools import combinations

import torch
from pydantic import NonNegativeInt
from torch import Tensor

_MOST_SUBSETS = 100_000


def spread(rewards_G: Tensor, *, group_size: int) -> Tensor:
    """Candidates at even distances in the order of rewards, the worst and the best included.

    Formula: places round(i·(G − 1)/(n − 1)) of the ascending order, i = 0 … n − 1, n the group's size
    Source: torchrl MCAdvantage
    Degenerate: equal rewards are ordered by place; a group of one is the median
    Peers: torchrl MCAdvantageSelector `uniform`
    """
    ordered_G = rewards_G.argsort(stable=True)
    if group_size == 1:
        return ordered_G[len(ordered_G) // 2 :][:1]
    step = (len(ordered_G) - 1) / (group_size - 1)
    return ordered_G[[round(place * step) for place in range(group_size)]]


def balanced(rewards_G: Tensor, *, group_size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """The subset whose mean reward is nearest to the middle of two bounds; among several, the one of largest range.

    Formula: argmin |mean_S r − (low + high)/2|, then argmax (max_S r − min_S r), over all subsets S of the group's size
    Source: torchrl MCAdvantage
    Degenerate: among subsets that are equal up to rounding, torchrl's choice; more than 100,000 subsets are an error
    Peers: torchrl MCAdvantageSelector `balanced` (greedy beyond that many subsets; its bounds drop groups too, as filter `return_bounds`)
    """
    num_candidates = len(rewards_G)
    if math.comb(num_candidates, group_size) > _MOST_SUBSETS:
        raise ValueError(
            f"{num_candidates} candidates have more than {_MOST_SUBSETS} subsets of {group_size} to try; take fewer "
            "rollout.extra_trajectories, or selection 'max_variance' or 'spread'"
        )
    subsets_CG = _subsets(num_candidates, group_size)
    chosen_CG = rewards_G[subsets_CG]
    distance_C = (chosen_CG.sum(1) / group_size - (low + high) / 2).abs()
    range_C = chosen_CG.amax(1) - chosen_CG.amin(1)
    rounding = 1e-9 * max(float(rewards_G.abs().max()), abs(low), abs(high))
    range_C = torch.where(distance_C <= distance_C.min() + rounding, range_C, -1.0)
    # Among subsets that are equal up to rounding, torchrl takes the one with the smallest distance.
    return subsets_CG[torch.where(range_C >= range_C.max() - rounding, distance_C, torch.inf).argmin()]


def best_worst_k(rewards_G: Tensor, *, group_size: int, num_best: NonNegativeInt | None = None) -> Tensor:
    """The candidates with the highest and the lowest rewards.

    Formula: the `num_best` highest rewards and the n − num_best lowest, n the group's size; `num_best: null` is n/2, rounded up
    Source: the down-sampling of PODS, arXiv:2504.13818, at a fixed share
    Degenerate: equal rewards are ordered by place
    Peers: none
    """
    num_best = (group_size + 1) // 2 if num_best is None else num_best
    if not 0 <= num_best <= group_size:
        raise ValueError(f"num_best={num_best} must be between 0 and the group's size, {group_size}")
    ordered_G = rewards_G.argsort(stable=True)
    return torch.cat([ordered_G[: group_size - num_best], ordered_G[len(ordered_G) - num_best :]])


def max_variance(rewards_G: Tensor, *, group_size: int) -> Tensor:
    """The subset whose rewards vary most.

    Formula: argmax var_S r over the subsets S of the group's size n: the k highest rewards and the n − k lowest, for some k
    Source: PODS, arXiv:2504.13818
    Degenerate: among several such subsets the one with the smallest k; equal rewards are ordered by place
    Peers: PODS `max_variance`
    """
    subsets = [best_worst_k(rewards_G, group_size=group_size, num_best=k) for k in range(group_size + 1)]
    return subsets[int(torch.stack([rewards_G[subset].var(correction=0) for subset in subsets]).argmax())]


@lru_cache(maxsize=8)
def _subsets(num_candidates: int, group_size: int) -> Tensor:
    """Cached: the groups of a run have equally many candidates, unless rewards fail."""
    return torch.tensor(list(combinations(range(num_candidates), group_size)))
