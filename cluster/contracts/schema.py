"""The Arrow schema of trajectories, from engine to learner to disk, without pickle. A row is a segment of a trajectory. A trajectory is one
segment unless its history was rewritten (`cluster.contracts.segments`).

A group is sampled as one batch. Scorers add columns, which stay small batches of their own until `joined` makes one batch of all. Every
batch from another actor or from disk passes `validate` before it is used, which also upgrades earlier versions of the schema.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from cluster.contracts.errors import DataError
from cluster.contracts.row_checks import check_contents, refuse
from cluster.contracts.segments import episodes, whole
from cluster.contracts.types import PART_LEFT, EpisodeStats, FinishReason, GroupSummary, RewardFailure, RewardStatus

SCHEMA_VERSION = "4"

_OF_REWARDS = ["reward", "reward_status", "reward_components", "reward_message"]
_KEY = ["group_id", "sample_index", "segment_index"]
"""First columns of a batch of added columns: they identify its rows."""
_MOST_REWARD_FAILURES = 4
"""Maximum number of kinds of failure in a summary."""

_TOKENS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_TURN = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)

SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("ticket_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        # Index among the trajectory's rows, from 0. Each has the trajectory's reward; a later one's prompt is the rewritten history.
        pa.field("segment_index", pa.int32(), nullable=False),
        pa.field("num_segments", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", _TOKENS, nullable=False),
        # Empty only if an episode failed before its first token: its reward status says so, and it never trains.
        pa.field("completion_token_ids", _TOKENS, nullable=False),
        # False for tokens of a tool or the environment, which have no loss.
        pa.field("loss_mask", pa.list_(pa.field("item", pa.bool_(), nullable=False)), nullable=False),
        # Natural log after temperature, under the weights that sampled; 0 where loss_mask is false. Null if unknown, in imported text.
        pa.field("rollout_logprobs", _FLOATS),
        pa.field("policy_versions", _TOKENS, nullable=False),
        # Ids of the experts that the engine chose, [positions, layers, experts per token], one byte each, or two (little-endian) if the
        # model has more than 256 experts. Positions: those of prompt and completion except the last token's, which is never read. Layers:
        # all of the model's, 0 in those without experts. Null without `rollout.routing_replay`, and if the engine returned none.
        pa.field("routed_experts", pa.large_binary()),
        pa.field("reference_logprobs", _FLOATS),
        # The reference's K likeliest tokens for each completion token, token after token; null if not needed.
        pa.field("reference_top_ids", _TOKENS),
        # K + 1 for each completion token: those of the K tokens, and that of all other tokens together.
        pa.field("reference_top_logprobs", _FLOATS),
        pa.field("reward", pa.float64()),
        pa.field("reward_status", pa.string()),
        # Null: this trajectory does not have the component.
        pa.field("reward_components", pa.map_(pa.string(), pa.float64()), nullable=False),
        # For each completion token, in episodes with earned rewards; null if the only reward is that of the whole trajectory.
        pa.field("token_rewards", _FLOATS),
        pa.field("finish_reason", pa.string(), nullable=False),
        # Spans of the completion that the policy sampled, from start to before end; null if that is the whole completion.
        pa.field("turns", pa.list_(pa.field("item", _TURN, nullable=False))),
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("completion_text", pa.string(), nullable=False),
        # JSON: the prompt's messages and other columns, and the environment's report.
        pa.field("info", pa.string(), nullable=False),
        # JSON: the segment's conversation by role, beginning with its prompt, with tool results and errors; null if prompt and completion
        # contain all of it.
        pa.field("messages", pa.string()),
        pa.field("environment", pa.string(), nullable=False),
        # JSON: `num_calls` of tools; `num_malformed_calls` of these; `num_uncanonical_turns`, whose prompt the template would render
        # differently (null if not compared); `num_written_tokens` between turns, by the role of the last message before a turn;
        # `num_retries` after a process of the environment died; `replies`, the places of each segment's turns among its messages;
        # `endings` of these, each from the stop text that ended the turn; `tools`, the schemas that each segment's prompt shows, once if
        # they are equal in all segments; `log`, the environment's logs. Null for a single turn.
        pa.field("episode", pa.string()),
        # `environment`, `tool:search`, `judge:style`, `sandbox`, `engine`; null if nothing failed or the stage is unknown.
        pa.field("failed_stage", pa.string()),
        pa.field("reward_message", pa.string()),
        pa.field("worker", pa.string(), nullable=False),
        # Seconds in which the model sampled or was waited for; the rest of the time from start to finish is the environment's.
        pa.field("model_seconds", pa.float64()),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("finished_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
    ],
    metadata={"treadwheel.schema_version": SCHEMA_VERSION},
)

_DEFAULTS: dict[str, Any] = {"segment_index": 0, "num_segments": 1, "environment": "single_turn"}
_FIELDS = [(field.name, field.type, _DEFAULTS.get(field.name)) for field in SCHEMA]
"""Name, type and default of each field. Arrow computes name and type at each access, which takes as long as the values of a row."""
_REQUIRED = frozenset(field.name for field in SCHEMA if not field.nullable)
_SINCE_4 = frozenset({"routed_experts"})
_MISSING = {
    "3": _SINCE_4,
    "2": _SINCE_4 | {*_DEFAULTS, "turns", "messages", "failed_stage", "episode", "model_seconds"},
}
"""Earlier versions that are read too, with the fields that they lack."""


def to_batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as a validated batch. Missing nullable fields become null; by default a row is the only segment of its trajectory. Raises
    DataError naming row and field."""
    arrays: list[pa.Array] = []
    for name, kind, default in _FIELDS:
        values = [row.get(name, default) for row in rows]
        if all(value is None for value in values):
            arrays.append(pa.nulls(len(values), kind))
            continue
        try:
            arrays.append(pa.array(values, type=kind))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            row = next((i for i, value in enumerate(values) if not _fits(value, kind)), 0)
            raise DataError(f"row {row}, field {name!r}: {error}") from error
    return validate(pa.record_batch(arrays, schema=SCHEMA))


