import io
import math
import threading

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cluster.contracts.config import MetricsConfig
from cluster.contracts.errors import ConfigError, StorageError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import StepStats
from cluster.metrics import MetricLog, finite, open_log, step_metrics
from cluster.record.run_directory import EVENTS, METRICS, RunDirectory
from cluster.sinks.console import LiveLine, PlainLines, line_of
from cluster.sinks.jsonl import JsonLines, read_steps
from cluster.sinks.tensorboard import tensorboard
from tests.fakes import group_summary


class Listed:
    def __init__(self) -> None:
        self.seen: list = []

    def step(self, version, metrics):
        self.seen.append((version, metrics))

    def event(self, record):
        self.seen.append(record)

    def close(self):
        self.seen.append("closed")


class Broken(Listed):
    def step(self, version, metrics):
        raise StorageError("disk full")


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(str(tmp_path))


def test_every_sink_gets_every_step():
    sinks = [Listed(), Listed()]
    with MetricLog(sinks) as log:
        log.step(1, {"reward/mean": 1})
    assert [sink.seen for sink in sinks] == [[(1, {"reward/mean": 1.0}), "closed"]] * 2


def test_an_unknown_name_is_not_lost(directory):
    with open_log(MetricsConfig(sinks=(Plugin(name="jsonl"),)), directory=directory, num_steps=1) as log:
        log.step(1, {"my/number": 2.0, "my/nan": math.nan})
    assert read_steps(directory)[1]["my/number"] == 2.0


def test_a_sink_that_cannot_write_is_loud_and_left_out(capsys):
    healthy = Listed()
    with MetricLog([Broken(), healthy]) as log:
        log.step(1, {})
        log.step(2, {})
    assert capsys.readouterr().err.count("metrics sink Broken failed") == 1
    assert healthy.seen == [(1, {}), (2, {}), "closed"]


def test_events_know_when_who_and_which_version(directory):
    log = MetricLog([], directory=directory, now=lambda: 12.5)
    log.step(3, {})
    log.event("failure", actor="rollout-0")
    log.close()
    (event,) = directory.read_json_lines(EVENTS)
    assert event["kind"] == "failure" and event["actor"] == "rollout-0"
    assert event["time"] == 12.5 and event["policy_version"] == 3 and event["pid"] > 0


def test_a_slow_sink_delays_neither_the_run_nor_its_events(directory):
    is_free, seen = threading.Event(), Listed()

    class Slow(Listed):
        def step(self, version, metrics):
            assert is_free.wait(timeout=60)
            super().step(version, metrics)

    slow = Slow()
    log = MetricLog([slow, seen], directory=directory)
    for version in range(3):
        log.step(version, {})
    log.event("failure")
    directory.writer.flush()
    assert [event["kind"] for event in directory.read_json_lines(EVENTS)] == ["failure"]
    assert slow.seen == []
    is_free.set()
    log.close()
    assert slow.seen == seen.seen


def test_a_listener_hears_at_once():
    log, listener = MetricLog([]), Listed()
    log.add(listener)
    log.step(1, {"a": 1})
    assert listener.seen == [(1, {"a": 1.0})]


def test_an_event_that_cannot_be_written_stops_the_run(directory):
    directory.write_file(f"{EVENTS}/in the way", b"")
    log = MetricLog([], directory=directory)
    log.event("failure")
    with pytest.raises(StorageError, match=r"events\.jsonl"):
        log.close()


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


def test_an_unknown_sink_names_its_setting(directory):
    with pytest.raises(
        ConfigError, match=r"metrics.sinks\[1\]='carrier_pigeon' is not there; cluster.sinks has: console, jsonl"
    ):
        open_log(
            MetricsConfig(sinks=(Plugin(name="jsonl"), Plugin(name="carrier_pigeon"))), directory=directory, num_steps=1
        )


def test_a_judges_components_are_metrics_of_the_step():
    summaries = [
        group_summary(0, rewards=(1.0, 0.0), reward_components={"format": (1.5, 2), "mean": (7.0, 1)}),
        group_summary(1, rewards=(0.0, None), reward_components={"format": (0.0, 1)}),
    ]
    stats = StepStats(policy_version=1, metrics={}, num_trajectories=4, num_trained_tokens=8, seconds=1.0)
    metrics = step_metrics(summaries, stats)
    assert metrics["reward/format"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(1 / 3), "the reward's own name wins"


def test_json_gets_no_nan():
    assert finite({"a": 1.0, "b": math.nan, "c": math.inf}) == {"a": 1.0, "b": None, "c": None}


def test_without_a_terminal_a_step_is_a_line():
    out, clock = io.StringIO(), [0.0]
    sink = PlainLines(4, stream=out, now=lambda: clock[0])
    sink.step(0, {"eval/accuracy": 0.5})
    for version in (1, 2, 3):
        clock[0] += 2.0
        sink.step(version, {"reward/mean": 0.5, "speed/sampling_tokens_per_s": 3412.0, "time/step_s": 2.0})
    sink.event({"kind": "failure", "message": "rollout-0 died"})
    sink.event({"kind": "checkpoint"})
    assert out.getvalue().splitlines() == [
        "step 0/4  eval 0.500",
        "step 1/4  reward 0.500  sampling 3,412 tok/s",
        "step 2/4  reward 0.500  sampling 3,412 tok/s  left 0:00:04",
        "step 3/4  reward 0.500  sampling 3,412 tok/s  left 0:00:02",
        "failure: rollout-0 died",
    ]


def test_steps_learned_again_do_not_tell_how_long_the_rest_takes():
    out, clock = io.StringIO(), [0.0]
    sink = PlainLines(100, stream=out, now=lambda: clock[0])
    for version in (1, 2, 3):
        clock[0] += 0.25
        sink.step(version, {"reward/mean": 0.5})
    for version in (4, 5, 6):
        clock[0] += 60.0
        sink.step(version, {"reward/mean": 0.5, "time/step_s": 60.0})
    left = [line.partition("left ")[2] for line in out.getvalue().splitlines()]
    assert left == ["", "", "", "", "1:35:00", "1:34:00"]


def test_in_a_terminal_events_scroll_by_above_the_line():
    out = io.StringIO()
    sink = LiveLine(4, console=Console(file=out, force_terminal=True, width=120))
    sink.step(1, {"reward/mean": 0.5})
    sink.event({"kind": "failure", "message": "rollout-0 [/died]"})
    sink.close()
    assert "rollout-0 [/died]" in out.getvalue() and "reward 0.500" in out.getvalue()


def test_the_line_shows_what_is_there_and_which_kl_it_is():
    both = {"learner/kl_reference_k3_mean": 0.01234, "learner/kl_old_k3_mean": 0.5}
    assert line_of({**both, "staleness/max": 1.0, "foreign": 3.0}) == "KL to reference 0.0123  staleness 1"
    assert line_of({"learner/kl_old_k3_mean": 0.5}) == "KL to old policy 0.5000"
