"""Lines in an object store: nothing lost and nothing doubled, wherever a process that merges segments is killed."""

import random
import threading

import pytest
from obstore.store import MemoryStore

from cluster.contracts.errors import StorageError
from cluster.record import segments
from cluster.record.object_store import ObjectStore

NAME = "metrics.jsonl"


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore("s3://memory/run", store=MemoryStore())


def append(store, *lines) -> None:
    for line in lines:
        store.append(NAME, line, is_durable=False)


def write(store, **names) -> None:
    for name, lines in names.items():
        store.write(
            f"metrics/{name.strip('_').replace('_', '-')}.jsonl", "".join(f"{line}\n" for line in lines).encode()
        )


def test_a_segment_is_what_was_appended_between_two_flushes(store):
    append(store, "a", "b")
    assert store.names("metrics") == []
    store.flush()
    append(store, "c")
    store.flush()
    assert store.names("metrics") == ["000001.jsonl", "000002.jsonl"]
    assert store.read("metrics/000001.jsonl").to_pybytes() == b"a\nb\n"


def test_a_full_segment_is_written_by_a_thread(store, monkeypatch):
    monkeypatch.setattr(segments, "CLOSE_AT_BYTES", 10)
    monkeypatch.setattr(segments, "CLOSE_AFTER_S", 3600.0)
    is_written, writers = threading.Event(), []
    create = store.create
    monkeypatch.setattr(
        store, "create", lambda *args: (create(*args), writers.append(threading.get_ident()), is_written.set())
    )
    append(store, "12345678")
    assert not writers
    append(store, "9")
    assert is_written.wait(60) and writers != [threading.get_ident()]
    assert store.read("metrics/000001.jsonl").to_pybytes() == b"12345678\n9\n"


def test_after_a_full_segment_lines_wait_again(store, monkeypatch):
    """Otherwise each line would be an object."""
    timers = []

    class Timer:
        def __init__(self, interval, call):
            self.interval, self.call = interval, call
            timers.append(self)

        def start(self): ...

        cancel = start

    monkeypatch.setattr(segments, "CLOSE_AT_BYTES", 10)
    monkeypatch.setattr(segments.threading, "Timer", Timer)
    append(store, "12345678", "9")
    timers[-1].call()
    append(store, "a", "b")
    assert [timer.interval for timer in timers] == [20.0, 0.0, 20.0]


def test_a_segment_is_written_when_its_time_has_come(store, monkeypatch):
    monkeypatch.setattr(segments, "CLOSE_AFTER_S", 0.0)
    is_written = threading.Event()
    create = store.create
    monkeypatch.setattr(store, "create", lambda *args: (create(*args), is_written.set()))
    append(store, "a")
    assert is_written.wait(60)


def test_two_processes_that_append_take_two_numbers(store):
    other = ObjectStore("s3://memory/run", store=store._store)
    append(store, "a")
    append(other, "b")
    names = store.names
    store.flush()
    other.names = lambda folder: []  # as it was listed before the other one wrote
    append(other, "c")
    other.flush()
    assert names("metrics") == ["000001.jsonl", "000002.jsonl"]
    assert store.read_appended(NAME) == "a\nb\nc\n"


def test_merged_segments_take_the_place_of_those_that_a_kill_left(store):
    write(store, _000001=["a"], _000002=["b"], _000001_000002=["a", "b"], _000003=["c"])
    assert store.read_appended(NAME) == "a\nb\nc\n"
    append(store, "d")
    store.compact()
    assert store.read_appended(NAME) == "a\nb\nc\nd\n"
    assert "000003-000004.jsonl" in store.names("metrics") and "000003.jsonl" not in store.names("metrics")


def test_many_small_segments_are_merged_on_the_way(store, monkeypatch):
    monkeypatch.setattr(segments, "MERGED_AT", 3)
    for line in "abcdefgh":
        append(store, line)
        store.flush()
    assert store.names("metrics") == ["000001-000003.jsonl", "000004-000006.jsonl", "000007.jsonl", "000008.jsonl"]
    assert store.read_appended(NAME) == "".join(f"{line}\n" for line in "abcdefgh")


