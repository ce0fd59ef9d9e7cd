"""What a filter of tokens takes out, and what it leaves alone."""

import dataclasses
import math

import pytest
import torch
from torch import tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from learner.algorithms.objective import Objective
from tests.unit.learner.algorithms.batches import case


@pytest.mark.parametrize(("denominator", "policy_loss"), [("kept", 2.0), ("all", 1.0)])
def test_an_entropy_filter_leaves_kl_and_entropy_terms_alone(denominator, policy_loss):
    # One trajectory of two tokens; the filter keeps the first. Advantage 2, ratio 1, k1 of 1 and 3, entropies of 4 and 2. The reference
    # gives its likeliest token 1/2 and 1/4, the policy both times 1/2.
    ones = torch.ones(1, 2, dtype=torch.float64)
    batch = dataclasses.replace(
        case(0).rows([0]).batch,
        loss_mask_NT=torch.ones(1, 2, dtype=torch.bool),
        rollout_logprobs_NT=-ones,
        proximal_logprobs_NT=-ones,
        reference_logprobs_NT=-ones - tensor([[1.0, 3.0]]),
        entropies_NT=tensor([[4.0, 2.0]]),
        policy_versions_NT=torch.zeros(1, 2, dtype=torch.int64),
        rewards_N=tensor([2.0], dtype=torch.float64),
        completion_lengths_N=tensor([2]),
        values_NT=None,
        reference_partition_NTP=tensor([[[0.5, 0.5], [0.25, 0.75]]]).double().log(),
    )
    made = Objective.from_config(
        AlgorithmConfig.model_validate(
            {
                "advantage": "raw_reward",
                "policy_loss": "reinforce",
                "filters": [
                    {"name": "high_entropy_tokens", "over": "sequence", "share": 0.5, "denominator": denominator}
                ],
                "kl": {"loss": {"coefficient": 0.1, "estimator": "k3", "log_ratio_clamp": 2.0}},
                "entropy_coefficient": 0.5,
                "distillation": {"coefficient": 3.0, "top_k": 1},
            }
        )
    )
    result = made.loss(
        made.prepare(batch),
        policy_logprobs_BT=-ones,
        entropies_BT=tensor([[4.0, 2.0]]),
        policy_partition_BTP=torch.full((1, 2, 2), 0.5, dtype=torch.float64).log(),
    )
    report = result.statistics.compute()
    terms = ("policy_loss", "entropy_loss", "kl_loss", "distillation_loss")
    assert report["loss"] == pytest.approx(sum(report[term] for term in terms)) == float(result.loss)
    assert report["policy_loss"] == pytest.approx(policy_loss)  # −(−1)·2 of the kept token
    assert report["entropy_loss"] == pytest.approx(-0.5 * (4 + 2) / 2)
    # k3 of log-ratios −1 and −3, which is held at −2
    assert report["kl_loss"] == pytest.approx(0.1 * ((math.exp(-1) + 1 - 1) + (math.exp(-2) + 2 - 1)) / 2)
    assert report["distillation_loss"] == pytest.approx(3 * (0 + 0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)


def test_tokens_are_chosen_among_those_of_trajectories_that_other_filters_keep():
    """The first trajectory was cut off, and rambles: over both the top fifth would be its tokens alone. Of the second's entropies 1 to 5
    the threshold is at place 0.8 * 4 = 3.2, that is 4.2: its last token stays."""
    ones = torch.ones(2, 5, dtype=torch.float64)
    entropies = tensor([[9.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]])
    batch = dataclasses.replace(
        case(0).rows([0, 1]).batch,
        loss_mask_NT=torch.ones(2, 5, dtype=torch.bool),
        rollout_logprobs_NT=-ones,
        proximal_logprobs_NT=-ones,
        reference_logprobs_NT=-ones,
        entropies_NT=entropies,
        policy_versions_NT=torch.zeros(2, 5, dtype=torch.int64),
        rewards_N=tensor([2.0, 1.0], dtype=torch.float64),
        completion_lengths_N=tensor([5, 5]),
        truncated_N=tensor([True, False]),
        values_NT=None,
        reference_partition_NTP=None,
    )
    for filters in (["high_entropy_tokens", "overlong_mask"], ["overlong_mask", "high_entropy_tokens"]):
        settings = {"advantage": "raw_reward", "policy_loss": "reinforce", "filters": filters}
        prepared = Objective.from_config(AlgorithmConfig.model_validate(settings)).prepare(batch)
        assert prepared.gradient_mask_NT.tolist() == [[False] * 5, [False] * 4 + [True]]
