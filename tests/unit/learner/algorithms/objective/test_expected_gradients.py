"""make learn-check: expected gradients of a run's objective against true ones. Nothing is sampled: every outcome of a small softmax
policy is enumerated with its probability, in float64, so a mean over infinitely many samples is compared, without a confidence band.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import names
from deploy.docs.algorithms import page
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import PRESETS, expand

REWARDS = {(0,): 1.0, (1,): 0.2, (2, 0): 2.0, (2, 1): -0.4}
"""The policy says 0 or 1 and ends, or 2 and then 0 or 1."""
OUTCOMES = list(REWARDS)
LOGITS = torch.tensor([0.3, -0.2, 0.5, 0.4, -0.6], dtype=torch.float64)
"""Of the first token, then of the second."""


def logprobs_of(logits: Tensor, outcomes: Sequence[tuple[int, ...]]) -> Tensor:
    """[N, 2], 0 behind an end."""
    first, second = logits[:3].log_softmax(0), logits[3:].log_softmax(0)
    none = torch.zeros((), dtype=torch.float64)
    return torch.stack([torch.stack([first[o[0]], second[o[1]] if len(o) > 1 else none]) for o in outcomes])


def batch_of(
    outcomes: Sequence[tuple[int, ...]], *, logprobs: Tensor, reference: Tensor | None = None, rewards: Sequence[float]
) -> BatchTensors:
    """One group."""
    num = len(outcomes)
    lengths = torch.tensor([len(outcome) for outcome in outcomes])
    return BatchTensors(
        loss_mask_NT=torch.arange(2) < lengths[:, None],
        rollout_logprobs_NT=logprobs,
        policy_versions_NT=torch.zeros(num, 2, dtype=torch.int64),
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        group_index_N=torch.zeros(num, dtype=torch.int64),
        truncated_N=torch.zeros(num, dtype=torch.bool),
        completion_lengths_N=lengths,
        trajectory_ids=[f"t{i}" for i in range(num)],
        group_ids=["g"] * num,
        prompt_ids=["p"] * num,
        current_version=0,
        reference_logprobs_NT=logprobs if reference is None else reference,
        proximal_logprobs_NT=logprobs,
        entropies_NT=torch.ones(num, 2, dtype=torch.float64),
        values_NT=torch.zeros(num, 2, dtype=torch.float64),
        reward_components_NK=torch.tensor(rewards, dtype=torch.float64)[:, None],
        reward_component_names=("reward",),
    )


def made_of(**algorithm: Any) -> Objective:
    return Objective.from_config(AlgorithmConfig.model_validate(expand(algorithm)))


def expected_step(made: Objective, *, group_size: int = 2) -> Tensor:
    """Minus the gradient of the logits, in expectation over all groups that the policy may sample: where a step goes."""
    total = torch.zeros_like(LOGITS)
    for outcomes in itertools.product(OUTCOMES, repeat=group_size):
        logits = LOGITS.clone().requires_grad_()
        logprobs = logprobs_of(logits, outcomes)
        rewards = [REWARDS[outcome] for outcome in outcomes]
        prepared = made.prepare(batch_of(outcomes, logprobs=logprobs.detach(), rewards=rewards))
        zeros = torch.zeros_like(logprobs)
        loss = made.loss(prepared, policy_logprobs_BT=logprobs, entropies_BT=zeros, values_BT=zeros).loss
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, logits)
            total -= logprobs.detach().sum().exp() * gradient
    return total


def true_gradient(*, per_length: bool = False) -> Tensor:
    """Of the mean reward; `per_length` of the mean of reward over length, the length's own gradient left out."""
    logits = LOGITS.clone().requires_grad_()
    totals = logprobs_of(logits, OUTCOMES).sum(1)
    worth = torch.tensor([REWARDS[o] / (len(o) if per_length else 1) for o in OUTCOMES], dtype=torch.float64)
    return torch.autograd.grad((totals.exp().detach() * worth * totals).sum(), logits)[0]


