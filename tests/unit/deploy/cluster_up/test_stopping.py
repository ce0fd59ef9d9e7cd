"""A run that is stopped saves what it can, and says truly what the same command will do."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.contracts.errors import ClaimLostError, DataError, MismatchError, PreemptedError, StorageError, WorkerError
from cluster.contracts.types import StepStats
from cluster.metrics import MetricLog
from cluster.record.ledger import Ledger
from cluster.record.run_directory import EVENTS, RunDirectory
from cluster.supervision.tasks import background
from deploy.cluster_up.stopping import Stop, how_it_goes_on, saved_when_stopped, until_interrupted
from deploy.launch import noting_the_end
from tests.fakes import ListedEvents, group_summary
from tests.unit.cluster.simulated_time import simulated

pytestmark = pytest.mark.usefixtures("in_a_terminal")


@pytest.mark.parametrize(
    ("end", "told"),
    [("os._exit(1)", "gone\n"), ("os.kill(os.getpid(), 9)", "gone\n"), ("pass", ""), ("sys.exit(3)", "")],
)
def test_a_process_that_is_gone_without_a_word_is_told_of(end, told):
    """Seen: Ray's core ended the driver by exit code 1 when Ray's raylet was gone, and the terminal said nothing."""
    program = (
        f"import os, sys\nfrom deploy.cluster_up.stopping import told_if_gone\nwith told_if_gone('gone'):\n    {end}"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert ended.stderr == told


class ScriptedLearner:
    """Saves at once, fails, or never ends."""

    def __init__(self, *, error: Exception | None = None, is_stuck: bool = False) -> None:
        self.is_saved = self.is_finished = False
        self._error, self._is_stuck = error, is_stuck

    async def finish_saving(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_stuck:
            await asyncio.Event().wait()
        self.is_finished = True

    async def save_progress(self, tell: Any, *, log_s: float) -> None:
        if self._is_stuck:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        stats = StepStats(policy_version=3, metrics={}, num_trained_tokens=8, seconds=1.0)
        tell(stats, [group_summary(0, version=2, rewards=(1.0, 0.0))])
        self.is_saved = True


class Asked(ScriptedLearner):
    """Something asks the run to stop while it saves."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self._ask = ask

    async def save_progress(self, tell: Any, *, log_s: float) -> None:
        self._ask()
        await asyncio.sleep(0)  # the loop hears of it
        await asyncio.sleep(0)
        self.is_saved = True


class Stuck(ScriptedLearner):
    """Is stopped again while it saves, and looks how the next signal would be heard."""

    async def save_progress(self, tell: Any, *, log_s: float) -> None:
        _terminate()
        try:
            await asyncio.Event().wait()
        finally:
            self.heard_by = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


class Pressed(ScriptedLearner):
    """So many signals come while it saves."""

    def __init__(self, num_signals: int) -> None:
        super().__init__()
        self._num_signals = num_signals

    async def save_progress(self, tell: Any, *, log_s: float) -> None:
        for _ in range(self._num_signals):
            _terminate()
            await asyncio.sleep(0)  # the loop hears of it
            await asyncio.sleep(0)
        self.is_saved = True


async def _run(
    learner: ScriptedLearner, log: ListedEvents, *, interrupted: asyncio.Event, timeout_s: float, number: int
) -> None:
    async with saved_when_stopped(learner, interrupted=interrupted, timeout_s=timeout_s, log=log):
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()


def _stop(learner: ScriptedLearner, *, timeout_s: float = 60, number: int = signal.SIGINT) -> ListedEvents:
    """What a run that is stopped logs."""
    log, interrupted, before = ListedEvents(), asyncio.Event(), _handlers()
    work = _run(learner, log, interrupted=interrupted, timeout_s=timeout_s, number=number)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(until_interrupted(work, interrupted=interrupted))
    assert _handlers() == before
    return log


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def _end(learner: Asked, *, ask: Callable[[], object], stop: Stop) -> None:
    """Runs what `ask` stops."""
    interrupted = asyncio.Event()

    async def work() -> None:
        async with saved_when_stopped(learner, interrupted=interrupted, timeout_s=60, log=ListedEvents()):
            ask()
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(until_interrupted(work(), interrupted=interrupted, stop=stop))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_saves_first_and_logs_the_step_that_the_loop_did_not_come_to_log(number: int, capsys):
    learner = ScriptedLearner()
    log = _stop(learner, number=number)
    assert log.kinds() == ["stopping"] and learner.is_saved
    assert capsys.readouterr().err == "treadwheel: stopping; a second Ctrl-C skips what takes long\n"
    assert log.events[0]["message"] == "saves a checkpoint, in at most 60 s; Ctrl-C again skips it"
    ((version, metrics),) = log.steps
    assert version == 3 and metrics["reward/mean"] == 0.5


