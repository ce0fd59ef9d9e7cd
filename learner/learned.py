"""What a step's passes saw of the tokens of some of its trajectories, as rows of the record of learning.

It reads what passes compute anyway and gives nothing back: a step learns the same with it and without. Each trajectory is taken in the
first pass of a step that comes to it, on the rank that makes the pass.

Shapes: B rows of a micro-batch, T tokens, C completion positions with loss.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from cluster.contracts.learned import LEARNED_SCHEMA
from learner.algorithms.objective.seen import TokensSeen
from learner.algorithms.placing import placed
from learner.assemble import Batch

_OF_WHAT_STAYS = ("advantages", "weights", "clipped")
"""Columns that a trajectory which a filter took out does not have."""


class LearnedRows:
    """Of one step, on one rank."""

    def __init__(self, batch: Batch, *, num_groups: int | None) -> None:
        """Of the batch's first `num_groups` groups; None: of all."""
        self._batch = batch
        groups = batch.tensors.group_index_N.tolist()
        self._waiting = {row for row, group in enumerate(groups) if num_groups is None or group < num_groups}
        self._rows: list[int] = []
        self._kept: list[Tensor] = []
        self._columns: list[dict[str, Tensor]] = []

    def take(self, rows: Sequence[int], seen: TokensSeen) -> None:
        """`rows` are places in the batch. What is taken stays on the device, one number a token and column."""
        chosen = [place for place, row in enumerate(rows) if row in self._waiting]
        if not chosen:
            return
        width, device = seen.policy_BT.shape[1], seen.policy_BT.device
        masks = [self._batch.rows[rows[place]].loss_mask for place in chosen]
        index_C = np.concatenate(
            [place * width + np.flatnonzero(mask) for place, mask in zip(chosen, masks, strict=True)]
        )
        taken_C = placed(index_C, device)
        self._columns.append({name: x_BT.flatten()[taken_C].float() for name, x_BT in seen.columns().items()})
        self._kept.append(seen.rows.is_kept_N[placed(chosen, device)])
        self._rows += [rows[place] for place in chosen]

    def pass_by(self, rows: Sequence[int]) -> None:
        """All ranks together have passed these places in the batch: no later pass of any rank takes them."""
        self._waiting.difference_update(rows)

    def batch(self) -> pa.RecordBatch | None:
        """The rows that this rank took; None where it took none."""
        if not self._rows:
            return None
        first_segments = pa.array([self._batch.episodes[row].start for row in self._rows])
        keys = self._batch.trajectories.select(["ticket_index", "sample_index"]).take(first_segments)
        masks = [self._batch.rows[row].loss_mask for row in self._rows]
        loss_mask, offsets = np.concatenate(masks), np.cumsum([0, *map(len, masks)])
        is_dropped = ~torch.cat(self._kept).cpu().numpy()
        columns: dict[str, pa.Array] = {name: keys[name] for name in keys.schema.names}
        sizes = [len(kept) for kept in self._kept]
        for field in LEARNED_SCHEMA:
            lacks = [field.name not in part for part in self._columns]
            if not all(lacks):
                # A loss may have bounds in some passes alone: the others' rows are null.
                given = [part.get(field.name, torch.zeros_like(part["policy_logprobs"])) for part in self._columns]
                found_C = torch.cat(given).cpu().numpy()
                is_absent = np.repeat(lacks, sizes)
                if field.name in _OF_WHAT_STAYS:
                    is_absent |= is_dropped
                columns[field.name] = _lists(found_C, loss_mask, offsets, field=field, is_absent=is_absent)
        arrays = [
            pc.cast(columns[field.name], field.type) if field.name in columns else pa.nulls(len(masks), field.type)
            for field in LEARNED_SCHEMA
        ]
        return pa.record_batch(arrays, schema=LEARNED_SCHEMA)


def _lists(
    found_C: np.ndarray, loss_mask: np.ndarray, offsets: np.ndarray, *, field: pa.Field, is_absent: np.ndarray
) -> pa.Array:
    """A list column of some trajectories, from the numbers of their tokens with loss. `is_absent` by trajectory: it has no such column,
    whatever stands in its place."""
    values = np.zeros(len(loss_mask), dtype=np.float32)
    values[loss_mask] = found_C
    values = values.astype(bool) if pa.types.is_boolean(field.type.value_type) else values
    items = pa.array(values, mask=~loss_mask)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, mask=pa.array(is_absent))
