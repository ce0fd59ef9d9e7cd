"""Off-policy corrections, with numbers worked out by hand."""

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


def test_self_normalised_weights_have_a_mean_of_1_over_tokens_or_over_trajectories():
    ratios = tensor([[1.0, 1.0], [6.0, 9.0]], dtype=torch.float64)
    mask = tensor([[True, True], [True, False]])

    def weights(**params):
        rollout = torch.full_like(ratios, -2.0)
        return importance.self_normalised_tis(
            rollout + ratios.log(), rollout_logprobs_NT=rollout, loss_mask_NT=mask, cap=4.0, **params
        )

    assert weights().tolist() == [pytest.approx([0.5, 0.5]), pytest.approx([2.0, 0.0])]
    assert weights(level="sequence").tolist() == [pytest.approx([0.4, 0.4]), pytest.approx([1.6, 0.0])]


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
