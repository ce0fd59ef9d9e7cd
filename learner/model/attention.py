"""Attention over packed rows: each sequence attends to itself only, and completions of one prompt share its keys and values.

Registered with transformers under the name `treadwheel_packed`. A packed row is `[1, T]` tokens; `Segments` say which tokens belong
together. Queries and keys are gathered into a few buckets of similar length, attended there, and scattered back: linear layers compute no
padding, attention computes little. `learner.model.packing` builds segments; `learner.model.policy` proves for each model that packing
changes nothing.

A segment without a shared prompt is plain causal attention, for which torch has its fastest kernel. Completions with a shared prompt, and
windows shorter than a segment, need a mask. A long completion after a shorter prompt computes the prompt's queries again instead, and is
plain causal.

On GPUs flash attention computes segments without buckets (`learner.model.flash`). Inputs that it does not support go through buckets, in
torch's memory-efficient kernel. `model.attention: flash_attention_2` packs without sharing prompts.

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
"""Cells of one bucket's mask. A larger segment has its own bucket, without a mask if its prompt is not longer than itself."""
MIN_FILL = 0.75
"""The shortest segment of a bucket has at least this share of the longest one's length; a shorter one starts a new bucket..."""
SMALL_LENGTH = 16
"""...unless both are this short: another bucket would cost more than the padding."""
FLOAT32_KEYS = 512
"""Up to this many keys, bfloat16 attention on CPUs takes two to three times as long as float32, mostly in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    query_index_SQ: Tensor
    """Positions in the row; padding repeats a segment's first token. A long segment's queries begin with those of its shared prompt."""
    key_index_SK: Tensor
    offset_S: Tensor
    """Number of keys before a segment's first query: the length of its shared prompt, or 0 if the queries begin with the prompt."""
    has_prompts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    buckets: tuple[Bucket, ...]
    cell_index_T: Tensor
    """For each token of the row, its position among the queries of all buckets."""
    lengths: Lengths | None = None
    """None on devices without flash attention."""
    sequence_group: SequenceGroup | None = None
    """The ranks that hold slices of the row; None when this rank holds all of it."""


def bucketed(segments: Sequence[Segment], *, num_tokens: int, device: torch.device | str = "cpu") -> Segments:
    """Buckets of similar length, and `lengths` for devices with flash attention. The segments cover the row exactly once."""
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
        repeated_S = np.array([_num_repeated_queries(s) for s in bucket])
        query_Q = np.arange((repeated_S + length_S).max())[None]
        key_K = np.arange((prompt_length_S + length_S).max())[None]
        own_SQ = query_Q - repeated_S[:, None]
        is_query_SQ = (own_SQ >= 0) & (own_SQ < length_S[:, None])
        query_index_SQ = np.where(
            own_SQ < 0, prompt_start_S[:, None] + query_Q, start_S[:, None] + np.where(is_query_SQ, own_SQ, 0)
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
                offset_S=placed(prompt_length_S - repeated_S, device),
                has_prompts=bool((prompt_length_S - repeated_S).any()),
            )
        )
    return Segments(
        buckets=tuple(buckets),
        cell_index_T=placed(cell_index_T, device),
        lengths=laid_in_row(segments, device=device) if has_flash(torch.device(device)) else None,
    )


def _num_repeated_queries(segment: Segment) -> int:
    """Queries of the shared prompt that a segment with its own bucket computes again and drops.

    With P prompt tokens and Q own tokens a causal kernel computes (P + Q)² / 2 cells. A masked kernel computes Q · (P + Q) cells and needs
    a mask of that size, so the causal kernel is no more work for P <= Q.
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

    With a sequence group, T counts this rank's slice, and attention is over the whole row for a part of the heads. `otherwise` computes
    sequence groups and inputs that flash attention does not support; None is `attend_in_buckets`. Attention sinks (`s_aux`) are not
    supported: the result is NaN, so that the proof in `learner.model.policy` fails.
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
    """As `packed_attention`. Without segments (a model that does not pass them on) rows get causal attention, so that the proof in
    `learner.model.policy` reports a difference instead of an exception."""
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
    """transformers' attention under the name `flash_attention_2`. Its kernels take 16-bit types only: float32, in which a single rank
    proves its model, is rounded to bfloat16."""
    dtype = query.dtype
    if segments is not None and (lengths := segments.lengths) is not None and lengths.copies is None:
        # Otherwise transformers derives them from the positions in each layer, and the host waits for the GPU each time.
        options |= {"cu_seq_lens_q": lengths.query_ends, "cu_seq_lens_k": lengths.key_ends}
        options |= {"max_length_q": lengths.most_queries, "max_length_k": lengths.most_keys}
    if torch.are_deterministic_algorithms_enabled():  # flash_attn does not read this setting
        options["deterministic"] = True
    if dtype == torch.float32:
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    attended, none = flash_attention_forward(module, query, key, value, attention_mask, **options)
    return attended.to(dtype), none


def widened(x: Tensor) -> Tensor:
    """bfloat16 as float32 on CPUs. There the gradient of a row that is gathered several times is summed in the row's type."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


