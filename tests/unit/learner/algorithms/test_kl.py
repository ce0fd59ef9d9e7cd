"""KL estimators, with numbers worked out by hand."""

import math

from torch import tensor
from torch.testing import assert_close

from learner.algorithms import kl
from tests.unit.learner.algorithms.batches import row

BOTH = tensor([[True, True]])


def test_kl_estimators_of_a_ratio_of_two():
    given = {"other_logprobs_BT": row(-1.0 - math.log(2), -1.0), "loss_mask_BT": BOTH}
    policy = row(-1.0, -1.0)
    assert_close(kl.k1(policy, **given), row(math.log(2), 0.0))
    assert_close(kl.k2(policy, **given), row(math.log(2) ** 2 / 2, 0.0))
    assert_close(kl.k3(policy, **given), row(0.5 + math.log(2) - 1, 0.0))
    assert_close(kl.drift(policy, **given), row(2 - math.log(2) - 1, 0.0))


def test_unbiased_kl_weighs_k3_by_the_ratio_to_the_policy_that_sampled():
    given = {
        "other_logprobs_BT": row(-2.0, -2.0),
        "rollout_logprobs_BT": row(-1.0 - math.log(3), -1.0),
        "loss_mask_BT": BOTH,
    }
    k3 = math.exp(-1) + 1 - 1
    assert_close(kl.unbiased(row(-1.0, -1.0), **given), row(3 * k3, k3))


def test_a_clamp_bounds_a_kl_that_would_overflow():
    got = kl.k3(row(-1000.0), other_logprobs_BT=row(-1.0), loss_mask_BT=tensor([[True]]), log_ratio_clamp=10.0)
    assert_close(got, row(math.exp(10) - 10 - 1))
