"""One point a step, also of a run that goes on."""

import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import RunDirectory
from cluster.sinks.jsonl import JsonLines
from cluster.sinks.tensorboard import tensorboard
from tests.object_store import s3


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(str(tmp_path))


def test_tensorboard_draws_the_evaluation_of_a_step_that_is_learned_again(directory, monkeypatch):
    first = [tensorboard(directory=directory, num_steps=9), JsonLines(directory)]
    for sink in first:
        sink.step(1, {"reward/mean": 0.125})
        sink.step(2, {"reward/mean": 0.25, "eval/accuracy": 0.75})
        sink.close()
    # Files are read in the order of their names: by the second, and within it by a count of which 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: time.time() + 2.0))
    resumed = tensorboard(directory=directory, num_steps=9)
    resumed.step(2, {"reward/mean": 0.5})
    resumed.close()
    read = EventAccumulator(directory.path("tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [(1, 0.125), (2, 0.5)]
    assert [(event.step, event.value) for event in read.Scalars("eval/accuracy")] == [(2, 0.75)]


def test_in_an_object_store_the_next_driver_draws_what_a_killed_one_had_not_uploaded(tmp_path):
    with s3("bucket"):
        directory = RunDirectory("s3://bucket/killed")
        killed = [tensorboard(directory=directory, num_steps=9), JsonLines(directory)]
        for version in (1, 2, 3):
            for sink in killed:
                sink.step(version, {"reward/mean": version / 8})
        directory.flush_lines()
        next_one = tensorboard(directory=RunDirectory("s3://bucket/killed"), num_steps=9)
        next_one.step(3, {"reward/mean": 0.5})
        next_one.close()
        (name,) = directory.names("tensorboard")
        directory.download(f"tensorboard/{name}", str(tmp_path / name))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [(1, 0.125), (2, 0.25), (3, 0.5)]


def test_the_file_of_a_run_in_an_object_store_is_uploaded(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.sinks.tensorboard._UPLOAD_EVERY_S", 0.0)
    with s3("bucket"):
        directory = RunDirectory("s3://bucket/run")
        sink = tensorboard(directory=directory, num_steps=9)
        sink.step(1, {"reward/mean": 0.125})
        (name,) = directory.names("tensorboard")
        sink.step(2, {"reward/mean": 0.25})
        sink.close()
        directory.download(f"tensorboard/{name}", str(tmp_path / name))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [(1, 0.125), (2, 0.25)]


def test_an_upload_that_fails_is_made_later(tmp_path, monkeypatch):
    def refuse(*_):
        raise StorageError("busy")

    monkeypatch.setattr("cluster.sinks.tensorboard._UPLOAD_EVERY_S", 0.0)
    with s3("bucket"):
        directory = RunDirectory("s3://bucket/away")
        sink = tensorboard(directory=directory, num_steps=9)
        with monkeypatch.context() as patch:
            patch.setattr(directory, "upload", refuse)
            sink.step(1, {"reward/mean": 0.125})
        sink.close()
        assert len(directory.names("tensorboard")) == 1
