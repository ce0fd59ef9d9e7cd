# ruff: noqa: ANN001, ANN202  a kernel's arguments are pointers and numbers, typed at its first call
# pyright: basic, reportArgumentType=false
"""GPU kernels of `learner.model.head`: each makes one pass over a tile of logits, which is larger than a GPU's caches.

Written in Triton, which compiles a kernel at its first call. `differs` checks on a device that the kernels compute what torch computes.

Shapes: C rows and V columns of the tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_REDUCED, _WRITTEN = 4096, 2048
"""Columns that a program processes at a time."""
_ROWS, _SPLIT = 64, _REDUCED + _REDUCED // 2
"""Rows of the tile that `differs` computes, and columns of the parts in which it is reduced."""
_TOLERANCE = 1e-4
"""Largest error relative to (value + 0.001). Rounding of float32 makes a tenth of that."""


def reduce_(
    logits_CV: Tensor,
    *,
    targets_C: Tensor,
    first: int,
    target_C: Tensor,
    maximum_C: Tensor,
    total_C: Tensor,
    weighted_C: Tensor | None,
) -> None:
    """Adds a tile to the running log-sum-exp of its rows, in place: the largest logit so far, the sum of exp(logit - largest), and the sum
    of exp(logit - largest) · logit. `first` is the tile's first token. If a row's target is in the tile, its logit is written to
    `target_C`. All tensors are contiguous, and float32 except for the targets' ids."""
    assert logits_CV.is_contiguous()
    num_rows, width = logits_CV.shape
    with torch.cuda.device_of(logits_CV):
        _reduce[(num_rows,)](
            logits_CV,
            targets_C,
            target_C,
            maximum_C,
            total_C,
            total_C if weighted_C is None else weighted_C,
            first,
            width,
            WEIGHTED=weighted_C is not None,
            BLOCK=_REDUCED,
        )


