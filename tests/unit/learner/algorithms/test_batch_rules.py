"""Filters and shaping, with numbers worked out by hand."""

import math

import torch
from torch import tensor
from torch.testing import assert_close

from learner.algorithms.batch_rules import filters, shaping
from tests.unit.learner.algorithms.batches import row


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
        tensor([1.0] * 4), completion_lengths_G=tensor([80, 90, 95, 120]), max_length=100, cache=20
    )
    assert_close(got, tensor([1.0, 0.5, 0.25, 0.0]))


def test_a_cache_of_nothing_punishes_beyond_the_limit_only():
    got = shaping.overlong_penalty(tensor([1.0, 1.0]), completion_lengths_G=tensor([100, 101]), max_length=100, cache=0)
    assert got.tolist() == [1.0, 0.0]


def test_rewards_are_clipped_and_scaled():
    assert shaping.reward_clip(tensor([-3.0, 0.5]), low=-1.0, high=1.0).tolist() == [-1.0, 0.5]
    assert shaping.reward_scale(tensor([1.0]), factor=2.0, offset=1.0).tolist() == [4.0]
    assert shaping.advantage_clip(tensor([[3.0]]), low=-1.0, high=1.0).tolist() == [[1.0]]


def test_truncated_completions_lose_reward():
    truncated = tensor([True, False])
    assert shaping.truncation_penalty(tensor([2.0, 2.0]), truncated_G=truncated, coefficient=0.5).tolist() == [1.0, 2.0]
    assert shaping.truncation_penalty(tensor([2.0, 2.0]), truncated_G=truncated, coefficient=-1.0).tolist() == [
        -1.0,
        2.0,
    ]


def test_whitening_centres_or_adds_the_mean_back():
    given = {"loss_mask_NT": tensor([[True, True, False]]), "ddof": 0, "epsilon": 0.0}
    assert_close(shaping.whiten(row(1.0, 3.0, math.nan), **given), row(-1.0, 1.0, 0.0))
    assert_close(shaping.whiten(row(1.0, 3.0, math.nan), **given, center=False), row(1.0, 3.0, 0.0))
    assert (shaping.whiten(row(0.1, 0.1, 7.0), **given | {"epsilon": 1e-12}) == 0).all()
