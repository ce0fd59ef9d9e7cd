"""Lines of a file that grows are read once, and anew when they are no longer what they were."""

import json
import threading

import pytest

from cluster.contracts.errors import DamagedError, StorageError
from cluster.record.run_directory import RunDirectory
from deploy.viewer.tail import Tail
from tests.object_store import s3
from tests.unit.deploy.viewer.run_files import append


def _tail(folder) -> Tail:
    return Tail(RunDirectory(str(folder)), "lines.jsonl")


def test_a_torn_last_line_waits_for_its_end(tmp_path):
    file, tail = tmp_path / "lines.jsonl", _tail(tmp_path)
    assert tail.records() == []
    file.write_text('{"a": 1}\n{"a":')
    first = tail.records()
    with file.open("a") as opened:
        opened.write(" 2}\n")
    assert tail.records() == [{"a": 1}, {"a": 2}] and first == [{"a": 1}]
    assert tail.generation == 0


def test_of_a_long_file_the_newest_lines_are_read_and_then_those_that_come(tmp_path):
    file = tmp_path / "lines.jsonl"
    append(file, [{"a": number} for number in range(10)])
    tail = Tail(RunDirectory(str(tmp_path)), "lines.jsonl", newest_bytes=3 * len('{"a": 1}\n') + 2)
    assert tail.records() == [{"a": 7}, {"a": 8}, {"a": 9}]
    append(file, [{"a": 10}])
    assert tail.records() == [{"a": 7}, {"a": 8}, {"a": 9}, {"a": 10}]


def test_a_file_that_was_written_anew_is_read_anew_even_if_it_is_longer(tmp_path):
    file, tail = tmp_path / "lines.jsonl", _tail(tmp_path)
    append(file, [{"a": 1}, {"a": 2}])
    tail.records()
    file.write_text('{"a": 7}\n{"a": 8}\n{"a": 9}\n')
    assert tail.records() == [{"a": 7}, {"a": 8}, {"a": 9}]
    file.write_text('{"a": 7}\n')
    assert tail.records() == [{"a": 7}]
    assert tail.generation == 2


@pytest.mark.parametrize(("num_changed", "fewest", "most"), [(1, 64, 200), (2, 64, 200), (300, 1000, 1200)])
@pytest.mark.parametrize("num_later", [0, 1, 63, 64, 65, 200])
def test_only_the_last_lines_are_parsed_again_when_a_driver_rewrites_some_of_them(
    tmp_path, monkeypatch, num_changed, fewest, most, num_later
):
    file, tail = tmp_path / "lines.jsonl", _tail(tmp_path)
    lines = [{"a": number} for number in range(1000 - num_later)]
    append(file, lines)
    tail.records()
    for number in range(1000 - num_later, 1000):
        lines.append({"a": number})
        append(file, lines[-1:])
        tail.records()
    changed = [{"a": -number, "b": 1} for number in range(num_changed)]
    parsed: list[bytes] = []
    monkeypatch.setattr(Tail, "_line", lambda self, text: parsed.append(text) or json.loads(text))
    file.write_text("")
    append(file, [*lines[:-num_changed], *changed])
    assert tail.records() == [*lines[:-num_changed], *changed]
    assert fewest <= len(parsed) <= most and tail.generation > 0
    append(file, [{"a": 7}])
    assert tail.records() == [*lines[:-num_changed], *changed, {"a": 7}]


def test_old_lines_are_dropped_from_a_long_file_that_grows(tmp_path):
    file = tmp_path / "lines.jsonl"
    tail = Tail(RunDirectory(str(tmp_path)), "lines.jsonl", newest_bytes=100)
    for number in range(100, 200):
        append(file, [{"a": number}])  # 11 bytes
        found = [line["a"] for line in tail.records()]
        assert len(found) <= 18 and found == list(range(number + 1 - len(found), number + 1))
    append(file, [{"a": number} for number in range(200, 300)])
    assert [line["a"] for line in tail.records()] == list(range(291, 300))


