"""Filters and shaping, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from cluster.contracts.errors import DataError
from learner.algorithms.batch_rules import filters, shaping
from learner.algorithms.moments import RunningMoments
from tests.unit.learner.algorithms.batches import row


def test_zero_variance_drops_groups_that_teach_nothing():
    assert not filters.zero_variance(tensor([0.7, 0.7]))
    assert filters.zero_variance(tensor([0.0, 1.0]))


def test_a_group_teaches_where_any_component_differs_among_those_that_have_it():
    nan = math.nan
    assert filters.zero_variance_components(tensor([[1.0, 0.0], [1.0, 2.0]]))
    assert not filters.zero_variance_components(tensor([[1.0, nan, nan], [1.0, 2.0, nan], [nan, 2.0, nan]]))


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


def test_a_share_of_tokens_is_of_those_that_count():
    entropies, mask = tensor([[1.0, 9.0, 3.0]]), tensor([[True, False, True]])
    for over in ("batch", "sequence"):
        chosen = filters.high_entropy_tokens(entropies, loss_mask_NT=mask, share=0.5, over=over)
        assert chosen.gradient_NT.tolist() == [[False, False, True]], over


@pytest.mark.parametrize(("share", "num_kept"), [(0.0, 0), (1 / 3, 2), (2 / 3, 3), (1.0, 4)])
def test_a_quantile_that_is_a_token_keeps_it(share, num_kept):
    entropies, mask = tensor([[0.1, 0.2, 0.3, 0.4]]), torch.ones(1, 4, dtype=torch.bool)
    kept = filters.high_entropy_tokens(entropies, loss_mask_NT=mask, share=share).gradient_NT
    assert kept.tolist() == [[False] * (4 - num_kept) + [True] * num_kept]


def test_a_quantile_keeps_its_token_in_the_float64_of_a_run_too():
    """0.3 · 10 is 3 for a reader, and 3.0000000000000004 for (1 - 0.7) · 10."""
    entropies = torch.arange(11.0, dtype=torch.float64)[None] / 8
    kept = filters.high_entropy_tokens(entropies, loss_mask_NT=torch.ones(1, 11, dtype=torch.bool), share=0.7)
    assert kept.gradient_NT.tolist() == [[False] * 3 + [True] * 8]


def test_a_quantile_between_two_tokens_is_between_these_two():
    """At place 0.3 · 4 = 1.2, a fifth of the way from 1 to 2."""
    entropies, mask = tensor([[0.0, 1.0, 2.0, 10.0, 11.0]]), torch.ones(1, 5, dtype=torch.bool)
    kept = filters.high_entropy_tokens(entropies, loss_mask_NT=mask, share=0.7).gradient_NT
    assert kept.tolist() == [[False, False, True, True, True]]


@pytest.mark.parametrize(("share", "num_kept"), [(0.1, (1, 1)), (0.5, (1, 1)), (0.7, (2, 1)), (1.0, (3, 2))])
def test_a_share_of_each_row_is_rounded_down_to_whole_tokens_and_is_one_at_least(share, num_kept):
    entropies, mask = tensor([[3.0, 2.0, 1.0], [2.0, 1.0, 9.0]]), tensor([[True] * 3, [True, True, False]])
    kept = filters.high_entropy_tokens(entropies, loss_mask_NT=mask, share=share, over="sequence").gradient_NT
    assert kept.tolist() == [[place < num for place in range(3)] for num in num_kept]


def test_of_no_tokens_none_is_chosen():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert not filters.high_entropy_tokens(torch.ones(1, 2), loss_mask_NT=nothing).gradient_NT.any()


def test_group_weights_make_up_for_groups_without_variance():
    advantages = tensor([[-1.0], [1.0], [3.0], [3.0]])
    given = {"rewards_N": tensor([0.0, 1.0, 0.5, 0.5]), "group_index_N": tensor([0, 0, 1, 1])}
    assert shaping.group_weights(advantages, **given).flatten().tolist() == [-2.0, 2.0, 3.0, 3.0]
    capped = shaping.group_weights(advantages, **given, cap=1.5, constant_weight=0.0)
    assert capped.flatten().tolist() == [-1.5, 1.5, 0.0, 0.0]


def test_group_weights_are_by_the_share_of_groups_that_vary():
    given = {"group_index_N": tensor([0, 0, 1, 1, 2, 2]), "constant_weight": 0.0}
    rewards = tensor([0.0, 1.0, 0.0, 1.0, 0.5, 0.5])
    weighed = shaping.group_weights(torch.ones(6, 1), rewards_N=rewards, **given)
    assert weighed.flatten().tolist() == [1.5, 1.5, 1.5, 1.5, 0.0, 0.0]
    assert (shaping.group_weights(torch.ones(6, 1), rewards_N=torch.ones(6), **given) == 1).all(), "none varies"


def test_a_negative_weight_of_a_prompt_is_refused():
    given = {"column": "difficulty"}
    weighed = shaping.column_weights(torch.ones(2, 1), columns={"difficulty": tensor([0.0, 2.0])}, **given)
    assert weighed.tolist() == [[0.0], [2.0]]
    with pytest.raises(DataError, match="column 'difficulty' weighs a prompt by -2; give weights of 0 or more"):
        shaping.column_weights(torch.ones(2, 1), columns={"difficulty": tensor([1.0, -2.0])}, **given)


def test_the_overlong_penalty_is_soft_inside_the_cache():
    got = shaping.overlong_penalty(
        tensor([1.0] * 5), completion_lengths_G=tensor([10, 80, 90, 95, 120]), max_length=100, cache=20
    )
    assert_close(got, tensor([1.0, 1.0, 0.5, 0.25, 0.0]))


def test_a_cache_of_all_punishes_from_the_first_token_on():
    got = shaping.overlong_penalty(tensor([1.0, 1.0]), completion_lengths_G=tensor([0, 50]), max_length=100, cache=100)
    assert got.tolist() == [1.0, 0.5]


def test_a_cache_of_nothing_punishes_beyond_the_limit_only():
    got = shaping.overlong_penalty(tensor([1.0, 1.0]), completion_lengths_G=tensor([100, 101]), max_length=100, cache=0)
    assert got.tolist() == [1.0, 0.0]


def test_rewards_are_clipped_and_scaled():
    assert shaping.reward_clip(tensor([-3.0, 0.5]), low=-1.0, high=1.0).tolist() == [-1.0, 0.5]
    assert shaping.reward_scale(tensor([1.0]), factor=2.0, offset=1.0).tolist() == [4.0]
    assert shaping.advantage_clip(tensor([[3.0]]), low=-1.0, high=1.0).tolist() == [[1.0]]


def test_a_completion_of_nothing_keeps_its_reward_where_rewards_are_by_token():
    lengths = tensor([3, 0])
    assert shaping.reward_over_length(tensor([6.0, 6.0]), completion_lengths_G=lengths).tolist() == [2.0, 6.0]
    squared = shaping.reward_over_length(tensor([18.0, 6.0]), completion_lengths_G=lengths, power=2.0)
    assert squared.tolist() == [2.0, 6.0]


def test_a_normalised_part_counts_once_unless_it_has_a_weight():
    """5 has a part of 4, which is 2 in spreads."""
    moments = RunningMoments(mean=0.0, var=2.0, count=2)  # a spread of 2 with ddof 1
    given = {"reward_moments": moments, "part": "a", "part_rewards_N": tensor([4.0, math.nan])}
    assert shaping.running_norm(tensor([5.0, 7.0]), **given).tolist() == [3.0, 7.0]
    assert shaping.running_norm(tensor([5.0, 7.0]), **given, part_weight=0.5).tolist() == [4.0, 7.0]


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
    equal = {"loss_mask_NT": torch.ones(1, 8, dtype=torch.bool), "epsilon": 1e-30}
    assert (shaping.whiten(tensor([[0.7] * 8]), **equal) == 0).all(), "whose mean is rounded"
    assert (shaping.whiten(tensor([[0.7] * 8]), **equal, zero_variance="rounding") != 0).all()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"epsilon": 5.0}, 2 / 3),
        ({"epsilon": 2.0, "epsilon_mode": "after"}, 2 / 4),
        ({"epsilon": 16.0, "epsilon_mode": "clamp"}, 2 / 4),
        ({"epsilon": 0.1, "epsilon_mode": "clamp"}, 2 / 2),
        ({"scale": False}, 2.0),
    ],
)
def test_whitening_adds_its_epsilon_to_the_variance_or_the_spread_or_clamps_at_it(given, expected):
    """Of 1 and 5: ±2 around their mean, a variance of 4."""
    whitened = shaping.whiten(row(1.0, 5.0), loss_mask_NT=tensor([[True, True]]), ddof=0, **given)
    assert_close(whitened, row(-expected, expected))
