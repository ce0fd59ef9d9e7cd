"""Divides the rows of a batch into micro-batches under a token budget (`plan`, pure), and lays each out as tensors (`lay_out`).

Packed: sequences lie one after another in a single row, the prompt of a group once, and attention keeps them apart
(`learner.model.attention`). Padded: rows of similar length, padded on the right, which does not affect causal models. The last token of a
completion is no input, since nothing is predicted from it. Plans are deterministic, and cost every rank the same up to one unit.

Shapes: N rows of the batch, W completion width of the batch, C completion positions with loss, K candidates of a token.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.placing import placed
from learner.model.attention import Segments, bucketed
from learner.model.flash import Segment
from learner.model.routing import Routes
from learner.sequence_parallel import SequenceGroup

MAX_REPEATED = 0.02
"""Extra tokens, as a share of the batch's, that computing prompts more than once may cost to save a pass."""
MAX_CPU_TOKENS = 4096
"""Tokens of one pass on a CPU, whatever the budget: larger passes exceed its caches and take up to twice as long."""
Layout = Literal["shared", "packed", "padded"]
"""`shared` is packed, with the prompt of a group computed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Tokens of one trajectory, or of one of its segments."""

    prompt: np.ndarray
    """int64, at least one."""
    completion: np.ndarray
    """int64, at least one."""
    loss_mask: np.ndarray
    """bool, as long as the completion; false tokens get no log-prob."""
    candidates: np.ndarray | None = None
    """Ids of further tokens to score, [completion, K]. Either all rows of a batch have them, or none (None)."""
    experts: np.ndarray | None = None
    """Recorded experts, [inputs, layers, experts per token]; None: the model's routers choose."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def num_inputs(self) -> int:
        return self.num_tokens - 1

    @property
    def segments(self) -> tuple["TokenRow", ...]:
        return (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """A trajectory of several segments, each with its own prompt. They stay in one pass, and their results are one row, so that a
    sequence's ratio is the whole episode's."""

    segments: tuple[TokenRow, ...]

    @property
    def loss_mask(self) -> np.ndarray:
        """The segments' masks, one after another."""
        return np.concatenate([each.loss_mask for each in self.segments])

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.segments)


Row = TokenRow | EpisodeRow

