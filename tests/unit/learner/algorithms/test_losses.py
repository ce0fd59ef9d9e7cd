"""Losses in sentences, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from cluster.contracts.plugins import Plugin, find
from learner.algorithms.batch_rules.aggregation import (
    aggregate,
    prompt_mean,
    sequence_mean,
    sequence_sum_mean,
    sequence_sum_over_length,
    token_mean,
)
from learner.algorithms.batch_rules.aggregation import sum as token_sum
from learner.algorithms.losses import covariance, sequence
from learner.algorithms.losses.policy import (
    cispo,
    clipped_ratio,
    cpgd,
    dppo,
    dro,
    importance_sampling,
    ppo_clip,
    reinforce,
    sapo,
)
from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.losses.values import value_clip
from learner.algorithms.registry.homes import HOMES

YES = tensor([[True, True, True, True]])


def ratios(*values: float) -> dict[str, Tensor]:
    """Log-probs whose ratios are these."""
    old = torch.full((1, len(values)), -1.0, dtype=torch.float64)
    return {"policy": old + tensor([values], dtype=torch.float64).log(), "proximal_logprobs_BT": old}


def run(function, values: tuple[float, ...], advantages: list[float], **params) -> TokenLosses:
    given = ratios(*values)
    mask = torch.ones(1, len(values), dtype=torch.bool)
    A = tensor([advantages], dtype=torch.float64)
    result = function(given.pop("policy"), **given, advantages_BT=A, loss_mask_BT=mask, **params)
    return result if isinstance(result, TokenLosses) else TokenLosses(result)


def row(*values: float) -> Tensor:
    return tensor([values], dtype=torch.float64)


def test_ppo_holds_the_ratio_only_where_that_helps():
    got = run(ppo_clip, (1.5, 0.5, 1.5, 0.5), [0.5, 0.5, -0.5, -0.5])
    assert_close(got.losses_BT, row(-0.6, -0.25, 0.75, 0.4))
    assert got.clipped_high_BT.tolist() == [[True, False, False, False]]
    assert got.clipped_low_BT.tolist() == [[False, False, False, True]]
    assert got.clipped_dual_BT is None


def test_dapo_clips_higher():
    assert_close(run(ppo_clip, (1.5,), [1.0], epsilon_high=0.28).losses_BT, row(-1.28))


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    got = run(ppo_clip, (10.0, 10.0, 0.5, 2.0), [-1.0, 1.0, -1.0, -1.0], dual_clip=3.0)
    assert_close(got.losses_BT, row(3.0, -1.2, 0.8, 2.0))
    assert got.clipped_dual_BT.tolist() == [[True, False, False, False]]
    assert got.clipped_low_BT.tolist() == [[False, False, True, False]]


def test_delta_bounds_the_unclipped_ratio_on_both_sides():
    assert_close(run(ppo_clip, (10.0,), [-1.0], delta=4.0).losses_BT, row(4.0))
    assert_close(run(ppo_clip, (10.0,), [1.0], delta=1.1).losses_BT, row(-1.1))
    # −min(1.1 · −1, 1.2 · −1): the clipped ratio is the larger one.
    assert_close(run(ppo_clip, (10.0,), [-1.0], delta=1.1).losses_BT, row(1.2))


def test_a_log_ratio_clamp_cuts_value_and_gradient():
    got = run(ppo_clip, (math.exp(30),), [-1.0], log_ratio_clamp=20.0)
    assert_close(got.losses_BT, row(math.exp(20)))


def test_no_advantage_is_no_loss_whatever_the_ratio():
    for name in ("ppo_clip", "importance_sampling", "cispo", "sapo", "gspo", "gmpo", "cpgd", "clipped_ratio"):
        got = run(find(Plugin(name=name), home=HOMES["policy_loss"], field="policy_loss"), (math.exp(200.0),), [0.0])
        assert got.losses_BT.tolist() == [[0.0]], name


def test_reinforce_weighs_log_probs():
    policy, mask = row(-2.0, -3.0), tensor([[True, True]])
    assert_close(reinforce(policy, advantages_BT=row(1.0, -1.0), loss_mask_BT=mask), row(2.0, -3.0))
    assert_close(reinforce(policy, advantages_BT=row(1.0, -1.0), loss_mask_BT=mask, positive_part=True), row(2.0, 0.0))


def test_importance_sampling_has_no_clip():
    assert_close(run(importance_sampling, (5.0,), [2.0]).losses_BT, row(-10.0))


def test_the_clipped_ratio_takes_the_gradient_outside():
    got = run(clipped_ratio, (5.0, 0.1, 1.1), [1.0, 1.0, 1.0])
    assert_close(got.losses_BT, row(-1.2, -0.8, -1.1))
    assert got.clipped_high_BT.tolist() == [[True, False, False]]
    assert got.clipped_low_BT.tolist() == [[False, True, False]]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    policy = ratios(10.0, 3.0, 0.1)["policy"].requires_grad_()
    given = {"proximal_logprobs_BT": row(-1.0, -1.0, -1.0), "advantages_BT": row(2.0, 2.0, -2.0)}
    got = cispo(policy, **given, loss_mask_BT=tensor([[True] * 3]), epsilon_max=5.0, epsilon_min=0.5)
    got.losses_BT.sum().backward()
    assert_close(policy.grad, row(-10.0, -6.0, 1.0))
    assert got.clipped_high_BT.tolist() == [[True, False, False]]
    assert got.clipped_low_BT.tolist() == [[False, False, True]]


def test_cpgd_clips_the_log_ratio():
    got = run(cpgd, (2.0, 0.5, 2.0, 0.5), [0.5, -0.5, -0.5, 0.5])
    held, free = row(-math.log(1.2), math.log(0.8)), row(math.log(2.0), math.log(2.0))
    assert_close(got.losses_BT, 0.5 * torch.cat([held, free], 1))
    assert got.clipped_high_BT.tolist() == [[True, False, False, False]]
    assert got.clipped_low_BT.tolist() == [[False, True, False, False]]
    with_offset = run(cpgd, (2.0, 0.5, 2.0, 0.5), [0.5, -0.5, -0.5, 0.5], offset="old_logprob")
    assert_close(
        with_offset.losses_BT - got.losses_BT, row(0.5, -0.5, -0.5, 0.5)
    )  # -log π_old · A, of a log-prob of -1


def test_sapo_is_half_open_at_ratio_one():
    assert_close(run(sapo, (1.0, 1.0), [1.0, -1.0]).losses_BT, row(-2.0, 2 / 1.05))


def test_gspo_gives_all_tokens_the_mean_log_ratio():
    got = run(sequence.gspo, (4.0, 1.0), [1.0, 1.0], epsilon_low=0.5, epsilon_high=5.0)
    assert_close(got.losses_BT, row(-2.0, -2.0))


@pytest.mark.parametrize("function", [sequence.gspo, sequence.gspo_token])
def test_gspo_holds_its_log_ratio_at_a_maximum(function):
    assert_close(run(function, (math.exp(30.0),), [-1.0], log_ratio_max=10.0).losses_BT, row(math.exp(10.0)))


def test_gspo_token_equals_gspo_when_the_advantage_is_constant():
    gradients = []
    for function in (sequence.gspo, sequence.gspo_token):
        policy = ratios(1.5, 0.9, 1.1)["policy"].requires_grad_()
        given = {"proximal_logprobs_BT": row(-1.0, -1.0, -1.0), "advantages_BT": row(1.0, 1.0, 1.0)}
        token = function(policy, **given, loss_mask_BT=tensor([[True] * 3]), epsilon_low=0.5, epsilon_high=0.5)
        token.losses_BT.mean().backward()
        gradients.append(policy.grad)
    assert_close(gradients[0], gradients[1])


def test_gmpo_clips_each_token_then_takes_the_geometric_mean():
    got = run(sequence.gmpo, (math.exp(1.0), 1.0), [1.0, 1.0])
    assert_close(got.losses_BT, -torch.full((1, 2), math.exp(0.2), dtype=torch.float64))
    assert (got.clipped_high_BT.tolist(), got.clipped_low_BT.any().item()) == ([[True, False]], False)
    longer = run(sequence.gmpo, (math.exp(1.0), 1.0), [1.0, 1.0], length_epsilon=2.0)  # means over 2 + 2 tokens
    assert_close(longer.losses_BT, -0.5 * torch.full((1, 2), math.exp(0.1), dtype=torch.float64))
    worse = run(sequence.gmpo, (math.exp(-1.0), 1.0), [-0.5, -0.5])
    assert_close(worse.losses_BT, torch.full((1, 2), 0.5 * math.exp(-0.2), dtype=torch.float64))
    assert (worse.clipped_low_BT.tolist(), worse.clipped_high_BT.any().item()) == ([[True, False]], False)


def test_gmpo_holds_a_ratio_only_where_that_helps():
    for log_ratio, advantage in ((1.0, -0.5), (-1.0, 0.5)):
        got = run(sequence.gmpo, (math.exp(log_ratio), 1.0), [advantage, advantage])
        assert_close(got.losses_BT, torch.full((1, 2), -advantage * math.exp(log_ratio / 2), dtype=torch.float64))
        assert not got.clipped_BT.any()


def test_vespo_weighs_a_trajectory_by_its_whole_ratio():
    given = {
        "rollout_logprobs_BT": row(-1.0, -1.0),
        "advantages_BT": row(1.0, 1.0),
        "loss_mask_BT": tensor([[True, True]]),
    }
    got = sequence.vespo(row(-1.0, -1.0), **given)
    assert_close(got, row(1.0, 1.0))
    assert_close(sequence.vespo(row(-60.0, -1.0), **given), row(0.0, 0.0))
    held = math.exp(2 * -1.0 + 3 * (1 - math.exp(-1.0)))
    assert_close(sequence.vespo(row(-60.0, -1.0), **given, log_weight_min=-1.0), row(60 * held, held))


def test_vespos_powers_are_by_the_sign_of_the_advantage():
    """W = 2: 2²·exp(3·(1 − 2)) and 2³·exp(2·(1 − 2))."""
    given = {"rollout_logprobs_BT": row(-1 - math.log(2), -1.0), "loss_mask_BT": tensor([[True, True]])}
    better = sequence.vespo(row(-1.0, -1.0), advantages_BT=row(0.5, 0.5), **given)
    worse = sequence.vespo(row(-1.0, -1.0), advantages_BT=row(-0.5, -0.5), **given)
    assert_close(better, row(1.0, 1.0) * 2 * math.exp(-3))
    assert_close(worse, row(1.0, 1.0) * -4 * math.exp(-2))


def test_dppo_lets_a_rare_token_have_any_ratio():
    given = {"advantages_BT": row(1.0, 1.0), "loss_mask_BT": tensor([[True, True]])}
    old, new = tensor([[0.001, 0.5]]).double().log(), tensor([[0.1, 0.9]]).double().log()
    got = dppo(new, rollout_logprobs_BT=old, **given)
    assert_close(got.losses_BT, row(-100.0, 0.0))
    assert got.clipped_high_BT.tolist() == [[False, True]]


def moved(old: float, new: float, advantage: float, **params) -> TokenLosses:
    """`dppo` of a token whose probability was `old` and is `new`."""
    given = {"advantages_BT": row(advantage), "loss_mask_BT": tensor([[True]])}
    return dppo(row(math.log(new)), rollout_logprobs_BT=row(math.log(old)), **given, **params)


def test_dppo_holds_a_token_that_moved_too_far_the_way_its_advantage_pushes_it():
    down, up = moved(0.5, 0.1, -0.5), moved(0.5, 0.9, 0.5)
    assert (down.losses_BT.item(), down.clipped_low_BT.item(), down.clipped_high_BT.item()) == (0.0, True, False)
    assert (up.losses_BT.item(), up.clipped_low_BT.item(), up.clipped_high_BT.item()) == (0.0, False, True)
    for old, new, advantage in ((0.5, 0.1, 0.5), (0.5, 0.9, -0.5), (0.5, 0.4, -0.5), (0.5, 0.6, 0.5)):
        inside = moved(old, new, advantage)
        assert_close(inside.losses_BT, row(-new / old * advantage))
        assert not inside.clipped_BT.any()


def test_dppo_measures_by_the_probability_or_by_the_kl_of_drawing_the_token_or_not():
    # 0.4 between the probabilities; 0.5 log(0.5/0.9) + 0.5 log(0.5/0.1) = 0.51 nats.
    assert_close(moved(0.5, 0.9, 1.0, threshold_high=0.45).losses_BT, row(-1.8))
    assert moved(0.5, 0.9, 1.0, threshold_high=0.45, divergence="kl").losses_BT.item() == 0.0
    assert_close(moved(0.5, 0.9, 1.0, threshold_high=0.55, divergence="kl").losses_BT, row(-1.8))


def test_dppo_takes_a_log_prob_rounded_to_above_0_for_a_certain_token():
    given = {"advantages_BT": row(-1.0), "loss_mask_BT": tensor([[True]]), "divergence": "kl"}
    held = dppo(row(-1e-3), rollout_logprobs_BT=row(1e-7), **given)
    assert_close(held.losses_BT, row(math.exp(-1e-3 - 1e-7)))
    assert not held.clipped_BT.any()


def test_dppo_caps_its_ratio_and_may_take_the_score_functions_gradient():
    capped = moved(0.5, 0.9, -1.0, ratio_cap=1.5)
    assert_close(capped.losses_BT, row(1.5))
    assert capped.clipped_dual_BT.item() and not moved(0.5, 0.9, -1.0, ratio_cap=2.0).clipped_dual_BT.any()
    assert_close(moved(0.5, 0.9, -1.0, score_function=True).losses_BT, row(1.8 * math.log(0.9)))
    assert_close(moved(0.5, 0.9, -1.0, score_function=True, ratio_cap=1.5).losses_BT, row(1.5 * math.log(0.9)))
    # −ρA where ρ = 1.8: held at 1.5, the ratio has no gradient, and the score function still has.
    for params, gradient in (({}, 1.8), ({"ratio_cap": 1.5}, 0.0)):
        assert_close(_gradient_of_dppo(**params), row(gradient))
    for params, gradient in (({}, 1.8), ({"ratio_cap": 1.5}, 1.5)):
        assert_close(_gradient_of_dppo(**params, score_function=True), row(gradient))


def _gradient_of_dppo(**params) -> Tensor:
    """Of a token whose probability was 0.5 and is 0.9, and whose advantage is -1."""
    policy = row(math.log(0.9)).requires_grad_()
    given = {"rollout_logprobs_BT": row(math.log(0.5)), "advantages_BT": row(-1.0), "loss_mask_BT": tensor([[True]])}
    dppo(policy, **given, **params).losses_BT.sum().backward()
    return policy.grad


@pytest.mark.parametrize(("function", "sign"), [(ppo_clip, -1.0), (clipped_ratio, 1.0), (cpgd, -1.0)])
@pytest.mark.parametrize("epsilon_low", [1.0, 1.5])
def test_a_lower_epsilon_of_one_holds_no_ratio(function, sign, epsilon_low):
    got = run(function, (math.exp(-9.0),), [sign], epsilon_low=epsilon_low)
    assert_close(got.losses_BT, row(-9.0 if function is cpgd else math.exp(-9.0)) * -sign)
    assert not got.clipped_BT.any()


def test_dro_pulls_back_in_log_space():
    assert_close(run(dro, (math.exp(3.0),), [0.0], beta=2.0).losses_BT, row(9.0))


def test_clip_cov_silences_the_token_of_highest_covariance():
    cov = row(0.1, 3.0, 9.0)
    params = {"covariances_BT": cov, "batch_covariances_M": cov[0], "cov_share": 0.34}
    got = run(covariance.clip_cov, (1.0, 1.0, 1.0), [1.0, 1.0, 1.0], **params)
    assert_close(got.losses_BT, row(-1.0, 0.0, -1.0))


COVARIANCES = (0.5, 2.0, 4.0, 3.0, 9.0)
"""Those from 1 to 5 are in `clip_cov`'s range."""


