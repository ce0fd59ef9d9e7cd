"""The vocabulary head: from hidden states to log-probs of the sampled tokens and of chosen candidates, and entropies.

Logits are computed tile by tile (`tile_shape`: positions x tokens) and reduced with a running log-sum-exp. Tiles are kept for backward up
to `Head.kept_bytes`; backward computes the others again. If all logits together are small (`MAX_WHOLE_BYTES`), and so is the weight if it
has to be converted, they are one tile, which is kept.

All sums are in float32 (float64 for float64 inputs). bfloat16 inputs are multiplied in bfloat16 if the machine is fast at it, else in
float32. On a GPU, the kernels of `learner.model.fused_head` reduce the tiles and compute the gradients of logits if they pass their check
there. With candidates torch computes both, and with a bias that trains the gradients.

If sampling is truncated (top_k, top_p, min_p), so is the softmax: a first pass over the logits finds each position's floor. Tokens below it
have no probability and no gradient. The sampled token always counts as kept: changed weights or other rounding may put it below the floor,
and its log-prob must stay finite.

Shapes: C completion positions, H hidden size, V vocabulary, K candidates of a position, P = K + 1.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.algorithms.running_sums import running_sum
from learner.model.compute_type import multiplies_in_float32
from learner.model.products import product, uses_onednn

CPU_TILE_POSITIONS, CPU_TILE_VOCABULARY = 1_024, 2_048
"""Rows and columns of one tile, 8 MiB: it stays in the cache, and its memory is reused. Larger blocks return to the system each time."""
GPU_TILE_POSITIONS, GPU_TILE_VOCABULARY = 16_384, 8_192
"""512 MiB: launching a kernel takes longer than computing a small tile, so calls must be few and large."""
MAX_WHOLE_BYTES = 64 * 1024**2
"""Logits of a micro-batch up to this size are one tile, and a weight up to this size is converted whole."""
LEAST_REST = 1e-26
"""Lower limit of the probability of all other tokens together: its logarithm and its inverse are finite in float32."""
_LEAST_SORTED = 2**22
"""Logits that are sorted at a time, or a sixth of a tile if that is more: sorting copies them and their indices."""
_NEVER_SAMPLED = -1e15
"""A dropped token's logit: its exponential is 0, and no product with it overflows to inf, which times 0 would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How log-probs are computed from hidden states and weights."""

    temperature: float = 1.0
    """Above 0. Logits are divided by it last, as in sampling."""
    scale: float = 1.0
    """Logits are multiplied by it first (Cohere's logit_scale, Granite's 1/logits_scaling)."""
    soft_cap: float | None = None
    """Logits become cap·tanh(logits/cap), as in Gemma 2; None: no cap."""
    top_k: int = 0
    """Keeps this many of the likeliest tokens, and any tied with the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Keeps, of those, the likeliest tokens that together reach this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this times as likely as the likeliest; 0 keeps all."""
    chunk_tokens: int | None = None
    """Positions of one tile; None: the device's default."""
    kept_bytes: int = 0
    """Upper limit of the logits kept for backward. Values do not depend on it."""

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Selected(NamedTuple):
    """In float32 (float64 for float64 hidden states), differentiable with respect to hidden states, weight and bias."""

    logprobs_C: Tensor
    """Log-probs of the targets."""
    entropies_C: Tensor | None
    """Entropies of the softmax; None if not requested."""
    partition_CP: Tensor | None
    """Log-probs of the candidates, then of all other tokens together; None without candidates."""


def selected_logprobs(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    *,
    head: Head,
    bias_V: Tensor | None = None,
    entropies: bool = False,
    candidates_CK: Tensor | None = None,
) -> Selected:
    """Log-probs under softmax(head(hidden)) over the tokens that the head keeps and the target.

    The candidates of a position are distinct; one may be the target. Without positions the tensors have length 0. Values do not depend on
    `chunk_tokens`. Raises ValueError for candidates with a head that truncates: dropped tokens have no log-prob.
    """
    if candidates_CK is not None and head.truncates:
        raise ValueError("candidates are chosen from all tokens, and this head drops some")
    floor_C = _floors(hidden_CH, weight_VH, bias_V, head=head) if head.truncates else None
    keeps = torch.is_grad_enabled() and (hidden_CH.requires_grad or weight_VH.requires_grad)
    logprobs_C, entropies_C, partition_CP = _SelectedLogprobs.apply(
        hidden_CH, weight_VH, bias_V, targets_C, candidates_CK, floor_C, head, entropies, keeps
    )
    return Selected(logprobs_C, entropies_C if entropies else None, None if candidates_CK is None else partition_CP)


