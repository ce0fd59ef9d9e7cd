"""KL, returns, corrections, filters, shaping, controllers, masks: in sentences, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from learner.algorithms import kl, masks
from learner.algorithms.advantages.returns import cumulative_returns, gae
from learner.algorithms.batch_rules import filters, shaping
from learner.algorithms.corrections import importance, masking
from learner.algorithms.objective import proximal
from learner.algorithms.objective.controllers import AdaptiveKl, FixedKl, RunningMoments
from learner.algorithms.objective.token_rewards import place_rewards, subtract_kl

BOTH = tensor([[True, True]])
HOLE = tensor([[True, False, True]])


def row(*values: float) -> Tensor:
    return tensor([values], dtype=torch.float64)


def test_kl_estimators_of_a_ratio_of_two():
    given = {"other_logprobs_BT": row(-1.0 - math.log(2), -1.0), "loss_mask_BT": BOTH}
    policy = row(-1.0, -1.0)
    assert_close(kl.k1(policy, **given), row(math.log(2), 0.0))
    assert_close(kl.k2(policy, **given), row(math.log(2) ** 2 / 2, 0.0))
    assert_close(kl.k3(policy, **given), row(0.5 + math.log(2) - 1, 0.0))
    assert_close(kl.drift(policy, **given), row(2 - math.log(2) - 1, 0.0))


def test_unbiased_kl_weighs_k3_by_the_ratio():
    given = {
        "other_logprobs_BT": row(-2.0, -2.0),
        "proximal_logprobs_BT": row(-1.0 - math.log(3), -1.0),
        "loss_mask_BT": BOTH,
    }
    k3 = math.exp(-1) + 1 - 1
    assert_close(kl.unbiased(row(-1.0, -1.0), **given), row(3 * k3, k3))


def test_a_clamp_bounds_a_kl_that_would_overflow():
    got = kl.k3(row(-1000.0), other_logprobs_BT=row(-1.0), loss_mask_BT=tensor([[True]]), log_ratio_clamp=10.0)
    assert_close(got, row(math.exp(10) - 10 - 1))


def test_gae_skips_holes_and_ends_at_zero():
    advantages, returns = gae(
        row(0.0, math.nan, 1.0), values_NT=row(0.5, math.inf, 0.25), loss_mask_NT=HOLE, gamma=0.5, lambda_=0.5
    )
    last = 1.0 - 0.25
    first = 0.5 * 0.25 - 0.5 + 0.25 * last
    assert_close(advantages, row(first, 0.0, last))
    assert_close(returns, row(first + 0.5, 0.0, 1.0))


def test_gae_may_discount_through_holes():
    advantages, _ = gae(
        row(0.0, 0.0, 1.0), values_NT=row(0.0, 0.0, 0.0), loss_mask_NT=HOLE, gamma=0.5, lambda_=1.0, holes="discount"
    )
    assert_close(advantages, row(0.25, 0.0, 1.0))


def test_returns_discount_what_is_to_come():
    assert_close(cumulative_returns(row(1.0, 9.0, 4.0), loss_mask_NT=HOLE, gamma=0.5), row(3.0, 0.0, 4.0))


def test_a_reward_lands_on_the_last_token_or_on_every_one():
    mask = tensor([[True, True, False], [False, False, False]])
    rewards = tensor([2.0, 3.0])
    assert place_rewards(rewards, loss_mask_NT=mask).tolist() == [[0, 2, 0], [0, 0, 0]]
    assert place_rewards(rewards, loss_mask_NT=mask, placement="every_token").tolist() == [[2, 2, 0], [0, 0, 0]]


def test_kl_is_taken_off_the_reward_where_unmasked():
    got = subtract_kl(row(1.0, 1.0, 1.0), kl_NT=row(2.0, math.nan, 0.0), coefficient=0.5, loss_mask_NT=HOLE)
    assert got.tolist() == [[0.0, 0.0, 1.0]]


def correction(function, *values: float, **params) -> list[list[float]]:
    rollout = torch.full((1, len(values)), -2.0, dtype=torch.float64)
    mask = torch.ones_like(rollout, dtype=torch.bool)
    proximal = rollout + tensor([values], dtype=torch.float64).log()
    return function(proximal, rollout_logprobs_BT=rollout, loss_mask_BT=mask, **params).tolist()[0]


def test_tis_truncates_and_icepop_drops():
    assert correction(importance.tis, 0.5, 4.0) == pytest.approx([0.5, 2.0])
    assert correction(importance.icepop, 0.4, 4.0, 6.0) == pytest.approx([0.0, 4.0, 0.0])


def test_tis_of_a_sequence_multiplies_its_tokens():
    assert correction(importance.tis, 2.0, 2.0, cap=5.0, level="sequence") == pytest.approx([4.0, 4.0])
    assert correction(importance.tis, 4.0, 1.0, cap=5.0, level="geometric") == pytest.approx([2.0, 2.0])


def test_the_decoupled_weight_is_the_plain_ratio():
    assert correction(importance.decoupled, 7.0) == pytest.approx([7.0])
    assert correction(importance.decoupled, 7.0, cap=3.0) == pytest.approx([3.0])


def test_sequence_mask_looks_at_the_geometric_mean():
    assert correction(masking.sequence_mask, 2.0, 0.5) == [1.0, 1.0]
    assert correction(masking.sequence_mask, 1.1, 1.1) == [0.0, 0.0]


def test_rejection_by_divergence():
    assert correction(masking.rejection, 1.0, 2.0, high=0.1) == [1.0, 0.0]
    assert correction(masking.rejection, 1.0, 2.0, high=0.1, level="max") == [0.0, 0.0]
    assert correction(masking.rejection, 1.0, 1.1, high=0.1, level="mean") == [1.0, 1.0]
    assert correction(masking.rejection, 1.0, 4.0, high=0.2, estimator="tv") == [1.0, 0.0]


def test_opsm_drops_bad_trajectories_that_the_policy_left():
    rollout, policy = torch.full((2, 2), -1.0), torch.full((2, 2), -2.0)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = tensor([[-1.0, -1.0], [1.0, 1.0]])
    got = masking.opsm(policy, rollout_logprobs_BT=rollout, advantages_BT=advantages, loss_mask_BT=mask, delta=0.1)
    assert got.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_the_approximate_proximal_policy_goes_with_the_lag():
    got = proximal.approximate_proximal(
        row(-3.0, -3.0, -3.0), policy_logprobs_BT=row(-1.0, -1.0, -1.0), lags_BT=tensor([[0, 1, 4]])
    )
    assert_close(got, row(-3.0, -3.0, -1.5))


def test_zero_variance_drops_groups_that_teach_nothing():
    assert not filters.zero_variance(tensor([0.7, 0.7]))
    assert filters.zero_variance(tensor([0.0, 1.0]))


def test_overlong_trajectories_are_left_out():
    assert filters.overlong_mask(tensor([True, False])).tolist() == [False, True]


def test_high_entropy_tokens_are_chosen_over_the_batch_or_in_each_row():
    entropies = tensor([[4.0, 3.0], [2.0, 1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    over_batch = filters.high_entropy_tokens(entropies, loss_mask_NT=mask, share=0.5)
    assert over_batch.gradient_NT.tolist() == [[True, True], [False, False]]
    assert over_batch.denominator_NT.all()
    in_rows = filters.high_entropy_tokens(entropies, loss_mask_NT=mask, share=0.5, over="sequence", denominator="kept")
    assert in_rows.gradient_NT.tolist() == [[True, False], [True, False]]
    assert in_rows.denominator_NT.tolist() == [[True, False], [True, False]]


def test_group_weights_make_up_for_groups_without_variance():
    advantages = tensor([[-1.0], [1.0], [3.0], [3.0]])
    given = {"rewards_N": tensor([0.0, 1.0, 0.5, 0.5]), "group_index_N": tensor([0, 0, 1, 1])}
    assert shaping.group_weights(advantages, **given).flatten().tolist() == [-2.0, 2.0, 3.0, 3.0]
    capped = shaping.group_weights(advantages, **given, cap=1.5, constant_weight=0.0)
    assert capped.flatten().tolist() == [-1.5, 1.5, 0.0, 0.0]


def test_the_overlong_penalty_is_soft_inside_the_cache():
    got = shaping.overlong_penalty(
        tensor([1.0] * 4), completion_lengths_N=tensor([80, 90, 95, 120]), max_length=100, cache=20
    )
    assert_close(got, tensor([1.0, 0.5, 0.25, 0.0]))


def test_a_cache_of_nothing_punishes_beyond_the_limit_only():
    got = shaping.overlong_penalty(tensor([1.0, 1.0]), completion_lengths_N=tensor([100, 101]), max_length=100, cache=0)
    assert got.tolist() == [1.0, 0.0]


def test_rewards_are_clipped_and_scaled():
    assert shaping.reward_clip(tensor([-3.0, 0.5]), low=-1.0, high=1.0).tolist() == [-1.0, 0.5]
    assert shaping.reward_scale(tensor([1.0]), factor=2.0, offset=1.0).tolist() == [4.0]
    assert shaping.advantage_clip(tensor([[3.0]]), low=-1.0, high=1.0).tolist() == [[1.0]]


def test_truncated_completions_lose_reward():
    cut = tensor([True, False])
    assert shaping.truncation_penalty(tensor([2.0, 2.0]), truncated_N=cut, coefficient=0.5).tolist() == [1.0, 2.0]
    assert shaping.truncation_penalty(tensor([2.0, 2.0]), truncated_N=cut, coefficient=-1.0).tolist() == [-1.0, 2.0]
    with pytest.raises(ValueError, match="coefficient=1"):
        shaping.truncation_penalty(tensor([2.0]), truncated_N=tensor([True]), coefficient=1.5)


def test_whitening_centres_or_adds_the_mean_back():
    given = {"loss_mask_NT": tensor([[True, True, False]]), "ddof": 0, "epsilon": 0.0}
    assert_close(shaping.whiten(row(1.0, 3.0, math.nan), **given), row(-1.0, 1.0, 0.0))
    assert_close(shaping.whiten(row(1.0, 3.0, math.nan), **given, center=False), row(1.0, 3.0, 0.0))
    assert (shaping.whiten(row(0.1, 0.1, 7.0), **given | {"epsilon": 1e-12}) == 0).all()


def test_moments_of_nothing_are_zero():
    nothing = tensor([[False, False]])
    assert masks.masked_mean(row(math.nan, 1.0), loss_mask_BT=nothing).item() == 0
    assert masks.whiten(row(math.nan, 1.0), loss_mask_BT=nothing).tolist() == [[0.0, 0.0]]


def test_half_precision_is_kept_only_inside_its_context():
    half = torch.ones(1, dtype=torch.bfloat16)
    with masks.half_precision_kept():
        assert masks.at_least_float32(half).dtype == torch.bfloat16
    assert masks.at_least_float32(half).dtype == torch.float32


def test_the_adaptive_coefficient_follows_the_measured_kl():
    controller = AdaptiveKl(coefficient=0.1, target=6.0, horizon=100)
    assert controller.observe(12.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 1.02)
    assert controller.observe(0.0, num_trajectories=10).coefficient == pytest.approx(0.1 * 0.98)
    assert FixedKl(coefficient=0.1).observe(99.0, num_trajectories=10).coefficient == 0.1


def test_running_moments_are_those_of_everything_so_far():
    moments, mean, std = RunningMoments().update(tensor([1.0, 3.0]))
    assert (mean, std) == pytest.approx((2.0, 2**0.5))
    moments, _, single = moments.update(tensor([8.0]))
    assert single == 0.0
    assert (moments.mean, moments.std) == pytest.approx((4.0, tensor([1.0, 3.0, 8.0]).std().item()))
