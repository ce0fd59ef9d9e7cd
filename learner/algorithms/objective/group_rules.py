"""Decisions about a single group: which of its candidates it keeps, and whether it trains.

The cluster decides as soon as a group is judged, and samples another prompt for a dropped one; the learner decides again with the whole
step. Both call these functions, on the CPU, with the group's rows in the same order: they never disagree, as long as a user's functions
answer the same to the same tensors.
Shapes: G trajectories of the group whose reward is known, K reward components.
"""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from math import nan
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.types import GroupSummary
from learner.algorithms.groups import group_rows
from learner.algorithms.masks import at_least_float32
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.objective.parts import Parts
from learner.algorithms.registry.variants import Variant

Group = Mapping[str, Any]
"""Tensors by the names of `homes.OF_A_GROUP`, and the names of the components."""


def of_summary(summary: GroupSummary) -> Group:
    """From the cluster's summary of a judged group. A component that a trajectory lacks is NaN."""
    known = _known(summary)
    names = tuple(sorted(name for name in summary.reward_components if "/" not in name))
    components = [summary.reward_components[name] for name in names]
    by_row = [[nan if values[place] is None else values[place] for values in components] for place in known]
    return {
        "rewards_G": torch.tensor(summary.known_rewards, dtype=torch.float64),
        "completion_lengths_G": torch.tensor([summary.completion_lengths[place] for place in known]),
        "truncated_G": torch.tensor([summary.truncated[place] for place in known]),
        "reward_components_GK": torch.tensor(by_row, dtype=torch.float64).reshape(len(known), len(components)),
        "reward_component_names": names,
    }


def of_batch(batch: BatchTensors) -> Iterator[tuple[Tensor, Group]]:
    """Each group with its row numbers."""
    columns = columns_of(batch, rewards_N=at_least_float32(batch.rewards_N))
    columns = {name: column.cpu() for name, column in columns.items()}
    names = {"reward_component_names": batch.reward_component_names}
    for rows in group_rows(batch.group_index_N.cpu()):
        yield rows, names | {name: column[rows] for name, column in columns.items()}


def columns_of(batch: BatchTensors, *, rewards_N: Tensor) -> dict[str, Tensor]:
    """Tensors of the whole batch, by the names that they have for one group."""
    components_NK = batch.reward_components_NK
    return {
        "rewards_G": rewards_N,
        "completion_lengths_G": batch.completion_lengths_N,
        "truncated_G": batch.truncated_N,
        "reward_components_GK": rewards_N.new_zeros(len(rewards_N), 0) if components_NK is None else components_NK,
    }


def dropped_by(group: Group, *, parts: Parts) -> Variant | None:
    """The first filter that drops the group; None: it trains, unless a filter of the whole batch drops it.

    Filters see the rewards that `shaped` returns.
    """
    filters = [each for each in parts.filters if each.is_of_a_group]
    group = shaped(group, parts=parts) if filters else group
    return next((each for each in filters if not each.verdict(each.with_given(group))), None)


def chosen(summary: GroupSummary, *, group_size: int, parts: Parts) -> list[int]:
    """The places of the chosen candidates, ascending; all with a known reward if these are no more than `group_size`."""
    assert parts.selection is not None, "only a selection chooses"
    known = _known(summary)
    if len(known) <= group_size:
        return known
    result = parts.selection.with_given(shaped(of_summary(summary), parts=parts), group_size=group_size)
    places = parts.selection.places(result, num_candidates=len(known), group_size=group_size)
    return sorted(known[place] for place in places)


def shaped(group: Group, *, parts: Parts) -> Group:
    """The group with rewards after the steps of `reward_shaping` before the first one that needs the whole batch."""
    for step in takewhile(lambda step: step.is_of_a_group, parts.reward_shaping):
        group = {**group, "rewards_G": step.tensor(step.with_given(group), group["rewards_G"].shape)}
    return group


def _known(summary: GroupSummary) -> list[int]:
    """The places of the trajectories whose reward is known."""
    return [place for place, reward in enumerate(summary.rewards) if reward is not None]
