"""A chain is read on, and says where it breaks."""

import json
from collections.abc import Iterator

import pytest

from cluster.record.ledger import NAME, Ledger
from cluster.record.recorder import PRUNED
from cluster.record.run_directory import RunDirectory
from deploy.viewer.chain import ChainReader, check_files
from tests.object_store import s3
from tests.unit.deploy.viewer.recorded import group, record


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    """Three steps; group 3 was dropped."""
    record(tmp_path, [group(0, 1.0), group(1, 0.0)], [group(2, 1.0), group(4, 0.0)], [group(5, 1.0), group(6, 0.0)])
    return RunDirectory(str(tmp_path))


def test_a_group_is_found_by_the_step_that_it_trained(directory):
    chain = ChainReader(directory, every_s=0).read()
    assert [chain.step_of(ticket) for ticket in range(8)] == [1, 1, 2, None, 2, 3, 3, None]


def test_a_record_that_comes_is_read_and_one_that_is_altered_is_noticed(directory, tmp_path):
    reader = ChainReader(directory, every_s=0)
    assert len(reader.read().records) == 3
    record(tmp_path, [group(7, 1.0)])
    assert len(reader.read().records) == 4
    whole = directory.read_text(NAME)
    directory.write_file(NAME, whole.replace('"groups":[2,4]', '"groups":[2,3]').encode())
    broken = reader.read()
    assert [one.step for one in broken.records] == [1, 2]
    assert broken.problem and "the record before it was altered" in broken.problem
    directory.write_file(NAME, whole.encode())
    assert (len(reader.read().records), reader.read().problem) == (4, None)


def test_a_chain_is_read_again_after_a_while_alone(directory):
    reader = ChainReader(directory, every_s=3600.0)
    assert reader.read() is reader.read()


def test_a_torn_last_line_waits_for_its_end(directory):
    whole = directory.read_file(NAME).to_pybytes()
    reader = ChainReader(directory, every_s=0)
    directory.write_file(NAME, whole[:-20])
    torn = reader.read()
    assert (len(torn.records), torn.problem, torn.is_torn) == (2, None, True)
    directory.write_file(NAME, whole)
    assert (len(reader.read().records), reader.read().is_torn) == (3, False)


def test_a_file_is_as_recorded_or_altered_or_missing_or_removed_or_too_much_to_read(directory):
    records = ChainReader(directory, every_s=0).read().records
    assert check_files(directory, records, most_bytes=10**9) == dict.fromkeys((1, 2, 3), "as recorded")
    directory.remove(records[0].trajectories)
    directory.write_file(records[1].trajectories, b"other")
    assert check_files(directory, records, most_bytes=10**9) == {1: "missing", 2: "altered", 3: "as recorded"}
    directory.write_json(PRUNED, {"steps": 1})
    assert check_files(directory, records, most_bytes=10) == {1: "removed", 2: "altered", 3: "not checked"}
    assert check_files(directory, records, most_bytes=0) == dict.fromkeys((1, 2, 3), "not checked")


@pytest.mark.parametrize("name", ["../trajectories/step-000001.arrow", "trajectories/step-000002.arrow"])
def test_no_file_but_the_steps_own_is_opened(directory, monkeypatch, name):
    (outside,) = [
        each.model_copy(update={"trajectories": name}) for each in ChainReader(directory, every_s=0).read().records[:1]
    ]
    monkeypatch.setattr(RunDirectory, "read_file", None)
    assert check_files(directory, [outside], most_bytes=10**9) == {1: "altered"}


@pytest.fixture
def stored() -> Iterator[RunDirectory]:
    """Two steps in an object store."""
    with s3("chains"):
        directory = RunDirectory("s3://chains/run")
        directory.cut_records(0)
        record(directory.url, [group(0, 1.0)], [group(1, 1.0)])
        yield directory


def test_of_an_object_store_the_last_known_record_is_read_again_and_those_after_it(stored, monkeypatch):
    reader = ChainReader(stored, every_s=0)
    assert len(reader.read().records) == 2
    asked = []
    read = RunDirectory.read_records
    monkeypatch.setattr(RunDirectory, "read_records", lambda self, after=0: asked.append(after) or read(self, after))
    record(stored.url, [group(2, 1.0)])
    asked.clear()  # the writer asks too
    assert len(reader.read().records) == 3
    assert asked == [1]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_run_that_is_begun_anew_in_an_object_store_is_read_anew(stored, num_steps):
    reader = ChainReader(stored, every_s=0)
    assert len(reader.read().records) == 2
    stored.cut_records(0)
    other = Ledger(stored)
    for index in range(num_steps):
        other.append(groups=[10 + index], trajectories="trajectories/x", trajectories_digest="d")
    assert [list(one.groups) for one in reader.read().records] == [[10 + index] for index in range(num_steps)]
    assert reader.read().problem is None


def test_a_record_that_is_no_record_is_named_in_one_line(directory):
    lines = directory.read_lines(NAME)
    directory.write_file(NAME, "\n".join([lines[0], json.dumps({"step": 2}), lines[2], ""]).encode())
    problem = ChainReader(directory, every_s=0).read().problem
    assert problem and problem.startswith(f"{NAME} line 2 is not a record") and "\n" not in problem
