import io
import math

import pytest
from rich.console import Console

from cluster.contracts.config import MetricsConfig
from cluster.contracts.errors import ConfigError, StorageError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import StepStats
from cluster.metrics import MetricLog, finite, open_log, step_metrics
from cluster.record.run_directory import EVENTS, METRICS, RunDirectory
from cluster.sinks.console import LiveLine, PlainLines, TimeLeft, clock, line_of
from cluster.sinks.jsonl import read_steps
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
    (event,) = directory.read_json_lines(EVENTS)
    assert event["kind"] == "failure" and event["actor"] == "rollout-0"
    assert event["time"] == 12.5 and event["policy_version"] == 3 and event["pid"] > 0


def test_a_step_done_again_counts_as_it_was_done_last(directory):
    for version, reward in ((1, 0.1), (2, 0.2), (2, 0.3)):
        directory.append_json(METRICS, {"policy_version": version, "time": 0.0, "reward/mean": reward})
    assert {version: numbers["reward/mean"] for version, numbers in read_steps(directory).items()} == {1: 0.1, 2: 0.3}


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
    out, now = io.StringIO(), iter([0.0, 2.0, 4.0])
    sink = PlainLines(4, stream=out, now=lambda: next(now))
    for version in range(3):
        sink.step(version, {"reward/mean": 0.5, "speed/sampling_tokens_per_s": 3412.0})
    sink.event({"kind": "failure", "message": "rollout-0 died"})
    sink.event({"kind": "checkpoint"})
    assert out.getvalue().splitlines() == [
        "step 0/4  reward 0.500  sampling 3,412 tok/s",
        "step 1/4  reward 0.500  sampling 3,412 tok/s  left 6s",
        "step 2/4  reward 0.500  sampling 3,412 tok/s  left 4s",
        "failure: rollout-0 died",
    ]


def test_in_a_terminal_events_scroll_by_above_the_line():
    out = io.StringIO()
    sink = LiveLine(4, console=Console(file=out, force_terminal=True, width=120))
    sink.step(1, {"reward/mean": 0.5})
    sink.event({"kind": "failure", "message": "rollout-0 [/died]"})
    sink.close()
    assert "rollout-0 [/died]" in out.getvalue() and "reward 0.500" in out.getvalue()


def test_the_line_shows_what_is_there():
    assert (
        line_of({"learner/kl_reference_k3_mean": 0.01234, "staleness/max": 1.0, "foreign": 3.0})
        == "KL 0.0123  staleness 1"
    )


def test_time_left_follows_the_pace_since_the_run_went_on():
    now = iter([100.0, 110.0, 130.0])
    left = TimeLeft(10, now=lambda: next(now))
    assert left.after(4) is None
    assert left.after(5) == 50.0
    assert left.after(7) == 30.0


@pytest.mark.parametrize(("seconds", "shown"), [(5.4, "5s"), (92, "1m32s"), (7500, "2h05m")])
def test_durations_read_well(seconds, shown):
    assert clock(seconds) == shown
