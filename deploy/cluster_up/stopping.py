"""Stops a run on Ctrl-C, SIGTERM, SIGHUP or a callback's order: it saves a checkpoint, ends its actors, and says how to go on."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from cluster.contracts.errors import ClaimLostError, PreemptedError, TreadwheelError
from cluster.controller import Log
from cluster.learner_group import LearnerGroup
from cluster.metrics import step_metrics
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory

T = TypeVar("T")

_ANSWERS = {1: "stopping; a second Ctrl-C skips what takes long", 2: "stopping at once"}
"""Answers to the first signal, and to later ones."""
_ENDING_S = 2.0
"""Part of a draining node's time that is kept for the driver to end."""
_LEAST_S = 5.0
"""Time to save even if the node has less by the driver's clock: the node's own clock, by which it set its end, may be late."""
_LOG_SHARE = 0.25
"""Largest part of the time to save that is spent on waiting for a log that is not durable."""
_TELL_IF_GONE = """trap '' HUP INT TERM; read -r _ || printf '%s\\n' "$0" >&2"""
"""Shell script that reads a pipe from this process. It prints its argument if the pipe closes before it has a line."""


@contextlib.contextmanager
def told_if_gone(message: str) -> Iterator[None]:
    """If this process ends inside the block, another process prints `message`. This process cannot: kill -9 ends it at once, and so does
    Ray's code in it when Ray's processes on this machine or the head are gone."""
    watching = None
    with contextlib.suppress(OSError):  # no memory for another process
        watching = subprocess.Popen(
            ["/bin/sh", "-c", _TELL_IF_GONE, message],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the driver
        )
    try:
        yield
    finally:
        if watching is not None:
            watching.communicate(b"\n")


class Stop:
    """Stops work, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ask: Callable[[], object] | None = None
        self._press: Callable[[], object] | None = None
        self.is_asked = False

    def ask(self) -> None:
        """Stops the work, unless it is stopping already. Work that has not begun yet stops when it begins."""
        with self._lock:
            self.is_asked = True
            if self._ask:
                self._ask()

    def press(self) -> None:
        """As Ctrl-C: a second call also cancels the saving."""
        with self._lock:
            self.is_asked = True
            if self._press:
                self._press()

    @contextlib.contextmanager
    def reaching(self, *, ask: Callable[[], object], press: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self._ask, self._press = ask, press
            if self.is_asked:
                ask()
        try:
            yield
        finally:
            with self._lock:
                self._ask = self._press = None


async def until_interrupted(
    work: Coroutine[Any, Any, T], *, interrupted: asyncio.Event | None = None, stop: Stop | None = None
) -> T:
    """Ctrl-C, SIGTERM, SIGHUP and `stop` cancel the work, which then saves and ends its actors. Raises KeyboardInterrupt then.

    A second signal also cancels the saving. A third has the system's default effect. The first sets `interrupted`, which tells it from a
    cancel by a failure. SIGHUP counts only once, since a closing terminal sends it more than once, and never under nohup. Only the main
    thread receives signals: in another thread only `stop` works.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    hears = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = {number: signal.getsignal(number) for number in hears}
    num_received = 0

    def interrupt() -> None:
        nonlocal num_received
        num_received += 1
        if interrupted is not None:
            interrupted.set()
        if num_received == 2 and before:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        task.cancel()
        with contextlib.suppress(OSError, ValueError):  # the same Ctrl-C may have ended the reader
            print(f"treadwheel: {_ANSWERS[min(num_received, 2)]}", file=sys.stderr, flush=True)

    def ask() -> None:
        if num_received == 0:
            interrupt()

    interrupts = lambda *_: loop.call_soon_threadsafe(interrupt)
    asks = lambda *_: loop.call_soon_threadsafe(ask)
    for number, handler in before.items():
        if number == signal.SIGHUP and handler == signal.SIG_IGN:  # under nohup
            continue
        # Not `loop.add_signal_handler`, which sends signals through a pipe. A forked child shares the pipe until it executes another
        # program: Ctrl-C, which reaches both, would count twice.
        signal.signal(number, asks if number == signal.SIGHUP else interrupts)
    try:
        with stop.reaching(ask=asks, press=interrupts) if stop else contextlib.nullcontext():
            return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.asynccontextmanager