def tile_shape(chunk_tokens: int | None, *, on_gpu: bool) -> tuple[int, int]:
    """Largest numbers of positions and of tokens in a tile of logits."""
    positions, tokens = (
        (GPU_TILE_POSITIONS, GPU_TILE_VOCABULARY) if on_gpu else (CPU_TILE_POSITIONS, CPU_TILE_VOCABULARY)
    )
    return chunk_tokens or positions, tokens


@torch.no_grad()
def top_tokens(
    hidden_CH: Tensor, weight_VH: Tensor, *, num_tokens: int, head: Head, bias_V: Tensor | None = None
) -> Tensor:
    """Ids of each position's likeliest tokens, the likeliest first, [C, K]. K is `num_tokens`, at most the vocabulary's size."""
    num_tokens = min(num_tokens, weight_VH.shape[0])
    rows = _whole_rows(hidden_CH, weight_VH, bias_V, head=head)
    return torch.cat([logits.topk(num_tokens).indices for logits in rows])


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_C: Tensor,
        candidates_CK: Tensor | None,
        floor_C: Tensor | None,
        head: Head,
        entropies: bool,
        keeps: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = _sum_dtype(hidden_CH)
        num_positions, size = hidden_CH.shape[0], weight_VH.shape[0]
        is_whole = _is_whole(hidden_CH, weight_VH)
        kernels = _kernels(hidden_CH)
        maximum_C = hidden_CH.new_full((num_positions,), -torch.inf, dtype=kind)
        total_C, weighted_C, rest_C, target_C = (hidden_CH.new_zeros(num_positions, dtype=kind) for _ in range(4))
        candidate_CK = None if candidates_CK is None else hidden_CH.new_zeros(candidates_CK.shape, dtype=kind)
        kept = list[Tensor]()
        room = 0 if not keeps else MAX_WHOLE_BYTES if is_whole else head.kept_bytes
        for tile, chunk in _tiles(hidden_CH, size, head=head, whole=is_whole):
            logits = _logits(hidden_CH[chunk], weight_VH[tile], None if bias_V is None else bias_V[tile], head=head)
            if floor_C is not None:
                _drop_below(floor_C[chunk], logits, targets=_Targets.of(targets_C[chunk], tile))
            if (room := room - logits.nbytes) >= 0:
                kept.append(logits)
            if kernels is not None and candidates_CK is None:
                kernels.reduce_(
                    logits,
                    targets_C=targets_C[chunk],
                    first=tile.start,
                    target_C=target_C[chunk],
                    maximum_C=maximum_C[chunk],
                    total_C=total_C[chunk],
                    weighted_C=weighted_C[chunk] if entropies else None,
                )
                continue
            targets = _Targets.of(targets_C[chunk], tile)
            target_C[chunk] = torch.where(targets.are_inside, logits[targets.cells], target_C[chunk])
            larger = torch.maximum(maximum_C[chunk], logits.amax(1))
            shrink = (maximum_C[chunk] - larger).exp_()
            probabilities = (logits - larger[:, None]).exp_()
            total_C[chunk] = total_C[chunk] * shrink + probabilities.sum(1)
            if entropies:
                weighted_C[chunk] = weighted_C[chunk] * shrink + torch.einsum("cv,cv->c", probabilities, logits)
            if candidates_CK is not None and candidate_CK is not None:
                places, cells = _inside(candidates_CK[chunk], tile)
                candidate_CK[chunk][places] = logits[cells]
                probabilities[cells] = 0
                rest_C[chunk] = rest_C[chunk] * shrink + probabilities.sum(1)
            maximum_C[chunk] = larger
        normalizer_C = maximum_C + total_C.log()
        none = normalizer_C.new_zeros(0)
        entropies_C = normalizer_C - weighted_C / total_C if entropies else none
        rest_C = (rest_C / total_C).clamp_min_(LEAST_REST)
        partition_CP = none
        if candidate_CK is not None:
            partition_CP = torch.cat([candidate_CK - normalizer_C[:, None], rest_C.log()[:, None]], 1)
        ctx.save_for_backward(
            hidden_CH, weight_VH, bias_V, targets_C, candidates_CK, floor_C, normalizer_C, entropies_C, rest_C, *kept
        )
        ctx.head, ctx.kernels, ctx.is_whole = head, kernels, is_whole
        ctx.set_materialize_grads(False)  # entropies that no loss uses need no backward
        return target_C - normalizer_C, entropies_C, partition_CP

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (
            hidden_CH, weight_VH, bias_V, targets_C, candidates_CK, floor_C, normalizer_C, entropies_C, rest_C, *kept,
        ) = ctx.saved_tensors  # fmt: skip
        head: Head = ctx.head
        # Contiguous: autograd may pass one expanded number, and kernels read a number for each row.
        gradient_C, entropy_gradient_C, partition_gradient_CP = (
            each if each is None else each.contiguous() for each in gradients
        )
        gradient_C = torch.zeros_like(normalizer_C) if gradient_C is None else gradient_C
        sum_C = gradient_C if partition_gradient_CP is None else gradient_C + partition_gradient_CP.sum(1)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kernels = None if needs_bias or partition_gradient_CP is not None else ctx.kernels
        kind = normalizer_C.dtype
        hidden_gradient_CH = torch.zeros_like(hidden_CH, dtype=kind) if needs_hidden else None
        weight_gradient_VH = torch.empty_like(weight_VH) if needs_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=kind) if needs_bias else None
        size = weight_VH.shape[0]
        # Tiles iterate over positions inside, vocabulary outside: a tile of the weight's gradient is summed in float32 and rounded once.
        summed = _WeightGradient(weight_gradient_VH, hidden_CH) if weight_gradient_VH is not None else None
        tiles = _tiles(hidden_CH, size, head=head, whole=ctx.is_whole)
        for (tile, chunk), logits in zip_longest(tiles, kept):
            if logits is None:
                logits = _logits(hidden_CH[chunk], weight_VH[tile], None if bias_V is None else bias_V[tile], head=head)
                if floor_C is not None:
                    _drop_below(floor_C[chunk], logits, targets=_Targets.of(targets_C[chunk], tile))
            options: dict[str, Any] = {
                "normalizer_C": normalizer_C[chunk],
                "sum_C": sum_C[chunk],
                "gradient_C": gradient_C[chunk],
                "entropies": None if entropy_gradient_C is None else (entropies_C[chunk], entropy_gradient_C[chunk]),
                "cap": 0.0 if head.soft_cap is None else head.temperature / head.soft_cap,
                "factor": head.scale / head.temperature,
            }
            if kernels is not None:
                options |= {"targets_C": targets_C[chunk], "first": tile.start, "dtype": _matmul_dtype(hidden_CH)}
                gradient = kernels.gradient(logits, **options)
            else:
                partition: _Partition | None = None
                if partition_gradient_CP is not None:
                    places, cells = _inside(candidates_CK[chunk], tile)
                    rest_gradient_C = partition_gradient_CP[chunk, -1] / rest_C[chunk]
                    partition = _Partition(cells, partition_gradient_CP[chunk][places], rest_gradient_C)
                targets = _Targets.of(targets_C[chunk], tile)
                gradient = _gradient(logits, targets=targets, partition=partition, **options)
            inside = gradient.to(_matmul_dtype(hidden_CH))
            if hidden_gradient_CH is not None:
                _add_product(hidden_gradient_CH[chunk], inside, weight_VH[tile])
            if summed is not None:
                summed.add(inside, tile, chunk)
            if bias_gradient_V is not None:
                bias_gradient_V[tile] += gradient.sum(0)
        if weight_gradient_VH is not None and not hidden_CH.shape[0]:
            weight_gradient_VH.zero_()
        # Autograd rounds the sums to the inputs' types.
        return hidden_gradient_CH, weight_gradient_VH, bias_gradient_V, *[None] * 6