@pytest.mark.parametrize("piece", [1, 12, 10_000])
def test_a_file_is_read_in_pieces_and_a_line_may_be_longer_than_one(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("deploy.viewer.tail._PIECE_BYTES", piece)
    lines = [{"a": number, "said": "x" * (number * 7 % 50)} for number in range(30)]
    append(tmp_path / "lines.jsonl", lines)
    with (tmp_path / "lines.jsonl").open("a") as opened:
        opened.write('{"a": ')
    tail = _tail(tmp_path)
    assert tail.records() == lines
    (tmp_path / "lines.jsonl").write_text("")
    anew = [*lines[::-1], {"a": 30}]
    append(tmp_path / "lines.jsonl", anew)
    assert tail.records() == anew


def test_lines_share_their_names(tmp_path):
    append(tmp_path / "lines.jsonl", [{"reward/mean": 1, "of": {"a part": 2}}])
    tail = _tail(tmp_path)
    (first,) = tail.records()
    append(tmp_path / "lines.jsonl", [{"reward/mean": 3, "of": {"a part": 4}}])
    second = tail.records()[1]
    for one, other in ((first, second), (first["of"], second["of"])):
        assert all(name is same for name, same in zip(one, other, strict=True))


def test_of_two_lines_with_one_key_the_later_counts(tmp_path):
    append(tmp_path / "lines.jsonl", [{"v": 2, "a": 1}, {"v": 1, "a": 1}, {"v": 2, "a": 5}])
    assert _tail(tmp_path).records(key="v") == [{"v": 1, "a": 1}, {"v": 2, "a": 5}]


def test_of_an_object_store_only_what_is_new_is_read(monkeypatch):
    asked: list[str] = []
    read = RunDirectory.read_file
    monkeypatch.setattr(RunDirectory, "read_file", lambda self, name: asked.append(name) or read(self, name))
    with s3("tails"):
        writer = RunDirectory("s3://tails/run")
        writer.write_file("lines.jsonl", b'{"a": 0}\n')  # copied from a local run
        tail = Tail(RunDirectory("s3://tails/run"), "lines.jsonl", store_every_s=0.0)
        for number in (1, 2):
            writer.append_json("lines.jsonl", {"a": number})
            writer.flush_lines()
            assert len(tail.records()) == number + 1
        assert sorted(asked) == ["lines.jsonl", "lines/000001.jsonl", "lines/000002.jsonl"]
        writer.compact_lines()
        assert tail.records() == [{"a": 0}, {"a": 1}, {"a": 2}]
        assert tail.generation == 0, "a segment that took others' places says what they said"
        asked.clear()
        assert len(tail.records()) == 3 and asked == []
        writer.remove("lines.jsonl")
        assert tail.records() == []
        writer.append_json("lines.jsonl", {"a": 7})
        writer.flush_lines()
        assert tail.records() == [{"a": 7}], "a run that began anew has objects of the same names"
        assert tail.generation == 1


def test_segments_of_an_object_store_are_read_at_the_same_time(monkeypatch):
    together, read = threading.Barrier(3, timeout=60), RunDirectory.read_file
    monkeypatch.setattr(RunDirectory, "read_file", lambda self, name: together.wait() >= 0 and read(self, name))
    with s3("several"):
        writer = RunDirectory("s3://several/run")
        for number in range(3):
            writer.append_json("lines.jsonl", {"a": number})
            writer.flush_lines()
        assert Tail(RunDirectory("s3://several/run"), "lines.jsonl").records() == [{"a": 0}, {"a": 1}, {"a": 2}]


def test_of_many_segments_of_an_object_store_the_newest_are_read_and_then_those_that_come():
    with s3("long"):
        writer = RunDirectory("s3://long/run")
        tail = Tail(RunDirectory("s3://long/run"), "lines.jsonl", newest_bytes=12, store_every_s=0.0)
        for number in range(5):
            writer.append_json("lines.jsonl", {"a": number})  # 9 bytes with its end
            writer.flush_lines()
        assert tail.records() == [{"a": 3}, {"a": 4}]
        for number in (5, 6, 7):
            writer.append_json("lines.jsonl", {"a": number})
            writer.flush_lines()
        assert tail.records() == [{"a": number} for number in range(3, 8)]
        assert tail.records() == [{"a": number} for number in (6, 7)], "too many lines to keep"


def test_a_store_that_does_not_give_a_segment_is_an_error_and_not_an_empty_file(monkeypatch):
    def refuse(*_):
        raise StorageError("the store does not answer")

    with s3("refused"):
        writer = RunDirectory("s3://refused/run")
        writer.append_json("lines.jsonl", {"a": 1})
        writer.flush_lines()
        monkeypatch.setattr(RunDirectory, "read_file", refuse)
        with pytest.raises(StorageError, match="does not answer"):
            Tail(RunDirectory("s3://refused/run"), "lines.jsonl", store_every_s=0.0).records()


def test_new_records_are_those_since_the_last_call_and_all_of_a_file_that_was_written_anew(tmp_path):
    tail = _tail(tmp_path)
    append(tmp_path / "lines.jsonl", [{"a": 1}, {"a": 2}])
    assert tail.new_records() == [{"a": 1}, {"a": 2}] and tail.new_records() == []
    append(tmp_path / "lines.jsonl", [{"a": 3}])
    assert tail.new_records() == [{"a": 3}]
    (tmp_path / "lines.jsonl").write_text('{"a": 4}\n')
    assert tail.new_records() == [{"a": 4}]


def test_a_segment_that_was_merged_while_it_was_read_waits_for_the_next_look(monkeypatch):
    with s3("merged"):
        writer = RunDirectory("s3://merged/run")
        writer.append_json("lines.jsonl", {"a": 1})
        writer.flush_lines()
        tail = Tail(RunDirectory("s3://merged/run"), "lines.jsonl", store_every_s=0.0)
        assert tail.records() == [{"a": 1}]
        listed = RunDirectory.versions
        gone = {"000001.jsonl": "1", "000002.jsonl": "2"}
        monkeypatch.setattr(RunDirectory, "versions", lambda self, folder="": gone)
        assert tail.records() == [{"a": 1}]
        monkeypatch.setattr(RunDirectory, "versions", listed)
        assert tail.records() == [{"a": 1}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nothing", "has a line that is not JSON"),
        ("[1]", r"is damaged: its line \[1\] holds no object$"),
        ('{"kind": "a", "time": [1]}', r"is damaged: its line .*\[1\].* has time=\[1\], which is not a number$"),
    ],
)
def test_a_damaged_line_is_said_in_a_sentence(tmp_path, line, why):
    (tmp_path / "events.jsonl").write_text(f'{{"kind": "a", "time": 1.0}}\n{line}\n')
    with pytest.raises(DamagedError, match=rf"events\.jsonl {why}"):
        Tail(RunDirectory(str(tmp_path)), "events.jsonl").records()
