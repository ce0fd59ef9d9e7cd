"""Every metric sink keeps the protocol's promises; new files below cluster/sinks are found and tested by themselves."""

import pytest

from cluster.contracts.config import MetricsConfig
from cluster.contracts.plugins import SINKS, Plugin, names
from cluster.metrics import Sink, resolve_sink
from cluster.record.run_directory import RunDirectory


@pytest.fixture(params=names(SINKS))
def sink(request, tmp_path) -> Sink:
    make = resolve_sink(MetricsConfig(sinks=(Plugin(name=request.param),)), 0)
    made = make(directory=RunDirectory(str(tmp_path)), num_steps=10)
    yield made
    made.close()


def test_it_takes_steps_known_and_unknown_numbers(sink):
    sink.step(0, {"eval/accuracy": 0.5})
    sink.step(1, {"reward/mean": 0.5, "my/number": 1.0})


def test_it_takes_numbers_that_are_none(sink):
    sink.step(1, {"reward/mean": float("nan"), "loss": float("inf")})


def test_it_takes_a_step_again_after_a_recovery(sink):
    sink.step(2, {"reward/mean": 0.5})
    sink.step(1, {"reward/mean": 0.5})


def test_it_takes_events_of_any_kind(sink):
    sink.event({"kind": "failure", "time": 0.0, "pid": 1, "message": "rollout-0 [died]"})
    sink.event({"kind": "something_else", "time": 0.0, "pid": 1})


def test_it_closes_without_a_step(sink):
    sink.close()
