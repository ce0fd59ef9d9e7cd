"""One line a step, also of a run that goes on."""

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
    assert [line["policy_version"] for line in lines(directory)] == [1, 2, 3]
    directory.append_json(METRICS, {"policy_version": 2, "time": 1.0, "a": 7.0})
    found = {version: numbers | {"time": 0.0} for version, numbers in read_steps(directory).items()}
    assert list(found.items()) == [
        (1, {"a": 1.0, "time": 0.0}),
        (2, {"a": 7.0, "time": 0.0}),
        (3, {"a": 3.0, "time": 0.0}),
    ]


def test_an_object_store_that_is_away_for_a_while_gets_all_numbers_later(monkeypatch):
    def refuse(*_):
        raise StorageError("busy")

    with s3("bucket"):
        directory = RunDirectory("s3://bucket/away")
        sink = JsonLines(directory)
        sink.step(1, {"reward/mean": 0.1})
        with monkeypatch.context() as patch:
            patch.setattr(directory, "replace_lines", refuse)
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
