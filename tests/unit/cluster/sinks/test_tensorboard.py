"""One point a step, also of a run that goes on."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cluster.record.run_directory import RunDirectory
from cluster.sinks.jsonl import JsonLines
from cluster.sinks.tensorboard import tensorboard


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(str(tmp_path))


def test_tensorboard_draws_the_evaluation_of_a_step_that_is_learned_again(directory):
    first = [tensorboard(directory=directory, num_steps=9), JsonLines(directory)]
    for sink in first:
        sink.step(1, {"reward/mean": 0.125})
        sink.step(2, {"reward/mean": 0.25, "eval/accuracy": 0.75})
        sink.close()
    resumed = tensorboard(directory=directory, num_steps=9)
    resumed.step(2, {"reward/mean": 0.5})
    resumed.close()
    read = EventAccumulator(directory.path("tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [(1, 0.125), (2, 0.5)]
    assert [(event.step, event.value) for event in read.Scalars("eval/accuracy")] == [(2, 0.75)]
