"""KL estimators, with numbers worked out by hand."""

import math

import pytest
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


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 2.0), ("k2", 2.0), ("k3", math.exp(-2) + 1), ("drift", math.exp(2) - 3)]
)
def test_a_clamp_holds_the_log_ratio_of_every_estimator(estimator, expected):
    """5 nats, held at 2."""
    given = {"other_logprobs_BT": row(-6.0), "loss_mask_BT": tensor([[True]]), "log_ratio_clamp": 2.0}
    assert_close(kl.ESTIMATORS[estimator](row(-1.0), **given), row(expected))


def test_a_clamp_bounds_a_kl_that_would_overflow():
    got = kl.k3(row(-1000.0), other_logprobs_BT=row(-1.0), loss_mask_BT=tensor([[True]]), log_ratio_clamp=10.0)
    assert_close(got, row(math.exp(10) - 10 - 1))


def test_the_unbiased_kl_holds_its_own_log_ratio_alone():
    """The reference is five times as likely: held at e, which leaves e - 1 - 1; the policy twice as likely as what sampled."""
    given = {"other_logprobs_BT": row(-2.0 + math.log(5)), "rollout_logprobs_BT": row(-2.0 - math.log(2))}
    got = kl.unbiased(row(-2.0), **given, loss_mask_BT=tensor([[True]]), log_ratio_clamp=1.0)
    assert_close(got, row(2 * (math.e - 2)))
    assert_close(kl.unbiased(row(-2.0), **given, loss_mask_BT=tensor([[True]])), row(2 * (4 - math.log(5))))


def test_the_unbiased_kl_pulls_towards_the_reference_beyond_its_clamp_too():
    """Seen before: a token far likelier under the reference was pushed down, by the whole of the clamped k3."""
    policy = row(-6.0, -1.0, -2.0).requires_grad_()
    given = {"other_logprobs_BT": row(-1.0, -6.0, -2.5), "rollout_logprobs_BT": row(-6.0 - math.log(2), -1.0, -2.0)}
    kl.unbiased(policy, **given, loss_mask_BT=tensor([[True] * 3]), log_ratio_clamp=2.0).sum().backward()
    # ρ times log π − log π_ref: 2 · −5, held at −2; 1 · 5, held at 2; and 1 · 0.5
    assert_close(policy.grad, row(-4.0, 2.0, 0.5))


def test_the_kl_over_a_partition_is_summed_over_its_parts():
    policy, other = tensor([[[0.5, 0.5], [math.nan] * 2]]).log(), tensor([[[0.25, 0.75], [math.nan] * 2]]).log()
    given = {"other_partition_BTP": other, "loss_mask_BT": tensor([[True, False]])}
    reverse, forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert_close(kl.partition_kl(policy, **given), row(reverse, 0.0))
    assert_close(kl.partition_kl(policy, **given, direction="forward"), row(forward, 0.0))


def test_rounding_of_a_partition_makes_no_kl_negative():
    """As if the policy's parts came to 0.75 and the reference's to 0.5."""
    policy, other = tensor([[[0.5, 0.25]]]).log(), tensor([[[0.25, 0.25]]]).log()
    got = kl.partition_kl(policy, other_partition_BTP=other, loss_mask_BT=tensor([[True]]))
    assert_close(got, row(0.5 * math.log(2) - 0.75 + 0.5))


def test_the_adaptive_coefficient_follows_the_measured_kl():
    given = {"num_trajectories": 10, "target": 6.0, "horizon": 100}
    assert kl.adapted_coefficient(0.1, kl_per_trajectory=12.0, **given) == pytest.approx(0.1 * 1.02)
    assert kl.adapted_coefficient(0.1, kl_per_trajectory=0.0, **given) == pytest.approx(0.1 * 0.98)


def test_a_step_of_more_trajectories_than_the_horizon_corrects_fully_and_no_further():
    """Without a bound, 1,024 trajectories on a horizon of 200 would make β negative: 0.1 · (1 − 0.2 · 5.12)."""
    given = {"kl_per_trajectory": 0.0, "target": 6.0, "horizon": 200}
    for num_trajectories in (200, 1024):
        assert kl.adapted_coefficient(0.1, num_trajectories=num_trajectories, **given) == pytest.approx(0.08)
