"""What a step reports of itself, worked out by hand on two trajectories of one token."""

import math

import pytest
import torch

from cluster.contracts.algorithm_config import AlgorithmConfig
from learner.algorithms.advantages.returns import gae
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.objective.statistics import Recorder, Statistics, reported_names


def report_of(section, *, policy_logprobs_BT, **tensors) -> dict[str, float]:
    """Of two trajectories of one group."""
    made = Objective.from_config(AlgorithmConfig.model_validate({"advantage": "raw_reward"} | section))
    batch = BatchTensors(
        group_index_N=torch.zeros(2, dtype=torch.int64),
        trajectory_ids=["a", "b"],
        group_ids=["g", "g"],
        prompt_ids=["p", "p"],
        **tensors,
    )
    prepared = made.prepare(batch)
    result = made.loss(prepared, policy_logprobs_BT=policy_logprobs_BT)
    report = Statistics.merge([result.statistics, made.statistics(prepared)]).compute()
    assert report.keys() <= reported_names().keys()
    return report


def reported(*, reward: float = 1.0, **section) -> dict[str, float]:
    """π is 2 and 1 times the policy μ that sampled, the reference is half of μ; the first earned the reward."""
    return report_of(
        section,
        policy_logprobs_BT=torch.tensor([[-1.0 + math.log(2)], [-1.0]]),
        loss_mask_NT=torch.ones(2, 1, dtype=torch.bool),
        rollout_logprobs_NT=torch.full((2, 1), -1.0),
        policy_versions_NT=torch.zeros(2, 1, dtype=torch.int64),
        rewards_N=torch.tensor([reward, 0.0], dtype=torch.float64),
        reference_logprobs_NT=torch.full((2, 1), -1.0 - math.log(2)),
        truncated_N=torch.zeros(2, dtype=torch.bool),
        completion_lengths_N=torch.ones(2, dtype=torch.int64),
        prompt_lengths_N=torch.tensor([3, 5]),
        current_version=0,
    )


def test_the_surrogate_is_reported_before_and_after_its_bounds():
    report = reported()
    assert report["surrogate_mean"] == pytest.approx((2 * 1 + 1 * 0) / 2)
    assert report["bounded_surrogate_mean"] == pytest.approx((1.2 * 1 + 1 * 0) / 2)


