"""Flash attention's stand-in on CPUs: what torch says of `varlen_attn`, which only GPUs have, as an operation that compilers do not enter.

Shapes: T query tokens of all segments, K key tokens, A heads, D head size.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from learner.model import attention


def serve(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Packed attention as on a GPU that has it, for all types. Returns what is called."""
    kernel = Mock(side_effect=_varlen_attn)
    monkeypatch.setattr(attention, "has_flash", lambda device: True)
    monkeypatch.setattr(attention, "takes_lengths", lambda dtype, head_size, value_size: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    return kernel


def serve_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve`, for what is compiled."""
    serve(monkeypatch)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_attn)


def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return _attended(query, key, value, query_ends, key_ends, most_queries, most_keys, scale, list(window_size))


def _pieces(query_ends: Tensor, key_ends: Tensor, window: Sequence[int]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each segment its queries, its keys and which of them see each other: its last query is at its last key."""
    for (start, end), (first, last) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        place_Q1 = torch.arange(last - first)[-(end - start) :, None]
        distance_QK = place_Q1 - torch.arange(last - first)
        left = last - first if window[0] < 0 else window[0]
        yield slice(start, end), slice(first, last), (distance_QK >= -window[1]) & (distance_QK <= left)


def _shares(query: Tensor, key: Tensor, sees_QK: Tensor, scale: float | None) -> Tensor:
    """[A, Q, K]; of keys with a head for each of the queries'."""
    scores_AQK = torch.einsum("qad,kad->aqk", query, key) * _factor(query, scale)
    return scores_AQK.masked_fill(~sees_QK, -torch.inf).softmax(-1)


def _factor(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


@torch.library.custom_op("treadwheel_tests::attended", mutates_args=())
def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float | None,
    window: list[int],
) -> Tensor:
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert int(query_ends.diff().max()) == most_queries and int(key_ends.diff().max()) == most_keys
    key, value = _repeated(key, query), _repeated(value, query)
    found = [
        torch.einsum("aqk,kad->qad", _shares(query[own], key[seen], sees_QK, scale), value[seen])
        for own, seen, sees_QK in _pieces(query_ends, key_ends, window)
    ]
    return torch.cat(found)


@torch.library.custom_op("treadwheel_tests::attended_backward", mutates_args=())
def _attended_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float | None,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _repeated(key, query), _repeated(value, query)
    of_queries = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    for own, seen, sees_QK in _pieces(query_ends, key_ends, window):
        shares_AQK = _shares(query[own], keys[seen], sees_QK, scale)
        of_values[seen] += torch.einsum("aqk,qad->kad", shares_AQK, gradient[own])
        pull_AQK = torch.einsum("qad,kad->aqk", gradient[own], values[seen])
        pull_AQK = shares_AQK * (pull_AQK - (pull_AQK * shares_AQK).sum(-1, keepdim=True)) * _factor(query, scale)
        of_queries[own] = torch.einsum("aqk,kad->qad", pull_AQK, keys[seen])
        of_keys[seen] += torch.einsum("aqk,qad->kad", pull_AQK, query[own])
    grouped = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (of_keys, of_values))
    return of_queries, *grouped


@_attended.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@_attended_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.scale, ctx.window = inputs[7:]


def _pull(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, query_ends, key_ends = ctx.saved_tensors
    found = _attended_backward(gradient, query, key, value, query_ends, key_ends, ctx.scale, ctx.window)
    return (*found, *[None] * 6)


_attended.register_autograd(_pull, setup_context=_keep)
