# ruff: noqa: ANN001, ANN202  a kernel's arguments are pointers and numbers, typed at its first call
# pyright: basic, reportArgumentType=false
"""What `learner.model.head` does with a tile of logits, in one pass over it each, for GPUs: a tile is larger than their caches.

Written in Triton, which compiles a kernel at its first call. `differs` says whether a device computes with them what torch computes.

Shapes: C rows and V columns of the tile.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_REDUCED, _WRITTEN = 4096, 2048
"""Columns that a program has at a time."""
_TOLERANCE = 1e-4


def reduce_(logits_CV: Tensor, *, maximum_C: Tensor, total_C: Tensor, weighted_C: Tensor | None) -> None:
    """Takes a tile into the running log-sum-exp of its rows, in place: the largest logit so far, the sum of exp(logit - largest), and the
    sum of that times the logit. All in float32, each without gaps."""
    num_rows, width = logits_CV.shape
    _reduce[(num_rows,)](
        logits_CV,
        maximum_C,
        total_C,
        total_C if weighted_C is None else weighted_C,
        width,
        WEIGHTED=weighted_C is not None,
        BLOCK=_REDUCED,
    )


def gradient(
    logits_CV: Tensor,
    *,
    normalizer_C: Tensor,
    sum_C: Tensor,
    columns_C: Tensor,
    target_C: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
    cap: float,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Of a loss in a tile's logits before cap and temperature, [C, V] in `dtype`.

    `sum_C` is the loss's gradient in each row's normalizer, with the sign turned; `target_C` that in the logit of `columns_C`, 0 for a row
    without one here. `entropies`: each row's, and the gradient in it. What lies before the logits multiplies by `factor`, and with a `cap`
    other than 0 by 1 - (cap * logit)^2.
    """
    num_rows, width = logits_CV.shape
    found_CV = torch.empty_like(logits_CV, dtype=dtype)
    entropies_C, pull_C = (normalizer_C, normalizer_C) if entropies is None else entropies
    _gradient[(num_rows, triton.cdiv(width, _WRITTEN))](
        logits_CV,
        found_CV,
        normalizer_C,
        sum_C,
        columns_C,
        target_C,
        entropies_C,
        pull_C,
        width,
        cap,
        factor,
        ENTROPIES=entropies is not None,
        CAPPED=cap != 0,
        BLOCK=_WRITTEN,
    )
    return found_CV


@functools.cache
def differs(device: torch.device) -> str | None:
    """Why the kernels are not to be used on this device; None where they compute what torch computes in float64."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"):
        logits_CV = 4 * torch.randn(64, 5000, generator=generator)  # no program's share divides the columns
        columns_C = torch.randint(5000, (64,), generator=generator)
        pulls = torch.randn(3, 64, generator=generator)
    try:
        return _difference(logits_CV.to(device), columns_C.to(device), *pulls.to(device))
    except Exception as error:  # noqa: BLE001  Triton, ptxas and the compiler of its launchers raise what they like
        return f"{type(error).__name__}: {error}"


def _difference(logits_CV: Tensor, columns_C: Tensor, sum_C: Tensor, target_C: Tensor, pull_C: Tensor) -> str | None:
    exact_CV = logits_CV.double()
    normalizer_C = exact_CV.logsumexp(1)
    shares_CV = (exact_CV - normalizer_C[:, None]).exp()
    entropies_C = normalizer_C - (shares_CV * exact_CV).sum(1)
    pulls_CV = sum_C[:, None] + pull_C[:, None] * (exact_CV - normalizer_C[:, None] + entropies_C[:, None])
    gradient_CV = (-shares_CV * pulls_CV).scatter_add(1, columns_C[:, None], target_C.double()[:, None])
    gradient_CV *= 0.5 * (1 - (0.05 * exact_CV).square())

    maximum_C = torch.full_like(sum_C, -torch.inf)
    total_C, weighted_C = torch.zeros_like(sum_C), torch.zeros_like(sum_C)
    for half_CV in logits_CV.split(2500, 1):
        reduce_(half_CV.contiguous(), maximum_C=maximum_C, total_C=total_C, weighted_C=weighted_C)
    found_CV = gradient(
        logits_CV,
        normalizer_C=normalizer_C.float(),
        sum_C=sum_C,
        columns_C=columns_C,
        target_C=target_C,
        entropies=(entropies_C.float(), pull_C),
        cap=0.05,
        factor=0.5,
        dtype=torch.float32,
    )
    pairs = {
        "the normalizer": (maximum_C + total_C.log(), normalizer_C),
        "the entropy": (normalizer_C - weighted_C / total_C, entropies_C),
        "the gradient": (found_CV, gradient_CV),
    }
    for name, (found, expected) in pairs.items():
        error = float((found.double() - expected).abs().max() / expected.abs().max())
        if not error < _TOLERANCE:
            return f"{name} differs by {error:.1e} of the largest"
    return None


@triton.jit
def _reduce(logits, maximum, total, weighted, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    largest = tl.load(maximum + row)
    sum_ = tl.load(total + row)
    weighted_sum = tl.load(weighted + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        values = tl.load(logits + row.to(tl.int64) * width + columns, mask=inside, other=-float("inf"))
        larger = tl.maximum(largest, tl.max(values, 0))
        shrink = tl.exp(largest - larger)
        shares = tl.exp(values - larger)
        sum_ = sum_ * shrink + tl.sum(shares, 0)
        if WEIGHTED:
            weighted_sum = weighted_sum * shrink + tl.sum(shares * tl.where(inside, values, 0.0), 0)
        largest = larger
    tl.store(maximum + row, largest)
    tl.store(total + row, sum_)
    if WEIGHTED:
        tl.store(weighted + row, weighted_sum)


@triton.jit
def _gradient(
    logits,
    found,
    normalizer,
    sums,
    targets,
    of_targets,
    entropies,
    pulls,
    width,
    cap,
    factor,
    ENTROPIES: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    places = row.to(tl.int64) * width + columns
    values = tl.load(logits + places, mask=inside, other=0.0)
    logprobs = values - tl.load(normalizer + row)
    pull = tl.load(sums + row)
    if ENTROPIES:
        pull += (logprobs + tl.load(entropies + row)) * tl.load(pulls + row)
    result = -tl.exp(logprobs) * pull
    result += tl.where(columns == tl.load(targets + row), tl.load(of_targets + row), 0.0)
    if CAPPED:
        capped = values * cap
        result *= 1.0 - capped * capped
    tl.store(found + places, (result * factor).to(found.dtype.element_ty), mask=inside)
