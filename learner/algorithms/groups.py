"""Trajectories by group. Shapes: N trajectories of the batch, in any order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.algorithms.masks import at_least_float32


def over_groups(function: Callable[..., Tensor], rewards_N: Tensor, *, group_index_N: Tensor, **params: Any) -> Tensor:
    """Applies `function` to each group's rewards; results in the batch's order."""
    result_N = torch.empty_like(at_least_float32(rewards_N))
    for rows in sorted_group_rows(rewards_N, group_index_N=group_index_N):
        result_N[rows] = function(rewards_N[rows], **params).to(result_N.dtype)
    return result_N


def group_rows(group_index_N: Tensor) -> list[Tensor]:
    """Row numbers of each group, groups by ascending index, rows in the batch's order."""
    order_N = torch.argsort(group_index_N, stable=True)
    _, counts = torch.unique_consecutive(group_index_N[order_N], return_counts=True)
    return list(torch.split(order_N, counts.tolist()))


def sorted_group_rows(rewards_N: Tensor, *, group_index_N: Tensor) -> list[Tensor]:
    """Row numbers of each group, by ascending reward: sums over a group then do not depend on the order of arrival."""
    return [rows[rewards_N[rows].argsort(stable=True)] for rows in group_rows(group_index_N)]


def all_equal(rewards: Tensor) -> bool:
    """Whether max == min. A variance of equal rewards may differ from 0, since their mean is rounded."""
    return bool(rewards.max() == rewards.min())