def test_a_run_is_stopped_also_when_nobody_reads_what_it_says(monkeypatch, caplog):
    """Seen before: `train | tee log`, and Ctrl-C ended tee first."""

    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr("sys.stderr", Gone())
    learner = ScriptedLearner()
    assert _stop(learner).kinds() == ["stopping"] and learner.is_saved
    assert caplog.messages == [], "no error in the event loop"


@pytest.mark.parametrize(
    ("seconds_left", "timeout_s", "told"),
    [
        (30.0, 60, ["saves a checkpoint, in at most 28 s; then ends with what stops it"]),
        (None, 60, ["saves a checkpoint, in at most 60 s; then ends with what stops it"]),
        (30.0, 0, []),
        (1.5, 60, ["saves a checkpoint, in at most 5 s; then ends with what stops it"]),
        (-27.0, 60, ["saves a checkpoint, in at most 5 s; then ends with what stops it"]),
        (-27.0, 3, ["saves a checkpoint, in at most 3 s; then ends with what stops it"]),
        (-27.0, 0, []),
    ],
)
async def test_a_run_whose_node_goes_away_saves_in_the_nodes_time_and_tries_if_it_seems_over(
    seconds_left, timeout_s, told, monkeypatch
):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    learner, log = ScriptedLearner(), ListedEvents()
    deadline = None if seconds_left is None else 1000.0 + seconds_left
    with pytest.raises(PreemptedError):
        async with saved_when_stopped(learner, interrupted=asyncio.Event(), timeout_s=timeout_s, log=log):
            raise PreemptedError("its node goes away", deadline=deadline)
    assert [event["message"] for event in log.events] == told and learner.is_saved == bool(told)


@simulated
async def test_a_step_that_the_node_has_no_time_for_is_not_saved_and_it_is_said(monkeypatch):
    class Slow(ScriptedLearner):
        async def save_progress(self, tell, *, log_s):
            await asyncio.Event().wait()

    monkeypatch.setattr("time.time", lambda: 1000.0)
    log = ListedEvents()
    with pytest.raises(PreemptedError):
        async with saved_when_stopped(Slow(), interrupted=asyncio.Event(), timeout_s=60, log=log):
            raise PreemptedError("its node goes away", deadline=1012.0)
    assert log.kinds() == ["stopping", "checkpoint_failed"]
    assert log.events[1]["message"] == "no checkpoint was saved: it takes longer than the 10 s that it has"


async def test_a_run_that_fails_by_itself_does_not_say_that_it_was_interrupted():
    async def spend_the_budget() -> None:
        raise WorkerError("the restart budget is spent")

    learner, log = ScriptedLearner(), ListedEvents()
    with pytest.raises(WorkerError, match="budget is spent"):
        async with (
            background() as tasks,
            saved_when_stopped(learner, interrupted=asyncio.Event(), timeout_s=60, log=log),
        ):
            tasks.create_task(spend_the_budget())
            await asyncio.Event().wait()
    assert log.events[0]["message"] == "saves a checkpoint, in at most 60 s; then ends with what stops it"
    assert learner.is_saved


@pytest.mark.parametrize(
    ("error", "timeout_s", "is_finished"),
    [(MismatchError("0.5 nats"), 60, True), (MismatchError("0.5 nats"), 0, False), (ClaimLostError("x"), 60, False)],
)
async def test_the_checkpoint_that_is_being_written_when_a_run_fails_is_finished(error, timeout_s, is_finished):
    """Seen in review: it was told of, and ended with the ranks that wrote it. One of a driver that has lost its directory is not ours."""
    learner = ScriptedLearner()
    with pytest.raises(type(error), match=str(error)):
        async with saved_when_stopped(learner, interrupted=asyncio.Event(), timeout_s=timeout_s, log=ListedEvents()):
            raise error
    assert learner.is_finished == is_finished and not learner.is_saved


@pytest.mark.parametrize(
    ("learner", "told"),
    [
        (ScriptedLearner(error=WorkerError("learner-0 died")), "learner-0 died"),
        (ScriptedLearner(is_stuck=True), "it takes longer than checkpoint.stop_timeout_s=0.01"),
    ],
)
async def test_a_checkpoint_that_a_failed_run_cannot_finish_does_not_hide_why_it_failed(learner, told):
    log = ListedEvents()
    with pytest.raises(MismatchError):
        async with saved_when_stopped(learner, interrupted=asyncio.Event(), timeout_s=0.01, log=log):
            raise MismatchError("0.5 nats")
    assert log.kinds() == ["checkpoint_failed"]
    assert log.events[0]["message"] == f"the checkpoint under way may not be whole: {told}"