def test_ratios_to_the_reference_are_those_of_the_new_and_of_the_old_policy():
    report = reported()
    assert report["ratio_reference_mean"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert report["ratio_reference_old_mean"] == pytest.approx(1 / 2)
    assert report["policy_logprob_max"] == pytest.approx(-1 + math.log(2))


def test_every_ratio_and_kl_has_its_sign_and_its_models():
    """log π − log μ is log 2 and 0, and so is log π − log π_old; log π − log π_ref is log 4 and log 2."""
    log2, report = math.log(2), reported()
    of_old, of_reference = (1 - log2, 0.0), (1 / 4 - 1 + 2 * log2, 1 / 2 - 1 + log2)
    expected = {
        "ratio": (2.0, 1.0),
        "kl_old_k1": (-log2, 0.0),
        "kl_old_k3": of_old,
        "kl_rollout_k1": (-log2, 0.0),
        "kl_rollout_k3": of_old,
        "kl_reference_k1": (2 * log2, log2),
        "kl_reference_k3": of_reference,
        "importance_weight": (2.0, 1.0),
    }
    for name, numbers in expected.items():
        found = [report[f"{name}_{output}"] for output in ("mean", "min", "max")]
        assert found == pytest.approx([sum(numbers) / 2, min(numbers), max(numbers)], abs=1e-6), name
    assert report["ratio_reference_max"] == report["ratio_reference_old_max"] == pytest.approx(1 / 2)
    assert report["kl_reference_per_trajectory_mean"] == pytest.approx(1.5 * log2)
    assert (report["mismatch_mean"], report["mismatch_max"]) == pytest.approx((log2 / 2, log2))
    assert report["importance_weight_ess"] == pytest.approx(9 / 10)


def test_tokens_are_counted_by_advantage_and_by_what_happened_to_them():
    report = reported()
    assert report["policy_logprob_positive_mean"] == pytest.approx(-1 + math.log(2))
    assert "policy_logprob_negative_mean" not in report
    assert (report["policy_logprob_mean"], report["rollout_logprob_mean"]) == pytest.approx((-1 + math.log(2) / 2, -1))
    assert report["reference_logprob_mean"] == pytest.approx(-1 - math.log(2))
    shares = ("clip_fraction", "clip_fraction_high", "clip_fraction_low", "ratio_outside", "correction_dropped")
    assert [report[name] for name in shares] == [0.5, 0.5, 0.0, 0.5, 0.0]
    assert [report[f"advantage_{output}"] for output in ("mean", "std", "min", "max")] == [0.5, 0.5, 0.0, 1.0]
    assert [report[f"reward_{output}"] for output in ("mean", "std", "min", "max")] == [0.5, 0.5, 0.0, 1.0]
    totals = ("tokens", "trajectories", "trajectories_filtered", "groups", "groups_without_variance")
    assert [report[name] for name in totals] == [2, 2, 0, 1, 0]
    below = reported(advantage={"name": "cpgd", "center": "mean"})  # advantages of a half and minus a half
    assert below["policy_logprob_negative_mean"] == pytest.approx(-1)


def of_several_tokens(ratios: list[list[float]], **section) -> dict[str, float]:
    """Trajectories of three tokens and of two, of which the second was cut off; ratios are to the policy that sampled.

    The reference says -2 of each token, and the versions that sampled are 0, 1 and 2, and 2 and 2, the present one.
    """
    return report_of(
        section,
        policy_logprobs_BT=torch.tensor(ratios, dtype=torch.float64).log() - 1,
        loss_mask_NT=torch.tensor([[True, True, True], [True, True, False]]),
        rollout_logprobs_NT=torch.full((2, 3), -1.0),
        policy_versions_NT=torch.tensor([[0, 1, 2], [2, 2, 0]]),
        rewards_N=torch.tensor([1.0, 0.0], dtype=torch.float64),
        reference_logprobs_NT=torch.full((2, 3), -2.0),
        truncated_N=torch.tensor([False, True]),
        completion_lengths_N=torch.tensor([3, 2]),
        current_version=2,
    )


def test_tokens_multiply_or_add_up_over_their_trajectory_and_those_of_the_newest_policy_tell_the_mismatch():
    report = of_several_tokens([[0.7, 0.75, 1.3], [1.1, 0.9, 50.0]])
    assert report["ratio_outside"] == 3 / 5
    weights = (0.7 * 0.75 * 1.3, 1.1 * 0.9)
    assert report["trajectory_weight_mean"] == pytest.approx(sum(weights) / 2)
    assert report["trajectory_weight_max"] == pytest.approx(max(weights))
    # log π − log π_ref is a nat more than log π − log μ.
    of_trajectories = [math.log(weights[0]) + 3, math.log(weights[1]) + 2]
    assert report["kl_reference_per_trajectory_mean"] == pytest.approx(sum(of_trajectories) / 2)
    gaps = [math.log(1.3), math.log(1.1), -math.log(0.9)]
    assert (report["mismatch_mean"], report["mismatch_max"]) == pytest.approx((sum(gaps) / 3, max(gaps)))
    assert report["mismatch_off_policy_steps_min"] == 0
    assert (report["off_policy_steps_mean"], report["off_policy_steps_max"]) == pytest.approx(((2 + 1) / 5, 2))
    assert (report["completion_length_mean"], report["truncated"], report["tokens"]) == (2.5, 0.5, 5)


def test_what_filters_took_out_is_counted():
    report = of_several_tokens([[1.0] * 3, [1.0] * 3], filters=["overlong_mask"])
    assert (report["filtered_tokens"], report["trajectories_filtered"], report["trajectories"]) == (2 / 5, 1, 2)


def test_the_weight_of_a_trajectory_is_held_at_a_hundred_nats():
    report = of_several_tokens([[math.exp(60)] * 3, [1.0] * 3])
    assert report["trajectory_weight_max"] == pytest.approx(math.exp(100))


def test_entries_that_are_masked_count_nowhere():
    recorder = Recorder(torch.device("cpu"))
    recorder.record("ratio", torch.tensor([[2.0, 4.0], [6.0, math.nan]]), torch.tensor([[True, True], [True, False]]))
    report = recorder.statistics().compute()
    assert [report[f"ratio_{output}"] for output in ("mean", "min", "max")] == [4.0, 2.0, 6.0]


def test_the_effective_sample_size_is_one_of_tokens_and_one_of_trajectories():
    report = reported()
    assert report["trajectory_weight_mean"] == pytest.approx(1.5) and report["trajectory_weight_max"] == pytest.approx(
        2
    )
    assert report["trajectory_weight_ess"] == pytest.approx((2 + 1) ** 2 / (2 * (4 + 1)))


def test_the_return_of_a_trajectory_needs_no_critic_and_has_the_kl_in_it():
    assert reported()["trajectory_return_mean"] == pytest.approx(0.5)
    with_kl = reported(kl={"reward": {"coefficient": 0.5, "estimator": "k1"}})
    assert with_kl["trajectory_return_mean"] == pytest.approx(0.5 - 0.5 * math.log(2))
    assert with_kl["shaped_reward_mean"] == pytest.approx(0.5)


def test_prompts_and_whole_trajectories_have_lengths():
    report = reported()
    assert (report["prompt_length_mean"], report["prompt_length_max"]) == (4, 5)
    assert (report["length_mean"], report["length_max"]) == (5, 6)


def test_a_reward_whose_square_no_number_is_has_a_mean_and_no_spread():
    report = reported(reward=1e200)
    assert report["reward_mean"] == 5e199 and not math.isfinite(report["reward_std"])


@pytest.mark.parametrize(
    "returns",
    [
        pytest.param([0.3] * 1000, id="equal, with a rounded sum"),
        pytest.param([0.3] * 80 + [math.nextafter(0.3, 1)] * 80, id="different by rounding of rewards"),
    ],
)
def test_returns_that_are_equal_up_to_rounding_have_no_spread_and_no_explained_variance(returns):
    recorder = Recorder(torch.device("cpu"))
    recorder.record("return", torch.tensor(returns, dtype=torch.float64))
    recorder.record("value_error", torch.linspace(0, 1, len(returns)))
    report = recorder.statistics().compute()
    assert report["return_std"] == 0
    assert "explained_variance" not in report


def test_the_explained_variance_is_one_less_the_share_that_the_errors_keep():
    recorder = Recorder(torch.device("cpu"))
    recorder.record("return", torch.tensor([1.0, 5.0]))  # a variance of 4
    recorder.record("value_error", torch.tensor([2.0, 4.0]))  # of 1
    assert recorder.statistics().compute()["explained_variance"] == 1 - 1 / 4


def test_returns_that_differ_by_rounding_of_values_have_no_explained_variance():
    recorder = Recorder(torch.device("cpu"))
    values_NT = torch.linspace(-1, 1, 160, dtype=torch.float64).sin().view(8, 20)
    mask_NT = torch.ones(8, 20, dtype=torch.bool)
    returns_NT = gae(torch.zeros(8, 20), values_NT=values_NT, loss_mask_NT=mask_NT, gamma=0.99, lambda_=1.0)[1]
    assert 0 < returns_NT.abs().max() < 1e-14
    recorder.record("return", returns_NT)
    recorder.record("value_error", returns_NT - values_NT)
    assert "explained_variance" not in recorder.statistics().compute()
