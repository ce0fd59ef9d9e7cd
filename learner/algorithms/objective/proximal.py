"""An estimate of π_old, the policy at the start of the step (`algorithm.proximal: approximate`). Shapes: B rows, T tokens."""

import torch
from torch import Tensor


@torch.no_grad()
def approximate_proximal(rollout_logprobs_BT: Tensor, *, policy_logprobs_BT: Tensor, lags_BT: Tensor) -> Tensor:
    """log π_old without a forward pass: interpolated between the policy that sampled and the present one, by version lag.

    Formula: log μ + (1 − 1/lag)·(log π − log μ); a lag of 0 or 1 gives log μ, which at lag 0 is exact
    Source: arXiv:2512.06547
    Degenerate: tokens of the same trajectory may have different lags
    Peers: AReaL
    """
    alpha_BT = 1 - 1 / lags_BT.clamp(min=1).to(rollout_logprobs_BT.dtype)
    return rollout_logprobs_BT + alpha_BT * (policy_logprobs_BT.detach() - rollout_logprobs_BT)
