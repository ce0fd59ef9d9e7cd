"""Off-policy corrections, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from learner.algorithms.corrections import importance, masking


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


def test_a_clamp_holds_the_log_ratio_once_it_is_summed():
    for function in (importance.tis, importance.icepop):
        given = {"log_ratio_clamp": math.log(3.0), "level": "sequence"} | (
            {"cap": 9.0} if function is importance.tis else {}
        )
        assert correction(function, 2.0, 2.0, **given) == pytest.approx([3.0, 3.0])
    assert correction(importance.tis, 0.1, 0.6, log_ratio_clamp=math.log(2.0)) == pytest.approx([0.5, 0.6])


def test_self_normalised_weights_have_a_mean_of_1_over_tokens_or_over_trajectories():
    ratios = tensor([[1.0, 2.0], [6.0, 9.0]], dtype=torch.float64)
    mask = tensor([[True, True], [True, False]])

    def weights(**params):
        rollout = torch.full_like(ratios, -2.0)
        return importance.self_normalised_tis(
            rollout + ratios.log(), rollout_logprobs_NT=rollout, loss_mask_NT=mask, cap=4.0, **params
        )

    # 1, 2 and 4 have a mean of 7/3; a trajectory of 2 and one of 4 have one of 3.
    assert weights().tolist() == [pytest.approx([3 / 7, 6 / 7]), pytest.approx([12 / 7, 0.0])]
    assert weights(level="sequence").tolist() == [pytest.approx([2 / 3, 2 / 3]), pytest.approx([4 / 3, 0.0])]
    assert weights(floor=1.5).tolist() == [pytest.approx([0.6, 0.8]), pytest.approx([1.6, 0.0])]
    assert weights(log_ratio_clamp=math.log(3)).tolist() == [pytest.approx([0.5, 1.0]), pytest.approx([1.5, 0.0])]


def test_weights_that_are_all_0_stay_0():
    nothing = torch.zeros(1, 2)
    mask = torch.ones_like(nothing, dtype=torch.bool)
    assert importance.with_mean_1(nothing, loss_mask_NT=mask, level="token").tolist() == [[0.0, 0.0]]


def test_the_decoupled_weight_is_the_plain_ratio():
    assert correction(importance.decoupled, 7.0) == pytest.approx([7.0])
    assert correction(importance.decoupled, 7.0, cap=3.0) == pytest.approx([3.0])


def test_sequence_mask_looks_at_the_geometric_mean():
    assert correction(masking.sequence_mask, 2.0, 0.5) == [1.0, 1.0]
    assert correction(masking.sequence_mask, 1.1, 1.1) == [0.0, 0.0]
    assert correction(masking.sequence_mask, 0.9, 0.9) == [0.0, 0.0]


DISTANCES = {
    "k1": -math.log(3.0),
    "k2": math.log(3.0) ** 2 / 2,
    "k3": 2 - math.log(3.0),
    "tv": 2 * math.exp(-2),
    "binary_kl": -math.exp(-2) * math.log(3.0)
    + (1 - math.exp(-2)) * math.log((1 - math.exp(-2)) / (1 - 3 * math.exp(-2))),
}
"""Of a token that was drawn with a probability of exp(-2), and has three times that now."""


@pytest.mark.parametrize("estimator", DISTANCES)
def test_rejection_keeps_the_tokens_whose_divergence_is_between_its_bounds(estimator):
    distance, given = DISTANCES[estimator], {"estimator": estimator}
    assert correction(masking.rejection, 3.0, high=distance + 0.01, low=distance - 0.01, **given) == [1.0]
    assert correction(masking.rejection, 3.0, high=distance - 0.01, **given) == [0.0]
    assert correction(masking.rejection, 3.0, low=distance + 0.01, high=9.0, **given) == [0.0]


def test_rejection_by_tv_measures_both_ways():
    assert correction(masking.rejection, 1.0, 1 / 3, high=0.08, estimator="tv") == [1.0, 0.0]  # 2/3 of exp(-2): 0.09


def test_rejection_takes_a_log_prob_rounded_to_above_0_for_a_certain_token():
    rollout, proximal = tensor([[1e-3, -1.0]]), tensor([[0.0, 1e-3]])
    given = {"rollout_logprobs_BT": rollout, "loss_mask_BT": tensor([[True, True]]), "estimator": "tv"}
    assert masking.rejection(proximal, **given, high=1e-6).tolist() == [[1.0, 0.0]]
    assert masking.rejection(proximal, **given, high=1 - math.exp(-1) + 1e-6).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("level", "distance"), [("sum", 0.844), ("mean", 0.281), ("max", 0.603)])
def test_rejection_keeps_or_drops_whole_trajectories(level, distance):
    """Of ratios of 1, 3 and 2, k2 is 0, 0.603 and 0.240."""
    given = {"estimator": "k2", "level": level}
    assert correction(masking.rejection, 1.0, 3.0, 2.0, high=distance + 0.01, **given) == [1.0, 1.0, 1.0]
    assert correction(masking.rejection, 1.0, 3.0, 2.0, high=distance - 0.01, **given) == [0.0, 0.0, 0.0]


def test_the_largest_divergence_of_a_trajectory_is_that_of_its_own_tokens():
    proximal, mask = tensor([[-1.0, -9.0], [-2.0, -9.0]]), tensor([[True, False], [True, True]])
    given = {"rollout_logprobs_BT": torch.full((2, 2), -2.0), "loss_mask_BT": mask, "estimator": "k1", "level": "max"}
    assert masking.rejection(proximal, **given, high=-0.5).tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_opsm_drops_bad_trajectories_that_the_policy_left():
    gaps, advantages = tensor([[1.0], [1.0], [1.0], [0.05]]), tensor([[-0.5], [0.5], [0.0], [-0.5]])
    rollout, mask = torch.full((4, 1), -1.0), torch.ones(4, 1, dtype=torch.bool)
    got = masking.opsm(
        rollout - gaps, rollout_logprobs_BT=rollout, advantages_BT=advantages, loss_mask_BT=mask, delta=0.1
    )
    assert got.tolist() == [[0.0], [1.0], [1.0], [1.0]]
