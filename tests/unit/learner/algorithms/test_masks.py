"""Moments under a mask."""

import math

from torch import tensor

from learner.algorithms import masks
from learner.algorithms.batch_rules import shaping
from tests.unit.learner.algorithms.batches import row


def test_moments_of_nothing_are_zero():
    nothing = tensor([[False, False]])
    assert masks.masked_mean(row(math.nan, 1.0), mask_BT=nothing).item() == 0
    assert shaping.whiten(row(math.nan, 1.0), loss_mask_NT=nothing).tolist() == [[0.0, 0.0]]
