"""Aggregations as weights over the WHOLE batch of an update: the loss is Σ w·l.

A micro-batch's loss is the sum over its own rows, so any split into micro-batches, packings and ranks adds up to exactly the same number.
A mean per micro-batch would overweight micro-batches of short completions. Shapes: N trajectories, T tokens.
"""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from learner.algorithms.conditions import InertWith
from learner.algorithms.masks import masked

EmptyRows = Annotated[Literal["exclude", "count"], InertWith("filters", ())]
"""Whether N counts trajectories whose tokens were all filtered out. In a run no other trajectory is empty."""


def token_mean(loss_mask_NT: Tensor) -> Tensor:
    """Mean over all tokens of the update.

    Formula: w = m / Σm
    Source: DAPO, arXiv:2503.14476
    Degenerate: nothing unmasked gives weights of 0, so a loss of 0 (verl and OpenRLHF give NaN)
    Peers: verl `token-mean`, OpenRLHF default, TRL `bnpo` and `dapo`, TapeAgents 0.1.0, torchtune, torchrl 0.14.1 `token`
    """
    return _divided_by(loss_mask_NT.sum().clamp(min=1), loss_mask_NT)


def sequence_mean(
    loss_mask_NT: Tensor, *, empty_rows: EmptyRows = "exclude", epsilon: NonNegativeFloat = 0.0
) -> Tensor:
    """Mean per trajectory, then over trajectories.

    Formula: w = m / ((len_i + ε) · N), N trajectories with at least one token, ε 0 (verl 1e-8)
    Source: GRPO, arXiv:2402.03300
    Degenerate: a trajectory whose tokens were all filtered out is not in N (verl, OpenRLHF); `empty_rows="count"` counts it (TRL);
        LightRFT gives NaN
    Peers: verl `seq-mean-token-mean`, TRL `grpo` (count), OpenRLHF `token_level_loss=False`, LightRFT, TapeAgents 0.1.16
    """
    length_N1 = loss_mask_NT.sum(1, keepdim=True)
    tokens_N1 = length_N1.clamp(min=1).double() + epsilon
    return _divided_by(tokens_N1 * _num_rows(length_N1, empty_rows=empty_rows), loss_mask_NT)


def prompt_mean(loss_mask_NT: Tensor, *, group_index_N: Tensor) -> Tensor:
    """Mean over all tokens of a prompt's trajectories, then over prompts.

    Formula: w = m / (tokens of the group · groups with at least one token)
    Source: ScaleRL, arXiv:2510.13786
    Degenerate: groups with nothing unmasked are not counted
    Peers: SkyRL `prompt_mean`; ScaleRL's "prompt average"
    """
    length_N = loss_mask_NT.sum(1)
    _, group_N = torch.unique(group_index_N, return_inverse=True)
    tokens_G = length_N.new_zeros(int(group_N.max()) + 1 if len(group_N) else 0).index_add(0, group_N, length_N)
    num_groups = (tokens_G > 0).sum().clamp(min=1)
    return _divided_by((tokens_G.clamp(min=1) * num_groups)[group_N][:, None], loss_mask_NT)


def sequence_sum_mean(loss_mask_NT: Tensor, *, empty_rows: EmptyRows = "exclude") -> Tensor:
    """Sum per trajectory, then mean over trajectories.

    Formula: w = m / N, N trajectories with at least one token
    Source: REINFORCE's own estimator
    Degenerate: `empty_rows="count"` counts trajectories whose tokens were all filtered out
    Peers: verl `seq-mean-token-sum`, TRL `luspo`, TapeAgents 0.1.16 with sums
    """
    return _divided_by(_num_rows(loss_mask_NT.sum(1), empty_rows=empty_rows), loss_mask_NT)


def sequence_sum_over_length(
    loss_mask_NT: Tensor, *, max_length: PositiveInt | None = None, empty_rows: EmptyRows = "count"
) -> Tensor:
    """Sum per trajectory over a constant length, so that long completions are not favoured.

    Formula: w = m / (N · L_max), L_max = `max_length`
    Source: Dr. GRPO, arXiv:2503.20783
    Degenerate: N counts trajectories whose tokens were all filtered out, unless `empty_rows="exclude"`. In a run with episodes L_max is
        `sampling.max_tokens` times `episodes.max_turns`. With `max_length: null` it is the largest number of loss tokens of a trajectory
        of the update, which is not constant
    Peers: TRL `dr_grpo` (max_completion_length), verl `seq-mean-token-sum-norm` (padded width, exclude)
    """
    length_N = loss_mask_NT.sum(1)
    longest = length_N.max().clamp(min=1) if max_length is None else max_length
    return _divided_by(_num_rows(length_N, empty_rows=empty_rows) * longest, loss_mask_NT)


def sum(loss_mask_NT: Tensor) -> Tensor:
    """Sum over all tokens.

    Formula: w = m
    Source: none
    Degenerate: the gradient grows with the update's tokens
    Peers: verl `token-sum`; torchrl `reduction="sum"`
    """
    return loss_mask_NT.double()


def aggregate(losses_BT: Tensor, *, weights_BT: Tensor) -> Tensor:
    """Σ w·l. A loss with weight 0 adds neither value nor gradient, even if it is inf or NaN."""
    kept_BT = masked(losses_BT, mask_BT=weights_BT != 0)
    return torch.sum(kept_BT * weights_BT.to(kept_BT.dtype))


def _divided_by(denominators: Tensor, loss_mask_NT: Tensor) -> Tensor:
    """The mask over the denominators, in float64: weights of 1/(tokens of an update) stay exact until they meet a float32 loss. A user's
    aggregation may give a mask of numbers, which weights its tokens."""
    shares = denominators.double().reciprocal()
    return (
        torch.where(loss_mask_NT, shares, 0.0) if loss_mask_NT.dtype == torch.bool else loss_mask_NT.double() * shares
    )


def _num_rows(length_N: Tensor, *, empty_rows: Literal["exclude", "count"]) -> Tensor:
    if empty_rows == "count":
        return length_N.new_tensor(max(len(length_N), 1))
    return (length_N > 0).sum().clamp(min=1)
