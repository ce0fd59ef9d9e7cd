"""Trajectories come back as they were recorded, or it is said why not."""

import math
import pickle

import pyarrow as pa
import pytest

from cluster.contracts.errors import DataError, LedgerError, StorageError
from cluster.contracts.learned import written_learned
from cluster.contracts.schema import SCHEMA, columns_of, to_batch, with_columns
from cluster.record.recorder import Recorder, digest_of, learned_name, learned_of, name_of, num_pruned_steps
from cluster.record.run_directory import RunDirectory
from cluster.record.storage import Storage
from tests.unit.cluster.contracts.rows import before, row


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(str(tmp_path))


def save_checkpoint(directory: RunDirectory, step: int) -> None:
    directory.write_file(f"checkpoints/step-{step:06d}/manifest.json", b"{}")


def recorded(directory: RunDirectory) -> list[int]:
    return [step for step in range(20) if directory.exists(name_of(step))]


def test_groups_come_back_in_their_order(directory):
    recorder = Recorder(directory)
    everything, (name, digest) = recorder.record(1, to_batch([row(ticket_index=4)]), to_batch([row(ticket_index=7)]))
    assert [group["ticket_index"][0].as_py() for group in recorder.read(name, digest)] == [4, 7]
    assert everything["ticket_index"].to_pylist() == [4, 7], "as the ranks get them"


def test_groups_of_an_earlier_version_come_back_in_the_present_schema(directory):
    old, content = before(row(ticket_index=4)), pa.BufferOutputStream()
    with pa.ipc.new_file(content, old.schema) as writer:
        writer.write_batch(old)
    directory.write_file(name_of(1), content.getvalue())
    (group,) = Recorder(directory).read(name_of(1), digest_of(content.getvalue()))
    assert group.schema.equals(SCHEMA) and group["ticket_index"].to_pylist() == [4]


def test_nothing_is_recorded_of_a_step_with_a_group_that_is_not_what_it_should_be(directory):
    good, bad = to_batch([row()]), to_batch([row(group_id="odd")])
    bad = bad.set_column(bad.schema.get_field_index("reward"), bad.schema.field("reward"), pa.array([math.inf]))
    with pytest.raises(DataError, match=r"group odd, sample 0\), field 'reward': is not finite"):
        Recorder(directory).record(1, good, bad)
    assert recorded(directory) == []


def test_a_group_in_pieces_is_recorded_byte_for_byte_as_the_group_in_one(directory):
    """Three trajectories, judged; the last and the first are chosen, which the reference scores."""
    sampled = to_batch([row(sample_index=i, reward=None, reward_status=None) for i in range(3)])
    rewards = {
        "reward": [1.0, None, 0.5],
        "reward_status": ["ok", "error", "ok"],
        "reward_components": [[("style", 1.0)], [], [("style", None)]],
        "reward_message": [None, "KeyError: 'x'", None],
    }
    reference = {"reference_logprobs": [[-1.0] * 3, [-2.0] * 3]}
    chosen = with_columns(sampled, **rewards).take(pa.array([2, 0]))
    pieces = [sampled, columns_of(sampled, **rewards), [2, 0], columns_of(chosen, **reference)]
    recorder = Recorder(directory)
    everything, named = recorder.record(1, with_columns(chosen, **reference), sampled)
    again, named_again = recorder.record(1, *pickle.loads(pickle.dumps(pieces)), sampled)
    assert named_again == named and again.equals(everything)


def test_the_record_of_learning_lies_beside_its_trajectories_and_is_removed_with_them(directory):
    recorder = Recorder(directory, keep_steps=2)
    for step in range(1, 5):
        _, (name, _) = recorder.record(step, to_batch([row()]))
        recorder.record_learned(name, step - 1)
        save_checkpoint(directory, step)
    recorder.record(5, to_batch([row()]))
    assert recorded(directory) == [4, 5] and directory.names("learned") == ["step-000004.arrow"]
    learned = learned_of(directory, name_of(4))
    assert learned is not None and learned.policy_version == 3