class _Partition(NamedTuple):
    """Gradients with respect to the candidates and the rest, for one tile."""

    cells: tuple[Tensor, Tensor]
    """Rows and columns of the candidates in the tile."""
    gradient: Tensor
    """With respect to their log-probs."""
    rest_gradient_C: Tensor
    """With respect to the probability of all other tokens."""


def _gradient(
    logits: Tensor,
    *,
    normalizer_C: Tensor,
    sum_C: Tensor,
    targets: "_Targets",
    gradient_C: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
    partition: _Partition | None,
    cap: float,
    factor: float,
) -> Tensor:
    """As `fused_head.gradient`, in torch and in the logits' type."""
    logprobs = logits - normalizer_C[:, None]
    gradient = logprobs.exp()
    others = None if partition is None else gradient * partition.rest_gradient_C[:, None]
    if entropies is not None:
        entropies_C, pull_C = entropies
        pull = logprobs.add_(entropies_C[:, None]).mul_(pull_C[:, None])
        gradient.mul_(pull.add_(sum_C[:, None]).neg_())
    else:
        gradient.mul_(-sum_C[:, None])
    gradient[targets.cells] += torch.where(targets.are_inside, gradient_C, 0)
    if partition is not None and others is not None:
        others[partition.cells] = partition.gradient
        gradient.add_(others)
    if cap:
        gradient.mul_(1 - (logits * cap).square_())
    return gradient if factor == 1 else gradient.mul_(factor)


