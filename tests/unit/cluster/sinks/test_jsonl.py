"""One line a step, also of a run that goes on."""

import contextlib
import math

import pytest

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import METRICS, RunDirectory
from cluster.sinks.jsonl import JsonLines, read_steps
from tests.object_store import s3


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(str(tmp_path))


def lines(directory) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "time"} for line in directory.read_json_lines(METRICS)]


def test_a_step_that_is_learned_again_keeps_its_line_its_evaluation_and_its_time(directory):
    first = JsonLines(directory)
    first.step(1, {"reward/mean": 0.1})
    first.step(2, {"reward/mean": 0.2, "eval/accuracy": 0.7})
    first.step(3, {"reward/mean": 0.3})
    times = [line["time"] for line in directory.read_json_lines(METRICS)]
    resumed = JsonLines(directory)
    resumed.step(2, {"reward/mean": 0.25})
    resumed.step(3, {"reward/mean": 0.3})
    resumed.step(4, {"reward/mean": 0.4})
    assert lines(directory) == [
        {"policy_version": 1, "reward/mean": 0.1},
        {"policy_version": 2, "reward/mean": 0.25, "eval/accuracy": 0.7},
        {"policy_version": 3, "reward/mean": 0.3},
        {"policy_version": 4, "reward/mean": 0.4},
    ]
    assert [line["time"] for line in directory.read_json_lines(METRICS)][:3] == times


def test_lines_are_in_order_and_a_reader_gets_the_last_of_each_version_without_numbers_that_were_not_finite(directory):
    sink = JsonLines(directory)
    for version in (1, 3, 2):
        sink.step(version, {"a": float(version), "b": math.nan})
    sink.close()
    assert [line["policy_version"] for line in lines(directory)] == [1, 2, 3]
    directory.append_json(METRICS, {"policy_version": 2, "time": 1.0, "a": 7.0})
    found = {version: numbers | {"time": 0.0} for version, numbers in read_steps(directory).items()}
    assert list(found.items()) == [
        (1, {"a": 1.0, "time": 0.0}),
        (2, {"a": 7.0, "time": 0.0}),
        (3, {"a": 3.0, "time": 0.0}),
    ]


def test_lines_that_a_disk_does_not_take_are_told_once_and_written_later(tmp_path, monkeypatch, capfd):
    directory = RunDirectory(str(tmp_path))
    sink = JsonLines(directory)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "append_json", lambda *_: (_ for _ in ()).throw(StorageError("metrics.jsonl: no")))
        for version in (1, 2):
            sink.step(version, {"a": 0.0})
    sink.step(3, {"a": 0.0})
    assert [line["policy_version"] for line in lines(directory)] == [1, 2, 3]
    assert capfd.readouterr().err == "treadwheel: metrics.jsonl: no; lines wait until they can be written\n"


def test_an_object_store_that_is_away_for_a_while_gets_all_numbers_later(monkeypatch):
    def refuse(*_):
        raise StorageError("busy")

    with s3("bucket"):
        directory = RunDirectory("s3://bucket/away")
        sink = JsonLines(directory)
        sink.step(1, {"reward/mean": 0.1})
        with monkeypatch.context() as patch:
            patch.setattr(directory, "append_json", refuse)
            sink.step(1, {"eval/accuracy": 0.7})
            sink.step(2, {"reward/mean": 0.2})
            with pytest.raises(StorageError, match="busy"):
                sink.close()
        sink.step(3, {"reward/mean": 0.3})
        assert lines(directory) == [
            {"policy_version": 1, "reward/mean": 0.1, "eval/accuracy": 0.7},
            {"policy_version": 2, "reward/mean": 0.2},
            {"policy_version": 3, "reward/mean": 0.3},
        ]


class Counted(RunDirectory):
    """Counts how often the last lines were read, and how many were made anew each time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.num_looks = 0
        self.made_anew: list[int] = []

    def read_last_lines(self, name, count):
        self.num_looks += 1
        return super().read_last_lines(name, count)

    def replace_lines(self, name, lines):
        raise AssertionError("the whole file")

    def replace_last_lines(self, name, count, lines):
        self.made_anew.append(count)
        super().replace_last_lines(name, count, lines)


@pytest.fixture(params=["disk", "store"])
def counted(request, tmp_path):
    with s3("bucket") if request.param == "store" else contextlib.nullcontext():
        yield Counted(str(tmp_path) if request.param == "disk" else "s3://bucket/counted")


def test_of_a_long_file_only_the_lines_of_steps_that_are_learned_again_are_made_anew_and_only_once(counted):
    """Seen in review: in a run of a week, each of them read and wrote 200,000 lines."""
    for version in range(100):
        counted.append_json(METRICS, {"policy_version": version, "time": float(version), "eval/reward": 0.5, "a": 1})
    sink = JsonLines(counted)
    for version in range(60, 100):
        assert counted.made_anew == []
        sink.step(version, {"a": 2.0})
    assert counted.made_anew == [80], "each of the 40 steps has two lines then"
    assert counted.num_looks == 3, "at 64 lines for step 60, and at 64 and 256 for the 80"
    sink.step(100, {"a": 3.0})
    assert counted.made_anew == [80]
    found = counted.read_json_lines(METRICS)
    assert [line["policy_version"] for line in found] == list(range(101))
    assert [line["a"] for line in found] == [1] * 60 + [2.0] * 40 + [3.0]
    assert [line["time"] for line in found[:100]] == list(range(100))
    assert [line["eval/reward"] for line in found[:100]] == [0.5] * 100


def test_a_step_that_is_learned_again_has_its_new_and_its_other_numbers_also_if_the_driver_is_killed_right_then(
    counted,
):
    first = JsonLines(counted)
    for version in (1, 2, 3, 4):
        first.step(version, {"a": 1.0, "eval/accuracy": 0.7})
    JsonLines(counted).step(2, {"a": 2.0})
    JsonLines(counted).step(3, {"a": 3.0})
    assert counted.made_anew == []
    last = {line["policy_version"]: line for line in lines(counted)}
    assert last[3] == {"policy_version": 3, "a": 3.0, "eval/accuracy": 0.7}, (
        "a reader may take the last line of a version"
    )
    assert {version: (line["a"], line["eval/accuracy"]) for version, line in read_steps(counted).items()} == {
        1: (1.0, 0.7),
        2: (2.0, 0.7),
        3: (3.0, 0.7),
        4: (1.0, 0.7),
    }
    JsonLines(counted).step(5, {"a": 5.0})
    assert counted.made_anew == [6] and [line["policy_version"] for line in lines(counted)] == [1, 2, 3, 4, 5]
    assert [line["a"] for line in lines(counted)] == [1.0, 2.0, 3.0, 1.0, 5.0]


def test_lines_that_cannot_be_put_in_order_now_are_at_the_next_step_or_at_the_end(directory, monkeypatch):
    def refuse(*_):
        raise StorageError("busy")

    sink = JsonLines(directory)
    for version in (1, 1, 2):
        sink.step(version, {"a": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(directory, "replace_last_lines", refuse)
        sink.step(2, {"b": 2.0})
        sink.step(2, {"a": 3.0})
        with pytest.raises(StorageError, match="busy"):
            sink.close()
    assert lines(directory)[1:] == [
        {"policy_version": 2, "a": 1.0},
        {"policy_version": 2, "a": 1.0, "b": 2.0},
        {"policy_version": 2, "a": 3.0, "b": 2.0},
    ]
    sink.close()
    assert lines(directory) == [{"policy_version": 1, "a": 1.0}, {"policy_version": 2, "a": 3.0, "b": 2.0}]
