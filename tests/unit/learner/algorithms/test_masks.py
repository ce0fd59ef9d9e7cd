"""Moments under a mask."""

import math

import torch
from torch import tensor

from learner.algorithms import masks
from tests.unit.learner.algorithms.batches import row


def test_moments_of_nothing_are_zero():
    nothing = tensor([[False, False]])
    assert masks.masked_mean(row(math.nan, 1.0), loss_mask_BT=nothing).item() == 0
    assert masks.whiten(row(math.nan, 1.0), loss_mask_BT=nothing).tolist() == [[0.0, 0.0]]


def test_half_precision_is_kept_only_inside_its_context():
    half = torch.ones(1, dtype=torch.bfloat16)
    with masks.half_precision_kept():
        assert masks.at_least_float32(half).dtype == torch.bfloat16
    assert masks.at_least_float32(half).dtype == torch.float32
