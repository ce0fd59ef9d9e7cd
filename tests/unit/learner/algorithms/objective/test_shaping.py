"""Shaping of rewards and advantages, by the road that a run takes."""

import dataclasses

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.registry.presets import expand
from tests.unit.learner.algorithms.batches import case


def make(**fields) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(expand(fields)))


def batch_of(rewards: list[float], *, group_size: int = 2) -> BatchTensors:
    """Groups of equal size; all else is drawn."""
    whole = case(0, num_groups=len(rewards) // group_size, group_size=group_size).batch
    return dataclasses.replace(whole, rewards_N=tensor(rewards, dtype=torch.float64))


def advantages(objective: Objective, batch: BatchTensors) -> Tensor:
    """Of each trajectory's last token."""
    prepared = objective.prepare(batch)
    rows = zip(prepared.advantages_NT, batch.loss_mask_NT, strict=True)
    return torch.stack([row[mask][-1] for row, mask in rows])


@pytest.mark.parametrize("kl", [{}, {"reward": {"coefficient": 0.1, "credit": "trajectory"}}])
def test_group_weights_see_a_group_without_variance_also_under_a_kl_in_the_reward(kl):
    batch = batch_of([1.0, 0.0, 0.5, 0.5])
    plain = advantages(make(advantage="rloo", kl=kl), batch)
    weighted = advantages(make(advantage="rloo", kl=kl, advantage_shaping=["group_weights"]), batch)
    assert_close(weighted, plain * tensor([2.0, 2.0, 1.0, 1.0]))  # two groups, of which one varies