def of_covariances(function, ratio: float, share: float, **params) -> list[float]:
    cov = row(*COVARIANCES)
    params |= {"covariances_BT": cov, "batch_covariances_M": cov[0], "cov_share": share}
    return run(function, (ratio,) * 5, [1.0] * 5, **params).losses_BT[0].tolist()


@pytest.mark.parametrize(
    ("share", "silent"), [(0.5, [False, False, True, True, False]), (0.1, [False, False, True, False, False])]
)
def test_clip_cov_silences_a_share_of_all_tokens_and_at_least_one(share, silent):
    assert of_covariances(covariance.clip_cov, 1.0, share) == [0.0 if each else -1.0 for each in silent]
    assert of_covariances(covariance.clip_cov, 1.0, 1.0) == [-1.0, 0.0, 0.0, 0.0, -1.0], "no more are in the range"


def test_kl_cov_punishes_a_share_of_all_tokens_and_at_least_one():
    free, punished = -math.exp(-2), 2 * 0.5 - math.exp(-2)
    given = {"ratio": math.exp(-2), "kl_coefficient": 0.5}
    both = of_covariances(covariance.kl_cov, share=0.5, **given)
    assert both == pytest.approx([free, free, punished, free, punished])
    assert of_covariances(covariance.kl_cov, share=0.1, **given) == pytest.approx([free, free, free, free, punished])


