"""Sequence parallelism: neighbouring ranks compute the passes of one micro-batch together (DeepSpeed-Ulysses, arXiv:2309.14509).

Each rank has a slice of the positions for layers that see one position at a time: embeddings, norms, linear layers, the vocabulary head.
Attention sees all positions: before it the ranks exchange slices of all heads for all positions of some heads, after it they exchange
back. Every rank joins the results of all slices. All ranks of a group then compute the same loss, and each backpropagates through its own
slice: the sum of their gradients is that of a single rank.

Shapes: A heads, L positions of a slice, T positions of all slices, D head size, P ranks of the group; C places of the joined results.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from cluster.contracts.errors import ConfigError
from learner.shape import num_heads

_MOVING_ROTATIONS = {"dynamic", "longrope"}
"""Rotary embeddings that transformers computes from the last position of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """This rank and the ranks that it shares passes with. All of them make the same calls in the same order."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def slice_length(self, num_positions: int) -> int:
        """Positions of a slice, the same on every rank; the last slices may reach beyond the end."""
        return -(-num_positions // self.size)

    def own(self, x: Tensor, *, dim: int = 0) -> Tensor:
        """This rank's slice of a dimension of positions, padded with 0 beyond the end."""
        num_positions = x.shape[dim]
        length = self.slice_length(num_positions)
        start = min(self.rank * length, num_positions)
        found = x.narrow(dim, start, min(length, num_positions - start))
        return F.pad(found, (*[0, 0] * (x.ndim - 1 - dim), 0, length - found.shape[dim]))

    def to_heads(self, x: Tensor) -> Tensor:
        """From [1, A, L, D] of this rank's slice to [1, A / P, T, D] of its heads. Keys and values with too few heads are repeated."""
        x = x.repeat_interleave(self.size // math.gcd(x.shape[1], self.size), dim=1)
        return _Exchange.apply(x[0].unflatten(0, (self.size, -1)), self.group).transpose(0, 1).flatten(1, 2)[None]

    def to_positions(self, x: Tensor) -> Tensor:
        """From [1, T, A / P, D] of this rank's heads to [1, L, A, D] of its slice."""
        return _Exchange.apply(x[0].unflatten(0, (self.size, -1)), self.group).transpose(0, 1).flatten(1, 2)[None]

    def joined(self, own: Tensor, *, places: Tensor, size: int) -> Tensor:
        """Joins the results of all ranks, [C, ...] with `size` rows. `own` are this rank's, for its `places`."""
        whole = own.new_zeros(size, *own.shape[1:]).index_copy(0, places, own)
        return _Joined.apply(whole, self.group) if size else whole


class _Exchange(torch.autograd.Function):
    """Sends part p of the first dimension to rank p, and replaces it by rank p's part for this rank."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


class _Joined(torch.autograd.Function):
    """The sum over ranks. Every rank already has its whole gradient: summing these would count it P times."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = own.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def refuse_what_cannot_be_split(text: PretrainedConfig, *, size: int, named: str) -> None:
    """Raises ConfigError for a model whose attention cannot be split among `size` ranks. `named`: the model's setting and value."""
    field = f"learner.sequence_parallel_size={size}"
    if num_heads(text) % size:
        raise ConfigError(
            f"{field} does not divide the {num_heads(text)} attention heads of {named}; use a divisor of them"
        )
    rotations = getattr(text, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rotations, *rotations.values()) if isinstance(each, dict)}
    if found := kinds & _MOVING_ROTATIONS:
        raise ConfigError(
            f"{field}: the rotary embedding ({found.pop()}) of {named} depends on the last position of a pass, which only one rank has; "
            "leave it out for this model"
        )
