"""The record of learning comes back as it was written, or one sentence says why not."""

import math

import pyarrow as pa
import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.learned import LEARNED_SCHEMA, LearnedTrajectory, read_learned, written_learned

FIRST = {
    "ticket_index": 7,
    "sample_index": 0,
    "policy_logprobs": [-0.5, None, -1.5],
    "proximal_logprobs": None,
    "advantages": [1.0, None, 1.0],
    "weights": [1.0, None, 0.0],
    "clipped": [False, None, True],
    "entropies": None,
}
SECOND = {**FIRST, "sample_index": 1, "policy_logprobs": [-2.0], "advantages": None, "weights": None, "clipped": None}


def part(*rows: dict[str, object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([*rows], schema=LEARNED_SCHEMA)


def test_a_trajectory_is_found_by_its_keys_whichever_rank_had_it():
    learned = read_learned(written_learned([part(SECOND), part(FIRST)], policy_version=11))
    assert learned.policy_version == 11
    assert learned.rows["sample_index"].to_pylist() == [0, 1]
    assert learned.trajectory(ticket_index=7, sample_index=0) == LearnedTrajectory(
        policy_logprobs=[-0.5, None, -1.5],
        proximal_logprobs=None,
        advantages=[1.0, None, 1.0],
        weights=[1.0, None, 0.0],
        clipped=[False, None, True],
        entropies=None,
    )
    assert learned.trajectory(ticket_index=8, sample_index=0) is None


def test_a_step_of_which_nothing_was_learned_is_a_record_without_rows():
    assert read_learned(written_learned([], policy_version=0)).rows.num_rows == 0


def test_a_number_that_is_not_finite_is_kept():
    learned = read_learned(
        written_learned([part({**FIRST, "advantages": [math.inf, None, math.nan]})], policy_version=0)
    )
    found = learned.trajectory(ticket_index=7, sample_index=0)
    assert found and found.advantages and found.advantages[0] == math.inf and math.isnan(found.advantages[2] or 0.0)


@pytest.mark.parametrize("kept", [0, 5, 100, 700, -1])
def test_a_torn_file_is_one_sentence(kept):
    content = written_learned([part(FIRST, SECOND)], policy_version=11).to_pybytes()
    with pytest.raises(DataError, match="a damaged record of learning: ") as raised:
        read_learned(content[:kept])
    assert "\n" not in str(raised.value)


def test_a_file_with_any_byte_altered_is_read_or_refused_and_never_worse():
    content = written_learned([part(FIRST, SECOND)], policy_version=11).to_pybytes()
    for place in range(len(content)):
        altered = bytearray(content)
        altered[place] ^= 0xFF
        try:
            learned = read_learned(bytes(altered))
        except DataError:
            continue
        for key in learned.places:
            learned.trajectory(ticket_index=key[0], sample_index=key[1])


def test_a_file_of_another_version_or_kind_says_so():
    schema = LEARNED_SCHEMA.with_metadata({"treadwheel.learned_version": "9"})
    with pytest.raises(DataError, match="of version '9', this build reads '1'"):
        read_learned(_file(schema, pa.RecordBatch.from_pylist([FIRST], schema=schema)))
    other = pa.record_batch({"x": [1]})
    with pytest.raises(DataError, match="of version 'none'"):
        read_learned(_file(other.schema, other))


def test_lists_of_different_lengths_in_one_row_are_refused():
    with pytest.raises(DataError, match="weights is not as long as policy_logprobs"):
        read_learned(written_learned([part({**FIRST, "weights": [1.0]})], policy_version=0))


def _file(schema: pa.Schema, batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
