"""Attention over packed rows: every sequence sees itself alone, and completions of one prompt share its keys and values.

Registered with transformers under the name `treadwheel_packed`. A packed row is `[1, T]` tokens; `Segments` say which of them belong
together. Queries and keys are gathered into a few buckets of like length, attended there, and put back: linear layers see no padding,
attention sees little. `learner.model.packing` builds segments, `learner.model.policy` proves for each model that packing changes nothing.

Segments of their own are plainly causal, for which torch takes its fastest kernel. Completions that share a prompt, and windows shorter
than a segment, need a mask. A long completion behind a shorter prompt asks the prompt's questions again instead, and is plainly causal.

On GPUs flash attention takes segments as they lie (`learner.model.flash`). What it does not take goes through buckets there too, in torch's
memory-efficient kernel.
`model.attention: flash_attention_2` packs without sharing.

Shapes: T tokens of a row, S segments of a bucket, Q query tokens, K key tokens, A attention heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from learner.algorithms.placing import placed
from learner.model.flash import Lengths, Segment, attend_lengths, has_flash, laid_in_row, takes_lengths
from learner.sequence_parallel import SequenceGroup

PACKED = "treadwheel_packed"
FLASH = "flash_attention_2"
MAX_MASK_CELLS = 2**24
"""Cells of one bucket's mask; longer segments go into buckets of their own, without a mask where their prompt is not longer."""
MIN_FILL = 0.75
"""A bucket's shortest segment has at least this share of its longest, below which a new bucket starts..."""
SMALL_LENGTH = 16
"""...unless both are this short: a bucket's own cost is larger than that padding."""
FLOAT32_KEYS = 512
"""Up to so many keys, attention in bfloat16 takes two to three times as long as in float32 on CPUs, most of it in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    query_index_SQ: Tensor
    """Places in the row; padding repeats a segment's first token. A long segment's begin with those of its shared prompt."""
    key_index_SK: Tensor
    offset_S: Tensor
    """Keys before a segment's first query: the length of its shared prompt, unless its queries begin there."""
    has_prompts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    buckets: tuple[Bucket, ...]
    cell_index_T: Tensor
    """For each token of the row its cell among all buckets' queries."""
    lengths: Lengths | None = None
    """None on devices without flash attention."""
    sequence_group: SequenceGroup | None = None
    """The ranks that have the row in slices; None where this rank has all of it."""


def bucketed(segments: Sequence[Segment], *, num_tokens: int, device: torch.device | str = "cpu") -> Segments:
    """Segments, which cover the row exactly once, as buckets of like length, and where it serves in the row's order too."""
    order = sorted(segments, key=lambda s: (s.prompt_length == 0, -(s.prompt_length + s.length), -s.length, s.start))
    buckets: list[Bucket] = []
    cell_index_T = np.zeros(num_tokens, dtype=np.int64)
    num_cells = 0
    while order:
        size = _bucket_size(order)
        bucket, order = order[:size], order[size:]
        start_S, length_S, prompt_start_S, prompt_length_S = (
            np.array([getattr(s, name) for s in bucket])
            for name in ("start", "length", "prompt_start", "prompt_length")
        )
        again_S = np.array([_num_asked_again(s) for s in bucket])
        query_Q = np.arange((again_S + length_S).max())[None]
        key_K = np.arange((prompt_length_S + length_S).max())[None]
        asked_SQ = query_Q - again_S[:, None]
        is_query_SQ = (asked_SQ >= 0) & (asked_SQ < length_S[:, None])
        query_index_SQ = np.where(
            asked_SQ < 0, prompt_start_S[:, None] + query_Q, start_S[:, None] + np.where(is_query_SQ, asked_SQ, 0)
        )
        own_SK = key_K - prompt_length_S[:, None]
        own_SK = np.where(own_SK < length_S[:, None], own_SK, 0)
        key_index_SK = np.where(
            key_K < prompt_length_S[:, None], prompt_start_S[:, None] + key_K, start_S[:, None] + own_SK
        )
        cell_index_T[query_index_SQ[is_query_SQ]] = num_cells + np.flatnonzero(is_query_SQ)
        num_cells += query_index_SQ.size
        buckets.append(
            Bucket(
                query_index_SQ=placed(query_index_SQ, device),
                key_index_SK=placed(key_index_SK, device),
                offset_S=placed(prompt_length_S - again_S, device),
                has_prompts=bool((prompt_length_S - again_S).any()),
            )
        )
    return Segments(
        buckets=tuple(buckets),
        cell_index_T=placed(cell_index_T, device),
        lengths=laid_in_row(segments, device=device) if has_flash(torch.device(device)) else None,
    )