@contextmanager
def windows_seen(name: str) -> Iterator[set[int | None]]:
    """Collects the window sizes that layers pass to the attention `name` inside the context; None is full attention."""
    seen: set[int | None] = set()
    original = ALL_ATTENTION_FUNCTIONS[name]

    def recording(*args: Any, sliding_window: int | None = None, **options: Any) -> tuple[Tensor, None]:
        seen.add(sliding_window)
        return original(*args, sliding_window=sliding_window, **options)

    ALL_ATTENTION_FUNCTIONS.register(name, recording)
    try:
        yield seen
    finally:
        ALL_ATTENTION_FUNCTIONS.register(name, original)


def _lengths(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, softcap: float | None) -> Lengths | None:
    """The segments' lengths; None where flash attention does not support the inputs."""
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
    """Attention over a whole row for this rank's heads; [1, T, A, D]."""
    if (lengths := _lengths(query, key, value, segments, softcap=softcap)) is not None:
        return attend_lengths(query, key, value, lengths, scaling=scaling, window=window)
    num_heads, dtype = query.shape[1], query.dtype
    query_T, key_T, value_T = (widened(x[0].transpose(0, 1).flatten(1)) for x in (query, key, value))
    cells: list[Tensor] = []
    for bucket in segments.buckets:
        kind = query_T.dtype if softcap is None and bucket.key_index_SK.shape[1] <= FLOAT32_KEYS else dtype
        # An embedding look-up is a gather with a fast backward for indices that repeat: shared prompts.
        query_S = _heads(F.embedding(bucket.query_index_SQ, query_T).to(kind), num_heads=num_heads)
        key_S = _heads(F.embedding(bucket.key_index_SK, key_T).to(kind), num_heads=key.shape[1])
        value_S = _heads(F.embedding(bucket.key_index_SK, value_T).to(kind), num_heads=value.shape[1])
        mask = _mask(bucket, sliding_window=window)
        attended = _attend(query_S, key_S, value_S, mask, scaling=scaling, softcap=softcap)
        cells.append(attended.transpose(1, 2).reshape(-1, num_heads * value.shape[-1]).to(dtype))
    row_T = F.embedding(segments.cell_index_T, cells[0] if len(cells) == 1 else torch.cat(cells))
    return row_T.view(1, -1, num_heads, value.shape[-1])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, softcap: float | None
) -> Tensor:
    """[S, A, Q, D]; causal without a mask. No dropout: the policy that learns must be the one that sampled."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and (query.is_cuda or softcap is not None):
        # On GPUs torch's flash attention alone supports grouped heads, and it does not support these inputs: torch would fall back to a
        # kernel that materialises all scores.
        key, value = _repeated(key, query), _repeated(value, query)
        grouped = False
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return weights @ value


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, one head for each query head."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _mask(bucket: Bucket, *, sliding_window: int | None) -> Tensor | None:
    """[S, 1, Q, K], true where a query attends to a key; None is plain causal."""
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
        # No key may be inside a padding query's window; one visible key keeps its softmax finite.
        mask_SQK[:, :, 0] |= ~mask_SQK.any(-1)
    return mask_SQK[:, None]


def _heads(x_SLE: Tensor, *, num_heads: int) -> Tensor:
    return x_SLE.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _bucket_size(order: Sequence[Segment]) -> int:
    """Number of segments in the next bucket; `order` is sorted, longest first."""
    first = order[0]
    num_keys = first.prompt_length + first.length
    num_queries = first.length
    for size, segment in enumerate(order):
        keys = segment.prompt_length + segment.length
        num_queries = max(num_queries, segment.length)
        is_short = keys < MIN_FILL * num_keys and num_keys > SMALL_LENGTH
        is_uneven = segment.length < MIN_FILL * num_queries and num_queries > 2 * SMALL_LENGTH
        is_full = size > 0 and (size + 1) * num_queries * num_keys > MAX_MASK_CELLS
        if is_short or is_uneven or is_full or (segment.prompt_length > 0) != (first.prompt_length > 0):
            return size
    return len(order)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_ATTENTION_FUNCTIONS.register(FLASH, flash_attention)
