"""The one Arrow schema of a trajectory: engine to learner to disk. One row a trajectory; no pickle anywhere.

A group is sampled as one batch; what scores it adds columns, which stay small batches of their own until `joined` makes one of all.
`validate` stands at every boundary: a batch from another actor or from disk goes through it before it is used.
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from cluster.contracts.errors import DataError
from cluster.contracts.types import FinishReason, GroupSummary, RewardFailure, RewardStatus

SCHEMA_VERSION = "2"

_KEY = ["group_id", "sample_index"]
"""Columns with which a batch of added columns begins: they say whose they are."""
_STATUSES = {None, *map(str, RewardStatus)}
_FAILED = (str(RewardStatus.ERROR), str(RewardStatus.TIMEOUT))
_MOST_REWARD_FAILURES = 4
"""Ways to fail that a summary tells of."""

_TOKENS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))

SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("ticket_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", _TOKENS, nullable=False),
        # Empty where an episode failed before its first token: its reward status says that it failed, and it never trains.
        pa.field("completion_token_ids", _TOKENS, nullable=False),
        # False where a tool or the environment wrote the token: no loss there.
        pa.field("loss_mask", pa.list_(pa.field("item", pa.bool_(), nullable=False)), nullable=False),
        # Natural log after temperature, under the weights that sampled; 0 where loss_mask is false. Null where no one knows: imported text.
        pa.field("rollout_logprobs", _FLOATS),
        pa.field("policy_versions", _TOKENS, nullable=False),
        pa.field("reference_logprobs", _FLOATS),
        # The reference's K likeliest tokens per completion token, token after token; null where no one asks for them.
        pa.field("reference_top_ids", _TOKENS),
        # K + 1 per completion token: theirs, and that of all other tokens together.
        pa.field("reference_top_logprobs", _FLOATS),
        pa.field("reward", pa.float64()),
        pa.field("reward_status", pa.string()),
        # Null: the judge knows the component, and this trajectory does not have it.
        pa.field("reward_components", pa.map_(pa.string(), pa.float64()), nullable=False),
        # Per completion token, for episodes that earn along the way; null when the reward is for the whole.
        pa.field("token_rewards", _FLOATS),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("completion_text", pa.string(), nullable=False),
        # JSON: the prompt's messages and other columns, and whatever the environment reports.
        pa.field("info", pa.string(), nullable=False),
        pa.field("reward_message", pa.string()),
        pa.field("worker", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("finished_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
    ],
    metadata={"treadwheel.schema_version": SCHEMA_VERSION},
)

RUN_DEPENDENT_COLUMNS = ("run_id", "worker", "started_at", "finished_at")
"""Columns that say where and when, not what: two runs that are equal bit for bit may differ in them."""

_PER_TOKEN = ("loss_mask", "policy_versions")
_PER_TOKEN_NULLABLE = ("rollout_logprobs", "reference_logprobs", "token_rewards")


def to_batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as a validated batch. Missing nullable fields become null; raises DataError naming row and field."""
    arrays: list[pa.Array] = []
    for field in SCHEMA:
        values = [row.get(field.name) for row in rows]
        try:
            arrays.append(pa.array(values, type=field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            row = next((i for i, value in enumerate(values) if not _fits(value, field.type)), 0)
            raise DataError(f"row {row}, field {field.name!r}: {error}") from error
    return validate(pa.record_batch(arrays, schema=SCHEMA))


def validate(batch: pa.RecordBatch, names: Collection[str] = SCHEMA.names) -> pa.RecordBatch:
    """The batch itself, if it is what the schema says; of these fields, if they hold what they may. Raises DataError naming row and field.

    Who reads a few fields of what another actor has validated need not look at every token again.
    """
    _check_types(batch)
    return _checked(batch, names)


def _checked(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """The batch, whose fields of these names hold what they may."""
    for name in names:
        if not SCHEMA.field(name).nullable and batch[name].null_count:
            _refuse(batch, name, pc.is_null(batch[name]), "is null")
    lengths = pc.list_value_length(batch["completion_token_ids"])
    if "completion_token_ids" in names or "reward_status" in names:
        _check_empty(batch, lengths)
    if "prompt_token_ids" in names:
        _refuse(batch, "prompt_token_ids", pc.equal(pc.list_value_length(batch["prompt_token_ids"]), 0), "is empty")
    for name in (each for each in (*_PER_TOKEN, *_PER_TOKEN_NULLABLE) if each in names):
        differs = pc.fill_null(pc.not_equal(pc.list_value_length(batch[name]), lengths), False)
        _refuse(batch, name, differs, "has another length than completion_token_ids")
    if "reference_top_ids" in names or "reference_top_logprobs" in names:
        _check_top_tokens(batch, lengths)
    for name in (each for each in (*_PER_TOKEN_NULLABLE, "reference_top_logprobs") if each in names):
        _check_finite(batch, name)
    if "reward" in names or "reward_status" in names:
        _check_rewards(batch)
    if "reward_components" in names:
        rows = batch["reward_components"].to_pylist()
        bad = [any(_is_not_finite(value) for _, value in row) for row in rows]
        _refuse(batch, "reward_components", bad, "holds one that is not finite")
    if "finish_reason" in names:
        is_known = pc.is_in(batch["finish_reason"], value_set=pa.array([str(reason) for reason in FinishReason]))
        _refuse(batch, "finish_reason", pc.invert(is_known), f"is none of {', '.join(FinishReason)}")
    return batch


def summarize(batch: pa.RecordBatch) -> GroupSummary:
    """What the controller may know of a group: counts, versions and rewards, no tokens."""
    lengths = pc.list_value_length(batch["completion_token_ids"]).to_pylist()
    return GroupSummary(
        group_id=batch["group_id"][0].as_py(),
        prompt_id=batch["prompt_id"][0].as_py(),
        num_trajectories=batch.num_rows,
        num_tokens=sum(lengths),
        oldest_versions=tuple(map(_oldest_version, batch["policy_versions"], batch["loss_mask"])),
        completion_lengths=tuple(lengths),
        truncated=tuple(reason == FinishReason.LENGTH for reason in batch["finish_reason"].to_pylist()),
        **added(batch),
    )


def added(columns: pa.RecordBatch) -> dict[str, Any]:
    """What columns tell a GroupSummary, by its fields: their size, and the rewards if these are among them."""
    told: dict[str, Any] = {"size_bytes": columns.nbytes}
    if "reward" in columns.schema.names:
        statuses = columns["reward_status"].to_pylist()
        told |= {
            "rewards": tuple(columns["reward"].to_pylist()) if any(statuses) else (),
            "reward_components": _components(columns["reward_components"]),
            "num_reward_errors": statuses.count(RewardStatus.ERROR),
            "num_reward_timeouts": statuses.count(RewardStatus.TIMEOUT),
            "reward_failures": _reward_failures(statuses, columns["reward_message"].to_pylist()),
        }
    return told


def with_columns(batch: pa.RecordBatch, **columns: Sequence[Any]) -> pa.RecordBatch:
    """The batch with columns replaced, which are checked as `validate` does."""
    for name, values in columns.items():
        index = SCHEMA.get_field_index(name)
        if index < 0:
            raise DataError(f"field {name!r} is not in the trajectory schema")
        batch = batch.set_column(index, SCHEMA.field(index), pa.array(values, type=SCHEMA.field(index).type))
    return _checked(batch, columns)


def columns_of(batch: pa.RecordBatch, **columns: Sequence[Any]) -> pa.RecordBatch:
    """A batch of these columns alone, to be joined with the one that they are of. Raises as `with_columns`."""
    return with_columns(batch, **columns).select([*_KEY, *columns])


def joined(pieces: Iterable[pa.RecordBatch | list[int]]) -> list[pa.RecordBatch]:
    """Whole groups from their pieces, one group after another: a batch, then columns that were added and rows that were chosen, in order.

    Raises DataError for columns of other rows or of another schema; what they hold was checked when they were made.
    """
    groups: list[pa.RecordBatch] = []
    for piece in pieces:
        if isinstance(piece, list):
            groups.append(groups.pop().take(pa.array(piece, type=pa.int64())))
        elif piece.schema.names[: len(_KEY)] != _KEY:
            groups.append(piece)
        else:
            groups.append(_with(groups.pop(), piece))
    return groups


def _with(batch: pa.RecordBatch, columns: pa.RecordBatch) -> pa.RecordBatch:
    _check_version(columns)
    for name in columns.schema.names:
        index = SCHEMA.get_field_index(name)
        if index < 0 or columns[name].type != SCHEMA.field(index).type:
            raise DataError(f"added field {name!r} of type {columns[name].type} is not in the trajectory schema")
        if name not in _KEY:
            batch = batch.set_column(index, SCHEMA.field(index), columns[name])
        elif not columns[name].equals(batch[name]):
            theirs, ours = (str(each[name].to_pylist())[:80] for each in (columns, batch))
            raise DataError(f"added columns are of other trajectories: field {name!r} is {theirs}, in the group {ours}")
    return batch


def _oldest_version(versions: pa.ListScalar, loss_mask: pa.ListScalar) -> int | None:
    trained = versions.values.filter(loss_mask.values)
    return pc.min(trained if len(trained) else versions.values).as_py()


def info_of(batch: pa.RecordBatch, row: int) -> dict[str, Any]:
    """The row's `info`, decoded."""
    return json.loads(batch["info"][row].as_py())


def _components(column: pa.Array) -> dict[str, tuple[float | None, ...]]:
    rows = [dict(row) for row in column.to_pylist()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: tuple(row.get(name) for row in rows) for name in names}


_FAILURES = {RewardStatus.TIMEOUT: "timeout", RewardStatus.OK: "part left"}


def _reward_failures(statuses: Sequence[str | None], messages: Sequence[str | None]) -> tuple[RewardFailure, ...]:
    """One per type of exception: its texts may differ from trajectory to trajectory, and the first one stands for all."""
    messages_by_kind: dict[str, list[str]] = {}
    for status, message in zip(statuses, messages, strict=True):
        if status in (RewardStatus.ERROR, RewardStatus.TIMEOUT) or message:
            said = " ".join((message or "no message").split())
            kind = _FAILURES.get(cast(RewardStatus, status)) or said.partition(": ")[0].removesuffix(":")
            messages_by_kind.setdefault(kind, []).append(said)
    failures = [RewardFailure(kind=kind, message=said[0], count=len(said)) for kind, said in messages_by_kind.items()]
    return tuple(sorted(failures, key=lambda failure: -failure.count)[:_MOST_REWARD_FAILURES])


def _check_version(batch: pa.RecordBatch) -> None:
    metadata = cast("dict[bytes, bytes]", batch.schema.metadata or {})
    version = metadata.get(b"treadwheel.schema_version", b"none").decode()
    if version != SCHEMA_VERSION:
        raise DataError(
            f"trajectory schema version {version!r}, this build reads {SCHEMA_VERSION!r}; go on with the version that wrote them"
        )


def _check_types(batch: pa.RecordBatch) -> None:
    _check_version(batch)
    if not batch.schema.equals(SCHEMA):
        _refuse_other_fields(batch)
    if batch.num_rows == 0:
        raise DataError("a trajectory batch has no rows")


def _refuse_other_fields(batch: pa.RecordBatch) -> None:
    if batch.schema.names != SCHEMA.names:
        missing = set(SCHEMA.names) - set(batch.schema.names)
        foreign = set(batch.schema.names) - set(SCHEMA.names)
        raise DataError(
            f"fields differ from the trajectory schema: missing {sorted(missing)}, foreign {sorted(foreign)}"
        )
    for field in SCHEMA:
        column = batch[field.name]
        if column.type != field.type:
            raise DataError(f"field {field.name!r} has type {column.type}, the trajectory schema says {field.type}")


def _check_finite(batch: pa.RecordBatch, name: str) -> None:
    values = pc.list_flatten(batch[name])
    bad = pc.fill_null(pc.invert(pc.is_finite(values)), False)
    if pc.any(bad).as_py():
        row = pc.list_parent_indices(batch[name])[pc.index(bad, True).as_py()].as_py()
        raise DataError(f"row {row} ({_name_of(batch, row)}), field {name!r}: contains a value that is not finite")


def _check_empty(batch: pa.RecordBatch, lengths: pa.Array) -> None:
    failed = pc.is_in(batch["reward_status"], value_set=pa.array(_FAILED))
    is_bad = pc.and_(pc.equal(lengths, 0), pc.invert(failed))
    why = "is empty: only an episode whose reward_status is 'error' or 'timeout' may end without a token"
    _refuse(batch, "completion_token_ids", is_bad, why)


def _check_top_tokens(batch: pa.RecordBatch, lengths: pa.Array) -> None:
    ids, logprobs = (pc.list_value_length(batch[f"reference_top_{name}"]) for name in ("ids", "logprobs"))
    per_token = pc.divide(ids, pc.max_element_wise(lengths, 1))
    ragged = pc.fill_null(pc.not_equal(pc.multiply(per_token, lengths), ids), False)
    _refuse(batch, "reference_top_ids", ragged, "does not have equally many for each token of the completion")
    differs = pc.not_equal(pc.fill_null(logprobs, 0), pc.fill_null(pc.add(ids, lengths), 0))
    _refuse(batch, "reference_top_logprobs", differs, "does not have one more per token than reference_top_ids")


def _check_rewards(batch: pa.RecordBatch) -> None:
    # In Python: for the few rows of a group, each call into Arrow costs more than all of them.
    rewards, statuses = batch["reward"].to_pylist(), batch["reward_status"].to_pylist()
    _refuse(batch, "reward", [*map(_is_not_finite, rewards)], "is not finite")
    unknown = [status not in _STATUSES for status in statuses]
    _refuse(batch, "reward_status", unknown, f"is none of {', '.join(RewardStatus)}")
    differs = [
        (status == RewardStatus.OK) is (reward is None) for reward, status in zip(rewards, statuses, strict=True)
    ]
    _refuse(batch, "reward", differs, "must be given exactly when its status is 'ok'")


def _is_not_finite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _refuse(batch: pa.RecordBatch, name: str, is_bad: pa.Array | list[bool], why: str) -> None:
    row = pc.index(is_bad, True).as_py() if isinstance(is_bad, pa.Array) else is_bad.index(True) if any(is_bad) else -1
    if row >= 0:
        raise DataError(f"row {row} ({_name_of(batch, row)}), field {name!r}: {why}; got {str(batch[name][row])[:80]}")


def _name_of(batch: pa.RecordBatch, row: int) -> str:
    return f"group {batch['group_id'][row]}, sample {batch['sample_index'][row]}"


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return False
    return True
