"""Calls a user's advantage, selection or loss with invented tensors: an error in it then ends the check, and not the run.

Shapes: N trajectories, G of a group, B rows of a micro-batch, T tokens, M all loss tokens.
"""

import math

import torch
from torch import Tensor

from learner.algorithms.objective.parts import token_losses
from learner.algorithms.registry.variants import Variant

NUM_GROUPS = 4
"""Groups of an invented batch."""
_NUM_TOKENS = 3
_OF_ROWS = torch.Size((2, _NUM_TOKENS))
"""Shape of an invented micro-batch."""

_UNKNOWN = frozenset(
    {"reward_components_NK", "reward_components_GK", "reward_component_names", "columns", "part_rewards_N"}
)
"""The judge and the prompts know the number and the names of these."""


def try_advantage(advantage: Variant, *, group_size: int) -> None:
    """Raises DataError if the advantage raises an error, or returns a value of another type or shape."""
    if _UNKNOWN & set(advantage.asks):
        return
    sizes = {"N": NUM_GROUPS * group_size, "G": group_size, "T": _NUM_TOKENS}
    result = advantage.with_given({name: _invented(name, sizes) for name in advantage.asks})
    of_tokens = torch.Size((sizes["N"], _NUM_TOKENS))
    if advantage.is_of_a_group:
        advantage.tensor(result, torch.Size((group_size,)))
    else:
        advantages = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        advantage.tensor(advantages, of_tokens[:1], of_tokens)


def try_selection(selection: Variant, *, group_size: int, num_candidates: int) -> None:
    """Raises DataError if the selection raises an error, or returns anything but the places of `group_size` candidates."""
    if _UNKNOWN & set(selection.asks):
        return
    supply = {name: _invented(name, {"G": num_candidates}) for name in selection.asks}
    result = selection.with_given(supply, group_size=group_size)
    selection.places(result, num_candidates=num_candidates, group_size=group_size)


def try_loss(loss: Variant) -> None:
    """Raises DataError if the loss raises an error, or returns a value of another type or shape."""
    supply = _for_a_loss(loss)
    supply[loss.asks[0]].requires_grad_()
    token_losses(loss, supply, shape=_OF_ROWS)


def is_zero_without_advantages(loss: Variant) -> bool:
    """Whether the loss is 0 where all advantages are 0, however far the policy has moved. Not known of a user's own loss: False."""
    if loss.is_own:
        return False
    supply = _for_a_loss(loss)
    for name in supply.keys() & {"advantages_BT", "covariances_BT", "batch_covariances_M"}:
        supply[name].zero_()
    supply["policy_logprobs_BT"] = -torch.linspace(0.1, 2.0, _OF_ROWS.numel(), dtype=torch.float64).reshape(_OF_ROWS)
    return not bool(token_losses(loss, supply, shape=_OF_ROWS).losses_BT.any())


def _for_a_loss(loss: Variant) -> dict[str, Tensor]:
    sizes = {"B": _OF_ROWS[0], "T": _OF_ROWS[1], "M": _OF_ROWS.numel()}
    return {name: _invented(name, sizes) for name in loss.asks}


def _invented(name: str, sizes: dict[str, int]) -> Tensor:
    meaning, _, axes = name.rpartition("_")
    shape = [sizes[axis] for axis in axes]
    if meaning in ("loss_mask", "truncated"):
        return torch.full(shape, meaning == "loss_mask")
    if meaning == "group_index":
        return torch.arange(NUM_GROUPS).repeat_interleave(sizes["G"])
    if meaning in ("policy_versions", "lags", "segment_index"):
        return torch.zeros(shape, dtype=torch.int64)
    if meaning == "completion_lengths":
        return torch.full(shape, _NUM_TOKENS)
    if meaning.endswith("logprobs"):
        return torch.full(shape, -0.5, dtype=torch.float64)
    numbers = torch.linspace(0.0, 1.0, math.prod(shape), dtype=torch.float64)
    return numbers.reshape(shape)
