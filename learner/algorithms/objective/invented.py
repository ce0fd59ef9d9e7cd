"""Calls a user's advantage or loss with invented tensors: an error in it then ends the check, and not the run.

Shapes: N trajectories, G of a group, B rows of a micro-batch, T tokens, M all loss tokens.
"""

import math

import torch
from torch import Tensor

from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.registry.variants import Variant

NUM_GROUPS = 4
"""Groups of an invented batch."""
_NUM_ROWS, _NUM_TOKENS = 2, 3

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
    elif isinstance(result, tuple) and len(result) == 2:
        advantage.tensor(result[0], of_tokens[:1], of_tokens)
    else:
        advantage.tensor(result, of_tokens[:1], of_tokens)


def try_loss(loss: Variant) -> None:
    """Raises DataError if the loss raises an error, or returns a value of another type or shape."""
    sizes = {"B": _NUM_ROWS, "T": _NUM_TOKENS, "M": _NUM_ROWS * _NUM_TOKENS}
    supply = {name: _invented(name, sizes) for name in loss.asks}
    supply[loss.asks[0]].requires_grad_()
    result = loss.with_given(supply)
    losses_BT = result.losses_BT if isinstance(result, TokenLosses) else result
    loss.tensor(losses_BT, torch.Size((_NUM_ROWS, _NUM_TOKENS)))


def is_zero_without_advantages(loss: Variant) -> bool:
    """Whether the loss is 0 where all advantages are 0, however far the policy has moved. Not known of a user's own loss: False."""
    if loss.is_own:
        return False
    sizes = {"B": _NUM_ROWS, "T": _NUM_TOKENS, "M": _NUM_ROWS * _NUM_TOKENS}
    supply = {name: _invented(name, sizes) for name in loss.asks}
    for name in supply.keys() & {"advantages_BT", "covariances_BT", "batch_covariances_M"}:
        supply[name].zero_()
    supply["policy_logprobs_BT"] = -torch.linspace(0.1, 2.0, _NUM_ROWS * _NUM_TOKENS, dtype=torch.float64).reshape(
        _NUM_ROWS, _NUM_TOKENS
    )
    result = loss.with_given(supply)
    return not bool((result.losses_BT if isinstance(result, TokenLosses) else result).any())


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
