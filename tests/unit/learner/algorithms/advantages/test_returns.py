"""Returns over time and through holes of the mask, with numbers worked out by hand."""

import math

from torch import tensor
from torch.testing import assert_close

from learner.algorithms.advantages.returns import cumulative_returns, gae
from tests.unit.learner.algorithms.batches import row

HOLE = tensor([[True, False, True]])


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
