"""The loss of a micro-batch, composed of the configured parts, and the loss of demonstrations.

Shapes: B rows, T tokens, C demonstrated tokens, P parts of the reference's partition.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig, KlLossConfig, KlRolloutConfig, SftConfig
from learner.algorithms import kl
from learner.algorithms.batch_rules.aggregation import aggregate
from learner.algorithms.masks import at_least_float32, masked
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.parts import Parts, token_losses
from learner.algorithms.objective.proximal import approximate_proximal
from learner.algorithms.objective.recording import TokensSeen, record
from learner.algorithms.objective.statistics import Recorder, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    loss: Tensor
    """Scalar with gradient. Its sum over micro-batches and ranks is the loss of the update."""
    statistics: Statistics
    """Of the policy on these rows: merge those of all micro-batches, ranks and updates with the batch's own, then compute."""
    seen: TokensSeen | None = None
    """None for demonstrations."""


def loss(
    rows: Prepared,
    parts: Parts,
    *,
    policy_logprobs_BT: Tensor,
    entropies_BT: Tensor | None,
    values_BT: Tensor | None,
    policy_partition_BTP: Tensor | None,
) -> LossResult:
    """See `Objective.loss`."""
    value = parts.config.value
    policy_BT = masked(policy_logprobs_BT.double(), mask_BT=rows.batch.loss_mask_NT)
    proximal_BT = _proximal(rows, policy_BT, proximal=parts.config.proximal)
    offered = _offered(
        rows, policy_BT=policy_BT, proximal_BT=proximal_BT, entropies_BT=entropies_BT, values_BT=values_BT
    )
    policy_losses = token_losses(parts.policy_loss, offered, shape=policy_BT.shape)
    corrections_BT = parts.corrected(rows.correction_weights_NT, offered, of_the_batch=False)
    kept_BT = masked(policy_losses.losses_BT, mask_BT=rows.gradient_mask_NT)
    losses = {"policy_loss": aggregate(kept_BT * corrections_BT, weights_BT=rows.policy_weights_NT)}
    losses |= _regularisers(rows, parts.config, policy_BT=policy_BT, entropies_BT=entropies_BT)
    recorder = Recorder(policy_BT.device)
    if (distillation := parts.config.distillation) is not None:
        divergence_BT = _divergence(rows, policy_partition_BTP, direction=distillation.direction, recorder=recorder)
        losses["distillation_loss"] = distillation.coefficient * aggregate(divergence_BT, weights_BT=rows.weights_NT)
    value_losses = None
    if value is not None and parts.value_loss is not None and rows.value_weights_NT is not None:
        value_losses = token_losses(parts.value_loss, offered, shape=policy_BT.shape)
        total = aggregate(value_losses.losses_BT, weights_BT=rows.value_weights_NT)
        losses["value_loss"] = value.coefficient * total
    losses["loss"] = torch.stack([each.to(policy_BT.dtype) for each in losses.values()]).sum()
    if values_BT is not None and "returns" in rows.moments:
        values_BT = rows.moments["returns"].restore(values_BT)
    seen = TokensSeen(
        rows=rows,
        policy_BT=policy_BT.detach(),
        proximal_BT=proximal_BT,
        has_own_proximal=_has_its_own_proximal(rows, proximal=parts.config.proximal),
        corrections_BT=corrections_BT,
        losses=policy_losses,
        entropies_BT=None if entropies_BT is None else entropies_BT.detach(),
    )
    record(recorder, seen, values_BT=values_BT, value_losses=value_losses, losses=losses)
    return LossResult(loss=losses["loss"], statistics=recorder.statistics(), seen=seen)


def imitation_loss(demonstrated_logprobs_C: Tensor, sft: SftConfig, *, num_tokens: int) -> LossResult:
    """Loss of some of an update's demonstrations, from log π of their tokens at the run's temperature.

    Formula: −coefficient · Σ log π / num_tokens, with the tokens of all the update's demonstrations
    Source: an auxiliary SFT loss, as PTX of InstructGPT (arXiv:2203.02155) and the demonstrations of DAPG (arXiv:1709.10087)
    """
    loss = -sft.coefficient * at_least_float32(demonstrated_logprobs_C).sum() / num_tokens
    recorder = Recorder(demonstrated_logprobs_C.device)
    recorder.record("demonstration_logprob", demonstrated_logprobs_C)
    recorder.total("sft_loss", loss)
    recorder.total("loss", loss)
    return LossResult(loss=loss, statistics=recorder.statistics())


