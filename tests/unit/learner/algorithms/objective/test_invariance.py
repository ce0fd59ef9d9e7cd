"""Every registered loss and advantage, under every layout: the same loss, gradient and statistics to float64 round-off."""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.contracts.algorithm_config import AlgorithmConfig, KlConfig, KlLossConfig, KlRolloutConfig, ValueConfig
from cluster.contracts.plugins import names
from learner.algorithms.objective import Objective
from learner.algorithms.registry.homes import HOMES
from tests.unit.learner.algorithms.batches import Case, case

pytestmark = pytest.mark.slow  # all of it, of every variant

LOSSES = names(HOMES["policy_loss"])
ADVANTAGES = names(HOMES["advantage"])
AGGREGATIONS = names(HOMES["aggregation"])
LAYOUTS = settings(max_examples=3, suppress_health_check=list(HealthCheck), derandomize=True)


def objective(**config) -> Objective:
    given_fields = {
        "proximal": "recompute",
        "kl": KlConfig(loss=KlLossConfig(coefficient=0.1), rollout=KlRolloutConfig(coefficient=0.05)),
        "entropy_coefficient": 0.01,
        "value": ValueConfig(backbone="shared"),
        "corrections": ("tis",),
    }
    return Objective.from_config(AlgorithmConfig.model_validate(given_fields | config))


REQUIRED = {
    "rejection": {"high": 0.5},
    "overlong_penalty": {"max_length": 6, "cache": 3},
    "reward_clip": {"low": 0.0, "high": 0.5},
    "return_bounds": {"low": -0.5, "high": 0.5},
    "reward_scale": {"factor": 2.0},
    "truncation_penalty": {"coefficient": 0.5},
    "advantage_clip": {"low": -0.5, "high": 0.5},
    "column_weights": {"column": "difficulty"},
}
BESIDE = {
    "max_rl": {"reward_shaping": ({"name": "reward_scale", "factor": 1.0, "offset": 10.0},)},
    "none": {"corrections": (), "proximal": "rollout"},
}
"""What an advantage wants of the rest: one takes no rewards below 0, and without any there is nothing to correct."""
EVERY = [
    *({"policy_loss": name} for name in LOSSES),
    *({"advantage": name} | BESIDE.get(name, {}) for name in ADVANTAGES),
    *({"aggregation": name} for name in AGGREGATIONS),
    *(
        {field: ({"name": name} | REQUIRED.get(name, {}),)}
        for field in ("corrections", "filters", "reward_shaping", "advantage_shaping")
        for name in names(HOMES[field])
    ),
    {"filters": ("zero_variance", {"name": "high_entropy_tokens", "share": 0.5})},
    {"filters": ({"name": "high_entropy_tokens", "over": "sequence", "denominator": "kept"},)},
    {"advantage_shaping": ("whiten",), "advantage": "gae", "kl": {"reward": {"coefficient": 0.1}}},
    {"kl": {"reward": {"coefficient": 0.1, "credit": "to_go"}, "loss": {"coefficient": 0.2, "estimator": "k3"}}},
    {"proximal": "approximate", "corrections": ("decoupled", "opsm")},
    {"distillation": {"coefficient": 0.5, "direction": "forward"}},
]


def same(a: tuple, b: tuple) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(a[2], b[2], rtol=1e-10, atol=1e-13)
    assert a[1].keys() == b[1].keys()
    for name, value in a[1].items():
        assert value == pytest.approx(b[1][name], rel=1e-9, abs=1e-10), name


@pytest.mark.parametrize("config", EVERY, ids=str)
@LAYOUTS
@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False))
def test_micro_batches_and_order_change_nothing(config, seed, shuffle):
    whole, made = case(seed), objective(**config)
    want = whole.loss(made)
    order = list(range(len(whole.policy)))
    shuffle.shuffle(order)
    cuts = sorted(shuffle.sample(range(1, len(order)), 3))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    same(want, whole.loss(made, parts))
    loss, report, gradient = whole.rows(order).loss(made)
    back = torch.empty_like(gradient)
    back[order] = gradient
    same(want, (loss, report, back))


