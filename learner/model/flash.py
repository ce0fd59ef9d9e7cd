"""Flash attention over the segments of a packed row, of any lengths, prompts and windows, without buckets or masks.

Torch has it for NVIDIA GPUs, 16-bit types and head sizes of up to 256 in multiples of 8, without a soft cap of scores. It is the fastest
attention there, and `learner.model.attention` uses it wherever it supports the inputs.

Shapes: T tokens of a row, K keys of all its segments, A attention heads, D head size, P tokens of shared prompts, C copies of them.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.placing import placed

MOST_HEAD_SIZE = 256
"""The kernel's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Queries are the row's tokens [start, start + length). Keys are the tokens of the shared prompt, if any, then the same tokens."""

    start: int
    length: int
    prompt_start: int = 0
    prompt_length: int = 0


@dataclass(frozen=True, slots=True)
class Copies:
    """Keys of all segments one after another, with the keys of a shared prompt before each of its completions."""

    index_K: Tensor
    """Position in the row of each key."""
    own_T: Tensor
    """For each token of the row, its position among the keys of its own segment."""
    shared_P: Tensor
    """Tokens of shared prompts: keys of other segments too."""
    places_C: Tensor
    """Positions of all their copies among the keys..."""
    whose_C: Tensor
    """...and, for each copy, the index of its token in `shared_P`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """All segments in the row's order, in the kernel's format. A segment's last query is aligned with its last key."""

    query_ends: Tensor
    """0 and the end of each segment's queries, int32. The queries are the row."""
    key_ends: Tensor
    most_queries: int
    most_keys: int
    copies: Copies | None
    """None when the keys are the row too."""


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether torch has flash attention for this device: NVIDIA GPUs since Ampere."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def laid_in_row(segments: Sequence[Segment], *, device: torch.device | str = "cpu") -> Lengths:
    """The lengths of segments that cover the row exactly once."""
    order = sorted(segments, key=lambda s: s.start)
    queries, keys = [s.length for s in order], [s.prompt_length + s.length for s in order]
    query_ends, key_ends = (placed(np.cumsum([0, *lengths], dtype=np.int32), device) for lengths in (queries, keys))
    return Lengths(
        query_ends=query_ends,
        key_ends=key_ends,
        most_queries=max(queries),
        most_keys=max(keys),
        copies=None if queries == keys else _copies(order, device=device),
    )


def _copies(order: Sequence[Segment], *, device: torch.device | str) -> Copies:
    ranges = [(r, s) for s in order for r in ((s.prompt_start, s.prompt_length), (s.start, s.length))]
    index_K = np.concatenate([np.arange(start, start + length) for (start, length), _ in ranges])
    is_own_K = np.repeat([start == s.start for (start, _), s in ranges], [length for (_, length), _ in ranges])
    own_T = np.flatnonzero(is_own_K)
    places_C = np.flatnonzero(~is_own_K)
    shared_P, whose_C = np.unique(index_K[places_C], return_inverse=True)
    return Copies(*(placed(x, device) for x in (index_K, own_T, shared_P, places_C, whose_C)))


def takes_lengths(dtype: torch.dtype, head_size: int, value_size: int) -> bool:
    """Whether the kernel supports this type and these head sizes."""
    is_fit = head_size == value_size <= MOST_HEAD_SIZE and head_size % 8 == 0
    return is_fit and dtype in (torch.bfloat16, torch.float16)


def attend_lengths(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, *, scaling: float | None, window: int | None
) -> Tensor:
    """Attention over the row, [1, T, A, D]; query [1, A, T, D], key and value [1, heads, T, D]."""
    query_T, key_K, value_K = (x[0].transpose(0, 1) for x in (query, key, value))
    if lengths.copies is not None:
        key_K, value_K = (_Copied.apply(x, lengths.copies) for x in (key_K, value_K))
    from torch.nn.attention.varlen import varlen_attn  # takes a second to import, and CPUs never need it

    attended = varlen_attn(
        query_T,
        key_K,
        value_K,
        lengths.query_ends,
        lengths.key_ends,
        lengths.most_queries,
        lengths.most_keys,
        scale=scaling,
        # Number of keys before and after a query that it attends to.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(attended, Tensor), "a tuple only with return_aux"
    return attended[None].contiguous()


class _Copied(torch.autograd.Function):
    """Gathers all segments' keys or values from the row's, [T, heads, D]. Gradients of a shared prompt are summed in float32."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x_T[copies.index_K]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        copies: Copies = ctx.copies
        (gradient_K,) = gradients
        found_T = gradient_K[copies.own_T]
        kind = torch.promote_types(found_T.dtype, torch.float32)
        shared_P = found_T[copies.shared_P].to(kind)
        shared_P.index_add_(0, copies.whose_C, gradient_K[copies.places_C].to(kind))
        found_T[copies.shared_P] = shared_P.to(found_T.dtype)
        return found_T, None