def _num_asked_again(segment: Segment) -> int:
    """Queries of the shared prompt that a segment with a bucket of its own computes once more, and drops.

    A causal kernel computes (P + Q)² / 2 cells of P prompt and Q own tokens, a masked one Q · (P + Q) and a mask of them: it is no more
    work where P <= Q.
    """
    num_keys = segment.prompt_length + segment.length
    is_long = segment.length * num_keys > MAX_MASK_CELLS
    return segment.prompt_length if is_long and segment.prompt_length <= segment.length else 0


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    otherwise: Callable[..., Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, A, T, D], key and value [1, heads, T, D]; result [1, T, A, D].

    With a sequence group T is of this rank's slice, and attention is over the whole row for a part of the heads. `otherwise` is for what
    flash attention does not take, and for such groups: `attend_in_buckets`, or what stands for it. Sinks of attention (`s_aux`) are not
    known here: all is NaN then, with which the proof of `learner.model.policy` fails.
    """
    if s_aux is not None:
        return query.new_full((1, query.shape[2], query.shape[1], value.shape[-1]), torch.nan), None
    options: dict[str, Any] = {"segments": segments, "scaling": scaling, "window": sliding_window, "softcap": softcap}
    if segments is not None and segments.sequence_group is None:
        lengths = _lengths(query, key, value, segments, softcap=softcap)
        if lengths is not None:
            return attend_lengths(query, key, value, lengths, scaling=scaling, window=sliding_window), None
    return (otherwise or attend_in_buckets)(query, key, value, **options), None


def attend_in_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Segments | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """As `packed_attention`. Without segments (a model that doesn't hand them down) rows are attended causally, so that the proof of
    `learner.model.policy` finds a difference instead of an exception."""
    if segments is None:
        attended = _attend(query, key, value, None, scaling=scaling, softcap=softcap)
        return attended.transpose(1, 2).contiguous()
    options: dict[str, Any] = {"segments": segments, "scaling": scaling, "window": window, "softcap": softcap}
    group = segments.sequence_group
    if group is None:
        return _attend_row(query, key, value, **options)
    num_tokens, num_padded = segments.cell_index_T.numel(), group.size * query.shape[2]
    whole = (group.to_heads(x)[:, :, :num_tokens] for x in (query, key, value))
    attended = F.pad(_attend_row(*whole, **options), (0, 0, 0, 0, 0, num_padded - num_tokens))
    return group.to_positions(attended)


def flash_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' own under the name `flash_attention_2`. Its kernels take 16 bits: float32, in which an only rank proves its model, is
    rounded for them."""
    dtype = query.dtype
    if segments is not None and (lengths := segments.lengths) is not None and lengths.copies is None:
        # Else transformers finds them by the positions in every layer, where the host waits for the GPU.
        options |= {"cu_seq_lens_q": lengths.query_ends, "cu_seq_lens_k": lengths.key_ends}
        options |= {"max_length_q": lengths.most_queries, "max_length_k": lengths.most_keys}
    if torch.are_deterministic_algorithms_enabled():  # the package does not ask
        options["deterministic"] = True
    if dtype == torch.float32:
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    attended, none = flash_attention_forward(module, query, key, value, attention_mask, **options)
    return attended.to(dtype), none


@contextmanager
def windows_seen() -> Iterator[set[int | None]]:
    """The windows that a model's layers ask packed attention for while this is open; None is for one that sees all."""
    seen: set[int | None] = set()
    own = ALL_ATTENTION_FUNCTIONS[PACKED]

    def noted(*args: Any, sliding_window: int | None = None, **options: Any) -> tuple[Tensor, None]:
        seen.add(sliding_window)
        return own(*args, sliding_window=sliding_window, **options)

    ALL_ATTENTION_FUNCTIONS.register(PACKED, noted)
    try:
        yield seen
    finally:
        ALL_ATTENTION_FUNCTIONS.register(PACKED, own)


def _lengths(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, softcap: float | None) -> Lengths | None:
    """Of the segments, where flash attention takes them."""
    is_plain = softcap is None and query.dtype == key.dtype == value.dtype
    return segments.lengths if is_plain and takes_lengths(query.dtype, query.shape[-1], value.shape[-1]) else None


def _attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Segments,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """A whole row, of whose heads some may be elsewhere; [1, T, A, D]."""
    if (lengths := _lengths(query, key, value, segments, softcap=softcap)) is not None:
        return attend_lengths(query, key, value, lengths, scaling=scaling, window=window)
    num_heads = query.shape[1]
    query_T, key_T, value_T = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    cells: list[Tensor] = []
    for bucket in segments.buckets:
        # An embedding look-up is a gather whose backward adds up the gradients of shared prompts fast.
        query_S = _heads(F.embedding(bucket.query_index_SQ, query_T), num_heads=num_heads)
        key_S = _heads(F.embedding(bucket.key_index_SK, key_T), num_heads=key.shape[1])
        value_S = _heads(F.embedding(bucket.key_index_SK, value_T), num_heads=value.shape[1])
        mask = _mask(bucket, sliding_window=window)
        attended = _attend(query_S, key_S, value_S, mask, scaling=scaling, softcap=softcap)
        cells.append(attended.transpose(1, 2).reshape(-1, num_heads * value.shape[-1]))
    row_T = F.embedding(segments.cell_index_T, cells[0] if len(cells) == 1 else torch.cat(cells))
    return row_T.view(1, -1, num_heads, value.shape[-1])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, softcap: float | None
) -> Tensor:
    """[S, A, Q, D]; causal without a mask, and without dropout: the policy that learns must be the one that sampled."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # The kernel that takes masks and float32 knows no grouped heads: torch would fall back to one that makes every score.
        key, value = _repeated(key, query), _repeated(value, query)
        grouped = False
    if softcap is None and query.dtype == torch.bfloat16 and key.shape[2] <= FLOAT32_KEYS and not query.is_cuda:
        attended = _attend(query.float(), key.float(), value.float(), mask, scaling=scaling, softcap=None)
        return attended.to(query.dtype)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    if grouped:
        key, value = _repeated(key, query), _repeated(value, query)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return weights @ value


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values with a head for each of the queries'."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _mask(bucket: Bucket, *, sliding_window: int | None) -> Tensor | None:
    """[S, 1, Q, K], true where a query sees a key; None is plain causal."""
    num_queries, num_keys = bucket.query_index_SQ.shape[1], bucket.key_index_SK.shape[1]
    window = num_keys if sliding_window is None else sliding_window
    slides = window < num_keys
    if not bucket.has_prompts and not slides:
        return None
    device = bucket.offset_S.device
    place_SQ = bucket.offset_S[:, None] + torch.arange(num_queries, device=device)
    distance_SQK = place_SQ[:, :, None] - torch.arange(num_keys, device=device)
    mask_SQK = distance_SQK >= 0
    if slides:
        mask_SQK &= distance_SQK < window
        # A padding query may lie beyond every key's window; one visible key keeps its softmax finite.
        mask_SQK[:, :, 0] |= ~mask_SQK.any(-1)
    return mask_SQK[:, None]


def _heads(x_SLE: Tensor, *, num_heads: int) -> Tensor:
    return x_SLE.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _bucket_size(order: Sequence[Segment]) -> int:
    """How many of the sorted segments, longest first, share a bucket with the first."""
    first = order[0]
    num_keys = first.prompt_length + first.length
    num_queries = first.length
    for size, segment in enumerate(order):
        keys = segment.prompt_length + segment.length
        num_queries = max(num_queries, segment.length)
        is_short = keys < MIN_FILL * num_keys and num_keys > SMALL_LENGTH
        is_uneven = segment.length < MIN_FILL * num_queries and num_queries > 2 * SMALL_LENGTH
        is_full = size and (size + 1) * num_queries * num_keys > MAX_MASK_CELLS
        if is_short or is_uneven or is_full or (segment.prompt_length > 0) != (first.prompt_length > 0):
            return max(size, 1)
    return len(order)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_ATTENTION_FUNCTIONS.register(FLASH, flash_attention)
