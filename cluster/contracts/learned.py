"""The record of learning: the objective's numbers for each token of some of a step's trajectories. One row is one trajectory, in Arrow.

Lists are as long as the trajectory's completion; an entry is null where the loss mask is false. The trajectories themselves, with the
log-probs of the policy that sampled them, are in the step's trajectories, under the same keys. Learning never reads this record.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from cluster.contracts.errors import DataError

LEARNED_VERSION = "1"
_VERSION, _POLICY_VERSION = "treadwheel.learned_version", "treadwheel.policy_version"
_KEY = ("ticket_index", "sample_index")
_FLOATS = pa.list_(pa.field("item", pa.float32()))

LEARNED_SCHEMA = pa.schema(
    [
        pa.field("ticket_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int64(), nullable=False),
        # Under the policy before the step's first update of this trajectory, after temperature as all log-probs are.
        pa.field("policy_logprobs", _FLOATS, nullable=False),
        # Of the policy in the denominator of ratios; null if that is the policy that sampled, or the one of `policy_logprobs`.
        pa.field("proximal_logprobs", _FLOATS),
        # This and the next two: null if a filter dropped the trajectory.
        pa.field("advantages", _FLOATS),
        # Product of the corrections, which multiplies the token's policy loss; 0 if a filter dropped the token.
        pa.field("weights", _FLOATS),
        # Whether the lower or the upper bound changed the token's loss; null if the loss has no bounds.
        pa.field("clipped", pa.list_(pa.field("item", pa.bool_()))),
        # In nats; null in a step that does not measure them.
        pa.field("entropies", _FLOATS),
    ]
)
"""Numbers that are not finite are kept: they explain a skipped update."""
_PER_TOKEN = [name for name in LEARNED_SCHEMA.names if name not in _KEY]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTrajectory:
    """One row, with the columns of the schema. None: the step had no such numbers for this trajectory."""

    policy_logprobs: list[float | None]
    proximal_logprobs: list[float | None] | None
    advantages: list[float | None] | None
    weights: list[float | None] | None
    clipped: list[bool | None] | None
    entropies: list[float | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The record of one step."""

    policy_version: int
    """Version before the step's updates: the step's number minus 1."""
    rows: pa.RecordBatch
    """In the order of their keys."""
    places: Mapping[tuple[int, int], int]
    """Places of the rows, by (ticket_index, sample_index)."""

    def trajectory(self, *, ticket_index: int, sample_index: int) -> LearnedTrajectory | None:
        """None: its group was not recorded, or no pass of the step included it."""
        if (place := self.places.get((ticket_index, sample_index))) is None:
            return None
        return LearnedTrajectory(**{name: self.rows[name][place].as_py() for name in _PER_TOKEN})


def written_learned(parts: Iterable[pa.RecordBatch], *, policy_version: int) -> pa.Buffer:
    """The file of a step, made of the rows of all ranks, in any order."""
    table = pa.Table.from_batches(parts, schema=LEARNED_SCHEMA).sort_by([(name, "ascending") for name in _KEY])
    facts = {_VERSION: LEARNED_VERSION, _POLICY_VERSION: str(policy_version)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, LEARNED_SCHEMA.with_metadata(facts)) as writer:
        # As one batch: for an empty table, `combine_chunks` makes none.
        writer.write_batch(pa.record_batch([c.combine_chunks() for c in table.columns], schema=LEARNED_SCHEMA))
    return sink.getvalue()


def read_learned(content: "pa.Buffer | bytes") -> Learned:
    """Reads a file's content. Raises DataError, in one sentence, if it is torn, altered, or of another version."""
    try:
        with pa.ipc.open_file(content) as reader:
            facts = cast("dict[bytes, bytes]", reader.schema.metadata or {})
            if (version := facts.get(_VERSION.encode(), b"none").decode(errors="replace")) != LEARNED_VERSION:
                raise DataError(f"a record of learning of version {version!r}, this build reads {LEARNED_VERSION!r}")
            if not reader.schema.equals(LEARNED_SCHEMA) or reader.num_record_batches != 1:
                raise DataError("a record of learning with other columns than this build reads")
            rows = reader.get_batch(0)
            # Otherwise a wrong offset would read beyond the file's end.
            rows.validate(full=True)
        policy_version = int(facts[_POLICY_VERSION.encode()])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(f"a damaged record of learning: {str(error).splitlines()[0]}") from error
    _refuse_ragged(rows)
    keys = zip(*(rows[name].to_pylist() for name in _KEY), strict=True)
    return Learned(policy_version=policy_version, rows=rows, places={key: place for place, key in enumerate(keys)})


def _refuse_ragged(rows: pa.RecordBatch) -> None:
    lengths = pc.list_value_length(rows["policy_logprobs"])
    for name in _PER_TOKEN:
        if pc.any(pc.not_equal(pc.list_value_length(rows[name]), lengths)).as_py():
            raise DataError(f"a damaged record of learning: {name} is not as long as policy_logprobs in every row")
