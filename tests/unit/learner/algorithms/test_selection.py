"""Which candidates make a group, with numbers worked out by hand."""

from itertools import combinations

import pytest
import torch
from torch import tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.schema import summarize
from learner.algorithms.batch_rules.selection import balanced, best_worst_k, max_variance, spread
from learner.algorithms.objective import Objective
from tests.unit.learner.trajectories import make_group

REWARDS = tensor([0.0, 4.0, 1.0, 2.0, 3.0])


def test_a_spread_goes_evenly_from_the_worst_to_the_best():
    assert spread(REWARDS, group_size=3).tolist() == [0, 3, 1]
    assert spread(REWARDS, group_size=1).tolist() == [3]
    assert spread(REWARDS, group_size=4).tolist() == [0, 2, 4, 1]  # places 0, 4/3, 8/3 and 4


def test_a_balanced_group_has_its_mean_in_the_middle_and_the_largest_range():
    assert balanced(REWARDS, group_size=2, low=1.5, high=2.5).tolist() == [0, 1]  # 0 and 4, not 1 and 3
    assert balanced(tensor([0.0, 0.0, 0.0, 1.0]), group_size=2).tolist() == [0, 3]


def test_rounding_does_not_decide_between_balanced_groups():
    """0.1 and 0.7 have a mean 0.1 below the middle, 0.5 and 0.7 one 0.1 above it: as far, and the first pair has the larger range."""
    rewards = tensor([0.0, 0.1, 0.5, 0.7], dtype=torch.float64)
    assert balanced(rewards, group_size=2).tolist() == [1, 3]


def test_the_best_and_the_worst_make_a_group():
    assert sorted(best_worst_k(REWARDS, group_size=3).tolist()) == [0, 1, 4]
    assert sorted(best_worst_k(REWARDS, group_size=3, num_best=1).tolist()) == [0, 1, 2]
    assert sorted(best_worst_k(REWARDS, group_size=4).tolist()) == [0, 1, 2, 4], "two of each"
    with pytest.raises(ValueError, match="num_best=4 must be between 0 and the group's size, 3"):
        best_worst_k(REWARDS, group_size=3, num_best=4)


def test_the_largest_variance_is_that_of_all_subsets():
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 4):
        rewards = torch.randn(7, generator=generator)
        largest = max(rewards[list(each)].var(correction=0) for each in combinations(range(7), size))
        assert rewards[max_variance(rewards, group_size=size)].var(correction=0) == pytest.approx(largest)
    assert sorted(max_variance(tensor([0.0, 1.0, 0.0, 0.0, 0.0]), group_size=2).tolist()) == [0, 1]


def test_a_run_chooses_among_the_shaped_rewards_that_are_known_and_in_the_groups_order():
    penalty = {"name": "overlong_penalty", "max_length": 4, "cache": 2}
    objective = Objective.from_config(
        AlgorithmConfig.model_validate({"selection": "max_variance", "reward_shaping": [penalty]})
    )
    group = make_group(0, rewards=(0.5, None, 1.0, 1.0, 0.2), lengths=(2, 2, 2, 4, 2))  # shaped: 0.5, -, 1, 0, 0.2
    assert objective.chosen(summarize(group), group_size=2) == [2, 3]
    assert objective.chosen(summarize(group), group_size=4) == [0, 2, 3, 4], "no more are known"


def test_too_many_subsets_to_try_are_refused_before_anything_is_sampled():
    objective = Objective.from_config(AlgorithmConfig.model_validate({"selection": "balanced"}))
    objective.check_group_size(8, num_candidates=16)
    with pytest.raises(
        ConfigError, match=r"algorithm\.selection='balanced': 40 candidates have more than 100000 subsets"
    ):
        objective.check_group_size(8, num_candidates=40)