LOSSES = [name for name in names(HOMES["policy_loss"]) if name not in ("clip_cov", "kl_cov")]
UNBIASED = {"raw_reward": 1.0, "rloo": 1.0, "cumulative_returns": 1.0, "mean_centered": 0.5, "dr_grpo": 0.5}
"""An advantage, and the multiple of the true gradient that a group of two gives: a mean with one's own reward in it loses 1/G."""


@pytest.mark.parametrize(
    ("loss", "advantage"),
    [*((loss, "rloo") for loss in LOSSES), *(("reinforce", advantage) for advantage in UNBIASED)],
)
def test_the_mean_gradient_on_policy_is_the_policy_gradient(loss, advantage):
    made = made_of(policy_loss=loss, advantage=advantage, aggregation="sequence_sum_mean")
    assert_close(expected_step(made), UNBIASED[advantage] * true_gradient())


def test_an_average_over_a_trajectorys_tokens_divides_its_reward_by_its_length():
    made = made_of(policy_loss="reinforce", advantage="raw_reward", aggregation="sequence_mean")
    assert_close(expected_step(made), true_gradient(per_length=True))
    assert (true_gradient(per_length=True) - true_gradient()).abs().max() > 0.05


def test_a_common_length_only_scales_the_gradient():
    aggregation = {"name": "sequence_sum_over_length", "max_length": 4}
    made = made_of(policy_loss="reinforce", advantage="rloo", aggregation=aggregation)
    assert_close(expected_step(made), true_gradient() / 4)


def test_dividing_by_the_spread_of_a_group_of_two_leaves_only_who_was_better():
    """(r − r')/2 over |r − r'|/√2: the step climbs the chance to win, not the mean reward."""
    logits = LOGITS.clone().requires_grad_()
    totals = logprobs_of(logits, OUTCOMES).sum(1)
    rewards = torch.tensor(list(REWARDS.values()), dtype=torch.float64)
    chances, wins = totals.exp().detach(), (rewards[:, None] - rewards).sign()
    (truth,) = torch.autograd.grad((chances[:, None] * chances * wins * totals[:, None]).sum() / 2**0.5, logits)
    advantage = {"name": "grpo", "epsilon": 0.0}
    step = expected_step(made_of(policy_loss="reinforce", advantage=advantage, aggregation="sequence_sum_mean"))
    assert_close(step, truth)


@pytest.mark.parametrize("preset", [name for name in PRESETS if "distillation" not in name])
def test_every_preset_climbs(preset):
    filled = {"filters": []} | ({"aggregation": {"max_length": 2}} if preset == "dr_grpo" else {})
    made = made_of(preset=preset, **filled)
    assert torch.cosine_similarity(expected_step(made), true_gradient(), dim=0) > 0.3


# KL terms: one token out of four

POLICY, REFERENCE, SAMPLER = (
    torch.tensor(logits, dtype=torch.float64)
    for logits in ([0.2, -0.4, 0.9, 0.1], [0.5, 0.3, -0.7, 0.0], [-0.3, 0.2, 0.4, 0.6])
)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    return (first.softmax(0) * (first.log_softmax(0) - second.log_softmax(0))).sum()


def truths(other: Tensor, sampler: Tensor) -> dict[str, tuple[float, Tensor]]:
    """Value and gradient of the divergences that the table speaks of."""
    found = {}
    for name, of in {
        "KL(π ‖ other)": lambda p: divergence(p, other),
        "KL(other ‖ π)": lambda p: divergence(other, p),
        "KL(π ‖ other) − KL(other ‖ π)": lambda p: divergence(p, other) - divergence(other, p),
        "KL(π ‖ other) − KL(π ‖ μ)": lambda p: divergence(p, other) - divergence(p, sampler),
        "0": lambda p: 0.0 * p.sum(),
    }.items():
        logits = POLICY.clone().requires_grad_()
        value = of(logits)
        found[name] = value.item(), torch.autograd.grad(value, logits)[0]
    return found