def test_what_was_merged_on_the_way_is_not_merged_again_in_the_end(store):
    """Of a run of weeks it is gigabytes. Seen before: all of it was fetched, joined in memory and written again."""
    write(store, _000001_000064=["a"], _000065=["b"])
    append(store, "c")
    fetched, read_many = [], store.read_many
    store.read_many = lambda names: fetched.extend(names) or read_many(names)
    store.compact()
    assert fetched == ["metrics/000065.jsonl", "metrics/000066.jsonl"]
    assert store.names("metrics") == ["000001-000064.jsonl", "000065-000066.jsonl"]
    assert store.read_appended(NAME) == "a\nb\nc\n"


def test_a_line_that_a_copied_run_has_too_is_written_and_nothing_is_fetched_for_it(store):
    """Seen in review: the line was lost, and every segment fetched all lines of the copy."""
    store.write(NAME, b"a\n")
    append(store, "b")
    store.compact()
    assert store.names("metrics") == ["000000-000001.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read_many", lambda names: pytest.fail(f"{names} were fetched"))
        append(store, "a")
        store.flush()
    assert store.read_appended(NAME) == "a\nb\na\n"


def test_a_reader_who_lists_before_a_merge_and_reads_after_it_lists_again(store):
    write(store, _000001=["a"], _000002=["b"])
    other, read_many = ObjectStore("s3://memory/run", store=store._store), store.read_many
    store._lines._names.add(NAME)

    def merged_meanwhile(names):
        store.read_many = read_many
        other._lines._names.add(NAME)
        other.compact()
        return read_many(names)

    store.read_many = merged_meanwhile
    assert store.read_appended(NAME) == "a\nb\n"


def test_of_two_processes_that_merge_the_later_takes_nothing_off_the_other(store):
    write(store, _000001=["a"], _000002=["b"])
    other, read_many = ObjectStore("s3://memory/run", store=store._store), store.read_many

    def merged_meanwhile(names):
        store.read_many = read_many
        other._lines._names.add(NAME)
        other.compact()
        return read_many(names)

    store._lines._names.add(NAME)
    store.read_many = merged_meanwhile
    store.compact()
    assert store.read_appended(NAME) == "a\nb\n"


def test_other_text_takes_the_place_of_all_lines_however_few_there_are(store):
    for text in ("a\n", "b\n"):  # of no segment, and of one
        store._lines.replace(NAME, text)
        assert (store.read_appended(NAME), store.names("metrics")) == (text, ["000001.jsonl"])
    append(store, "c")
    store._lines.replace(NAME, "d\n")
    assert store.read_appended(NAME) == "d\n"


def test_the_last_lines_are_replaced_without_a_touch_of_earlier_segments(store):
    write(store, _000001_000064=["a", "b"], _000065=["c"], _000066=["d", "e"])
    write(store, _000064=["b"])  # a process that merged was killed before it removed this one
    untouched = store.versions("metrics")["000001-000064.jsonl"]
    store._lines.replace_last(NAME, 2, "D\nE\n")
    assert store.read("metrics/000066.jsonl").to_pybytes() == b"D\nE\n"
    store._lines.replace_last(NAME, 3, "X\n")
    assert store.names("metrics") == ["000001-000064.jsonl", "000064.jsonl", "000065-000066.jsonl"]
    assert store.read_appended(NAME) == "a\nb\nX\n" and store.versions("metrics")["000001-000064.jsonl"] == untouched
    store._lines.replace_last(NAME, 2, "Y\n")
    assert store.names("metrics") == ["000001-000066.jsonl"] and store.read_appended(NAME) == "a\nY\n"
    append(store, "z")
    assert store.read_last(NAME, 2) == "Y\nz\n" and store.names("metrics")[-1] == "000067.jsonl"