def gradient(
    logits_CV: Tensor,
    *,
    normalizer_C: Tensor,
    sum_C: Tensor,
    targets_C: Tensor,
    first: int,
    gradient_C: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
    cap: float,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the loss with respect to the logits before scale, cap and temperature: [C, V] in `dtype`.

    `sum_C`: minus the gradient with respect to each row's normalizer. `gradient_C`: the gradient with respect to the log-prob of the row's
    target; it counts if the target is in the tile, whose first token is `first`. `entropies`: each row's entropy, and the gradient with
    respect to it. Temperature and scale multiply by `factor`; a `cap` other than 0 multiplies by 1 - (cap * logit)^2.
    """
    assert logits_CV.is_contiguous()
    num_rows, width = logits_CV.shape
    found_CV = torch.empty_like(logits_CV, dtype=dtype)
    entropies_C, pull_C = (normalizer_C, normalizer_C) if entropies is None else entropies
    with torch.cuda.device_of(logits_CV):
        _gradient[(num_rows, triton.cdiv(width, _WRITTEN))](
            logits_CV,
            found_CV,
            normalizer_C,
            sum_C,
            targets_C,
            gradient_C,
            entropies_C,
            pull_C,
            first,
            width,
            cap,
            factor,
            ENTROPIES=entropies is not None,
            CAPPED=cap != 0,
            BLOCK=_WRITTEN,
        )
    return found_CV


def differs(device: torch.device) -> str | None:
    """Why this device must not use the kernels; None if each variant of them computes what torch computes in float64.

    Raises OutOfMemoryError, which says nothing about the kernels.
    """
    try:
        # A full tile, and the last tile of a vocabulary, whose width is no multiple of a program's columns.
        for width in (3 * _REDUCED, 2 * _REDUCED + 13):
            for is_full in (True, False):
                if (why := _difference(device, width, is_full=is_full)) is not None:
                    return why
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  Triton, ptxas and the compiler of its launchers raise errors of any class
        return f"{type(error).__name__}: {error}"
    return None


def _difference(device: torch.device, width: int, *, is_full: bool) -> str | None:
    """Tests one variant: entropies, cap and float32 if full, else bfloat16 alone. Includes dropped logits and targets outside the tile."""
    generator, kind = torch.Generator("cpu").manual_seed(width), torch.float32
    logits_CV = 4 * torch.randn(_ROWS, width, generator=generator, dtype=kind, device="cpu")
    logits_CV[:, ::7] = -1e15
    # The tile begins with this token, and some targets lie before or after the tile.
    first = 48
    columns_C = torch.randint(width, (_ROWS,), generator=generator, device="cpu")
    columns_C[::4], columns_C[2::8] = columns_C[::4] + width, -1
    pulls = torch.randn(3, _ROWS, generator=generator, dtype=kind, device="cpu")
    pulls[1, ::2] = 0
    logits_CV, columns_C = logits_CV.to(device), columns_C.to(device)
    sum_C, gradient_C, pull_C = pulls.to(device)
    is_inside_C, inside_C1 = (columns_C >= 0) & (columns_C < width), columns_C.clamp(0, width - 1)[:, None]
    cap, factor = (0.05, 0.5) if is_full else (0.0, 1.0)

    exact_CV = logits_CV.double()
    normalizer_C = exact_CV.logsumexp(1)
    shares_CV = (exact_CV - normalizer_C[:, None]).exp()
    entropies_C = normalizer_C - (shares_CV * exact_CV).sum(1)
    pulls_CV = sum_C[:, None].expand_as(exact_CV)
    if is_full:
        pulls_CV = pulls_CV + pull_C[:, None] * (exact_CV - normalizer_C[:, None] + entropies_C[:, None])
    expected_CV = (-shares_CV * pulls_CV).scatter_add(1, inside_C1, (gradient_C * is_inside_C).double()[:, None])
    expected_CV *= factor * (1 - (cap * exact_CV).square())

    maximum_C = torch.full_like(sum_C, -torch.inf)
    total_C, weighted_C = torch.zeros_like(sum_C), torch.zeros_like(sum_C) if is_full else None
    target_C = torch.zeros_like(sum_C)
    for tile_CV, begins in zip(logits_CV.split(_SPLIT, 1), range(first, first + width, _SPLIT), strict=True):
        reduce_(
            tile_CV.contiguous(),
            targets_C=first + columns_C,
            first=begins,
            target_C=target_C,
            maximum_C=maximum_C,
            total_C=total_C,
            weighted_C=weighted_C,
        )
    found_CV = gradient(
        logits_CV,
        normalizer_C=normalizer_C.float(),
        sum_C=sum_C,
        targets_C=first + columns_C,
        first=first,
        gradient_C=gradient_C,
        entropies=(entropies_C.float(), pull_C) if is_full else None,
        cap=cap,
        factor=factor,
        dtype=torch.float32 if is_full else torch.bfloat16,
    )
    # With a cap, the gradient of a dropped logit is meaningless on both sides.
    kept_CV = logits_CV > -1e15
    pairs = {
        "the targets' logits": (target_C, (exact_CV.gather(1, inside_C1)[:, 0] * is_inside_C), _TOLERANCE),
        "the normalizer": (maximum_C + total_C.log(), normalizer_C, _TOLERANCE),
        "the gradient": (found_CV[kept_CV], expected_CV[kept_CV], _TOLERANCE if is_full else 2**-7),
    }
    if weighted_C is not None:
        pairs["the entropy"] = (normalizer_C - weighted_C / total_C, entropies_C, _TOLERANCE)
    for name, (found, expected, tolerance) in pairs.items():
        error = float(((found.double() - expected).abs() / (1e-3 + expected.abs())).max())
        if not error < tolerance:
            return f"{name} differs by {error:.1e} of itself"
    return None


@triton.jit
def _reduce(
    logits,
    targets,
    target,
    maximum,
    total,
    weighted,
    first,
    width,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.load(targets + row) - first
    is_here = (column >= 0) & (column < width)
    tl.store(target + row, tl.load(logits + row.to(tl.int64) * width + column, mask=is_here, other=0.0), mask=is_here)
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
    gradients,
    entropies,
    pulls,
    first,
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
    result += tl.where(columns == tl.load(targets + row) - first, tl.load(gradients + row), 0.0)
    if CAPPED:
        capped = values * cap
        result *= 1.0 - capped * capped
    tl.store(found + places, (result * factor).to(found.dtype.element_ty), mask=inside)
