"""The vocabulary head: log-probs of the sampled tokens, and entropies, from hidden states.

Logits of a batch never exist. They are made tile by tile (`chunk_tokens` positions x at most `MAX_TILE_VOCABULARY` tokens), reduced
with a running log-sum-exp, and made again in backward. Where all of them are small (`MAX_KEPT_BYTES`) they are kept instead, which
is faster. Everything is summed in float32 (float64 for float64 inputs) whatever the inputs' type.

Where sampling is truncated (top_k, top_p, min_p), so is the softmax: a first pass over the logits finds for each position the floor
below which no token is sampled, and tokens below it have no probability and no gradient. The sampled token always counts as kept:
weights that have moved, or another rounding, may put it below the floor, and its log-prob must stay finite.

Shapes: C completion positions, H hidden size, V vocabulary.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_TILE_VOCABULARY = 16_384
"""Columns of one tile: with 1,024 positions 64 MiB of logits, whatever the vocabulary."""
MAX_KEPT_BYTES = 64 * 1024**2
"""Logits of a micro-batch up to this size are kept for backward."""
_NEVER_SAMPLED = -1e15
"""A dropped token's logit: its exponential is 0, and no product of it overflows to inf, whose product with 0 would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What lies between hidden states and log-probs, apart from the weights."""

    temperature: float = 1.0
    """Logits are divided by it last, as at sampling."""
    scale: float = 1.0
    """Logits are multiplied by it first (Cohere's logit_scale, Granite's 1/logits_scaling)."""
    soft_cap: float | None = None
    """cap·tanh(logits/cap), as Gemma 2 and others do; None leaves it out."""
    top_k: int = 0
    """Only so many most likely tokens are kept, and those as likely as the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Of those, the most likely tokens that reach this probability together; 1 keeps all."""
    min_p: float = 0.0
    """Only tokens at least this times as likely as the likeliest are kept; 0 keeps all."""
    chunk_tokens: int = 1024
    """Positions of one tile."""

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def selected_logprobs(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    *,
    head: Head,
    bias_V: Tensor | None = None,
    entropies: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `targets_C` under softmax(head(hidden)), shape [C], and the softmax's entropy, shape [C], or None.

    The softmax is over the tokens that the head keeps, and the target. Both are in float32 (float64 for float64 hidden states) and
    differentiable in hidden states, weight and bias. No positions give tensors of length 0. Values do not depend on `chunk_tokens`.
    """
    if not head.temperature > 0:
        raise ValueError(f"temperature={head.temperature} must be positive")
    if _can_fuse(hidden_CH, head=head, bias_V=bias_V, entropies=entropies):
        return _fused(hidden_CH, weight_VH, targets_C, head=head), None
    floor_C = _floors(hidden_CH, weight_VH, bias_V, head=head) if head.truncates else None
    logprobs_C, entropies_C = _SelectedLogprobs.apply(hidden_CH, weight_VH, bias_V, targets_C, floor_C, head, entropies)
    return logprobs_C, entropies_C if entropies else None


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_C: Tensor,
        floor_C: Tensor | None,
        head: Head,
        entropies: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = _sum_dtype(hidden_CH)
        num_positions, size = hidden_CH.shape[0], weight_VH.shape[0]
        keeps = num_positions * size * kind.itemsize <= MAX_KEPT_BYTES
        maximum_C = hidden_CH.new_full((num_positions,), -torch.inf, dtype=kind)
        total_C, weighted_C, target_C = (hidden_CH.new_zeros(num_positions, dtype=kind) for _ in range(3))
        kept: Tensor | None = None
        for tile, chunk in _tiles(num_positions, size, head=head, whole=keeps):
            logits = _logits(hidden_CH[chunk], weight_VH[tile], None if bias_V is None else bias_V[tile], head=head)
            rows, columns = _targets_inside(targets_C[chunk], tile)
            target_C[chunk][rows] = logits[rows, columns]
            if floor_C is not None:
                _drop_below(floor_C[chunk], logits, kept=(rows, columns))
            larger = torch.maximum(maximum_C[chunk], logits.amax(1))
            shrink = (maximum_C[chunk] - larger).exp_()
            probabilities = (logits - larger[:, None]).exp_()
            total_C[chunk] = total_C[chunk] * shrink + probabilities.sum(1)
            if entropies:
                weighted_C[chunk] = weighted_C[chunk] * shrink + torch.einsum("cv,cv->c", probabilities, logits)
            maximum_C[chunk] = larger
            kept = logits if keeps else None
        normalizer_C = maximum_C + total_C.log()
        entropies_C = normalizer_C - weighted_C / total_C if entropies else normalizer_C.new_zeros(0)
        ctx.save_for_backward(hidden_CH, weight_VH, bias_V, targets_C, floor_C, normalizer_C, entropies_C, kept)
        ctx.head = head
        ctx.set_materialize_grads(False)  # entropies that no loss uses cost nothing here
        return target_C - normalizer_C, entropies_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_CH, weight_VH, bias_V, targets_C, floor_C, normalizer_C, entropies_C, kept = ctx.saved_tensors
        head: Head = ctx.head
        gradient_C, entropy_gradient_C = gradients
        gradient_C = torch.zeros_like(normalizer_C) if gradient_C is None else gradient_C
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kind = normalizer_C.dtype
        hidden_gradient_CH = torch.zeros_like(hidden_CH, dtype=kind) if needs_hidden else None
        weight_gradient_VH = torch.empty_like(weight_VH) if needs_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=kind) if needs_bias else None
        num_positions, size = hidden_CH.shape[0], weight_VH.shape[0]
        # Vocabulary outside, positions inside: a tile of the weight's gradient is summed in float32 and rounded once.
        summed: Tensor | None = None
        for tile, chunk in _tiles(num_positions, size, head=head, whole=kept is not None):
            logits = kept
            if logits is None:
                logits = _logits(hidden_CH[chunk], weight_VH[tile], None if bias_V is None else bias_V[tile], head=head)
                if floor_C is not None:
                    _drop_below(floor_C[chunk], logits, kept=_targets_inside(targets_C[chunk], tile))
            logprobs = logits - normalizer_C[chunk, None]
            gradient = logprobs.exp()
            if entropy_gradient_C is not None:
                pull = logprobs.add_(entropies_C[chunk, None]).mul_(entropy_gradient_C[chunk, None])
                gradient.mul_(pull.add_(gradient_C[chunk, None]).neg_())
            else:
                gradient.mul_(-gradient_C[chunk, None])
            rows, columns = _targets_inside(targets_C[chunk], tile)
            gradient[rows, columns] += gradient_C[chunk][rows]
            if head.soft_cap is not None:
                gradient.mul_(1 - (logits * (head.temperature / head.soft_cap)).square_())
            if head.scale != head.temperature:
                gradient.mul_(head.scale / head.temperature)
            inside = gradient.to(_matmul_dtype(hidden_CH))
            if hidden_gradient_CH is not None:
                _add_product(hidden_gradient_CH[chunk], inside, weight_VH[tile])
            if weight_gradient_VH is not None:
                if summed is None or chunk.start == 0:
                    summed = torch.zeros(weight_VH[tile].shape, dtype=kind, device=weight_VH.device)
                _add_product(summed, inside.t(), hidden_CH[chunk])
                if chunk.stop >= num_positions:
                    weight_gradient_VH[tile] = summed
            if bias_gradient_V is not None:
                bias_gradient_V[tile] += gradient.sum(0)
        if weight_gradient_VH is not None and num_positions == 0:
            weight_gradient_VH.zero_()
        return (
            None if hidden_gradient_CH is None else hidden_gradient_CH.to(hidden_CH.dtype),
            weight_gradient_VH,
            None if bias_gradient_V is None or bias_V is None else bias_gradient_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, head: Head) -> Tensor:
    """One tile, [chunk, tile], divided by the temperature; a fresh tensor in the type of sums."""
    kind = _sum_dtype(hidden_CH)
    if hidden_CH.is_cuda and hidden_CH.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden_CH, weight_VH.t(), out_dtype=kind)
    else:
        logits = torch.mm(hidden_CH.to(kind), weight_VH.to(kind).t())
    if bias_V is not None:
        logits.add_(bias_V.to(kind))
    if head.soft_cap is not None:
        return logits.mul_(head.scale / head.soft_cap).tanh_().mul_(head.soft_cap / head.temperature)
    return logits if head.scale == head.temperature else logits.mul_(head.scale / head.temperature)


@torch.no_grad()
def _floors(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, head: Head) -> Tensor:
    """Logit of each position below which no token is kept, [C]. Whole rows of logits take a quarter of a tile: sorting copies them."""
    height = max(1, head.chunk_tokens * MAX_TILE_VOCABULARY // (4 * weight_VH.shape[0]))
    found = [_floor(_logits(rows, weight_VH, bias_V, head=head), head=head) for rows in hidden_CH.split(height)]
    return torch.cat(found)


def _floor(logits_CV: Tensor, *, head: Head) -> Tensor:
    """min_p first, then top_k, then top_p over what these leave, as the engine has it.

    The floor lies half way between the lowest kept logit and the next lower one: a tile of another shape rounds logits otherwise, and
    no token may cross it for that. Tokens with exactly the lowest kept logit are all kept.
    """
    ascending_CV = logits_CV.sort(1).values
    size = ascending_CV.shape[1]
    lowest_C = ascending_CV[:, -1] + math.log(head.min_p) if head.min_p > 0 else ascending_CV[:, 0]
    if 0 < head.top_k < size:
        lowest_C = torch.maximum(lowest_C, ascending_CV[:, size - head.top_k])
    is_dropped_CV = ascending_CV < lowest_C[:, None]
    if head.top_p < 1:
        probabilities_CV = ascending_CV.masked_fill(is_dropped_CV, -torch.inf).softmax(1)
        is_dropped_CV |= probabilities_CV.cumsum(1) <= 1 - head.top_p
    num_dropped_C1 = is_dropped_CV.sum(1, keepdim=True).clamp_(max=size - 1)
    kept_C1, below_C1 = (
        ascending_CV.gather(1, place) for place in (num_dropped_C1, (num_dropped_C1 - 1).clamp_(min=0))
    )
    return torch.where(num_dropped_C1 > 0, (kept_C1 + below_C1) / 2, -torch.inf)[:, 0]


def _drop_below(floor_C: Tensor, logits: Tensor, *, kept: tuple[Tensor, Tensor]) -> None:
    """In place. `kept` are rows and columns of a tile that stay in any case."""
    values = logits[kept]
    logits.masked_fill_(logits < floor_C[:, None], _NEVER_SAMPLED)
    logits[kept] = values


def _tiles(num_positions: int, size: int, *, head: Head, whole: bool) -> list[tuple[slice, slice]]:
    """(vocabulary slice, position slice), vocabulary outside. One tile when `whole`, none without positions."""
    if num_positions == 0:
        return []
    if whole:
        return [(slice(0, size), slice(0, num_positions))]
    width, height = min(size, MAX_TILE_VOCABULARY), head.chunk_tokens
    return [
        (slice(v, min(v + width, size)), slice(c, min(c + height, num_positions)))
        for v in range(0, size, width)
        for c in range(0, num_positions, height)
    ]


def _targets_inside(targets_C: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Rows of the chunk whose target lies in the tile, and their columns in it."""
    inside_C = (targets_C >= tile.start) & (targets_C < tile.stop)
    rows = inside_C.nonzero()[:, 0]
    return rows, targets_C[rows] - tile.start


def _add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == sum_.dtype:
        sum_.addmm_(left, right.to(left.dtype))
    else:
        sum_.add_(torch.mm(left, right.to(left.dtype), out_dtype=sum_.dtype))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _matmul_dtype(x: Tensor) -> torch.dtype:
    """GPUs multiply in the inputs' type and sum in float32; CPUs without matrix units are faster in float32 throughout."""
    return x.dtype if x.is_cuda else _sum_dtype(x)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _can_fuse(hidden_CH: Tensor, *, head: Head, bias_V: Tensor | None, entropies: bool) -> bool:
    """Whether the package cut-cross-entropy is there and computes the same. Not yet run on hardware.

    It can scale logits only by scaling its half-precision inputs, which rounds them: such heads, and no positions, stay here. Liger's
    fused linear cross-entropy is left out on purpose: it makes gradients in forward for one common upstream gradient, and a policy
    loss has another one for each token.
    """
    if not _is_on_gpu(hidden_CH) or hidden_CH.dtype not in (torch.bfloat16, torch.float16) or hidden_CH.shape[0] == 0:
        return False
    if entropies or bias_V is not None or head.truncates or head.scale != head.temperature:
        return False
    if head.soft_cap is not None and head.temperature != 1.0:
        return False
    return importlib.util.find_spec("cut_cross_entropy") is not None


def _fused(hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, *, head: Head) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    # Its default leaves out small gradients.
    exact = {"impl": "cce_exact", "reduction": "none"}
    return -linear_cross_entropy(hidden_CH, weight_VH, targets_C, softcap=head.soft_cap, **exact).float()
