"""Moments under a mask."""

import math

import torch
from torch import tensor

from learner.algorithms import masks
from learner.algorithms.batch_rules import shaping
from tests.unit.learner.algorithms.batches import row


def test_moments_of_nothing_are_zero():
    nothing = tensor([[False, False]])
    assert masks.masked_mean(row(math.nan, 1.0), mask_BT=nothing).item() == 0
    assert shaping.whiten(row(math.nan, 1.0), loss_mask_NT=nothing).tolist() == [[0.0, 0.0]]


def test_halves_and_whole_numbers_are_computed_in_float32():
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        assert masks.at_least_float32(torch.ones(1, dtype=dtype)).dtype == torch.float32, dtype
    assert masks.at_least_float32(torch.ones(1).double()).dtype == torch.float64


def test_an_epsilon_is_added_to_the_count():
    both = tensor([[True, True, False]])
    assert masks.masked_mean(row(1.0, 5.0, math.nan), mask_BT=both).item() == 3
    assert masks.masked_mean(row(1.0, 5.0, math.nan), mask_BT=both, dim=1, epsilon=1.0).tolist() == [2.0]
