import threading
from unittest.mock import Mock

import pytest

from cluster.contracts.errors import StorageError
from cluster.record import verdicts
from cluster.record.run_directory import VERDICTS, RunDirectory
from cluster.record.verdicts import Verdicts

ONE, TWO = {"a1": '[[1.0, {"tone": null}]]'}, {"b2": "[[0.5, {}], [0.25, {}]]"}


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(str(tmp_path / "run"))
    made.claim("num_steps: 1")
    yield made
    made.release()


def again(directory: RunDirectory) -> RunDirectory:
    """As the next driver of the run finds it."""
    directory.release()
    directory.claim("num_steps: 1")
    return directory


def test_what_was_added_is_known_to_the_next_driver(directory):
    kept = Verdicts(directory)
    assert kept.known == {}, "a run directory of an earlier version has no such file"
    kept.add(ONE)
    kept.add(TWO)
    kept.add({})
    assert Verdicts(again(directory)).known == kept.known == ONE | TWO


def test_a_line_that_a_crash_tore_is_left_out_and_what_follows_is_kept(directory):
    Verdicts(directory).add(ONE)
    directory.writer.flush()
    with open(directory.path(VERDICTS), "a") as file:
        file.write('{"key": "c3", "verdict": [[0.')
    kept = Verdicts(again(directory))
    assert kept.known == ONE
    kept.add(TWO)
    assert Verdicts(again(directory)).known == ONE | TWO


def test_the_oldest_are_forgotten_beyond_the_limit(directory, monkeypatch):
    """Room for 3: the file is made anew when it would have more than 6 lines."""
    monkeypatch.setattr(verdicts, "MOST_VERDICTS", 3)
    kept = Verdicts(directory)
    for number in range(8):
        kept.add({str(number): "[[1.0, {}]]"})
        directory.writer.flush()
        assert len(directory.read_lines(VERDICTS)) == (number + 1 if number < 6 else number - 3)
    assert [*kept.known] == [*Verdicts(again(directory)).known] == ["5", "6", "7"]


def test_a_store_that_is_away_when_the_file_is_made_anew_loses_nothing(directory, monkeypatch):
    """Room for 3, as above: the seventh is written behind the others, and the eighth makes the file anew."""
    monkeypatch.setattr(verdicts, "MOST_VERDICTS", 3)
    kept = Verdicts(directory)
    for number in range(6):
        kept.add({str(number): "[[1.0, {}]]"})
    directory.writer.flush()
    with monkeypatch.context() as away:
        away.setattr(directory, "replace_lines", Mock(side_effect=StorageError("away")))
        kept.add({"6": "[[1.0, {}]]"})
        directory.writer.flush()
        directory.writer.flush()
    assert len(directory.read_lines(VERDICTS)) == 7
    kept.add({"7": "[[1.0, {}]]"})
    directory.writer.flush()
    assert len(directory.read_lines(VERDICTS)) == 3
    assert [*Verdicts(again(directory)).known] == ["5", "6", "7"]


def test_a_slow_disk_makes_the_file_anew_once(directory, monkeypatch):
    """Room for 3. Seen before: each verdict that came before the disk was done made all of them anew, and events waited behind."""
    monkeypatch.setattr(verdicts, "MOST_VERDICTS", 3)
    made_anew, is_free = Mock(wraps=directory.replace_lines), threading.Event()
    monkeypatch.setattr(directory, "replace_lines", made_anew)
    kept = Verdicts(directory)
    directory.writer.put(lambda: is_free.wait(60))
    for number in range(10):
        kept.add({str(number): "[[1.0, {}]]"})
    is_free.set()
    directory.writer.flush()
    assert made_anew.call_count == 1 and len(directory.read_lines(VERDICTS)) == 6
    assert [*Verdicts(again(directory)).known] == ["7", "8", "9"]


def test_a_directory_that_the_process_does_not_own_is_not_written(tmp_path):
    kept = Verdicts(directory := RunDirectory(str(tmp_path / "scratch")))
    kept.add(ONE)
    directory.writer.flush()
    assert kept.known == ONE and not (tmp_path / "scratch").exists()