def test_a_process_that_is_killed_while_it_replaces_the_last_lines_leaves_the_old_or_the_new_ones(store, monkeypatch):
    write(store, _000001=["a"], _000002=["b"], _000003=["c"])
    for step, left in (("write", "a\nb\nc\n"), ("delete", "a\nnew\n")):
        with monkeypatch.context() as patch:
            patch.setattr(store, step, refuse)
            with pytest.raises(StorageError, match="busy"):
                store._lines.replace_last(NAME, 2, "new\n")
        assert store.read_appended(NAME) == left
    assert store.names("metrics") == ["000001.jsonl", "000002-000003.jsonl", "000002.jsonl", "000003.jsonl"]


def test_last_lines_that_were_merged_after_they_were_listed_are_found(store, monkeypatch):
    write(store, _000001=["a"], _000002=["b"])
    read_many, other = store.read_many, ObjectStore("s3://memory/run", store=store._store)

    def merged_meanwhile(names):
        monkeypatch.setattr(store, "read_many", read_many)
        other._lines._names.add(NAME)
        other.compact()
        return read_many(names)

    monkeypatch.setattr(store, "read_many", merged_meanwhile)
    assert store.read_last(NAME, 2) == "a\nb\n"


def test_nothing_comes_after_lines_that_were_removed(store, monkeypatch):
    append(store, "in the store")
    store.flush()
    append(store, "refused")
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", refuse)
        with pytest.raises(StorageError, match="busy"):
            store.flush()
    append(store, "waits")
    store.remove(NAME)
    store.flush()
    assert store.names("metrics") == []


def test_lines_that_came_with_a_copy_of_a_local_run_are_the_first(store):
    store.write(NAME, b"a\nb\ntorn")
    append(store, "c")
    assert store.exists(NAME)
    assert store.read_appended(NAME) == "a\nb\nc\n"
    store.compact()
    assert store.names("metrics") == ["000000-000001.jsonl"] and store.read_appended(NAME) == "a\nb\nc\n"
    store.remove(NAME)
    assert store.names("") == []


