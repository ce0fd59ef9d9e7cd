"""Rows of the record of learning: numbers per token that a step's passes computed for some of its trajectories.

It only reads numbers that passes compute anyway: a step learns the same with and without it. Each trajectory is recorded in the first pass
of the step that contains it, on the rank that makes the pass.

Shapes: B rows of a micro-batch, T tokens, C completion positions with loss.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from cluster.contracts.learned import LEARNED_SCHEMA
from learner.algorithms.objective.recording import TokensSeen
from learner.algorithms.placing import placed
from learner.assemble import Batch

_OF_KEPT_TRAJECTORIES = ("advantages", "weights", "clipped")
"""Columns that are null for a trajectory that a filter dropped."""


class LearnedRows:
    """The rows of one step on one rank."""

    def __init__(self, batch: Batch, *, num_groups: int | None) -> None:
        """Records the batch's first `num_groups` groups; None: all groups."""
        self._batch = batch
        groups = batch.tensors.group_index_N.tolist()
        self._waiting = {row for row, group in enumerate(groups) if num_groups is None or group < num_groups}
        self._rows: list[int] = []
        self._kept: list[Tensor] = []
        self._columns: list[dict[str, Tensor]] = []

    def take(self, rows: Sequence[int], seen: TokensSeen) -> None:
        """Records the rows that were not recorded before. `rows` are places in the batch. Keeps one number per token and column, on the
        device."""
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
        """All ranks together have made passes over these places in the batch: no later pass records them."""
        self._waiting.difference_update(rows)

    def batch(self) -> pa.RecordBatch | None:
        """The rows that this rank recorded; None if there are none."""
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
                # A loss may have bounds in some passes only: rows of the other passes are null.
                given = [part.get(field.name, torch.zeros_like(part["policy_logprobs"])) for part in self._columns]
                found_C = torch.cat(given).cpu().numpy()
                is_absent = np.repeat(lacks, sizes)
                if field.name in _OF_KEPT_TRAJECTORIES:
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
    """A list column of some trajectories, from the numbers of their tokens with loss; null for a trajectory that `is_absent`."""
    values = np.zeros(len(loss_mask), dtype=np.float32)
    values[loss_mask] = found_C
    values = values.astype(bool) if pa.types.is_boolean(field.type.value_type) else values
    items = pa.array(values, mask=~loss_mask)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, mask=pa.array(is_absent))
