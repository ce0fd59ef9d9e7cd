"""Lines of a file that grows are read once, and anew when they are no longer what they were."""

from cluster.record.run_directory import RunDirectory
from deploy.viewer.tail import Tail
from tests.object_store import s3
from tests.unit.deploy.viewer.run_files import append


def _tail(folder) -> Tail:
    return Tail(RunDirectory(str(folder)), "metrics.jsonl")


def test_a_torn_last_line_waits_for_its_end(tmp_path):
    file, tail = tmp_path / "metrics.jsonl", _tail(tmp_path)
    assert tail.records() == []
    file.write_text('{"a": 1}\n{"a":')
    assert tail.records() == [{"a": 1}]
    with file.open("a") as opened:
        opened.write(" 2}\n")
    assert tail.records() == [{"a": 1}, {"a": 2}]
    assert tail.generation == 0


def test_a_file_that_was_written_anew_is_read_anew_even_if_it_is_longer(tmp_path):
    file, tail = tmp_path / "metrics.jsonl", _tail(tmp_path)
    append(file, [{"a": 1}, {"a": 2}])
    tail.records()
    file.write_text('{"a": 7}\n{"a": 8}\n{"a": 9}\n')
    assert tail.records() == [{"a": 7}, {"a": 8}, {"a": 9}]
    file.write_text('{"a": 7}\n')
    assert tail.records() == [{"a": 7}]
    assert tail.generation == 2


def test_of_two_lines_with_one_key_the_later_counts(tmp_path):
    append(tmp_path / "metrics.jsonl", [{"v": 2, "a": 1}, {"v": 1, "a": 1}, {"v": 2, "a": 5}])
    assert _tail(tmp_path).records(key="v") == [{"v": 1, "a": 1}, {"v": 2, "a": 5}]


def test_lines_of_an_object_store_are_read_again_when_objects_come(monkeypatch):
    monkeypatch.setattr("deploy.viewer.tail._STORE_S", 0.0)
    with s3("tails"):
        writer = RunDirectory("s3://tails/run")
        tail = Tail(RunDirectory("s3://tails/run"), "metrics.jsonl")
        for number in (1, 2):
            writer.append_json("metrics.jsonl", {"a": number})
            writer.flush_lines()
            assert len(tail.records()) == number
        writer.compact_lines()
        assert tail.records() == [{"a": 1}, {"a": 2}]
        assert tail.generation == 0, "a segment that took others' places says what they said"
