import asyncio
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cluster.contracts.config import MetricsConfig
from cluster.contracts.errors import ConfigError, MismatchError, PreemptedError, StorageError
from cluster.contracts.plugins import Plugin
from cluster.contracts.types import StepStats
from cluster.metrics import MetricLog, _InThread, open_log, step_metrics
from cluster.record.run_directory import EVENTS, RunDirectory
from cluster.sinks.jsonl import JsonLines, read_steps
from tests.fakes import group_summary
from tests.object_store import s3


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
    log.close()
    assert [sink.seen for sink in sinks] == [[(1, {"reward/mean": 1.0}), "closed"]] * 2


class Altering(Listed):
    """A callback that takes what it was told for its own."""

    def step(self, version, metrics):
        metrics["mine"] = metrics.pop("reward/mean")

    def event(self, record):
        record.clear()


def test_a_sink_that_alters_what_it_is_told_alters_it_for_itself(directory):
    last = Listed()
    with MetricLog([last], directory=directory) as log:
        log.add(Altering())
        log.step(1, {"reward/mean": 1.0})
        log.event("launched")
    (_, metrics), event, _ = last.seen
    assert metrics == {"reward/mean": 1.0}
    assert event["kind"] == directory.read_json_lines(EVENTS)[0]["kind"] == "launched"


def test_an_unknown_name_is_not_lost(directory):
    with open_log(MetricsConfig(sinks=(Plugin(name="jsonl"),)), directory=directory, num_steps=1) as log:
        log.step(1, {"my/number": np.float32(2.0), "my/nan": math.nan})
    assert read_steps(directory)[1]["my/number"] == 2.0


def test_a_number_of_an_event_that_json_has_no_word_for_is_null_to_all(directory):
    sink = Listed()
    with MetricLog([sink], directory=directory) as log:
        log.event("checkpoint", metric=math.nan)
    assert directory.read_json_lines(EVENTS)[0]["metric"] is sink.seen[0]["metric"] is None


def test_no_event_shows_a_secret_to_a_file_or_a_sink(directory):
    sink = Listed()
    with MetricLog([sink], directory=directory) as log:
        log.event("failed", reason="https://me:hunter2@host/a does not answer", details={"api_key": "hunter2"})
    assert directory.read_json_lines(EVENTS)[0]["reason"] == "https://<hidden>@host/a does not answer"
    assert "hunter2" not in f"{directory.read_text(EVENTS)}{vars(sink)}"


def test_a_sink_that_cannot_write_is_loud_and_left_out(capsys):
    healthy = Listed()
    with MetricLog([Broken(), healthy]) as log:
        log.step(1, {})
        log.step(2, {})
    assert capsys.readouterr().err.count("metrics sink Broken is left out from now on: disk full") == 1
    assert [seen for seen in healthy.seen if not isinstance(seen, dict)] == [(1, {}), (2, {}), "closed"]


def test_the_reason_why_a_sink_is_left_out_shows_no_secret(capsys):
    """Seen in review: MLflow names the URL that it asked, with its password."""

    class Tracker(Listed):
        def step(self, version, metrics):
            raise OSError("API request to https://me:hunter2@host/api failed")

    with MetricLog([Tracker()]) as log:
        log.step(1, {})
    assert capsys.readouterr().err.endswith("now on: API request to https://<hidden>@host/api failed\n")


async def test_a_sink_that_is_left_out_is_an_event_once(directory):
    with MetricLog([Broken()], directory=directory) as log:
        for version in (1, 2, 3):
            log.step(version, {})
            await log.written()
    (event,) = directory.read_json_lines(EVENTS)
    assert (event["kind"], event["sink"]) == ("sink_left_out", "Broken") and "disk full" in event["message"]


def test_a_sink_that_is_left_out_in_the_last_step_is_an_event_before_the_end(directory):
    with MetricLog([Broken()], directory=directory) as log:
        (thread,) = log._sinks
        log.step(1, {})
        assert thread.mark().wait(60)
        log.end("finished")
    assert [event["kind"] for event in directory.read_json_lines(EVENTS)] == ["sink_left_out", "finished"]