def test_lines_that_a_store_refused_are_kept_for_the_next_segment(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", refuse)
        append(store, "a")
        with pytest.raises(StorageError, match="busy"):
            store.flush()
        append(store, "b")
    assert store.read_appended(NAME) == "a\nb\n"


def refuse(*_):
    raise StorageError("busy")


def test_lines_that_wait_behind_those_of_another_file_come_before_lines_that_came_meanwhile(store, monkeypatch):
    def refuse_meanwhile(*_):
        append(store, "b")
        raise StorageError("busy")

    store.append("events.jsonl", "refused", is_durable=False)
    append(store, "a")
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", refuse_meanwhile)
        with pytest.raises(StorageError, match="busy"):
            store.flush()
    append(store, "c")
    assert store.read_appended(NAME) == "a\nb\nc\n"
    assert store.read_appended("events.jsonl") == "refused\n"


def test_an_outage_that_healed_costs_no_line_raises_nothing_and_is_told_once(store, monkeypatch, capsys):
    monkeypatch.setattr(segments, "CLOSE_AFTER_S", 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", refuse)
        for line in "abc":
            append(store, line)
            store._lines._flush_later()
    append(store, "d")
    assert store.read_appended(NAME) == "a\nb\nc\nd\n"
    told = "treadwheel: lines wait until the store takes them: busy\n"
    assert capsys.readouterr().err == told
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", refuse)
        append(store, "e")
        store._lines._flush_later()
    assert capsys.readouterr().err == told, "another outage"


def test_after_a_failed_write_a_thread_writes_though_nothing_more_is_appended(store, monkeypatch):
    is_written, create = threading.Event(), store.create

    def at_first(*_):
        monkeypatch.setattr(store, "create", lambda *args: (create(*args), is_written.set()))
        raise StorageError("busy")

    monkeypatch.setattr(store, "create", at_first)
    monkeypatch.setattr(segments, "CLOSE_AFTER_S", 0.0)
    append(store, "a")
    assert is_written.wait(60)


def test_lines_that_are_there_are_not_written_again_because_merging_failed(store, monkeypatch):
    monkeypatch.setattr(segments, "MERGED_AT", 2)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", refuse)
        for line in "abc":
            append(store, line)
            store.flush()
    append(store, "d")
    assert store.read_appended(NAME) == "a\nb\nc\nd\n"
    assert store.names("metrics") == ["000001-000003.jsonl", "000004.jsonl"]


def test_a_segment_whose_answer_was_lost_is_not_written_twice(store, monkeypatch):
    create = store.create
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", lambda *args: (create(*args), refuse()))
        append(store, "a")
        with pytest.raises(StorageError, match="busy"):
            store.flush()
    append(store, "b")
    assert store.read_appended(NAME) == "a\nb\n"


def test_a_segment_whose_answer_was_lost_and_that_others_merged_meanwhile_is_not_written_twice(store, monkeypatch):
    append(store, "a")
    store.flush()
    create = store.create
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", lambda *args: (create(*args), refuse()))
        append(store, "b", "c")
        with pytest.raises(StorageError, match="busy"):
            store.flush()
    write(store, _000001_000003=["a", "b", "c", "theirs"])
    for number in (1, 2):
        store.delete([f"metrics/{number:06d}.jsonl"])
    append(store, "d")
    assert store.read_appended(NAME) == "a\nb\nc\ntheirs\nd\n"


def test_a_segment_that_was_refused_is_not_hidden_by_one_that_others_merged_meanwhile(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", refuse)
        append(store, "ours")
        with pytest.raises(StorageError, match="busy"):
            store.flush()
    write(store, _000001_000002=["theirs", "theirs too"])
    assert store.read_appended(NAME) == "theirs\ntheirs too\nours\n"


def test_while_the_store_stalls_one_thread_waits_for_it_however_much_is_appended(store, monkeypatch):
    monkeypatch.setattr(segments, "CLOSE_AT_BYTES", 10)
    monkeypatch.setattr(segments, "CLOSE_AFTER_S", 3600.0)
    is_asked, goes_on, create = threading.Event(), threading.Event(), store.create

    def stalls(*args):
        is_asked.set()
        assert goes_on.wait(60)
        create(*args)

    monkeypatch.setattr(store, "create", stalls)
    append(store, "a" * 10)
    assert is_asked.wait(60)
    append(store, *("b" * 10 for _ in range(20)))
    flush = store._lines._flush_later
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer) and each.function == flush]
    assert len(timers) == 2, "one writes, and one waits for it"
    goes_on.set()
    assert store.read_appended(NAME).count("\n") == 21


def test_the_segments_of_a_run_of_weeks_are_each_looked_at_a_few_times():
    """Seen before: each was compared with all others, at every new segment. A sort of 4,096 takes 12 comparisons of each."""
    num_comparisons = 0

    class Number(int):
        def _counted(self, other):
            nonlocal num_comparisons
            num_comparisons += 1

        def __lt__(self, other):
            self._counted(other)
            return int(self) < int(other)

        def __le__(self, other):
            self._counted(other)
            return int(self) <= int(other)

        def __gt__(self, other):
            self._counted(other)
            return int(self) > int(other)

    spans = [(Number(first), Number(first + 63)) for first in range(1, 64 * 4096, 64)]
    random.Random(0).shuffle(spans)
    assert segments._live(spans) == spans and num_comparisons < 4096 * 20


def test_a_segment_is_left_out_where_another_one_holds_it_and_only_then():
    spans = [(0, 0), (1, 1), (1, 64), (2, 70), (65, 65), (71, 71), (71, 80), (72, 79)]
    assert segments._live(spans) == [(0, 0), (1, 64), (2, 70), (71, 80)]
    assert segments._live([(0, 0), (0, 64), (65, 65)]) == [(0, 64), (65, 65)]