def test_covariances_of_no_tokens_choose_none():
    none = {"covariances_BT": row(-math.inf), "batch_covariances_M": torch.empty(0)}
    for function in (covariance.clip_cov, covariance.kl_cov):
        assert run(function, (1.0,), [1.0], **none).losses_BT.tolist() == [[-1.0]]


@pytest.mark.parametrize(("cov", "by_covariance"), [(3.0, True), (0.5, False)])
def test_clip_cov_says_which_tokens_its_bounds_hold_and_which_its_covariances(cov, by_covariance):
    """The first is below the range of covariances, as is the second under the other of its values."""
    params = {"covariances_BT": row(0.1, cov), "batch_covariances_M": tensor([0.1, cov]).double()}
    got = run(covariance.clip_cov, (1.5, 1.0), [1.0, 1.0], **params)
    assert (got.clipped_low_BT.tolist(), got.clipped_high_BT.tolist()) == ([[False, False]], [[True, False]])
    assert got.clipped_covariance_BT.tolist() == [[False, by_covariance]]
    assert got.clipped_BT.tolist() == [[True, by_covariance]]


def test_clip_cov_leaves_the_value_of_a_token_that_a_bound_holds():
    params = {"covariances_BT": row(3.0), "batch_covariances_M": tensor([3.0]).double()}
    got = run(covariance.clip_cov, (1.5,), [1.0], **params)
    assert_close(got.losses_BT, row(-1.2))
    assert (got.clipped_high_BT.tolist(), got.clipped_covariance_BT.tolist()) == ([[True]], [[False]])