class _WeightGradient:
    """Sums the weight's gradient over all positions, one tile of the vocabulary after another."""

    def __init__(self, into_VH: Tensor, hidden_CH: Tensor) -> None:
        self._into_VH, self._hidden_CH = into_VH, hidden_CH
        self._gradient_CV = into_VH.new_empty(0)
        self._summed_VH = into_VH.new_empty(0)

    def add(self, gradient: Tensor, tile: slice, chunk: slice) -> None:
        """Adds the product for a gradient of the logits, [chunk, tile]. The chunks of a tile come in order."""
        num_positions, is_last = self._hidden_CH.shape[0], chunk.stop >= self._hidden_CH.shape[0]
        is_half = self._into_VH.dtype == self._hidden_CH.dtype == torch.bfloat16
        if is_half and not self._hidden_CH.is_cuda and not multiplies_in_float32():
            # On CPUs a product of bfloat16 is summed in float32 and rounded to bfloat16: one product over all positions is rounded once.
            shape = num_positions, tile.stop - tile.start
            if self._gradient_CV.shape != shape:
                self._gradient_CV = self._into_VH.new_empty(shape)
            self._gradient_CV[chunk] = gradient
            if is_last:
                torch.mm(self._gradient_CV.t(), self._hidden_CH, out=self._into_VH[tile])
            return
        if chunk.start == 0:
            self._summed_VH = _product(gradient.t(), self._hidden_CH[chunk], dtype=_sum_dtype(self._hidden_CH))
        else:
            _add_product(self._summed_VH, gradient.t(), self._hidden_CH[chunk])
        if is_last:
            self._into_VH[tile] = self._summed_VH


def head_kernels(device: torch.device) -> str:
    """`fused`, or why torch computes float32 tiles on this GPU."""
    module, why = _proven(device)
    return "fused" if module is not None else f"torch, because the fused kernels cannot be used: {why}"


def _kernels(hidden_CH: Tensor) -> ModuleType | None:
    """`learner.model.fused_head`; None if it cannot compute these inputs."""
    return _proven(hidden_CH.device)[0] if hidden_CH.is_cuda and _sum_dtype(hidden_CH) == torch.float32 else None


@functools.cache
def _proven(device: torch.device) -> tuple[ModuleType | None, str | None]:
    """The kernels, or why they cannot be used. Cached: the check takes seconds, since Triton compiles the kernels."""
    try:
        from learner.model import fused_head
    except Exception as error:  # noqa: BLE001  Triton is missing, or does not fit this torch
        return None, f"{type(error).__name__}: {error}"
    why = fused_head.differs(device)
    return (fused_head if why is None else None), why


def _is_whole(hidden_CH: Tensor, weight_VH: Tensor) -> bool:
    kind = _sum_dtype(hidden_CH)
    converted = 0 if hidden_CH.is_cuda or weight_VH.dtype == kind else weight_VH.numel()
    return max(hidden_CH.shape[0] * weight_VH.shape[0], converted) * kind.itemsize <= MAX_WHOLE_BYTES


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, head: Head) -> Tensor:
    """Logits of one tile, [chunk, tile], divided by the temperature; a new tensor in the type of sums."""
    kind = _sum_dtype(hidden_CH)
    if hidden_CH.is_cuda and hidden_CH.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden_CH, weight_VH.t(), out_dtype=kind)
    else:
        with _multiplying_as(hidden_CH.dtype):
            logits = product(hidden_CH.to(kind), weight_VH.to(kind).t())
    if bias_V is not None:
        logits.add_(bias_V.to(kind))
    if head.soft_cap is not None:
        return logits.mul_(head.scale / head.soft_cap).tanh_().mul_(head.soft_cap / head.temperature)
    return logits if head.scale == head.temperature else logits.mul_(head.scale / head.temperature)


