"""Advantages in sentences, with numbers worked out by hand."""

import math
from functools import partial

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from learner.algorithms.advantages.batch import (
    gdpo,
    gpg,
    group_mean_batch_std,
    opo,
    raw_reward,
    reinforce_pp,
    reinforce_pp_baseline,
)
from learner.algorithms.advantages.group import cpgd, grpo, max_rl, mean_centered, pass_at_k, rloo
from learner.algorithms.groups import over_groups


def test_grpo_divides_by_the_unbiased_spread():
    assert_close(grpo(tensor([0.0, 2.0]), epsilon=0.0), tensor([-1.0, 1.0]) / 2**0.5)


def test_grpo_with_ddof_0_divides_by_the_biased_spread():
    assert_close(grpo(tensor([0.0, 2.0]), epsilon=0.0, ddof=0), tensor([-1.0, 1.0]))


def test_grpo_adds_its_epsilon_or_clamps_at_it():
    assert_close(grpo(tensor([0.0, 2.0]), epsilon=1.0, ddof=0), tensor([-0.5, 0.5]))
    assert_close(grpo(tensor([0.0, 2.0]), epsilon=4.0, epsilon_mode="clamp", ddof=0), tensor([-0.25, 0.25]))


def test_a_group_without_variance_is_exactly_zero_where_rounding_would_amplify():
    rewards = tensor([0.7] * 8)
    assert (grpo(rewards, epsilon=1e-9) == 0).all()
    assert grpo(rewards, epsilon=1e-9, zero_variance="rounding").abs().max() > 0.1


@pytest.mark.parametrize(
    "function",
    [
        grpo,
        mean_centered,
        rloo,
        max_rl,
        cpgd,
        partial(reinforce_pp, epsilon=0.0),
        partial(reinforce_pp_baseline, group_index_N=torch.zeros(8)),
        partial(group_mean_batch_std, group_index_N=torch.zeros(8), epsilon=0.0),
        partial(opo, group_index_N=torch.zeros(8), loss_mask_NT=torch.ones(8, 8, dtype=torch.bool).tril()),
        partial(gpg, group_index_N=torch.zeros(8)),
    ],
)
def test_equal_rewards_whose_mean_is_rounded_give_exactly_zero(function):
    assert tensor([0.7] * 8).mean() != tensor(0.7)
    advantages = function(tensor([0.7] * 8))
    assert (advantages * 0 == advantages).all()


@pytest.mark.parametrize(
    "function",
    [
        partial(group_mean_batch_std, group_index_N=torch.zeros(8), epsilon=0.0),
        partial(pass_at_k, normalise=True, epsilon=0.0),
    ],
)
def test_equal_rewards_of_no_spread_at_all_give_zero_without_an_epsilon(function):
    assert function(torch.ones(8)).tolist() == [0.0] * 8


@pytest.mark.parametrize("function", [grpo, mean_centered, rloo])
def test_a_group_of_one_is_zero_raw_or_an_error_as_told(function):
    assert function(tensor([3.0]), singleton="zero").tolist() == [0.0]
    assert_close(function(tensor([3.0]), singleton="raw"), tensor([3.0]))
    with pytest.raises(ValueError, match="at least 2 trajectories"):
        function(tensor([3.0]), singleton="error")


def test_rloo_rewards_the_only_success():
    assert_close(rloo(tensor([1.0, 0.0, 0.0])), tensor([1.0, -0.5, -0.5]))


def test_rloo_of_one_has_no_baseline():
    with pytest.raises(ValueError, match="got 1"):
        rloo(tensor([1.0]))


def test_dr_grpo_keeps_the_spread():
    assert_close(mean_centered(tensor([0.0, 10.0])), tensor([-5.0, 5.0]))


def test_max_rl_weighs_rare_success_more():
    assert_close(max_rl(tensor([1.0, 0.0, 0.0, 0.0]), epsilon=0.0), tensor([3.0, -1.0, -1.0, -1.0]))


def test_max_rl_adds_its_epsilon_to_the_mean():
    assert_close(max_rl(tensor([1.0, 0.0]), epsilon=0.5), tensor([0.5, -0.5]))