def test_kl_cov_punishes_the_token_of_highest_covariance():
    cov = row(0.1, 3.0)
    params = {"covariances_BT": cov, "batch_covariances_M": cov[0], "cov_share": 0.5, "kl_coefficient": 1.0}
    got = run(covariance.kl_cov, (math.e, math.e), [1.0, 1.0], **params)
    assert_close(got.losses_BT, row(-math.e, 1 - math.e))


def test_covariance_is_of_advantage_and_log_prob_over_the_batch():
    mask = tensor([[True, True, False]])
    got = covariance.covariances(row(-1.0, -3.0, math.nan), advantages_NT=row(1.0, 0.0, math.nan), loss_mask_NT=mask)
    assert_close(got, row(0.5, 0.5, -math.inf))


@pytest.mark.parametrize("advantage", [0.0, 0.1])
def test_equal_advantages_have_covariances_of_exactly_0_and_kl_cov_punishes_no_token(advantage):
    """The mean of nineteen times 0.1 is not 0.1 in float64: rounding would choose among the tokens."""
    mask, advantages = torch.ones(1, 19, dtype=torch.bool), [advantage] * 19
    logprobs = torch.linspace(-3.0, -0.1, 19, dtype=torch.float64)[None]
    cov = covariance.covariances(logprobs, advantages_NT=row(*advantages), loss_mask_NT=mask)
    assert (cov == 0).all()
    params = {"covariances_BT": cov, "batch_covariances_M": cov[0], "cov_share": 0.5}
    got = run(covariance.kl_cov, (math.e,) * 19, advantages, **params)
    assert_close(got.losses_BT, row(*[-math.e * advantage] * 19))