def test_a_step_that_is_learned_again_has_no_record_of_learning_until_it_is_learned(directory):
    recorder = Recorder(directory)
    _, (name, _) = recorder.record(1, to_batch([row()]))
    recorder.forget_learned(name)
    recorder.record_learned(name, 0)
    recorder.forget_learned(name)
    assert directory.names("learned") == [] and recorded(directory) == [1]


def test_all_trajectories_are_kept_unless_told_otherwise(directory):
    recorder = Recorder(directory)
    for step in range(1, 6):
        recorder.record(step, to_batch([row()]))
        save_checkpoint(directory, step)
    assert recorded(directory) == [1, 2, 3, 4, 5] and num_pruned_steps(directory) == 0


def test_what_a_checkpoint_may_need_again_is_never_removed(directory):
    recorder = Recorder(directory, keep_steps=2, keep_checkpoints=2)
    for step in range(1, 11):
        recorder.record(step, to_batch([row()]))
        if step in (3, 6):
            save_checkpoint(directory, step)
        if step == 5:
            assert recorded(directory) == [1, 2, 3, 4, 5], "should the one checkpoint be damaged, all is learned again"
    assert recorded(directory) == [4, 5, 6, 7, 8, 9, 10], (
        "should the newer checkpoint be damaged, step 4 is learned again"
    )
    save_checkpoint(directory, 9)
    recorder.record(11, to_batch([row()]))
    assert recorded(directory) == [7, 8, 9, 10, 11] and num_pruned_steps(directory) == 6


def test_so_many_steps_are_kept_though_newer_checkpoints_need_fewer(directory):
    recorder = Recorder(directory, keep_steps=4, keep_checkpoints=1)
    for step in range(1, 11):
        recorder.record(step, to_batch([row()]))
        save_checkpoint(directory, step)
    assert recorded(directory) == [7, 8, 9, 10]


def test_trajectories_that_were_altered_are_refused(directory):
    recorder = Recorder(directory)
    _, (name, digest) = recorder.record(1, to_batch([row(ticket_index=4)]))
    recorder.record(1, to_batch([row(ticket_index=7)]))
    with pytest.raises(LedgerError, match=f"{name} was altered after it was recorded: its digest is not {digest}"):
        recorder.read(name, digest)


def test_a_step_that_is_learned_again_brings_no_removed_one_back(directory):
    recorder = Recorder(directory, keep_steps=1)
    for step in range(1, 5):
        save_checkpoint(directory, step)
        recorder.record(step, to_batch([row()]))
    assert num_pruned_steps(directory) == 3
    recorder.record(3, to_batch([row()]))
    assert num_pruned_steps(directory) == 3


def test_a_removed_step_is_not_a_lost_one(directory):
    recorder = Recorder(directory, keep_steps=1)
    _, (_, digest) = recorder.record(1, to_batch([row()]))
    save_checkpoint(directory, 1)
    _, kept = recorder.record(2, to_batch([row()]))
    assert len(recorder.read(*kept)) == 1
    with pytest.raises(
        LedgerError, match=r"step-000001\.arrow was removed \(record\.keep_trajectories\): only steps after 1"
    ):
        recorder.read(name_of(1), digest)
    directory.remove(name_of(2))
    with pytest.raises(StorageError, match=r"step-000002\.arrow: .* bring it back from a copy"):
        recorder.read(*kept)


def test_a_record_of_learning_has_the_name_of_its_trajectories_in_a_folder_of_its_own():
    assert learned_name("trajectories/step-000012.arrow") == "learned/step-000012.arrow"
    assert learned_name("trajectories/step-000012-0123456789ab.arrow") == "learned/step-000012-0123456789ab.arrow"


def test_a_step_without_a_record_of_learning_has_none(tmp_path):
    files = Storage(str(tmp_path))
    assert learned_of(files, "trajectories/step-000001.arrow") is None
    files.write_file("learned/step-000001.arrow", written_learned([], policy_version=0))
    learned = learned_of(files, "trajectories/step-000001.arrow")
    assert learned is not None and learned.policy_version == 0