def _regularisers(
    rows: Prepared, config: AlgorithmConfig, *, policy_BT: Tensor, entropies_BT: Tensor | None
) -> dict[str, Tensor]:
    """KL and entropy terms, over all tokens, also those without policy gradient."""
    found: dict[str, Tensor] = {}
    for field, name, other_BT in (
        ("loss", "kl_loss", rows.batch.reference_logprobs_NT),
        ("rollout", "kl_rollout_loss", rows.batch.rollout_logprobs_NT),
    ):
        if (term := getattr(config.kl, field)) is not None:
            estimate_BT = _kl(term, policy_BT, other_BT, rows)
            found[name] = rows.kl_coefficients[field] * aggregate(estimate_BT, weights_BT=rows.weights_NT)
    if config.entropy_coefficient and entropies_BT is not None:
        bonus_BT = masked(entropies_BT, mask_BT=rows.loss_mask_NT)
        found["entropy_loss"] = -config.entropy_coefficient * aggregate(bonus_BT, weights_BT=rows.weights_NT)
    return found


def _divergence(
    rows: Prepared, policy_BTP: Tensor | None, *, direction: Literal["reverse", "forward"], recorder: Recorder
) -> Tensor:
    other_BTP, mask_BT = rows.batch.reference_partition_NTP, rows.loss_mask_NT
    assert policy_BTP is not None and other_BTP is not None, "prepare() refuses a batch without them"
    recorder.record("rest", policy_BTP[..., -1].exp(), mask_BT)
    recorder.record("rest_reference", other_BTP[..., -1].exp(), mask_BT)
    kl_BT = kl.partition_kl(policy_BTP, other_partition_BTP=other_BTP, loss_mask_BT=mask_BT, direction=direction)
    recorder.record("distillation_kl", kl_BT, mask_BT)
    return kl_BT


def _proximal(rows: Prepared, policy_BT: Tensor, *, proximal: str) -> Tensor:
    """Log-probs of π_old."""
    batch = rows.batch
    if proximal == "rollout":
        return batch.rollout_logprobs_NT
    if proximal == "approximate":
        return approximate_proximal(batch.rollout_logprobs_NT, policy_logprobs_BT=policy_BT, lags_BT=batch.lags_NT)
    return policy_BT.detach() if batch.proximal_logprobs_NT is None else batch.proximal_logprobs_NT


def _has_its_own_proximal(rows: Prepared, *, proximal: str) -> bool:
    """Whether π_old differs from the present policy and from the policy that sampled, if that is known."""
    if proximal == "rollout":
        return not rows.batch.is_sampler_known
    return proximal == "approximate" or rows.batch.proximal_logprobs_NT is not None


def _kl(term: KlLossConfig | KlRolloutConfig, policy_BT: Tensor, other_BT: Tensor | None, rows: Prepared) -> Tensor:
    assert other_BT is not None, "prepare() refuses a batch without them"
    given = {"other_logprobs_BT": other_BT, "loss_mask_BT": rows.loss_mask_NT, "log_ratio_clamp": term.log_ratio_clamp}
    if term.estimator == "unbiased":
        return kl.unbiased(policy_BT, rollout_logprobs_BT=rows.batch.rollout_logprobs_NT, **given)
    return kl.ESTIMATORS[term.estimator](policy_BT, **given)


def _offered(
    rows: Prepared, *, policy_BT: Tensor, proximal_BT: Tensor, entropies_BT: Tensor | None, values_BT: Tensor | None
) -> dict[str, Tensor | None]:
    """Tensors that losses and corrections may ask for, by name."""
    old_values_BT, returns_BT = rows.batch.values_NT, rows.returns_NT
    if "returns" in rows.moments and old_values_BT is not None and returns_BT is not None:
        old_values_BT, returns_BT = map(rows.moments["returns"].normalise, (old_values_BT, returns_BT))
    return {
        "policy_logprobs_BT": policy_BT,
        "proximal_logprobs_BT": proximal_BT,
        "rollout_logprobs_BT": rows.batch.rollout_logprobs_NT,
        "reference_logprobs_BT": rows.batch.reference_logprobs_NT,
        "advantages_BT": rows.advantages_NT,
        "loss_mask_BT": rows.loss_mask_NT,
        "lags_BT": rows.batch.lags_NT,
        "entropies_BT": None if entropies_BT is None else at_least_float32(entropies_BT),
        "values_BT": None if values_BT is None else at_least_float32(values_BT),
        "old_values_BT": old_values_BT,
        "returns_BT": returns_BT,
        "covariances_BT": rows.covariances_NT,
        "batch_covariances_M": rows.batch_covariances_M,
    }