def test_kl_cov_still_punishes_a_token_of_negative_covariance_in_a_large_share():
    cov = row(3.0, 0.0, 0.0, -1.0, -2.0)
    params = {"covariances_BT": cov, "batch_covariances_M": cov[0], "cov_share": 0.8}
    got = run(covariance.kl_cov, (math.e,) * 5, [1.0] * 5, **params)
    assert_close(got.losses_BT, row(1.0, 0.0, 0.0, 1.0, 0.0) - math.e)


def test_values_are_held_near_the_old_ones():
    given = {"old_values_BT": row(0.0, 0.0), "returns_BT": row(1.0, -1.0), "loss_mask_BT": tensor([[True, True]])}
    got = value_clip(row(1.0, 1.0), **given)
    assert_close(got.losses_BT, row(0.5 * 0.8**2, 0.5 * 2.0**2))
    assert (got.clipped_low_BT.tolist(), got.clipped_high_BT.tolist()) == ([[False, False]], [[True, False]])
    below = value_clip(row(-1.0, -1.0), **given)
    assert_close(below.losses_BT, row(0.5 * 2.0**2, 0.5 * 0.8**2))
    assert (below.clipped_low_BT.tolist(), below.clipped_high_BT.tolist()) == ([[False, True]], [[False, False]])
    assert_close(value_clip(row(1.0, 1.0), **given, clip_range=None).losses_BT, row(0.0, 2.0))


