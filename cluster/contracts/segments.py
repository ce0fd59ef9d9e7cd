"""Episodes of several segments. A segment is a row: a stretch of the episode in which each prompt continues the one before. The key of an
episode is (group_id, sample_index). Its rows are adjacent, in the order of its segments.

All computations on trajectories use `whole`, which has one row for each episode, with the joined completions of its segments. So an episode
has one reward, one baseline and one weight, however many segments it has, and contains each sampled token once.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cluster.contracts.errors import DataError
from cluster.contracts.row_checks import name_of

SEGMENT = ("segment_index", "num_segments")
_KEY = ("group_id", "sample_index")
_PER_TOKEN = frozenset(
    {
        *("completion_token_ids", "loss_mask", "policy_versions", "rollout_logprobs", "token_rewards"),
        *("reference_logprobs", "reference_top_ids", "reference_top_logprobs"),
    }
)
_OF_THE_END = frozenset({"finish_reason", "finished_at", "messages", "episode", "model_seconds"})
"""Columns whose value is that of the last segment. All other columns that are not joined have the first segment's value."""
_OF_ALL = ("reward", "reward_status", "failed_stage")
"""Columns that are equal in all segments of an episode."""


def episodes(batch: pa.RecordBatch) -> list[range]:
    """The rows of each episode. Raises DataError, naming group and sample, if a segment is missing or misplaced."""
    indices, sizes = (batch[name].to_pylist() for name in SEGMENT)
    if max(indices) == 0 and max(sizes) == 1:
        return [range(row, row + 1) for row in range(batch.num_rows)]
    keys = list(zip(*(batch[name].to_pylist() for name in _KEY), strict=True))
    found: list[range] = []
    while (start := found[-1].stop if found else 0) < batch.num_rows:
        episode = range(start, min(start + max(sizes[start], 1), batch.num_rows))
        have = [indices[row] for row in episode if keys[row] == keys[start] and sizes[row] == sizes[start]]
        if have != list(range(sizes[start])):
            raise DataError(
                f"{name_of(batch, start)}: the episode is incomplete: it has {sizes[start]} segments, but the rows from {start} are "
                f"segments {have[:8]}; the rows of an episode must be adjacent, from segment 0 to the last"
            )
        found.append(episode)
    return found


def whole(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One row for each episode, with the columns of the batch; the batch itself if each episode is one segment. Raises as `episodes`, and
    DataError if segments of an episode have different rewards, or if only some of them have a value in a nullable column."""
    found = episodes(batch)
    if len(found) == batch.num_rows:
        return batch
    for name in _OF_ALL:
        if name in batch.schema.names:
            _refuse_different(batch, name, found)
    return pa.record_batch([_of_episodes(batch, name, found) for name in batch.schema.names], schema=batch.schema)


def _of_episodes(batch: pa.RecordBatch, name: str, found: Sequence[range]) -> pa.Array:
    column = batch[name]
    if name in _PER_TOKEN:
        return _joined(batch, name, found)
    if name == "turns":
        return pa.array([_turns(batch, rows) for rows in found], type=column.type)
    if name == "completion_text":
        texts = column.to_pylist()
        return pa.array(["".join(texts[row] for row in rows) for rows in found], type=column.type)
    if name == "routed_experts":
        # Experts belong to positions, and each segment has its own prompt before them.
        return pa.nulls(len(found), column.type)
    if name in SEGMENT:
        return pa.array([SEGMENT.index(name)] * len(found), type=column.type)
    place = -1 if name in _OF_THE_END else 0
    return column.take(pa.array([rows[place] for rows in found]))


def _joined(batch: pa.RecordBatch, name: str, found: Sequence[range]) -> pa.Array:
    column = batch[name]
    is_null = column.is_null().to_pylist()
    for rows in found:
        if len({is_null[row] for row in rows}) > 1:
            raise DataError(
                f"{name_of(batch, rows.start)}, field {name!r}: is null, but other segments of the episode have a value"
            )
    offsets = list(accumulate(pc.fill_null(pc.list_value_length(column), 0).to_pylist(), initial=0))
    bounds = [offsets[row] for row in (*(rows.start for rows in found), batch.num_rows)]
    mask = pa.array([is_null[rows.start] for rows in found])
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), column.flatten(), type=column.type, mask=mask)


def _turns(batch: pa.RecordBatch, rows: range) -> list[dict[str, Any]]:
    """The turns of an episode, by their places in its completion. A segment without a list of turns is one turn."""
    found: list[dict[str, Any]] = []
    before = 0
    for row in rows:
        length = len(batch["completion_token_ids"][row])
        one = {"start": 0, "end": length, "finish_reason": batch["finish_reason"][row].as_py()}
        of_row = batch["turns"][row].as_py()
        for turn in ([one] if length else []) if of_row is None else of_row:
            found.append(turn | {"start": before + turn["start"], "end": before + turn["end"]})
        before += length
    return found


def _refuse_different(batch: pa.RecordBatch, name: str, found: Sequence[range]) -> None:
    values = batch[name].to_pylist()
    for rows in found:
        own = [values[row] for row in rows]
        if any(value != own[0] for value in own):
            raise DataError(f"{name_of(batch, rows.start)}, field {name!r}: segments of one episode differ: {own[:8]}")