def _whole_rows(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, head: Head) -> Iterator[Tensor]:
    """Logits of all tokens, for some positions at a time."""
    positions, width = tile_shape(head.chunk_tokens, on_gpu=hidden_CH.is_cuda)
    height = max(1, max(positions * width // 6, _LEAST_SORTED) // weight_VH.shape[0])
    return (_logits(rows, weight_VH, bias_V, head=head) for rows in hidden_CH.split(height))


@torch.no_grad()
def _floors(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, head: Head) -> Tensor:
    """Each position's logit below which no token is kept, [C]."""
    rows = _whole_rows(hidden_CH, weight_VH, bias_V, head=head)
    return torch.cat([_floor(logits, head=head) for logits in rows])


def _floor(logits_CV: Tensor, *, head: Head) -> Tensor:
    """min_p first, then top_k, then top_p over the tokens left, as in the engine.

    The floor lies half way between the lowest kept logit and the next lower one, so that no token crosses it when a tile of another shape
    rounds differently. All tokens with exactly the lowest kept logit are kept.
    """
    ascending_CV = logits_CV.sort(1).values
    size = ascending_CV.shape[1]
    lowest_C = ascending_CV[:, -1] + math.log(head.min_p) if head.min_p > 0 else ascending_CV[:, 0]
    if 0 < head.top_k < size:
        lowest_C = torch.maximum(lowest_C, ascending_CV[:, size - head.top_k])
    is_dropped_CV = ascending_CV < lowest_C[:, None]
    if head.top_p < 1:
        probabilities_CV = ascending_CV.masked_fill(is_dropped_CV, -torch.inf).softmax(1)
        is_dropped_CV |= running_sum(probabilities_CV) <= 1 - head.top_p
    kept_C1 = ascending_CV.gather(1, is_dropped_CV.sum(1, keepdim=True).clamp_(max=size - 1))
    below_C1 = ascending_CV.masked_fill(ascending_CV >= kept_C1, -torch.inf).amax(1, keepdim=True)
    return ((kept_C1 + below_C1) / 2)[:, 0]


class _Targets(NamedTuple):
    """One token for each row of a tile, indexed without reading values on the host, which would wait for the GPU."""

    cells: tuple[Tensor, Tensor]
    """Rows and columns, all inside the tile."""
    are_inside: Tensor
    """[chunk]: whether the token is in this tile. If not, its column is meaningless."""

    @classmethod
    def of(cls, ids: Tensor, tile: slice) -> "_Targets":
        columns = (ids - tile.start).clamp(0, tile.stop - tile.start - 1)
        return cls((torch.arange(ids.shape[0], device=ids.device), columns), (ids >= tile.start) & (ids < tile.stop))


def _drop_below(floor_C: Tensor, logits: Tensor, *, targets: _Targets) -> None:
    """In place. Targets are never dropped."""
    values = logits[targets.cells]
    logits.masked_fill_(logits < floor_C[:, None], _NEVER_SAMPLED)
    logits[targets.cells] = torch.where(targets.are_inside, values, logits[targets.cells])


def _tiles(hidden_CH: Tensor, size: int, *, head: Head, whole: bool) -> list[tuple[slice, slice]]:
    """(vocabulary slice, position slice), vocabulary in the outer loop. One tile when `whole`, none without positions."""
    num_positions = hidden_CH.shape[0]
    if num_positions == 0:
        return []
    if whole:
        return [(slice(0, size), slice(0, num_positions))]
    height, width = tile_shape(head.chunk_tokens, on_gpu=hidden_CH.is_cuda)
    return [
        (slice(v, min(v + width, size)), slice(c, min(c + height, num_positions)))
        for v in range(0, size, width)
        for c in range(0, num_positions, height)
    ]


def _inside(ids: Tensor, tile: slice) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """The ids of a chunk, [chunk, ...], that are in the tile: their places among the ids, and their rows and columns in the tile."""
    places = ((ids >= tile.start) & (ids < tile.stop)).nonzero(as_tuple=True)
    return places, (places[0], ids[places] - tile.start)


def _product(left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
    if left.dtype != dtype:
        return torch.mm(left, right.to(left.dtype), out_dtype=dtype)
    with _multiplying_as(right.dtype):
        return product(left, right.to(dtype))


def _add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    if uses_onednn(left, right):
        sum_.add_(product(left, right))
    elif left.dtype == sum_.dtype:
        with _multiplying_as(right.dtype):
            sum_.addmm_(left, right.to(left.dtype))
    else:
        torch.addmm(sum_, left, right.to(left.dtype), out_dtype=sum_.dtype, out=sum_)


@contextlib.contextmanager
def _multiplying_as(dtype: torch.dtype) -> Iterator[None]:
    """Lets CPUs that are fast at it multiply float32 factors as bfloat16, rounding them, and sum in float32. `dtype` is the type
    of the weights or hidden states before conversion; with other types than bfloat16 nothing changes."""
    backend: Any = torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 and not multiplies_in_float32() else before
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _matmul_dtype(x: Tensor) -> torch.dtype:
    """GPUs multiply in the inputs' type and sum in float32. On CPUs `_multiplying_as` rounds inside the product."""
    return x.dtype if x.is_cuda else _sum_dtype(x)