async def saved_when_stopped(
    learner: LearnerGroup, *, interrupted: asyncio.Event, timeout_s: float, log: Log
) -> AsyncIterator[None]:
    """When the block is cancelled or preempted, its learned steps are saved first, within `timeout_s` (0: never) and within the node's
    time, or `_LEAST_S` if that is less. When it fails, the checkpoint that is being written is finished, within the same time.
    From then on the log raises nothing before it is closed: it may be the part that fails.

    `interrupted` is set if a signal cancels the block, and not if a failure outside the block does.
    """
    try:
        yield
    except (asyncio.CancelledError, PreemptedError) as ended:
        log.keep_errors()
        stopped = _preempted_before(ended) or ended
        if isinstance(stopped, PreemptedError) and stopped.deadline is not None:
            timeout_s = min(timeout_s, max(stopped.deadline - time.time() - _ENDING_S, _LEAST_S))
        if timeout_s:
            why = "Ctrl-C again skips it" if interrupted.is_set() else "then ends with what stops it"
            log.event("stopping", message=f"saves a checkpoint, in at most {timeout_s:g} s; {why}")
            # The loop may have been stopped before it could log this step.
            saving = learner.save_progress(
                lambda stats, summaries: log.step(stats.policy_version, step_metrics(summaries, stats)),
                log_s=_LOG_SHARE * timeout_s,
            )
            within = _within(
                timeout_s, saving, log, otherwise="no checkpoint was saved", limit=_limit(stopped, timeout_s)
            )
            try:
                await _through_a_first_signal(within, interrupted=interrupted)
            except asyncio.CancelledError:
                if stopped is ended:
                    raise
        raise stopped from stopped.__cause__
    except ClaimLostError:
        raise
    except TreadwheelError as failed:
        log.keep_errors()
        if timeout_s:
            otherwise = "the checkpoint under way may not be whole"
            within = _within(
                timeout_s, learner.finish_saving(), log, otherwise=otherwise, limit=_limit(failed, timeout_s)
            )
            await _through_a_first_signal(within, interrupted=interrupted)
        raise


def _preempted_before(error: BaseException) -> PreemptedError | None:
    """The preemption behind a cancel: a signal may come while the block still ends because its node drains."""
    group = error.__cause__
    if not isinstance(error, asyncio.CancelledError) or not isinstance(group, BaseExceptionGroup):
        return None
    return next((each for each in group.exceptions if isinstance(each, PreemptedError)), None)


async def _within(timeout_s: float, saving: Coroutine[Any, Any, None], log: Log, *, otherwise: str, limit: str) -> None:
    """If saving fails or takes too long, logs `otherwise` and the reason. `limit`: the time limit in words."""
    try:
        async with asyncio.timeout(timeout_s):
            await saving
    except (TimeoutError, TreadwheelError) as error:
        reason = str(error) or f"it takes longer than {limit}"
        log.event("checkpoint_failed", reason=reason, message=f"{otherwise}: {reason}")


async def _through_a_first_signal(saving: Coroutine[Any, Any, None], *, interrupted: asyncio.Event) -> None:
    """If no signal has come yet, the run ends by its own error: the first signal only sets `interrupted`, and the next cancels only the
    saving. A failure outside the saving cancels saving and run."""
    if interrupted.is_set():
        return await saving
    task, work = asyncio.current_task(), asyncio.ensure_future(saving)
    assert task is not None, "a run is a task"
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        if not interrupted.is_set():
            work.cancel()
            return await work
        task.uncancel()
        try:
            await work
        except asyncio.CancelledError:
            task.uncancel()


def _limit(stopped: BaseException, timeout_s: float) -> str:
    if isinstance(stopped, PreemptedError):
        return f"the {timeout_s:.0f} s that it has"
    return f"checkpoint.stop_timeout_s={timeout_s:g}"


def how_it_goes_on(run_dir: RunDirectory) -> str:
    """A sentence on how the stopped command resumes when it is started again, from the run directory."""
    try:
        recorded = Ledger(run_dir).version
        saved = max(run_dir.checkpoints(), default=0)
    except TreadwheelError as error:
        return f"stopped; the same command goes on from what it saved, which cannot be read now: {error}"
    if recorded == 0:
        return "stopped before the first step; the same command starts again"
    if saved == recorded:
        return f"stopped; step {saved} is saved, and the same command goes on from there"
    again = f"step {recorded}" if saved + 1 == recorded else f"steps {saved + 1} to {recorded}"
    last = f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint"
    return f"stopped; {last}: the same command learns {again} again from the record, then goes on"
