"""Shaping of rewards and advantages, by the road that a run takes."""

import dataclasses
import json

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


def test_running_norm_divides_by_the_spread_of_all_rewards_so_far_and_is_checkpointed():
    shaping = [{"name": "reward_scale", "factor": 10.0}, "running_norm"]
    made = make(advantage="raw_reward", reward_shaping=shaping)
    assert_close(advantages(made, batch_of([0.1, 0.3])), tensor([1.0, 3.0]).double() / 2**0.5)
    made.adopt(made.prepare(batch_of([0.1, 0.3])))
    resumed = make(advantage="raw_reward", reward_shaping=shaping)
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    expected = tensor([8.0, 4.0]).double() / tensor([1.0, 3.0, 8.0, 4.0]).double().std()
    assert_close(advantages(made, batch_of([0.8, 0.4])), expected)
    assert (advantages(resumed, batch_of([0.8, 0.4])) == advantages(made, batch_of([0.8, 0.4]))).all()


def test_running_norm_leaves_rewards_as_they_are_until_they_vary():
    made = make(advantage="raw_reward", reward_shaping=["running_norm"])
    assert_close(advantages(made, batch_of([0.7, 0.7])), tensor([0.7, 0.7]).double())
    centred = make(advantage="raw_reward", reward_shaping=[{"name": "running_norm", "center": True}])
    assert_close(advantages(centred, batch_of([1.0, 3.0])), tensor([-1.0, 1.0]).double() / 2**0.5)


def test_the_order_of_a_steps_trajectories_moves_no_running_moment():
    whole = case(1, num_groups=20, group_size=3)
    made = make(advantage="raw_reward", reward_shaping=["running_norm"])
    shuffled = whole.rows(torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist())
    assert made.prepare(whole.batch).moments == made.prepare(shuffled.batch).moments