def test_max_rl_refuses_negative_rewards_which_would_turn_its_signs():
    with pytest.raises(ValueError, match="max_rl is defined for rewards of at least 0, got -2; add an offset"):
        max_rl(tensor([1.0, -2.0]))


def test_the_raw_advantage_of_a_group_of_one_is_its_reward_under_a_std_of_one():
    assert_close(grpo(tensor([3.0]), singleton="raw", epsilon=0.5), tensor([2.0]))  # 3 / (1 + 0.5)
    assert_close(grpo(tensor([3.0]), singleton="raw", epsilon=0.5, epsilon_mode="clamp"), tensor([3.0]))


def test_pass_at_k_pays_the_winner_its_lead():
    assert_close(pass_at_k(tensor([0.2, 1.0, 0.5])), tensor([0.0, 0.5, 0.0]))
    assert pass_at_k(tensor([1.0, 0.5, 1.0])).tolist() == [0.0, 0.0, 0.0], "nobody leads"
    assert_close(
        pass_at_k(tensor([0.0, 2.0]), normalise=True, epsilon=2 - 2**0.5), tensor([0.0, 1.0])
    )  # a spread of √2
    with pytest.raises(ValueError, match="pass_at_k needs at least 2 trajectories in a group, got 1; sample more"):
        pass_at_k(tensor([1.0]))


def test_raw_reward_is_the_reward():
    assert raw_reward(tensor([1, 2])).tolist() == [1.0, 2.0]


def test_cpgd_centres_or_leaves_the_reward():
    assert_close(cpgd(tensor([0.0, 4.0])), tensor([-2.0, 2.0]))
    assert_close(cpgd(tensor([0.0, 2.0]), center="raw"), tensor([0.0, 2.0]))
    assert_close(cpgd(tensor([0.0, 4.0]), center="normalised"), tensor([-1.0, 1.0]))


def test_reinforce_pp_whitens_over_the_batch():
    assert_close(reinforce_pp(tensor([0.0, 2.0]), ddof=0), tensor([-1.0, 1.0]))
    assert_close(reinforce_pp(tensor([0.0, 2.0]), ddof=0, epsilon=3.0), tensor([-0.5, 0.5]))
    assert_close(reinforce_pp(tensor([0.0, 2.0]), epsilon=0.0), tensor([-1.0, 1.0]) / 2**0.5)
    assert reinforce_pp(tensor([3.0])).tolist() == [0.0]


def test_reinforce_pp_baseline_centres_groups_first():
    rewards, groups = tensor([0.0, 2.0, 10.0, 12.0]), tensor([0, 0, 1, 1])
    assert_close(reinforce_pp_baseline(rewards, group_index_N=groups, ddof=0), tensor([-1.0, 1.0, -1.0, 1.0]))


def test_reinforce_pp_baseline_takes_no_rounding_off_a_group_of_equal_rewards():
    rewards, groups = tensor([0.1, 0.7, 0.3, 0.5, 0.5]), tensor([0, 0, 0, 1, 1])
    centred = over_groups(mean_centered, rewards, group_index_N=groups)
    assert centred.mean() != 0
    assert reinforce_pp_baseline(rewards, group_index_N=groups)[3:].tolist() == [0.0, 0.0]


def test_lite_ppo_divides_by_the_batch_spread():
    rewards, groups = tensor([0.0, 2.0, 4.0, 6.0]), tensor([0, 0, 1, 1])
    spread = rewards.std()
    assert_close(
        group_mean_batch_std(rewards, group_index_N=groups, epsilon=0.0), tensor([-1.0, 1.0, -1.0, 1.0]) / spread
    )
    assert_close(
        group_mean_batch_std(rewards, group_index_N=groups, epsilon=2.0), tensor([-1.0, 1.0, -1.0, 1.0]) / (spread + 2)
    )
    biased = group_mean_batch_std(rewards, group_index_N=groups, epsilon=0.0, ddof=0)
    assert_close(biased, tensor([-1.0, 1.0, -1.0, 1.0]) / 5**0.5)  # a variance of (9 + 1 + 1 + 9) / 4
    assert group_mean_batch_std(tensor([3.0]), group_index_N=tensor([0])).tolist() == [0.0]