def test_a_save_that_fails_is_an_event_and_the_run_ends_all_the_same():
    assert _stop(ScriptedLearner(error=WorkerError("learner-0 died"))).kinds() == ["stopping", "checkpoint_failed"]


def test_a_second_signal_ends_the_saving():
    assert _stop(ScriptedLearner(is_stuck=True), timeout_s=1e6).kinds() == ["stopping"]


def test_a_third_signal_has_the_systems_effect():
    learner = Stuck()
    _stop(learner, timeout_s=1e6)
    assert learner.heard_by == [signal.default_int_handler, signal.SIG_DFL]


@pytest.mark.parametrize("way", ["ask", "press"])
def test_a_run_that_was_asked_to_stop_before_it_began_stops_when_it_begins(way: str):
    stop = Stop()
    getattr(stop, way)()

    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(until_interrupted(asyncio.wait_for(work(), 60), stop=stop))


def test_a_run_that_has_ended_is_not_stopped_any_more():
    stop = Stop()
    asyncio.run(until_interrupted(asyncio.sleep(0), stop=stop))
    stop.ask()
    stop.press()


@pytest.mark.parametrize("begins", ["a callback", "SIGTERM"])
def test_a_callback_that_asks_a_run_to_stop_which_stops_already_does_not_end_the_saving(begins: str, capsys):
    """Seen in review: the step that is told before it is saved reaches callbacks, and their `True` was taken for a second Ctrl-C."""
    learner, stop = Asked(lambda: stop.ask()), Stop()
    _end(learner, ask=stop.ask if begins == "a callback" else _terminate, stop=stop)
    assert learner.is_saved
    assert capsys.readouterr().err == "treadwheel: stopping; a second Ctrl-C skips what takes long\n"


def test_a_terminal_that_closes_says_so_twice_and_the_saving_goes_on():
    learner = Asked(_hang_up)
    _end(learner, ask=_hang_up, stop=Stop())
    assert learner.is_saved


def test_a_run_under_nohup_goes_on_when_its_terminal_closes():
    async def work() -> str:
        _hang_up()
        await asyncio.sleep(0)  # the loop would hear of it
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(until_interrupted(work())) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_notebook_that_is_interrupted_again_ends_the_saving():
    learner, stop = Asked(lambda: stop.press()), Stop()
    _end(learner, ask=stop.press, stop=stop)
    assert not learner.is_saved


@pytest.mark.parametrize("num_signals", [1, 2])
@pytest.mark.parametrize("why", [PreemptedError("its node goes away"), DataError("200 groups in a row were dropped")])
def test_a_signal_while_a_run_that_ends_by_itself_saves_does_not_hide_why_it_ends(why: Exception, num_signals: int):
    """Seen in review: a node that goes away, and SIGTERM while the run saved, left no checkpoint and an exit code that starts nothing."""
    learner, interrupted = Pressed(num_signals), asyncio.Event()

    async def fail() -> None:
        raise why

    async def work() -> None:
        async with (
            background() as beside,
            saved_when_stopped(learner, interrupted=interrupted, timeout_s=60, log=ListedEvents()),
            background() as within,
        ):
            (within if isinstance(why, PreemptedError) else beside).create_task(fail())
            await asyncio.Event().wait()

    with pytest.raises(type(why), match=str(why)):
        asyncio.run(until_interrupted(work(), interrupted=interrupted))
    assert interrupted.is_set()
    assert learner.is_saved == (num_signals == 1)


def test_a_signal_while_a_run_still_ends_since_its_node_goes_away_does_not_hide_why_it_ends():
    learner, interrupted, stop = ScriptedLearner(), asyncio.Event(), Stop()

    async def watch() -> None:
        raise PreemptedError("node-1 goes away")

    async def work() -> None:
        async with (
            saved_when_stopped(learner, interrupted=interrupted, timeout_s=60, log=ListedEvents()),
            background() as tasks,
        ):
            tasks.create_task(watch())
            try:
                await asyncio.Event().wait()
            finally:
                stop.press()
                await asyncio.sleep(0.1)

    with pytest.raises(PreemptedError, match="node-1 goes away"):
        asyncio.run(until_interrupted(work(), interrupted=interrupted, stop=stop))
    assert interrupted.is_set() and learner.is_saved