@pytest.mark.parametrize("config", EVERY, ids=str)
@LAYOUTS
@given(
    seed=st.integers(0, 10_000),
    left=st.integers(0, 3),
    right=st.integers(0, 3),
    garbage=st.permutations([math.nan, math.inf, -math.inf]),
)
def test_padding_and_what_is_in_it_change_nothing(config, seed, left, right, garbage):
    whole, made = case(seed), objective(**config)
    padded = whole.with_garbage(garbage[0]).padded(left=left, right=right, garbage=garbage[1])
    loss, report, gradient = padded.loss(made)
    width = whole.policy.shape[1]
    assert float(gradient[:, :left].abs().sum()) == 0 and float(gradient[:, left + width :].abs().sum()) == 0
    same(whole.loss(made), (loss, report, gradient[:, left : left + width]))


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_tokens_get_no_gradient(loss):
    spoiled = case(1).with_garbage(math.nan)
    _, _, gradient = spoiled.loss(objective(policy_loss=loss))
    assert torch.isfinite(gradient).all()
    assert (gradient[~spoiled.batch.loss_mask_NT] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_at_ratio_one_the_gradient_is_the_policy_gradient(loss):
    """Under an aggregation by sequences, since sequence losses spread a trajectory's gradient evenly over its tokens."""
    on_policy = case(3)
    proximal = on_policy.batch.proximal_logprobs_NT
    batch = dataclasses.replace(on_policy.batch, rollout_logprobs_NT=proximal)
    on_policy = Case(batch, proximal, on_policy.entropies, on_policy.values)
    plain = {
        "proximal": "rollout",  # the same log-probs
        "kl": KlConfig(),
        "entropy_coefficient": 0.0,
        "value": None,
        "corrections": (),
        "aggregation": "sequence_mean",
    }
    # Every covariance of so small a batch is in its range.
    wide = {"name": "clip_cov", "cov_low": -99.0, "cov_high": 99.0}
    made = objective(policy_loss=wide if loss == "clip_cov" else loss, **plain)
    prepared = made.prepare(on_policy.batch)
    want = -prepared.advantages_NT * prepared.weights_NT
    _, _, got = on_policy.loss(made)
    if loss == "clip_cov":
        touched = (got - want).abs() > 1e-12
        assert touched.sum() == 1, "it changes the token of highest covariance only"
        assert prepared.covariances_NT[touched].item() == prepared.covariances_NT.max() and got[touched].item() == 0
        return
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


WITHOUT_BASELINE = ("token_rewards", "gdpo", "gae", "cumulative_returns", "raw_reward")


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name not in WITHOUT_BASELINE])
def test_equal_rewards_give_exactly_no_advantage(advantage):
    equal = case(4)
    batch = dataclasses.replace(equal.batch, rewards_N=torch.full_like(equal.batch.rewards_N, 0.7).float())
    prepared = objective(advantage=advantage, **BESIDE.get(advantage, {})).prepare(batch)
    assert (prepared.advantages_NT == 0).all()


SHIFT_FREE = [
    "dr_grpo",
    "mean_centered",
    "grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "group_mean_batch_std",
    "opo",
    "cpgd",
]


@pytest.mark.parametrize("advantage", SHIFT_FREE)
def test_shifting_all_rewards_moves_no_advantage(advantage):
    before = case(5)
    shifted = dataclasses.replace(before.batch, rewards_N=before.batch.rewards_N + 3.0)
    made = objective(advantage=advantage)
    torch.testing.assert_close(
        made.prepare(before.batch).advantages_NT, made.prepare(shifted).advantages_NT, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_log_probs_are_computed_as_float32_ones_are(loss):
    rounded = case(6)
    low = {
        name: getattr(rounded.batch, name).bfloat16()
        for name in ("rollout_logprobs_NT", "proximal_logprobs_NT", "reference_logprobs_NT", "values_NT")
    }
    exact = {name: tensor.float() for name, tensor in low.items()}
    rewards = {"rewards_N": rounded.batch.rewards_N.float()}
    policy = rounded.policy.bfloat16()
    in_half = Case(dataclasses.replace(rounded.batch, **low, **rewards), policy, rounded.entropies, rounded.values)
    in_single = Case(
        dataclasses.replace(rounded.batch, **exact, **rewards), policy.float(), rounded.entropies, rounded.values
    )
    made = objective(policy_loss=loss)
    assert in_half.loss(made)[0].item() == in_single.loss(made)[0].item()
