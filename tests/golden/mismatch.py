"""How far the learner is from the policy that sampled, in the field's usual measures. Shapes: B rows, T tokens."""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.masks import expm1_minus, log_ratio, masked_mean, masked_sum


@torch.no_grad()
def off_policy_metrics(
    learner_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    log_ratio_clamp: float = 20.0,
    epsilon: float = 0.0,
    empty_rows: Literal["exclude", "count"] = "exclude",
) -> dict[str, Tensor]:
    """Perplexities, KL(μ ‖ π) by k1 and k3, and χ² of tokens and of trajectories; rows with nothing unmasked are left out, or
    count as perplexity 1 (verl).

    The clamp is for χ² alone. `epsilon` is added to token counts (verl 1e-8).
    """
    has_tokens_B = loss_mask_BT.any(1) if empty_rows == "exclude" else torch.ones_like(loss_mask_BT[:, 0])
    log_ppl_B = -masked_mean(learner_logprobs_BT, mask_BT=loss_mask_BT, dim=1, epsilon=epsilon)
    rollout_log_ppl_B = -masked_mean(rollout_logprobs_BT, mask_BT=loss_mask_BT, dim=1, epsilon=epsilon)
    gap_B = log_ppl_B - rollout_log_ppl_B
    ratio_BT = log_ratio(learner_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT)
    held_BT = ratio_BT.clamp(-log_ratio_clamp, log_ratio_clamp)
    sum_B = masked_sum(ratio_BT, mask_BT=loss_mask_BT, dim=1).clamp(-log_ratio_clamp, log_ratio_clamp)

    def over_rows(x_B: Tensor) -> Tensor:
        return masked_mean(x_B, mask_BT=has_tokens_B)

    return {
        "learner_perplexity": over_rows(log_ppl_B.exp()),
        "learner_log_perplexity": over_rows(log_ppl_B),
        "rollout_perplexity": over_rows(rollout_log_ppl_B.exp()),
        "rollout_log_perplexity": over_rows(rollout_log_ppl_B),
        "log_perplexity_gap": over_rows(gap_B),
        "log_perplexity_gap_abs": over_rows(gap_B.abs()),
        "log_perplexity_gap_max": torch.where(has_tokens_B, gap_B, -torch.inf).amax(),
        "log_perplexity_gap_min": torch.where(has_tokens_B, gap_B, torch.inf).amin(),
        "perplexity_ratio": over_rows(gap_B.exp()),
        "k1": masked_mean(-ratio_BT, mask_BT=loss_mask_BT, epsilon=epsilon),
        "k3": masked_mean(expm1_minus(ratio_BT), mask_BT=loss_mask_BT, epsilon=epsilon),
        "chi2_token": masked_mean((2 * held_BT).exp(), mask_BT=loss_mask_BT, epsilon=epsilon) - 1,
        "chi2_sequence": over_rows((2 * sum_B).exp()) - 1,
    }