def test_ctrl_c_in_a_child_that_is_not_yet_another_program_is_not_one_of_ours():
    def start() -> None:
        subprocess.run(["true"], check=True, preexec_fn=lambda: os.kill(os.getpid(), signal.SIGINT))

    async def work() -> str:
        await asyncio.to_thread(start)
        await asyncio.sleep(0)  # the loop would hear of it now
        return "done"

    assert asyncio.run(until_interrupted(work())) == "done"


def test_a_run_that_is_to_stop_at_once_saves_nothing():
    learner = ScriptedLearner()
    assert _stop(learner, timeout_s=0).kinds() == [] and not learner.is_saved


async def test_saving_ends_with_its_deadline_and_the_run_is_still_stopped():
    class Slow:
        async def save_progress(self, tell: Any, *, log_s: float) -> None:
            await asyncio.Event().wait()

    log = ListedEvents()
    with pytest.raises(asyncio.CancelledError):
        async with saved_when_stopped(Slow(), interrupted=asyncio.Event(), timeout_s=0.01, log=log):
            raise asyncio.CancelledError
    assert log.events[-1]["message"].endswith("it takes longer than checkpoint.stop_timeout_s=0.01")


def _taking_no_events(directory: RunDirectory) -> MetricLog:
    """A log whose first event the disk did not take."""
    Path(directory.path(EVENTS)).mkdir(parents=True)
    log = MetricLog([], directory=directory)
    log.event("launched")
    directory.writer._thread.submit(lambda: None).result()
    return log


@pytest.mark.parametrize(
    ("why", "raised"),
    [
        (PreemptedError("its node goes away"), PreemptedError),
        (asyncio.CancelledError(), StorageError),
        (MismatchError("0.5 nats"), MismatchError),
    ],
)
async def test_a_log_that_takes_no_events_does_not_keep_a_run_that_ends_from_its_checkpoint(why, raised, tmp_path):
    """Seen in review: the error of an earlier event came up in place of the save, and in place of the preemption, after which nothing
    started the run again."""

    class Learner(ScriptedLearner):
        async def save_progress(self, tell: Any, *, log_s: float) -> None:
            log.event("checkpoint")
            await log.written()
            await super().save_progress(tell, log_s=log_s)

        async def finish_saving(self) -> None:
            log.event("checkpoint_failed")
            await super().finish_saving()

    learner, directory = Learner(), RunDirectory(str(tmp_path))
    with pytest.raises(raised), _taking_no_events(directory) as log:
        async with (
            noting_the_end(log),
            saved_when_stopped(learner, interrupted=asyncio.Event(), timeout_s=60, log=log),
        ):
            raise why
    assert learner.is_saved or learner.is_finished
    directory.release()


async def test_the_save_of_a_stopped_run_waits_for_its_log_for_a_quarter_of_its_time(monkeypatch):
    waits: list[float] = []

    class Learner(ScriptedLearner):
        async def save_progress(self, tell: Any, *, log_s: float) -> None:
            waits.append(log_s)

    monkeypatch.setattr("time.time", lambda: 1000.0)
    for deadline in (None, 1030.0):
        with pytest.raises(PreemptedError):
            async with saved_when_stopped(Learner(), interrupted=asyncio.Event(), timeout_s=60, log=ListedEvents()):
                raise PreemptedError("its node goes away", deadline=deadline)
    assert waits == [15.0, 7.0]


@pytest.mark.parametrize(
    ("recorded", "saved", "says"),
    [
        (0, (), "stopped before the first step; the same command starts again"),
        (1, (), "there is no checkpoint: the same command learns step 1 again from the record, then goes on"),
        (17, (), "there is no checkpoint: the same command learns steps 1 to 17 again from the record"),
        (17, (5, 10), "the last checkpoint is that of step 10: the same command learns steps 11 to 17 again"),
        (17, (10, 17), "stopped; step 17 is saved, and the same command goes on from there"),
    ],
)
def test_what_the_same_command_will_do_is_said(tmp_path: Path, recorded: int, saved: tuple[int, ...], says: str):
    directory = RunDirectory(str(tmp_path))
    ledger = Ledger(directory)
    for index in range(recorded):
        ledger.append(groups=[index], trajectories="none", trajectories_digest="none")
    for step in saved:
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    for other in (".step-000099.saving", "step-000099.bad"):
        (tmp_path / "checkpoints" / other).mkdir(parents=True)
    assert says in how_it_goes_on(directory)


def test_a_run_directory_that_cannot_be_read_now_does_not_hide_why_the_run_ended(tmp_path: Path):
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "ledger.jsonl").mkdir()
    told = how_it_goes_on(RunDirectory(str(tmp_path)))
    assert told.startswith("stopped; the same command goes on from what it saved, which cannot be read now: ")
