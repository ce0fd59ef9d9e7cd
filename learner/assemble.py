"""Turns Arrow groups into the learner's inputs: token rows for the model, padded tensors for the objective.

An episode of several segments is one row of the tensors, with the completions of its segments joined: the objective credits episodes, not
segments. The model computes each segment after its own prompt.

A trajectory whose reward failed (`error`, `timeout`, or none given) or that was aborted does not train, and counts in no denominator and no
baseline; the rest of its group trains without it. A step whose trajectories all failed is an error, not an empty step.

Shapes: N trajectories that train, W longest completion, K reward components or candidates of a token, P = K + 1.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from cluster.contracts.errors import DataError
from cluster.contracts.row_checks import name_of
from cluster.contracts.schema import as_one, info_of
from cluster.contracts.segments import episodes, whole
from cluster.contracts.types import FinishReason, RewardStatus
from learner.algorithms.objective.batch import BatchTensors
from learner.model.packing import EpisodeRow, Row, TokenRow
from learner.model.routing import Routing

_ROUNDING = 1e-5
"""Rounding error allowed in a sum of token rewards, relative to the sum of their sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's trajectories."""

    rows: list[Row]
    tensors: BatchTensors
    trajectories: pa.RecordBatch
    """The trained trajectories as they came, one row per segment, for the record and for inspection after errors."""
    episodes: list[range]
    """For each episode, its rows in `trajectories`."""
    num_failed: int
    """Trajectories left out because their reward failed."""
    num_aborted: int
    num_without_experts: int | None
    """Segments for which the engine returned no experts; None where none are replayed."""

    def write_rows(self, rows: Sequence[int], path: Path) -> None:
        """Writes these trajectories as an Arrow file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self.trajectories.schema) as writer:
            segments = [segment for row in rows for segment in self.episodes[row]]
            writer.write_batch(self.trajectories.take(pa.array(segments, type=pa.int64())))


def assemble(
    groups: Sequence[pa.RecordBatch],
    *,
    current_version: int,
    vocabulary_size: int,
    columns: Sequence[str] = (),
    routing: Routing | None = None,
) -> Batch:
    """Assembles the groups in the given order, with these columns of their prompts and the recorded experts for the routers of `routing`.

    Raises DataError naming row and field for invalid data and for an episode with a missing segment.
    """
    if not groups:
        raise DataError("an update needs at least one group")
    trajectories, num_failed, num_aborted = _trained(as_one(groups))
    found = episodes(trajectories)
    segments = _segments(trajectories, vocabulary_size)
    num_without_experts = None
    if routing is not None:
        num_without_experts = trajectories["routed_experts"].null_count
        recorded = _experts(trajectories, segments, routing)
        segments = [replace(row, experts=experts) for row, experts in zip(segments, recorded, strict=True)]
    rows = [
        segments[each.start] if len(each) == 1 else EpisodeRow(segments=tuple(segments[row] for row in each))
        for each in found
    ]
    episode_rows = whole(trajectories)
    tensors = replace(
        _tensors(episode_rows, current_version=current_version),
        columns={name: _column(episode_rows, name) for name in columns},
        segment_index_NT=_segment_index(trajectories, found),
    )
    return Batch(
        rows=rows,
        tensors=tensors,
        trajectories=trajectories,
        episodes=found,
        num_failed=num_failed,
        num_aborted=num_aborted,
        num_without_experts=num_without_experts,
    )


def _trained(everything: pa.RecordBatch) -> tuple[pa.RecordBatch, int, int]:
    """The rows of the trajectories that train, the number whose reward failed, and the number that were aborted."""
    found = episodes(everything)
    statuses, reasons = everything["reward_status"].to_pylist(), everything["finish_reason"].to_pylist()
    has_reward = [statuses[rows.start] == RewardStatus.OK for rows in found]
    is_finished = [all(reasons[row] != FinishReason.ABORTED for row in rows) for rows in found]
    kept = [row for rows, *trains in zip(found, has_reward, is_finished, strict=True) if all(trains) for row in rows]
    num_failed, num_aborted = has_reward.count(False), is_finished.count(False)
    if not kept:
        raise DataError(
            f"none of {len(found)} trajectories can train: {num_failed} rewards failed, {num_aborted} were aborted; "
            "see reward_message in the run's trajectories"
        )
    trained = everything if len(kept) == everything.num_rows else everything.take(pa.array(kept, type=pa.int64()))
    return trained, num_failed, num_aborted


def _segments(batch: pa.RecordBatch, vocabulary_size: int) -> list[TokenRow]:
    prompts, completions = _Lists.of(batch, "prompt_token_ids"), _Lists.of(batch, "completion_token_ids")
    _check_tokens(batch, prompts, vocabulary_size, name="prompt_token_ids")
    _check_tokens(batch, completions, vocabulary_size, name="completion_token_ids")
    masks, candidates = _Lists.of(batch, "loss_mask"), _candidates(batch, vocabulary_size)
    return [
        TokenRow(prompt=p, completion=c, loss_mask=m, candidates=k)
        for p, c, m, k in zip(
            prompts.split(np.int64), completions.split(np.int64), masks.split(np.bool_), candidates, strict=True
        )
    ]


def _experts(batch: pa.RecordBatch, rows: Sequence[TokenRow], routing: Routing) -> list[np.ndarray | None]:
    """Recorded experts of each row, [inputs, layers, experts per token]; None for a row without them."""
    dtype = np.dtype(np.uint8 if routing.num_experts <= 256 else "<u2")
    found: list[np.ndarray | None] = []
    for place, (row, recorded) in enumerate(zip(rows, batch["routed_experts"], strict=True)):
        if not recorded.is_valid:
            found.append(None)
            continue
        shape = (row.num_inputs, routing.num_layers, routing.num_experts_per_token)
        buffer = recorded.as_buffer()
        if buffer.size != math.prod(shape) * dtype.itemsize:
            raise DataError(
                f"{_name_of(batch, place)}, field 'routed_experts': {buffer.size} bytes, and {'x'.join(map(str, shape))} experts of the "
                f"learner's model are {math.prod(shape) * dtype.itemsize}; engine and learner must have the same model"
            )
        experts = np.frombuffer(buffer, dtype=dtype).reshape(shape)
        if (largest := int(experts.max())) >= routing.num_experts:
            raise DataError(
                f"{_name_of(batch, place)}, field 'routed_experts': expert {largest}, and the model has {routing.num_experts}"
            )
        found.append(experts)
    return found


def _segment_index(trajectories: pa.RecordBatch, found: Sequence[range]) -> torch.Tensor | None:
    """[N, T], 0 after the completion; None if every trajectory is one row."""
    if len(found) == trajectories.num_rows:
        return None
    lengths = _Lists.of(trajectories, "completion_token_ids").lengths()
    of_each = [torch.repeat_interleave(lengths[rows.start : rows.stop]) for rows in found]
    return torch.nn.utils.rnn.pad_sequence(of_each, batch_first=True)


def _tensors(batch: pa.RecordBatch, *, current_version: int) -> BatchTensors:
    """Tensors of a batch with one row per trajectory."""
    prompts, completions = _Lists.of(batch, "prompt_token_ids"), _Lists.of(batch, "completion_token_ids")
    group_ids: list[str] = batch["group_id"].to_pylist()
    places = {group_id: index for index, group_id in enumerate(dict.fromkeys(group_ids))}
    names, components_NK = _components(batch)
    loss_mask_NT = _Lists.of(batch, "loss_mask").padded(np.bool_)
    is_sampler_known = _has(batch, "rollout_logprobs")
    rollout_logprobs_NT = torch.zeros(loss_mask_NT.shape)
    if is_sampler_known:
        rollout_logprobs_NT = _Lists.of(batch, "rollout_logprobs").padded(np.float32)
    width = loss_mask_NT.shape[1]
    tensors = BatchTensors(
        loss_mask_NT=loss_mask_NT,
        rollout_logprobs_NT=rollout_logprobs_NT,
        is_sampler_known=is_sampler_known,
        policy_versions_NT=_Lists.of(batch, "policy_versions").padded(np.int64),
        # float64: advantages are not rounded before they meet a loss.
        rewards_N=torch.from_numpy(batch["reward"].to_numpy(zero_copy_only=False).astype(np.float64)),
        group_index_N=torch.tensor([places[group_id] for group_id in group_ids]),
        truncated_N=torch.tensor([reason == FinishReason.LENGTH for reason in batch["finish_reason"].to_pylist()]),
        completion_lengths_N=completions.lengths(),
        prompt_lengths_N=prompts.lengths(),
        trajectory_ids=[f"{g}/{s}" for g, s in zip(group_ids, batch["sample_index"].to_pylist(), strict=True)],
        group_ids=group_ids,
        prompt_ids=batch["prompt_id"].to_pylist(),
        current_version=current_version,
        reference_logprobs_NT=_partial(batch, "reference_logprobs", width=width),
        reference_partition_NTP=_partition(batch, completions),
        token_rewards_NT=_partial(batch, "token_rewards", width=width),
        reward_components_NK=components_NK,
        reward_component_names=names,
    )
    newest = int((tensors.policy_versions_NT * tensors.loss_mask_NT).max())
    if newest > current_version:
        raise DataError(
            f"field 'policy_versions': a token of version {newest}, but the learner is at {current_version}"
        )
    tensors.validate()
    _refuse_other_sums(batch, tensors)
    return tensors


def _refuse_other_sums(batch: pa.RecordBatch, tensors: BatchTensors) -> None:
    """Raises DataError if the rewards of a trajectory's tokens do not add up to its reward: shaping and metrics would use another number
    than the advantage."""
    if tensors.token_rewards_NT is None:
        return
    earned_NT = tensors.token_rewards_NT.double()
    # Token rewards are float32. Rows without any are NaN and compare as false.
    bad_N = (earned_NT.sum(1) - tensors.rewards_N).abs() > _ROUNDING * earned_NT.abs().sum(1)
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        raise DataError(
            f"{_name_of(batch, row)}, field 'token_rewards': they sum to {earned_NT[row].sum().item():g}, and the trajectory's reward is "
            f"{tensors.rewards_N[row].item():g}; give a reward that is the sum of what its tokens earned, or leave token_rewards out"
        )


def _candidates(batch: pa.RecordBatch, vocabulary_size: int) -> list[np.ndarray] | list[None]:
    """The reference's likeliest tokens of each row, [completion, K]; None for each row if no row has any."""
    if not _has(batch, "reference_top_ids"):
        return [None] * batch.num_rows
    lists = _Lists.of(batch, "reference_top_ids")
    _check_tokens(batch, lists, vocabulary_size, name="reference_top_ids")
    lengths = pc.list_value_length(batch["completion_token_ids"]).to_pylist()
    return [ids.reshape(length, -1) for ids, length in zip(lists.split(np.int32), lengths, strict=True)]