def expected_term(place: str, estimator: str, sampler: Tensor) -> tuple[float, Tensor]:
    """Value and gradient of β·KL with β = 1, in expectation over the sampler's tokens."""
    tokens = [(i,) for i in range(4)]

    def padded(logits: Tensor) -> Tensor:
        return torch.nn.functional.pad(logits.log_softmax(0)[:, None], (0, 1))

    made = made_of(
        advantage="raw_reward", aggregation="sum", policy_loss="importance_sampling", entropy_coefficient=0.0,
        kl={place: {"coefficient": 1.0, "estimator": estimator}},
    )  # fmt: skip
    batch = batch_of(tokens, logprobs=padded(sampler), reference=padded(REFERENCE), rewards=[0.0] * 4)
    prepared: Prepared = made.prepare(batch)
    chances = torch.nn.functional.pad(sampler.softmax(0)[:, None], (0, 1))
    prepared = dataclasses.replace(prepared, weights_NT=chances, policy_weights_NT=chances)
    logits = POLICY.clone().requires_grad_()
    loss = made.loss(prepared, policy_logprobs_BT=padded(logits)).loss
    gradient = torch.autograd.grad(loss, logits)[0]
    value = -(prepared.advantages_NT * chances).sum() if place == "reward" else loss
    return value.item(), gradient


KL_TABLE = [
    [cell.strip(" `") for cell in line.removeprefix("| `kl.").strip("|").split(" | ")]
    for line in page().splitlines()
    if line.startswith("| `kl.")
]


@pytest.mark.parametrize("row", KL_TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_docs_table_of_kl_terms_is_what_enumeration_finds(row):
    place, estimator, *claims = row
    for sampler, (value_of, gradient_of) in ((POLICY, claims[:2]), (SAMPLER, claims[2:])):
        other = sampler if place == "rollout" else REFERENCE
        known = truths(other, sampler)
        value, gradient = expected_term(place, estimator, sampler)
        agreeing = {name for name, (true, _) in known.items() if value == pytest.approx(true, abs=1e-12)}
        assert value_of in agreeing or (value_of == "biased" and not agreeing), (value_of, agreeing)
        agreeing = {name for name, (_, true) in known.items() if torch.allclose(gradient, true, atol=1e-12)}
        assert gradient_of in agreeing or (gradient_of == "biased" and not agreeing), (gradient_of, agreeing)


def test_the_kl_of_a_trajectory_is_credited_in_full_by_trajectory_and_to_go_and_in_part_by_token():
    """Choosing to go on costs the KL of what follows: `token` leaves that out."""
    reference = logprobs_of(torch.tensor([0.9, 0.1, -0.4, -0.8, 0.7], dtype=torch.float64), OUTCOMES)

    def full(logits: Tensor) -> Tensor:
        logprobs = logprobs_of(logits, OUTCOMES)
        return (logprobs.sum(1).exp() * (logprobs - reference).sum(1)).sum()

    def per_token(logits: Tensor) -> Tensor:
        logprobs = logprobs_of(logits, OUTCOMES)
        chances, gaps = logprobs.sum(1).exp().detach(), (logprobs - reference).detach()
        return (chances[:, None] * logprobs * gaps).sum()

    chances = logprobs_of(LOGITS, OUTCOMES).sum(1).exp()
    for credit, truth in {"trajectory": full, "to_go": full, "token": per_token}.items():
        made = made_of(
            advantage="raw_reward", aggregation="sum", policy_loss="reinforce",
            kl={"reward": {"coefficient": 1.0, "credit": credit}},
        )  # fmt: skip
        batch = batch_of(OUTCOMES, logprobs=logprobs_of(LOGITS, OUTCOMES), reference=reference, rewards=[0.0] * 4)
        prepared = made.prepare(batch)
        weights = chances[:, None] * batch.loss_mask_NT
        prepared = dataclasses.replace(prepared, weights_NT=weights, policy_weights_NT=weights)
        logits, same = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
        loss = made.loss(prepared, policy_logprobs_BT=logprobs_of(logits, OUTCOMES)).loss
        assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(truth(same), same)[0])