async def test_a_disk_that_takes_no_numbers_for_a_while_gets_them_later(directory, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise StorageError("disk full")

    with open_log(MetricsConfig(sinks=(Plugin(name="jsonl"),)), directory=directory, num_steps=3) as log:
        log.step(1, {"loss": 1.0})
        await log.written()
        with monkeypatch.context() as patch:
            patch.setattr(directory, "append_json", full)
            log.step(2, {"loss": 2.0})
            await log.written()
        log.step(3, {"loss": 3.0})
    assert [(version, step["loss"]) for version, step in read_steps(directory).items()] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    assert capsys.readouterr().err == "treadwheel: disk full; lines wait until they can be written\n"


def test_events_know_when_who_and_which_version(directory):
    log = MetricLog([], directory=directory, now=lambda: 12.5)
    log.step(3, {})
    log.event("worker_left", actor="rollout-0")
    log.close()
    (event,) = directory.read_json_lines(EVENTS)
    assert event["kind"] == "worker_left" and event["actor"] == "rollout-0"
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
    log.event("checkpoint")
    directory.writer.flush()
    assert [event["kind"] for event in directory.read_json_lines(EVENTS)] == ["checkpoint"]
    assert slow.seen == []
    is_free.set()
    log.close()
    assert slow.seen == seen.seen


def test_a_closed_log_leaves_no_thread(directory):
    """Seen in review: each run of a script left its sinks' threads and the writer's, with all that these held."""
    before = {*threading.enumerate()}
    with MetricLog([Listed(), Listed()], directory=directory) as log:
        log.event("launched")
        started = {*threading.enumerate()} - before
    for thread in started:
        thread.join(10)
    assert [thread.is_alive() for thread in started] == [False, False, False]
    log.event("after the end")
    directory.writer.finish()
    assert directory.read_json_lines(EVENTS)[-1]["kind"] == "after the end"


def test_a_listener_hears_at_once():
    log, listener = MetricLog([]), Listed()
    log.add(listener)
    log.step(1, {"a": 1})
    assert listener.seen == [(1, {"a": 1.0})]


def test_an_event_that_cannot_be_written_stops_the_run(directory):
    directory.write_file(f"{EVENTS}/in the way", b"")
    log = MetricLog([], directory=directory)
    log.event("checkpoint")
    with pytest.raises(StorageError, match=r"events\.jsonl"):
        log.close()


def test_a_run_whose_events_a_disk_did_not_take_has_failed_and_all_hear_of_it(directory, monkeypatch):
    log, listener = MetricLog([], directory=directory), Listed()
    log.add(listener)
    append = directory.append_json

    def full(name: str, record: dict) -> None:
        monkeypatch.setattr(directory, "append_json", append)
        raise StorageError("disk full")

    monkeypatch.setattr(directory, "append_json", full)
    log.event("checkpoint")
    with pytest.raises(StorageError, match="disk full"):
        log.end("finished")
    log.end("failed", reason="disk full")
    log.close()
    assert [record["kind"] for record in listener.seen] == ["checkpoint", "failed"]
    assert [record["kind"] for record in directory.read_json_lines(EVENTS)] == ["failed"]


def test_all_hear_that_a_run_failed_though_a_disk_takes_no_events(directory, monkeypatch):
    def full(name: str, record: dict) -> None:
        raise StorageError("disk full")

    log, listener = MetricLog([], directory=directory), Listed()
    log.add(listener)
    monkeypatch.setattr(directory, "append_json", full)
    log.event("checkpoint")
    directory.writer._thread.submit(lambda: None).result()
    log.end("failed")
    assert [record["kind"] for record in listener.seen] == ["checkpoint", "failed"]
    with pytest.raises(StorageError, match="disk full"):
        log.close()


def test_an_event_after_one_that_was_lost_is_not_lost_too(directory, monkeypatch):
    log, listener = MetricLog([], directory=directory), Listed()
    log.add(listener)
    append = directory.append_json
    monkeypatch.setattr(directory, "append_json", lambda name, record: directory.nothing)
    log.event("lost")
    directory.writer._thread.submit(lambda: None).result()
    monkeypatch.setattr(directory, "append_json", append)
    with pytest.raises(AttributeError):
        log.event("checkpoint")
    log.close()
    assert [record["kind"] for record in listener.seen] == ["lost", "checkpoint"]
    assert [record["kind"] for record in directory.read_json_lines(EVENTS)] == ["checkpoint"]


def test_an_unknown_sink_names_its_setting(directory):
    with pytest.raises(
        ConfigError, match=r"metrics.sinks\[1\]='carrier_pigeon' is not there; cluster.sinks has: console, jsonl"
    ):
        open_log(
            MetricsConfig(sinks=(Plugin(name="jsonl"), Plugin(name="carrier_pigeon"))), directory=directory, num_steps=1
        )


def test_a_sink_that_refuses_the_run_leaves_no_other_one_open(directory, monkeypatch):
    """The live table holds the terminal: open, it takes the words that say why."""
    first = Listed()

    def refuse(**_) -> None:
        raise ConfigError("name a server")

    monkeypatch.setattr("cluster.metrics.resolve_sink", lambda _, index: refuse if index else lambda **_: first)
    with pytest.raises(ConfigError, match="name a server"):
        open_log(MetricsConfig(sinks=(Plugin(name="console"), Plugin(name="mlflow"))), directory=directory, num_steps=1)
    assert first.seen == ["closed"]


def test_a_sink_of_ones_own_need_not_close_well(directory, monkeypatch):
    first = SimpleNamespace(step=print, event=print)

    def refuse(**_) -> None:
        raise ConfigError("name a server")

    monkeypatch.setattr("cluster.metrics.resolve_sink", lambda _, index: refuse if index else lambda **_: first)
    config = MetricsConfig(sinks=(Plugin(name="console"), Plugin(name="mlflow")))
    with pytest.raises(ConfigError, match="name a server"):
        open_log(config, directory=directory, num_steps=1)
    assert open_log(config.model_copy(update={"sinks": config.sinks[:1]}), directory=directory, num_steps=1)


def test_a_sink_of_ones_own_without_close_is_not_waited_for(directory, capsys):
    """Seen in review: its thread ended with a traceback, and the run's end waited half a minute for it."""
    MetricLog([SimpleNamespace(step=print, event=print)], directory=directory).close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "SimpleNamespace is left out from now on: AttributeError" in line


def test_a_judges_components_are_metrics_of_the_step():
    summaries = [
        group_summary(0, rewards=(1.0, 0.0), reward_components={"format": (1.0, 0.5), "mean": (7.0, None)}),
        group_summary(1, rewards=(0.0, None), reward_components={"format": (0.0, None)}),
    ]
    stats = StepStats(policy_version=1, metrics={}, num_trained_tokens=8, seconds=1.0)
    metrics = step_metrics(summaries, stats)
    assert metrics["reward/format"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(1 / 3), "the reward's own name wins"


def test_a_steps_numbers_are_those_of_its_groups_and_its_update():
    """Step 6 learns with version 5: a group of three trajectories that began with version 4, and one of one that began with version 1."""
    large = group_summary(
        0, version=4, num_trajectories=3, num_tokens=12, rewards=(1.0, 0.0, None), truncated=(True, False, False)
    )
    small = group_summary(
        1, version=1, num_trajectories=1, num_tokens=2, rewards=(None,), truncated=(True,), num_reward_timeouts=1
    )
    stats = StepStats(policy_version=6, metrics={"learner/loss": 0.25}, num_trained_tokens=9, seconds=1.5)
    assert step_metrics([large, small], stats) == {
        "reward/mean": 0.5,
        "buffer/num_judged": 4.0,
        "reward/num_errors": 0.0,
        "reward/num_timeouts": 1.0,
        "tokens/sampled": 14.0,
        "tokens/trained": 9.0,
        "tokens/completion_mean": 3.5,
        "tokens/truncated_share": 0.5,
        "staleness/mean": 2.5,
        "staleness/max": 4.0,
        "time/learning_s": 1.5,
        "learner/loss": 0.25,
    }


def test_a_step_without_a_known_reward_has_no_mean_and_no_component():
    stats = StepStats(policy_version=1, metrics={}, num_trained_tokens=0, seconds=1.0)
    told = step_metrics([group_summary(0, rewards=(None, None), reward_components={"format": (None, None)})], stats)
    assert math.isnan(told["reward/mean"]) and "reward/format" not in told


def test_a_step_of_chosen_trajectories_that_is_told_again_keeps_the_failures_of_its_candidates(directory):
    """Seen in review: Ctrl-C or a resume wrote 0 over them."""
    chosen = group_summary(0, num_trajectories=3, rewards=(1.0, 0.0, None), num_reward_errors=1).of([0, 1])
    again = step_metrics([chosen], StepStats(policy_version=1, metrics={}, num_trained_tokens=8, seconds=1.0))
    config = MetricsConfig(sinks=(Plugin(name="jsonl"),))
    with open_log(config, directory=directory, num_steps=2) as log:
        log.step(1, again | {"buffer/num_judged": 3.0, "reward/num_errors": 1.0})
        log.step(1, again)
    told = read_steps(directory)[1]
    assert (told["buffer/num_judged"], told["reward/num_errors"]) == (3.0, 1.0)


def test_failures_are_counted_of_all_judged_trajectories_of_the_step():
    judged = [group_summary(0, rewards=(1.0, None), num_reward_errors=1), group_summary(1, rewards=(1.0, 0.0))]
    told = step_metrics(judged, StepStats(policy_version=1, metrics={}, num_trained_tokens=8, seconds=1.0))
    assert (told["buffer/num_judged"], told["reward/num_errors"]) == (4.0, 1.0)


async def test_what_is_written_of_a_run_in_a_store_another_process_reads():
    with s3("bucket"):
        config = MetricsConfig(sinks=(Plugin(name="jsonl"),))
        with open_log(config, directory=RunDirectory("s3://bucket/run"), num_steps=2) as log:
            log.step(1, {"reward/mean": 0.5})
            log.event("checkpoint")
            assert read_steps(RunDirectory("s3://bucket/run")) == {}
            await log.written()
            found = RunDirectory("s3://bucket/run")
            assert read_steps(found)[1]["reward/mean"] == 0.5
            assert [event["kind"] for event in found.read_json_lines(EVENTS)] == ["checkpoint"]
            log.step(1, {"eval/accuracy": 0.25})
            await log.written()
            assert read_steps(found)[1].items() >= {"reward/mean": 0.5, "eval/accuracy": 0.25}.items()


async def test_what_is_written_of_a_run_on_a_disk_has_left_the_threads_that_write_it(directory):
    """Seen in review: a resumed run was killed after its first save, while a long metrics.jsonl was still made anew for lines before it."""
    is_begun, is_free = threading.Event(), threading.Event()

    class Slow(Listed):
        def step(self, version, metrics):
            is_begun.set()
            assert is_free.wait(timeout=60)
            super().step(version, metrics)

    slow = Slow()
    directory.writer.put(lambda: is_free.wait(60) and time.sleep(0.1))
    with MetricLog([slow], directory=directory) as log:
        log.event("checkpoint")
        log.step(1, {})
        writing = asyncio.create_task(log.written())
        assert await asyncio.to_thread(is_begun.wait, 60)
        done_before, _ = await asyncio.wait({writing}, timeout=0.2)
        is_free.set()
        await writing
        assert not done_before and slow.seen[-1] == (1, {})
        assert [event["kind"] for event in directory.read_json_lines(EVENTS)] == ["checkpoint"]


async def test_a_store_that_takes_no_lines_is_an_event_and_stops_nothing(monkeypatch):
    def refuse(_):
        raise StorageError("s3://bucket/run: the store answered 503")

    sink = Listed()
    with s3("bucket"), MetricLog([sink], directory=(directory := RunDirectory("s3://bucket/run"))) as log:
        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "flush_lines", refuse)
            await log.written()
        await log.written()
        assert [event["kind"] for event in directory.read_json_lines(EVENTS)] == ["storage_failed"]
    assert [(seen["kind"], seen["reason"]) for seen in sink.seen[:1]] == [
        ("storage_failed", "s3://bucket/run: the store answered 503")
    ]


def test_a_sink_that_is_left_out_is_not_waited_for(capsys):
    sink = _InThread(Listed())
    never = threading.Event()
    assert not sink.is_done(never, within_s=0.0)
    sink.leave_out("the server is gone")
    assert sink.is_done(never, within_s=0.0)


def test_the_patience_is_that_for_all_sinks_together(monkeypatch):
    clock, waited = [0.0], list[float]()

    def is_done(sink, mark, *, within_s):
        waited.append(within_s)
        clock[0] += within_s
        return False

    monkeypatch.setattr("cluster.metrics.time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(_InThread, "is_done", is_done)
    MetricLog([Listed(), Listed()], patience_s=30.0).close()
    assert waited == [30.0, 0.0]


def test_of_two_ends_the_first_counts_and_sinks_have_it_at_once():
    sink = Listed()
    with MetricLog([sink]) as log:
        log.end("stopped")
        assert [record["kind"] for record in sink.seen] == ["stopped"]
        log.end("finished")
    assert [seen if seen == "closed" else seen["kind"] for seen in sink.seen] == ["stopped", "closed"]


def test_a_sink_that_never_returns_holds_neither_the_end_nor_the_close(capsys, monkeypatch):
    never, healthy, is_done = threading.Event(), Listed(), _InThread.is_done

    class Hanging(Listed):
        def step(self, version, metrics):
            never.wait()
            raise OSError("the server is gone")

    def is_done_unless_it_hangs(sink, mark, *, within_s):
        """On a busy machine a thread may need longer than the patience."""
        assert sink.name == "Hanging" or mark.wait(60)
        return is_done(sink, mark, within_s=within_s)

    monkeypatch.setattr(_InThread, "is_done", is_done_unless_it_hangs)
    with MetricLog([Hanging(), healthy], patience_s=0.01) as log:
        hanging, _ = log._sinks
        log.step(1, {})
        log.end("finished")
        has_failed = hanging.mark()
        assert healthy.seen[-1]["kind"] == "finished"
    assert healthy.seen[-1] == "closed"
    never.set()
    assert has_failed.wait(60)
    told = capsys.readouterr().err
    says = "it was not done 0.01 s after the run's end"
    assert told == f"treadwheel: metrics sink Hanging is left out from now on: {says}\n", "once, though it then fails"


def test_a_sink_that_never_returns_does_not_fill_the_memory(capsys, monkeypatch):
    monkeypatch.setattr("cluster.metrics._MOST_BEHIND", 3)
    is_begun, never, healthy = threading.Event(), threading.Event(), Listed()

    class Hanging(Listed):
        def event(self, record):
            is_begun.set()
            never.wait()
            super().event(record)

    before = {*threading.enumerate()}
    log = MetricLog([hanging := Hanging()], patience_s=1.0)
    (thread,) = {*threading.enumerate()} - before
    log.add(healthy)
    for number in range(10):
        log.event("drop", number=number)
        assert is_begun.wait(60)
    log.step(1, {})
    never.set()
    log.close()
    thread.join(60)
    assert [seen["number"] for seen in hanging.seen] == [0], "left out: it gets nothing that waited, and is not closed"
    assert [seen["kind"] for seen in healthy.seen[:-1]] == ["drop"] * 10 + ["sink_left_out"]
    assert "Hanging is left out from now on: it is 3 steps and events behind" in capsys.readouterr().err


async def test_a_late_sink_holds_what_is_written_once_and_catches_up(monkeypatch):
    is_free, seen = threading.Event(), Listed()

    class Slow(Listed):
        def step(self, version, metrics):
            assert is_free.wait(timeout=60)
            super().step(version, metrics)

    slow = Slow()
    with s3("bucket"):
        log = MetricLog([slow, seen], directory=RunDirectory("s3://bucket/run"), patience_s=0.01)
        late, _ = log._sinks
        log.step(1, {})
        await log.written()
        waits, wait = [], log._late
        monkeypatch.setattr(
            log, "_late", lambda sinks, patience_s: waits.append(late in sinks) or wait(sinks, patience_s)
        )
        monkeypatch.setattr(log, "_patience_s", 60.0)  # it hangs no more
        await log.written()
        is_free.set()
        assert late.mark().wait(60)
        await log.written()
        assert waits == [False, True]
        log.close()
    assert slow.seen == seen.seen == [(1, {}), "closed"]


async def test_the_numbers_of_a_step_that_is_not_over_are_written_for_a_checkpoint_that_comes_before_its_end():
    """Seen in review: the learner died beside the end of step 1, and saved step 1 on its way back. SIGKILL then lost its line for ever."""
    sink = Listed()
    with MetricLog([sink], directory=None) as log:
        log.pending(1, {"loss": 1.0})
        log.event("broadcast")
        await log.written()
        await log.written()
        log.step(1, {"loss": 1.0, "weights/canary_error": 0.5})
        log.pending(2, {"loss": 2.0})
        log.step(2, {"loss": 2.5})
        await log.written()
    assert [seen for seen in sink.seen if not isinstance(seen, dict)] == [
        (1, {"loss": 1.0}),
        (1, {"loss": 1.0, "weights/canary_error": 0.5}),
        (2, {"loss": 2.5}),
        "closed",
    ]


def taking_no_events(directory: RunDirectory) -> MetricLog:
    """A log whose first event was not taken."""
    Path(directory.path(EVENTS)).mkdir(parents=True)
    log = MetricLog([], directory=directory)
    log.event("launched")
    directory.writer._thread.submit(lambda: None).result()
    return log


async def test_a_log_that_keeps_its_errors_raises_them_when_it_is_closed(directory):
    done = []
    with pytest.raises(StorageError, match=r"events\.jsonl: Is a directory"), taking_no_events(directory) as log:
        log.keep_errors()
        log.event("stopping")
        log.step(1, {})
        await log.written()
        done.append("saved")
        log.end("stopped")
        done.append("ended")
    assert done == ["saved", "ended"]
    log.close()


@pytest.mark.parametrize("error", [PreemptedError("its node goes away"), MismatchError("0.5 nats")])
def test_an_error_of_the_log_does_not_hide_why_a_run_ended(error, directory, capsys):
    with pytest.raises(type(error), match=str(error)), taking_no_events(directory) as log:
        try:
            raise error
        finally:
            log.end("stopped")
    assert capsys.readouterr().err.startswith(f"treadwheel: {directory.path(EVENTS)}: Is a directory; ")


async def test_a_tracker_that_hangs_leaves_time_to_write_the_lines_of_a_run_that_is_stopped():
    is_free = threading.Event()

    class Hanging(Listed):
        def step(self, version, metrics):
            assert is_free.wait(timeout=60)

    with s3("bucket"):
        directory, found = RunDirectory("s3://bucket/hangs"), RunDirectory("s3://bucket/hangs")
        with MetricLog([Hanging(), JsonLines(directory)], directory=directory, patience_s=60) as log:
            log.step(1, {"loss": 1.0})
            await log.written(within_s=2.0)
            assert read_steps(found)[1]["loss"] == 1.0
            is_free.set()


async def test_a_directory_that_does_not_answer_is_waited_for_within_a_limit(directory):
    is_free = threading.Event()
    directory.writer.put(lambda: is_free.wait(60))
    with MetricLog([], directory=directory) as log:
        with pytest.raises(TimeoutError):
            await log.written(within_s=0.01)
        is_free.set()
