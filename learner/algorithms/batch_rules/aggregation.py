"""Aggregations as weights over the WHOLE batch of a step: the loss is Σ w·l.

A micro-batch's loss is then the sum over its own rows, and micro-batches, packings and ranks add up to the same number exactly.
A mean per micro-batch would overweight micro-batches of short completions. Shapes: N trajectories, T tokens.
"""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from learner.algorithms.conditions import InertWith
from learner.algorithms.masks import masked

EmptyRows = Annotated[Literal["exclude", "count"], InertWith("filters", ())]
"""Whether trajectories that filters emptied count; a run has no others."""


def token_mean(loss_mask_NT: Tensor) -> Tensor:
    """Mean over all tokens of the step.

    Formula: w = m / Σm
    Source: DAPO, arXiv:2503.14476
    Degenerate: nothing unmasked gives weights of 0, so a loss of 0 (verl and OpenRLHF give NaN)
    Peers: verl `token-mean`, OpenRLHF default, TRL `bnpo` and `dapo`, TapeAgents 0.1.0, torchtune, torchrl 0.14.1 `token`
    """
    mask_NT = _as_weights(loss_mask_NT)
    return mask_NT / mask_NT.sum().clamp(min=1)


def sequence_mean(
    loss_mask_NT: Tensor, *, empty_rows: EmptyRows = "exclude", epsilon: NonNegativeFloat = 0.0
) -> Tensor:
    """Mean per trajectory, then over trajectories.

    Formula: w = m / ((len_i + ε) · N), N trajectories with at least one token, ε 0 (verl 1e-8)
    Source: GRPO, arXiv:2402.03300
    Degenerate: a trajectory with nothing unmasked is no part of N (verl, OpenRLHF); `empty_rows="count"` counts it (TRL);
        LightRFT gives NaN
    Peers: verl `seq-mean-token-mean`, TRL `grpo` (count), OpenRLHF `token_level_loss=False`, LightRFT, TapeAgents 0.1.16
    """
    mask_NT = _as_weights(loss_mask_NT)
    length_N = mask_NT.sum(1, keepdim=True)
    return mask_NT / (length_N.clamp(min=1) + epsilon) / _num_rows(length_N, empty_rows=empty_rows)


def prompt_mean(loss_mask_NT: Tensor, *, group_index_N: Tensor) -> Tensor:
    """Mean over all tokens of a prompt's trajectories, then over prompts.

    Formula: w = m / (tokens of the group · groups with at least one token)
    Source: ScaleRL, arXiv:2510.13786
    Degenerate: groups with nothing unmasked are not counted
    Peers: SkyRL `prompt_mean`; ScaleRL's "prompt average"
    """
    mask_NT = _as_weights(loss_mask_NT)
    _, group_N = torch.unique(group_index_N, return_inverse=True)
    tokens_per_group = torch.zeros(
        int(group_N.max()) + 1 if len(group_N) else 0, dtype=mask_NT.dtype, device=mask_NT.device
    )
    tokens_per_group = tokens_per_group.index_add(0, group_N, mask_NT.sum(1))
    num_groups = (tokens_per_group > 0).sum().clamp(min=1)
    return mask_NT / tokens_per_group.clamp(min=1)[group_N][:, None] / num_groups


def sequence_sum_mean(loss_mask_NT: Tensor, *, empty_rows: EmptyRows = "exclude") -> Tensor:
    """Sum per trajectory, then mean over trajectories.

    Formula: w = m / N, N trajectories with at least one token
    Source: REINFORCE's own estimator
    Degenerate: `empty_rows="count"` counts trajectories with nothing unmasked
    Peers: verl `seq-mean-token-sum`, TRL `luspo`, TapeAgents 0.1.16 with sums
    """
    mask_NT = _as_weights(loss_mask_NT)
    return mask_NT / _num_rows(mask_NT.sum(1, keepdim=True), empty_rows=empty_rows)


def sequence_sum_over_length(
    loss_mask_NT: Tensor, *, max_length: PositiveInt | None = None, empty_rows: EmptyRows = "count"
) -> Tensor:
    """Sum per trajectory over a constant length, so that long completions are not favoured.

    Formula: w = m / (N · L_max)
    Source: Dr. GRPO, arXiv:2503.20783
    Degenerate: `max_length=None`, which no run leaves, takes the longest completion of the step; the padded width depends on the layout
    Peers: TRL `dr_grpo` (max_completion_length), verl `seq-mean-token-sum-norm` (padded width, exclude)
    """
    mask_NT = _as_weights(loss_mask_NT)
    length_N = mask_NT.sum(1, keepdim=True)
    longest = length_N.max().clamp(min=1) if max_length is None else max_length
    return mask_NT / _num_rows(length_N, empty_rows=empty_rows) / longest


def sum(loss_mask_NT: Tensor) -> Tensor:
    """Sum over all tokens.

    Formula: w = m
    Source: none
    Degenerate: the step's gradient grows with its tokens
    Peers: verl `token-sum`; torchrl `reduction="sum"`
    """
    return _as_weights(loss_mask_NT)


def aggregate(losses_BT: Tensor, *, weights_BT: Tensor) -> Tensor:
    """Σ w·l, without a trace of losses that have no weight."""
    kept_BT = masked(losses_BT, mask_BT=weights_BT != 0)
    return torch.sum(kept_BT * weights_BT.to(kept_BT.dtype))


def _as_weights(loss_mask_NT: Tensor) -> Tensor:
    """float64: weights of 1/(tokens of a step) lose nothing before they meet a float32 loss."""
    return loss_mask_NT.to(torch.float64)


def _num_rows(length_N: Tensor, *, empty_rows: Literal["exclude", "count"]) -> Tensor | int:
    if empty_rows == "count":
        return max(len(length_N), 1)
    return (length_N > 0).sum().clamp(min=1)