def _partition(batch: pa.RecordBatch, completions: "_Lists") -> torch.Tensor | None:
    """The reference's log-probs of its likeliest tokens and, last, of all others together, [N, W, P]."""
    if not _has(batch, "reference_top_logprobs"):
        return None
    lists = _Lists.of(batch, "reference_top_logprobs")
    sizes = set((np.diff(lists.offsets) // np.diff(completions.offsets)).tolist())
    if len(sizes) > 1:
        raise DataError(f"field 'reference_top_logprobs': trajectories of one step have {sorted(sizes)} per token")
    return lists.padded(np.float32).view(batch.num_rows, -1, *sizes)


def _has(batch: pa.RecordBatch, name: str) -> bool:
    """Whether the rows have a nullable column. Raises DataError if only some have it."""
    column = batch[name]
    if 0 < column.null_count < batch.num_rows:
        row = pc.index(pc.is_null(column), True).as_py()
        raise DataError(
            f"{_name_of(batch, row)}, field {name!r}: is null, while other trajectories of the step have it"
        )
    return column.null_count == 0


def _partial(batch: pa.RecordBatch, name: str, *, width: int) -> torch.Tensor | None:
    """The column padded to the batch's width, NaN for rows without it; None if no row has it."""
    column = batch[name]
    if column.null_count == batch.num_rows:
        return None
    padded_NT = _Lists.of(batch, name).padded(np.float32, width=width)
    padded_NT[torch.from_numpy(column.is_null().to_numpy(zero_copy_only=False))] = torch.nan
    return padded_NT


def _components(batch: pa.RecordBatch) -> tuple[tuple[str, ...], torch.Tensor | None]:
    """The rows' components, ordered by name; NaN where a row lacks one. `part/name`, a part's own number, is only reported."""
    rows = [dict(row) for row in batch["reward_components"].to_pylist()]
    names = tuple(sorted(name for name in set().union(*rows) if "/" not in name))
    if not names:
        return (), None
    table = np.array([[row.get(name) for name in names] for row in rows], dtype=np.float64)  # None becomes NaN
    return names, torch.from_numpy(table)


def _column(batch: pa.RecordBatch, name: str) -> torch.Tensor:
    """The number of each trajectory's prompt in a column. Raises DataError if a prompt has none."""
    values = [info_of(batch, row).get(name) for row in range(batch.num_rows)]
    for row, value in enumerate(values):
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:  # refuses NaN and infinity too
            raise DataError(
                f"{_name_of(batch, row)}: column {name!r} of its prompt is {value!r}; give every prompt a number there"
            )
    return torch.tensor(values, dtype=torch.float64)


def _check_tokens(batch: pa.RecordBatch, lists: "_Lists", vocabulary_size: int, *, name: str) -> None:
    bad = np.flatnonzero((lists.values < 0) | (lists.values >= vocabulary_size))
    if len(bad):
        row = int(np.searchsorted(lists.offsets, bad[0], side="right") - 1)
        raise DataError(
            f"{_name_of(batch, row)}, field {name!r}: token {lists.values[bad[0]]} is outside the learner's vocabulary of "
            f"{vocabulary_size}; tokenizer, engine and learner must have the same model"
        )


def _name_of(batch: pa.RecordBatch, row: int) -> str:
    return f"row {row} ({name_of(batch, row)})"


@dataclass(frozen=True, slots=True)
class _Lists:
    """A list column as one flat array and the bounds of the rows in it."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, batch: pa.RecordBatch, name: str) -> "_Lists":
        column = batch[name]
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(column.flatten().to_numpy(zero_copy_only=False), offsets)

    def lengths(self) -> torch.Tensor:
        """[N], int64."""
        return torch.from_numpy(np.diff(self.offsets).astype(np.int64))

    def split(self, dtype: type[np.generic]) -> list[np.ndarray]:
        values = self.values.astype(dtype)
        return [values[start:end] for start, end in pairwise(self.offsets.tolist())]

    def padded(self, dtype: type[np.generic], *, width: int | None = None) -> torch.Tensor:
        """[N, W], 0 or false after a row's end; as wide as the longest row unless a width is given."""
        lengths = np.diff(self.offsets)
        result = np.zeros((len(lengths), width or lengths.max()), dtype=dtype)
        result[np.arange(result.shape[1]) < lengths[:, None]] = self.values
        return torch.from_numpy(result)