def validate(batch: pa.RecordBatch, names: Collection[str] = SCHEMA.names) -> pa.RecordBatch:
    """The batch, `upgraded`. Checks the schema, and the contents of the fields in `names`. Raises DataError naming row and field.

    To read a few fields that another actor validated, name only these: the tokens are then not checked again.
    """
    batch = upgraded(batch)
    _check_types(batch)
    return _checked(batch, names)


def as_one(groups: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All groups as one validated batch, in order. To validate many small groups one by one would take ten times as long.

    Raises DataError also for texts that are too long together.
    """
    groups = [upgraded(group) for group in groups]
    for group in groups:
        _check_types(group)
    everything, *beyond = pa.Table.from_batches(groups).combine_chunks().to_batches()
    if beyond:  # Arrow counts the bytes of a text column in 32 bits
        sizes = {
            field.name: sum(group[field.name].nbytes for group in groups)
            for field in SCHEMA
            if field.type == pa.string()
        }
        longest = max(sizes, key=lambda name: sizes[name])
        raise DataError(
            f"field {longest!r} of the step's rows has {sizes[longest]:,} bytes, of at most {2**31 - 1:,}; take fewer groups_per_step, "
            "or leave long columns out of the prompts"
        )
    return _checked(everything, SCHEMA.names)


def upgraded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of an earlier version in the present one, with defaults in its new fields; any other batch unchanged."""
    missing = _MISSING.get(_version_of(batch))
    if missing is None:
        return batch
    fields: list[pa.Field] = []
    arrays: list[pa.Array] = []
    for field in SCHEMA:
        if field.name in batch.schema.names:
            fields.append(batch.schema.field(field.name))
            arrays.append(batch[field.name])
        elif field.name in missing:
            fields.append(field)
            arrays.append(pa.array([_DEFAULTS.get(field.name)] * batch.num_rows, type=field.type))
    return pa.record_batch(arrays, schema=pa.schema(fields, metadata=SCHEMA.metadata))


def _checked(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """The batch, after a check of the contents of these fields."""
    given: list[str] = []
    for name in names:
        num_nulls = batch[name].null_count
        if num_nulls and name in _REQUIRED:
            refuse(batch, name, pc.is_null(batch[name]), "is null")
        if num_nulls < batch.num_rows or name in _OF_REWARDS:
            given.append(name)
    check_contents(batch, given)
    return batch


def summarize(batch: pa.RecordBatch) -> GroupSummary:
    """The facts about a group for the controller: counts, versions and rewards, no tokens. Each trajectory counts once, with all its
    segments. Raises DataError for an incomplete trajectory."""
    batch = whole(batch)
    spans = _spans(batch["loss_mask"])
    is_sampled = batch["loss_mask"].flatten().to_numpy(zero_copy_only=False)
    sampled = tuple(int(is_sampled[own].sum()) for own in spans)
    lengths = tuple(own.stop - own.start for own in spans)
    return GroupSummary(
        group_id=batch["group_id"][0].as_py(),
        prompt_id=batch["prompt_id"][0].as_py(),
        num_trajectories=batch.num_rows,
        num_tokens=sum(sampled),
        oldest_versions=tuple(_oldest_versions(batch, is_sampled, spans)),
        completion_lengths=lengths,
        sampled_lengths=sampled,
        truncated=tuple(reason == FinishReason.LENGTH for reason in batch["finish_reason"].to_pylist()),
        episodes=_episodes(batch, lengths=lengths, sampled=sampled),
        **added(batch),
    )


_OF_EPISODES = ("environment", "turns", "episode", "failed_stage", "model_seconds", "started_at", "finished_at")


def _episodes(
    trajectories: pa.RecordBatch, *, lengths: Sequence[int], sampled: Sequence[int]
) -> tuple[EpisodeStats | None, ...]:
    """Statistics of whole trajectories; empty for single turns. `lengths`: their completion tokens; `sampled`: those that were sampled."""
    if trajectories["episode"].null_count == trajectories.num_rows:
        return ()
    rows = trajectories.select(_OF_EPISODES).to_pylist()
    return tuple(
        None if row["episode"] is None else _stats(row, num_tokens=length, num_sampled_tokens=num_sampled)
        for row, length, num_sampled in zip(rows, lengths, sampled, strict=True)
    )


def _stats(row: Mapping[str, Any], *, num_tokens: int, num_sampled_tokens: int) -> EpisodeStats:
    report, num_turns = json.loads(row["episode"]), len(row["turns"] or ())
    num_uncanonical = report.get("num_uncanonical_turns")
    return EpisodeStats(
        environment=row["environment"],
        num_turns=num_turns,
        num_calls=report["num_calls"],
        num_malformed_calls=report["num_malformed_calls"],
        num_compared_turns=0 if num_uncanonical is None else num_turns,
        num_uncanonical_turns=num_uncanonical or 0,
        num_sampled_tokens=num_sampled_tokens,
        num_written_tokens=num_tokens - num_sampled_tokens,
        written_by_role=report.get("num_written_tokens", {}),
        num_retries=report.get("num_retries", 0),
        failed_stage=row["failed_stage"],
        log={name: float(value) for name, value in report["log"].items() if not isinstance(value, str)},
        seconds=(row["finished_at"] - row["started_at"]).total_seconds(),
        model_seconds=row["model_seconds"] or 0.0,
    )


def added(columns: pa.RecordBatch) -> dict[str, Any]:
    """Values for fields of a GroupSummary: the size of the columns, and the rewards if these are among them."""
    facts: dict[str, Any] = {"size_bytes": columns.nbytes}
    if "reward" in columns.schema.names:
        # All segments of a trajectory have its reward: the first is enough.
        if any(places := columns["segment_index"].to_pylist()):
            columns = columns.filter(pa.array([place == 0 for place in places]))
        statuses = columns["reward_status"].to_pylist()
        facts |= {
            "rewards": tuple(columns["reward"].to_pylist()) if any(statuses) else (),
            "reward_components": _components(columns["reward_components"]),
            "num_reward_errors": statuses.count(RewardStatus.ERROR),
            "num_reward_timeouts": statuses.count(RewardStatus.TIMEOUT),
            "reward_failures": _reward_failures(statuses, columns["reward_message"].to_pylist()),
        }
    return facts


def with_columns(batch: pa.RecordBatch, **columns: Sequence[Any]) -> pa.RecordBatch:
    """The batch with columns replaced, which are checked as `validate` does."""
    for name, values in columns.items():
        index = SCHEMA.get_field_index(name)
        if index < 0:
            raise DataError(f"field {name!r} is not in the trajectory schema")
        field = SCHEMA.field(index)
        batch = batch.set_column(index, field, pa.array(values, type=field.type))
    return _checked(batch, columns)


def columns_of(batch: pa.RecordBatch, **columns: Sequence[Any]) -> pa.RecordBatch:
    """A batch of these columns only, to be joined with `batch` later. Raises as `with_columns`."""
    return with_columns(batch, **columns).select([*_KEY, *columns])


def joined(pieces: Iterable[pa.RecordBatch | list[int]]) -> list[pa.RecordBatch]:
    """Whole groups from their pieces, one group after another: a batch, then in order its added columns and lists of chosen trajectories,
    by their places.

    Raises DataError for columns of other rows or of another schema. Their contents were checked when they were made.
    """
    groups: list[pa.RecordBatch] = []
    for piece in pieces:
        if isinstance(piece, list):
            groups.append(_chosen(groups.pop(), cast("list[int]", piece)))
        elif piece.schema.names[: len(_KEY)] != _KEY:
            groups.append(piece)
        else:
            groups.append(_with(groups.pop(), piece))
    return groups


def _chosen(group: pa.RecordBatch, trajectories: Sequence[int]) -> pa.RecordBatch:
    found = episodes(group)
    return group.take(pa.array([row for place in trajectories for row in found[place]], type=pa.int64()))


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


def _spans(column: pa.ListArray) -> list[slice]:
    """Each row's place among the flattened values of all rows."""
    lengths: list[int] = pc.list_value_length(column).to_pylist()
    return [slice(start, end) for start, end in pairwise(accumulate(lengths, initial=0))]


def _oldest_versions(trajectories: pa.RecordBatch, is_trained: Any, spans: Iterable[slice]) -> Iterator[int | None]:
    """The oldest version of each trajectory; None without tokens."""
    versions = trajectories["policy_versions"].flatten().to_numpy()
    for own in spans:
        counted = counted_versions(versions[own], is_trained[own])
        yield int(counted.min()) if len(counted) else None


def counted_versions(versions: Any, is_trained: Any) -> Any:
    """Versions of a trajectory's tokens that train, or of all its tokens if none trains; NumPy arrays."""
    trained = versions[is_trained]
    return trained if len(trained) else versions


def info_of(batch: pa.RecordBatch, row: int) -> dict[str, Any]:
    """The row's `info`, decoded."""
    return json.loads(batch["info"][row].as_py())


def _components(column: pa.Array) -> dict[str, tuple[float | None, ...]]:
    rows = [dict(row) for row in column.to_pylist()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: tuple(row.get(name) for row in rows) for name in names}


_FAILURES = {RewardStatus.TIMEOUT: "timeout", RewardStatus.OK: PART_LEFT}


def _reward_failures(statuses: Sequence[str | None], messages: Sequence[str | None]) -> tuple[RewardFailure, ...]:
    """One failure for each type of exception. Messages may differ between trajectories; the first stands for all."""
    messages_by_kind: dict[str, list[str]] = {}
    for status, message in zip(statuses, messages, strict=True):
        if status in (RewardStatus.ERROR, RewardStatus.TIMEOUT) or message:
            line = " ".join((message or "no message").split())
            kind = _FAILURES.get(cast(RewardStatus, status)) or line.partition(": ")[0].removesuffix(":")
            messages_by_kind.setdefault(kind, []).append(line)
    failures = [RewardFailure(kind=kind, message=own[0], count=len(own)) for kind, own in messages_by_kind.items()]
    return tuple(sorted(failures, key=lambda failure: -failure.count)[:_MOST_REWARD_FAILURES])


def _version_of(batch: pa.RecordBatch) -> str:
    metadata = cast("dict[bytes, bytes]", batch.schema.metadata or {})
    return metadata.get(b"treadwheel.schema_version", b"none").decode()


def _check_version(batch: pa.RecordBatch) -> None:
    if (version := _version_of(batch)) != SCHEMA_VERSION:
        raise DataError(
            f"trajectory schema version {version!r}, this build reads {', '.join(map(repr, sorted(_MISSING)))} and {SCHEMA_VERSION!r}; "
            "go on with the version that wrote them"
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


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return False
    return True
