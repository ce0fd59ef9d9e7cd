"""Shaping of rewards and advantages, by the road that a run takes."""

import dataclasses
import json

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import DataError
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


def test_a_step_of_shaping_sees_what_the_ones_before_it_made():
    """A group's step behind a group's and behind the batch's: 4 is held at 3, and is 6; the spread of 0 and 8 is √32."""
    clip, scale = {"name": "reward_clip", "low": 0.0, "high": 3.0}, {"name": "reward_scale", "factor": 2.0}
    made = make(advantage="raw_reward", reward_shaping=[clip, scale])
    assert advantages(made, batch_of([1.0, 4.0])).tolist() == [2.0, 6.0]
    behind = make(advantage="raw_reward", reward_shaping=["running_norm", scale])
    assert_close(advantages(behind, batch_of([0.0, 8.0])), tensor([0.0, 16.0]).double() / 32**0.5)


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


def test_a_column_of_the_prompt_weighs_its_trajectories_and_no_mini_batch_changes_that():
    made = make(advantage="raw_reward", advantage_shaping=[{"name": "column_weights", "column": "difficulty"}])
    assert made.columns == ("difficulty",) and make().columns == ()
    weighted = dataclasses.replace(batch_of([1.0, 2.0, 3.0, 4.0]), columns={"difficulty": tensor([0.5, 0.5, 2.0, 2.0])})
    assert_close(advantages(made, weighted), tensor([0.5, 1.0, 6.0, 8.0]).double())
    taken = made.mini_batch(made.prepare(weighted), [3, 0], begins_step=True)
    assert taken.batch.columns["difficulty"].tolist() == [2.0, 0.5]


def test_a_negative_weight_is_refused():
    made = make(advantage_shaping=[{"name": "column_weights", "column": "difficulty"}])
    batch = dataclasses.replace(batch_of([1.0, 2.0]), columns={"difficulty": tensor([-1.0, -1.0])})
    with pytest.raises(DataError, match="column 'difficulty' weighs a prompt by -1; give weights of 0 or more"):
        made.prepare(batch)


def test_length_divides_the_advantage_or_the_reward():
    mask = tensor([[True, True, True, True], [True, False, False, False]])
    whole = batch_of([8.0, 2.0])
    per_token = {n: torch.zeros(2, 4, dtype=torch.float64) for n in ("reference", "proximal", "rollout")}
    batch = dataclasses.replace(
        whole,
        loss_mask_NT=mask,
        policy_versions_NT=torch.zeros(2, 4, dtype=torch.int64),
        completion_lengths_N=tensor([4, 1]),
        entropies_NT=None,
        values_NT=None,
        reference_partition_NTP=None,
        **{f"{name}_logprobs_NT": values for name, values in per_token.items()},
    )
    over = make(advantage="raw_reward", advantage_shaping=["over_length"])
    assert advantages(over, batch).tolist() == [2.0, 2.0]
    root = make(advantage="raw_reward", advantage_shaping=[{"name": "over_length", "power": 0.5}])
    assert advantages(root, batch).tolist() == [4.0, 2.0]
    before = make(advantage="mean_centered", reward_shaping=["reward_over_length"])
    assert advantages(before, batch).tolist() == [0.0, 0.0]


def test_rewards_per_token_are_advantages_as_they_are():
    whole = batch_of([0.0, 0.0])
    mask = torch.ones_like(whole.loss_mask_NT)
    given = torch.arange(12.0, dtype=torch.float64).reshape(2, 6)
    batch = dataclasses.replace(whole, loss_mask_NT=mask, token_rewards_NT=given)
    assert_close(make(advantage="token_rewards").prepare(batch).advantages_NT, given)