def test_gdpo_normalises_each_component_before_it_sums():
    rewards, groups = tensor([[0.0, 100.0], [1.0, 0.0]]), tensor([0, 0])
    given = {"reward_component_names": ("right", "long"), "group_index_N": groups, "epsilon": 0.0}
    assert (gdpo(rewards, **given) == 0).all(), "both components cancel, whatever their scale"
    weighted = gdpo(rewards, **given, component_weights={"long": 0.0, "right": 1.0}, ddof=0)
    assert_close(weighted, tensor([-1.0, 1.0]))


def test_gdpo_adds_its_epsilon_to_both_spreads():
    """±1 over 1 + 1, then ±0.5 over 0.5 + 1."""
    given = {"reward_component_names": ("right",), "group_index_N": tensor([0, 0]), "epsilon": 1.0, "ddof": 0}
    assert_close(gdpo(tensor([[0.0], [2.0]]), **given), tensor([-1.0, 1.0]) / 3)


def test_gdpo_wants_a_weight_for_each_component():
    given = {"reward_component_names": ("format", "right"), "group_index_N": tensor([0, 0])}
    with pytest.raises(
        ValueError, match="component_weights are of right, and the judge's components are format, right"
    ):
        gdpo(torch.zeros(2, 2), **given, component_weights={"right": 1.0})


def test_gdpo_leaves_a_missing_component_out_of_its_groups_statistics():
    # `format` of 0 and 2 is ±1 (ddof 0); the third trajectory has none of it. All of `right` are equal.
    rewards, groups = tensor([[0.0, 1.0], [2.0, 1.0], [math.nan, 1.0]]), tensor([0, 0, 0])
    given = {"reward_component_names": ("format", "right"), "group_index_N": groups, "epsilon": 0.0, "ddof": 0}
    assert_close(gdpo(rewards, **given), tensor([-1.0, 1.0, 0.0]) * 1.5**0.5)  # whitened: the variance is 2/3


def test_opo_weighs_its_baseline_by_the_tokens_that_the_policy_wrote():
    mask = tensor([[True, True, True, False], [True, False, False, False]])  # a tool may have written the others
    assert_close(opo(tensor([1.0, 0.0]), loss_mask_NT=mask, group_index_N=tensor([0, 0])), tensor([0.25, -0.75]))


def test_opos_baseline_of_a_group_of_one_and_of_a_group_without_tokens_is_nothing():
    mask = tensor([[True], [False], [False], [True], [False]])
    rewards, groups = tensor([3.0, 1.0, 0.0, 1.0, 0.0]), tensor([0, 1, 1, 2, 2])
    assert opo(rewards, loss_mask_NT=mask, group_index_N=groups).tolist() == [3.0, 1.0, 0.0, 0.0, -1.0]


def test_gpg_scales_up_by_the_share_of_failures():
    rewards, groups = tensor([1.0, 0.0, 0.0, 0.0]), tensor([0, 0, 0, 0])
    assert_close(gpg(rewards, group_index_N=groups), 4 * tensor([0.75, -0.25, -0.25, -0.25]))
    assert_close(gpg(tensor([1.0, 0.0, 2.0, 1.0]), group_index_N=groups), tensor([0.0, -4.0, 4.0, 0.0]) / 3)
    assert gpg(torch.zeros(4), group_index_N=groups).tolist() == [0.0] * 4
    # A group of one has no baseline; two of three rewards are not 0.
    assert gpg(tensor([2.0, 0.0, 1.0]), group_index_N=tensor([0, 1, 1])).tolist() == [3.0, -0.75, 0.75]


def test_groups_may_lie_anywhere_in_the_batch():
    rewards, groups = tensor([0.0, 10.0, 2.0, 12.0]), tensor([7, 3, 7, 3])
    assert_close(over_groups(mean_centered, rewards, group_index_N=groups), tensor([-1.0, -1.0, 1.0, 1.0]))