MASK = tensor([[True, True, True], [True, False, False], [False, False, False]])


def test_aggregations_differ_in_what_they_divide_by():
    ones = torch.ones(3, 3, dtype=torch.float64)
    assert aggregate(ones, weights_BT=token_sum(MASK)).item() == 4
    assert_close(token_mean(MASK)[0], torch.full((3,), 0.25, dtype=torch.float64))
    assert_close(sequence_mean(MASK), tensor([[1 / 6] * 3, [1 / 2, 0, 0], [0, 0, 0]], dtype=torch.float64))
    assert_close(sequence_mean(MASK, empty_rows="count")[1, 0].item(), 1 / 3)
    assert_close(sequence_mean(MASK, epsilon=1.0)[:2, 0], tensor([1 / 8, 1 / 4]).double())
    assert_close(sequence_sum_mean(MASK)[1, 0].item(), 1 / 2)
    assert_close(sequence_sum_over_length(MASK, max_length=10)[1, 0].item(), 1 / 30)
    assert_close(sequence_sum_over_length(MASK)[1, 0].item(), 1 / 9)


@pytest.mark.parametrize("rule", [token_mean, sequence_mean, sequence_sum_mean, sequence_sum_over_length, token_sum])
def test_a_mask_of_numbers_weighs_its_tokens(rule):
    """As an aggregation of one's own may have it."""
    assert_close(rule(MASK.float()), rule(MASK), rtol=0, atol=0)
    assert_close(token_mean(tensor([[2.0, 1.0, 1.0]])), tensor([[0.5, 0.25, 0.25]]).double())


def test_prompt_mean_counts_each_prompt_once():
    weights = prompt_mean(MASK, group_index_N=tensor([5, 5, 9]))
    assert_close(weights.sum().item(), 1.0)
    assert_close(weights[1, 0].item(), 1 / 4)
    of_two = prompt_mean(MASK, group_index_N=tensor([9, 5, 5]))  # of three tokens, and of one
    assert_close(of_two[:, 0], tensor([1 / 6, 1 / 2, 0]).double())


def test_a_batch_of_nothing_has_a_loss_of_zero():
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    for weigh in (token_mean, sequence_mean, sequence_sum_mean, sequence_sum_over_length, token_sum):
        assert aggregate(torch.full((2, 2), math.nan), weights_BT=weigh(nothing)).item() == 0
    by_prompt = prompt_mean(nothing, group_index_N=tensor([0, 1]))
    assert aggregate(torch.full((2, 2), math.nan), weights_BT=by_prompt).item() == 0


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo"])
def test_clip_fractions_count_what_a_bound_changed(name):
    got = run(find(Plugin(name=name), home=HOMES["policy_loss"], field="policy_loss"), (1.0, 1.0), [1.0, -1.0])
    assert not got.clipped_BT.any()