_IDLE = TokenRow(prompt=np.zeros(1, np.int64), completion=np.zeros(1, np.int64), loss_mask=np.zeros(1, np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass."""

    rows: tuple[int, ...]
    """Indices in the batch, in the order of the rows of [B, W] results."""
    input_ids: Tensor
    """[1, T] packed, [B, L] padded."""
    position_ids: Tensor
    segments: Segments | None
    """None when padded."""
    head_index_C: Tensor
    """Index of the hidden state that predicts each target, in the flattened input."""
    targets_C: Tensor
    candidates_CK: Tensor | None
    routes: Routes | None
    """None when no row has recorded experts."""
    result_index_C: Tensor
    """Index of each target in flattened [B, W]."""
    width: int
    """W."""

    def scatter(self, values_C: Tensor) -> Tensor:
        """Writes values per position, [C, ...], into [B, W, ...], 0 elsewhere; differentiable."""
        flat = values_C.new_zeros(len(self.rows) * self.width, *values_C.shape[1:])
        return flat.index_copy(0, self.result_index_C, values_C).view(len(self.rows), self.width, *values_C.shape[1:])


def tokens_per_pass(max_tokens: int, *, device: torch.device) -> int:
    """The budget, limited to MAX_CPU_TOKENS on a CPU."""
    return min(max_tokens, MAX_CPU_TOKENS) if device.type == "cpu" else max_tokens


def plan(rows: Sequence[Row], *, max_tokens: int, layout: Layout, num_ranks: int = 1) -> list[list[tuple[int, ...]]]:
    """Each rank's micro-batches, as tuples of row indices; all ranks have equally many. A row beyond the budget gets one alone.

    With fewer rows than ranks some tuples are empty: every rank must take part in each collective operation.
    """
    if layout == "padded":
        bins = _pad_bins(rows, max_tokens=max_tokens, num_ranks=num_ranks)
    else:
        bins = _pack_bins(rows, max_tokens=max_tokens, num_ranks=num_ranks, layout=layout)
    return _dealt(bins, rows, layout=layout, num_ranks=num_ranks)


def lay_out(
    rows: Sequence[Row], chosen: Sequence[int], *, layout: Layout, width: int, device: torch.device | str = "cpu"
) -> MicroBatch:
    """The chosen rows as tensors of one forward pass; `width` is the batch's longest completion.

    Without rows it is a pass of one token without loss, for a rank that only has to take part.
    """
    if not chosen:
        return replace(lay_out([_IDLE], [0], layout=layout, width=width, device=device), rows=())
    starts: list[tuple[int, int]] = []
    """For each segment, the index of the token that predicts its first completion token, and of its first completion input."""
    laid, columns = _segments(rows, chosen, width=width)
    if layout == "padded":
        input_ids, position_ids, segments = _padded(laid, starts)
    else:
        input_ids, position_ids, segments = _packed(laid, starts, shares=layout == "shared")
    head_index, targets, results, candidates = [], [], [], []
    for segment, column, (before, first) in zip(laid, columns, starts, strict=True):
        wanted = np.flatnonzero(segment.loss_mask)
        head_index.append(np.where(wanted == 0, before, first + wanted - 1))
        targets.append(segment.completion[wanted])
        results.append(column + wanted)
        if segment.candidates is not None:
            candidates.append(segment.candidates[wanted])
    head_index_C, targets_C, result_index_C = (
        placed(np.concatenate(x), device) for x in (head_index, targets, results)
    )
    return MicroBatch(
        rows=tuple(chosen),
        input_ids=placed(input_ids, device),
        position_ids=placed(position_ids, device),
        segments=None if segments is None else bucketed(segments, num_tokens=input_ids.shape[1], device=device),
        head_index_C=head_index_C,
        targets_C=targets_C,
        candidates_CK=placed(np.concatenate(candidates), device, dtype=torch.int64) if candidates else None,
        routes=_routes(laid, starts, num_inputs=input_ids.size, device=device),
        result_index_C=result_index_C,
        width=width,
    )


def cut(batch: MicroBatch, group: SequenceGroup) -> tuple[MicroBatch, Tensor]:
    """This rank's slice of a packed pass, and the indices of its completion positions among those of the whole pass."""
    assert batch.segments is not None, "padded rows are not split"
    length = group.slice_length(batch.input_ids.shape[1])
    head_index_C = batch.head_index_C - group.rank * length
    places_C = ((head_index_C >= 0) & (head_index_C < length)).nonzero()[:, 0]
    candidates_CK, routes = batch.candidates_CK, batch.routes
    if routes is not None:
        routes = replace(routes, experts_TLK=group.own(routes.experts_TLK), num_rows_T=group.own(routes.num_rows_T))
    own = replace(
        batch,
        input_ids=group.own(batch.input_ids, dim=1),
        position_ids=group.own(batch.position_ids, dim=1),
        segments=replace(batch.segments, sequence_group=group),
        head_index_C=head_index_C[places_C],
        targets_C=batch.targets_C[places_C],
        candidates_CK=None if candidates_CK is None else candidates_CK[places_C],
        routes=routes,
        result_index_C=batch.result_index_C[places_C],
    )
    return own, places_C


def _routes(
    rows: Sequence[TokenRow], starts: Sequence[tuple[int, int]], *, num_inputs: int, device: torch.device | str
) -> Routes | None:
    """A shared prompt gets the experts of its last row that has some."""
    shape = next((row.experts.shape[1:] for row in rows if row.experts is not None), None)
    if shape is None:
        return None
    # int16: torch has few operations for unsigned types, and no model has that many experts.
    experts = np.zeros((num_inputs, *shape), dtype=np.int16)
    num_rows = np.zeros(num_inputs, dtype=np.float32)
    for row, (before, first) in zip(rows, starts, strict=True):
        if row.experts is None:
            continue
        size = len(row.prompt)
        for start, part in ((before + 1 - size, row.experts[:size]), (first, row.experts[size:])):
            experts[start : start + len(part)] = part
            num_rows[start : start + len(part)] += 1
    return Routes(experts_TLK=placed(experts, device), num_rows_T=placed(num_rows, device))


def _segments(rows: Sequence[Row], chosen: Sequence[int], *, width: int) -> tuple[list[TokenRow], list[int]]:
    """The segments of the chosen rows, in order, and the index of each one's first completion token in flattened [B, W]."""
    laid, columns = list[TokenRow](), list[int]()
    for place, index in enumerate(chosen):
        column = place * width
        for segment in rows[index].segments:
            laid.append(segment)
            columns.append(column)
            column += len(segment.completion)
    return laid, columns


def _packed(
    rows: Sequence[TokenRow], starts: list[tuple[int, int]], *, shares: bool
) -> tuple[np.ndarray, np.ndarray, list[Segment]]:
    sharers: dict[bytes, int] = defaultdict(int)
    for row in rows:
        sharers[row.prompt.tobytes()] += 1
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    prompt_starts: dict[bytes, int] = {}
    end = 0

    def add(ids: np.ndarray, first_position: int) -> int:
        nonlocal end
        tokens.append(ids)
        positions.append(np.arange(first_position, first_position + len(ids)))
        end += len(ids)
        return end - len(ids)

    for row in rows:
        key, size, inputs = row.prompt.tobytes(), len(row.prompt), row.completion[:-1]
        if not shares or sharers[key] == 1:
            start = add(np.concatenate([row.prompt, inputs]), 0)
            segments.append(Segment(start=start, length=size + len(inputs)))
            starts.append((start + size - 1, start + size))
            continue
        if key not in prompt_starts:
            prompt_starts[key] = add(row.prompt, 0)
            segments.append(Segment(start=prompt_starts[key], length=size))
        before = prompt_starts[key] + size - 1
        if len(inputs) == 0:
            starts.append((before, before))
            continue
        start = add(inputs, size)
        segments.append(Segment(start=start, length=len(inputs), prompt_start=prompt_starts[key], prompt_length=size))
        starts.append((before, start))
    return np.concatenate(tokens)[None], np.concatenate(positions)[None], segments


def _padded(rows: Sequence[TokenRow], starts: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, None]:
    width = max(row.num_inputs for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    for place, row in enumerate(rows):
        input_ids[place, : row.num_inputs] = np.concatenate([row.prompt, row.completion[:-1]])
        first = place * width + len(row.prompt)
        starts.append((first - 1, first))
    return input_ids, np.broadcast_to(np.arange(width), input_ids.shape).copy(), None


def cost(rows: Sequence[Row], chosen: Iterable[int], *, layout: Layout) -> int:
    """Number of tokens that a forward pass computes, padding included."""
    laid = [segment for i in chosen for segment in rows[i].segments]
    if layout == "padded":
        return len(laid) * max((segment.num_inputs for segment in laid), default=0)
    if layout == "packed":
        return sum(segment.num_inputs for segment in laid)
    prompts = {segment.prompt.tobytes(): len(segment.prompt) for segment in laid}
    return sum(prompts.values()) + sum(len(segment.completion) - 1 for segment in laid)


def _pad_bins(rows: Sequence[Row], *, max_tokens: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Rows of similar length, at most `max_tokens` with padding, at most ceil(rows / ranks) of them in a bin."""
    longest = [max(segment.num_inputs for segment in row.segments) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (-longest[i], i))
    max_rows = -(-len(rows) // num_ranks)
    bins: list[tuple[int, ...]] = []
    while order:
        max_segments = max_tokens // longest[order[0]]
        num_segments = accumulate(len(rows[i].segments) for i in order[:max_rows])
        size = max(sum(number <= max_segments for number in num_segments), 1)
        bins.append(tuple(sorted(order[:size])))
        order = order[size:]
    return bins


def _pack_bins(rows: Sequence[Row], *, max_tokens: int, num_ranks: int, layout: Layout) -> list[tuple[int, ...]]:
    """As few bins as the budget allows, in multiples of the ranks; of several such plans, the one whose busiest rank has the fewest tokens.

    The first plan keeps groups whole where they fit. With shared prompts two more plans divide groups, into pieces of a bin's size and of a
    quarter of it: these may need fewer bins, or spread a group over ranks. They may cost `MAX_REPEATED` more if they save a bin.
    """
    shares = layout == "shared"
    fitting = [i for i in range(len(rows)) if cost(rows, [i], layout=layout) <= max_tokens]
    # A row beyond the budget fills one bin: its further tokens need no others.
    total = cost(rows, fitting, layout=layout) + max_tokens * (len(rows) - len(fitting))
    num_bins = num_ranks * max(-(-total // (max_tokens * num_ranks)), 1)
    while True:
        whole = _filled(rows, most=max_tokens, num_bins=num_bins, layout=layout)
        fits = _fit(whole, rows, max_tokens=max_tokens, layout=layout)
        if fits and (num_ranks == 1 or not shares):
            return whole
        load = _load(whole, rows, layout=layout, num_ranks=num_ranks)
        found = [(load, whole)] if fits else []
        limit = load if fits else (1 + MAX_REPEATED) * load
        share = -(-total // num_bins)
        for most in (share, share // 4) if shares else ():
            divided = _filled(rows, most=most, num_bins=num_bins, layout=layout)
            load = _load(divided, rows, layout=layout, num_ranks=num_ranks)
            if load <= limit and _fit(divided, rows, max_tokens=max_tokens, layout=layout):
                found.append((load, divided))
        if found:
            return min(found, key=lambda each: each[0])[1]
        num_bins += num_ranks


def _fit(bins: Sequence[Sequence[int]], rows: Sequence[Row], *, max_tokens: int, layout: Layout) -> bool:
    """Whether each bin is within the budget or has a single row."""
    return all(len(chosen) == 1 or cost(rows, chosen, layout=layout) <= max_tokens for chosen in bins)


def _load(bins: Sequence[tuple[int, ...]], rows: Sequence[Row], *, layout: Layout, num_ranks: int) -> int:
    """Number of tokens of the busiest rank."""
    ranks = _dealt(bins, rows, layout=layout, num_ranks=num_ranks)
    return max(sum(cost(rows, chosen, layout=layout) for chosen in rank) for rank in ranks)


def _dealt(
    bins: Sequence[tuple[int, ...]], rows: Sequence[Row], *, layout: Layout, num_ranks: int
) -> list[list[tuple[int, ...]]]:
    """Equally many bins for each rank, in turns: the rank with a turn's most expensive bin gets the cheapest of the next turn."""
    by_cost = sorted(bins, key=lambda b: (-cost(rows, b, layout=layout), b))
    by_cost += [()] * (-len(bins) % num_ranks)
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    for index, chosen in enumerate(by_cost):
        turn, place = divmod(index, num_ranks)
        ranks[place if turn % 2 == 0 else num_ranks - 1 - place].append(chosen)
    return ranks


def _filled(rows: Sequence[Row], *, most: int, num_bins: int, layout: Layout) -> list[tuple[int, ...]]:
    """At most `num_bins` bins: units of at most `most` tokens, the longest first, each into the emptiest bin."""
    units = _units(rows, max_tokens=most, shares=layout == "shared")
    costs = [cost(rows, unit, layout=layout) for unit in units]
    loads, bins = [0] * num_bins, [list[int]() for _ in range(num_bins)]
    for index in sorted(range(len(units)), key=lambda u: (-costs[u], u)):
        lightest = loads.index(min(loads))
        loads[lightest] += costs[index]
        bins[lightest].extend(units[index])
    return [tuple(sorted(chosen)) for chosen in bins if chosen]


def _units(rows: Sequence[Row], *, max_tokens: int, shares: bool) -> list[tuple[int, ...]]:
    """Rows that stay together: those with the same first prompt, in pieces of at most `max_tokens`; single rows if nothing is shared."""
    if not shares:
        return [(i,) for i in range(len(rows))]
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_prompt[row.segments[0].prompt.tobytes()].append(i)
    units: list[tuple[int, ...]] = []
    for members in by_prompt.values():
        piece, held, size = list[int](), dict[bytes, int](), 0
        for i in members:
            prompts = {segment.prompt.tobytes(): len(segment.prompt) for segment in rows[i].segments}
            own = sum(len(segment.completion) - 1 for segment in rows[i].segments)
            more = own + sum(prompts[key] for key in prompts.keys() - held.keys())
            if piece and size + more > max_tokens:
                units.append(tuple(piece))
                piece, held, size = [], {}, 0
                more = own + sum(prompts.values())
            piece.append(i)
            held |= prompts
            size += more
        units.append(tuple(piece))
    return units
