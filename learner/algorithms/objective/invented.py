"""Calls a user's functions with invented tensors: an error in one then ends the check, and not the run.

Shapes: N trajectories, G of a group, B rows of a micro-batch, T tokens, M all loss tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.errors import DataError
from learner.algorithms.objective.parts import Parts, choice, token_losses
from learner.algorithms.registry.variants import Variant

NUM_GROUPS = 4
"""Groups of an invented batch."""
_SIZES = {"B": 2, "T": 3, "M": 6}
_OF_ROWS = torch.Size((_SIZES["B"], _SIZES["T"]))
"""Shape of an invented micro-batch."""
_NUM_CALLS = 16
"""Calls of a filter of groups with the same group."""
_OF_THE_PRESENT_POLICY = frozenset({"policy_logprobs_BT", "entropies_BT", "values_BT"})
"""Tensors with gradient."""
_UNKNOWN = frozenset(
    {"reward_components_NK", "reward_components_GK", "reward_component_names", "columns", "part_rewards_N", "reward_moments"}
)  # fmt: skip
"""The judge, the prompts and the steps so far decide these."""


def try_parts(parts: Parts, *, group_size: int) -> None:
    """Raises DataError if a user's shaping, filter, aggregation, correction or loss raises an error, or returns a value of another type or
    shape; also for a loss without gradient, and for losses and corrections that are not finite."""
    of_group, of_all, of_tokens = (_shape(axes, group_size=group_size) for axes in ("G", "N", "NT"))
    for step, result in _results(*parts.reward_shaping, group_size=group_size):
        step.tensor(result, of_group if step.is_of_a_group else of_all)
    for chosen, result in _results(*parts.filters, group_size=group_size):
        if chosen.is_of_a_group:
            _try_again(chosen, chosen.verdict(result), group_size=group_size)
        else:
            choice(chosen, result, of_all, of_tokens)
    weights = (parts.aggregation, parts.value_aggregation)
    for part, result in _results(*parts.advantage_shaping, *weights, group_size=group_size):
        part.tensor(result, of_tokens)
    for correction, result in _results(*parts.corrections, group_size=group_size):
        _refuse_not_finite(correction, correction.tensor(result, of_tokens if correction.is_of_the_batch else _OF_ROWS))
    for loss in (parts.policy_loss, parts.value_loss):
        if loss is not None and loss.is_own:
            _try_loss(loss)


def try_advantage(advantage: Variant, *, group_size: int) -> None:
    """Raises DataError if a user's advantage raises an error, or returns a value of another type or shape."""
    of_group, of_all, of_tokens = (_shape(axes, group_size=group_size) for axes in ("G", "N", "NT"))
    for _, result in _results(advantage, group_size=group_size):
        if advantage.is_of_a_group:
            advantage.tensor(result, of_group)
        else:
            advantages = result[0] if isinstance(result, tuple) and len(result) == 2 else result
            advantage.tensor(advantages, of_all, of_tokens)


def try_selection(selection: Variant, *, group_size: int, num_candidates: int) -> None:
    """Raises DataError if the selection raises an error, or returns anything but the places of `group_size` candidates."""
    if _UNKNOWN.isdisjoint(selection.asks):
        result = selection.with_given(_supply(selection, group_size=num_candidates), group_size=group_size)
        selection.places(result, num_candidates=num_candidates, group_size=group_size)


def _try_again(chosen: Variant, verdict: bool, *, group_size: int) -> None:
    for _ in range(_NUM_CALLS - 1):
        if chosen.verdict(chosen.with_given(_supply(chosen, group_size=group_size))) != verdict:
            raise DataError(
                f"algorithm.{chosen.field}={chosen.plugin.name!r} keeps and drops the same group; cluster and learner call it, so it "
                "must answer the same to the same tensors, without random numbers and memory of earlier calls"
            )


@torch.enable_grad()
def _try_loss(loss: Variant) -> None:
    supply = _supply(loss)
    for name in _OF_THE_PRESENT_POLICY & supply.keys():
        supply[name].requires_grad_()
    losses_BT = token_losses(loss, supply, shape=_OF_ROWS).losses_BT
    _refuse_not_finite(loss, losses_BT)
    if not losses_BT.requires_grad:
        raise DataError(
            f"algorithm.{loss.field}={loss.plugin.name!r} returned losses without gradient, from which nothing is learned; compute them "
            f"from {loss.asks[0]}, without detach() and torch.no_grad()"
        )


def _refuse_not_finite(part: Variant, result: Tensor) -> None:
    bad = result[~result.isfinite()].tolist()
    if bad:
        raise DataError(
            f"algorithm.{part.field}={part.plugin.name!r} returned {bad[0]} for finite numbers (equal log-probs, others from 0 to 1); "
            "return finite ones"
        )


def _results(*parts: Variant | None, group_size: int) -> Iterator[tuple[Variant, Any]]:
    """Each user's function among these parts with its result, unless it asks for tensors that nothing can invent."""
    for part in parts:
        if part is not None and part.is_own and _UNKNOWN.isdisjoint(part.asks):
            yield part, part.with_given(_supply(part, group_size=group_size))


def is_zero_without_advantages(loss: Variant) -> bool:
    """Whether the loss is 0 where all advantages are 0, however far the policy has moved. Not known of a user's own loss: False."""
    if loss.is_own:
        return False
    supply = _supply(loss)
    for name in supply.keys() & {"advantages_BT", "covariances_BT", "batch_covariances_M"}:
        supply[name].zero_()
    supply["policy_logprobs_BT"] = -torch.linspace(0.1, 2.0, _OF_ROWS.numel(), dtype=torch.float64).reshape(_OF_ROWS)
    return not bool(token_losses(loss, supply, shape=_OF_ROWS).losses_BT.any())


def _supply(part: Variant, *, group_size: int = 1) -> dict[str, Tensor]:
    return {name: _invented(name, group_size=group_size) for name in part.asks}


def _shape(axes: str, *, group_size: int) -> torch.Size:
    sizes = _SIZES | {"N": NUM_GROUPS * group_size, "G": group_size}
    return torch.Size([sizes[axis] for axis in axes])


def _invented(name: str, *, group_size: int) -> Tensor:
    meaning, _, axes = name.rpartition("_")
    shape = _shape(axes, group_size=group_size)
    if meaning in ("loss_mask", "truncated"):
        return torch.full(shape, meaning == "loss_mask")
    if meaning == "group_index":
        return torch.arange(NUM_GROUPS).repeat_interleave(group_size)
    if meaning in ("policy_versions", "lags", "segment_index"):
        return torch.zeros(shape, dtype=torch.int64)
    if meaning == "completion_lengths":
        return torch.full(shape, _SIZES["T"])
    if meaning.endswith("logprobs"):
        return torch.full(shape, -0.5, dtype=torch.float64)
    return torch.linspace(0.0, 1.0, shape.numel(), dtype=torch.float64).reshape(shape)
