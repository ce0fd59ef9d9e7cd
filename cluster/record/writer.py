"""Disk work off the event loop: one thread makes the calls, in their order."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial


class Writer:
    """Makes calls without a wait. The next `put`, `put_latest` or `flush` raises the first error of a call; later calls are still made."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = _one_thread()
        self._putting = threading.Lock()
        self._latest: dict[str, Callable[[], None]] = {}
        self._error: BaseException | None = None
        self._keeps_errors = False
        self._lock = threading.Lock()
        self._clock = clock
        self._began: float | None = None
        """Begin of the call that is being made; None between two calls."""
        self._told: float | None = None
        """Begin of the last call that `drain_silence` returned."""

    def put(self, call: Callable[[], None]) -> None:
        """Returns at once; `call` is made after all that were put before, also when their error is raised."""
        error = self._taken_error()
        self._submit(partial(self._make, call)).add_done_callback(self._note_error)
        _raise(error)

    def put_latest(self, name: str, call: Callable[[], None]) -> None:
        """As `put`, for a file that each call writes anew: replaces a call of the same name that is not made yet."""
        with self._lock:
            is_waiting = name in self._latest
            self._latest[name] = call
        if is_waiting:
            _raise(self._taken_error())
        else:
            self.put(lambda: self._make_latest(name))

    def flush(self) -> None:
        """Returns when all calls are made."""
        self._submit(lambda: None).result()
        _raise(self._taken_error())

    def keep_errors(self) -> None:
        """From now on only `finish` raises the first error of a call, also one of an earlier call."""
        self._keeps_errors = True

    def finish(self) -> None:
        """As `flush`, ends the thread, and also raises an error that was kept. Later calls may still be put: they start a thread."""
        self._submit(lambda: None).result()
        with self._putting:
            self._thread.shutdown()
            self._thread = _one_thread()
        with self._lock:
            error, self._error = self._error, None
        _raise(error)

    def drain_silence(self, *, longer_than_s: float) -> float | None:
        """Seconds that the call which is being made has taken, if they are more than `longer_than_s`; only once for each call. Touches no
        disk."""
        began = self._began
        if began is None or began == self._told or self._clock() - began <= longer_than_s:
            return None
        self._told = began
        return self._clock() - began

    def _submit(self, call: Callable[[], None]) -> "Future[None]":
        with self._putting:
            return self._thread.submit(call)

    def _make(self, call: Callable[[], None]) -> None:
        self._began = self._clock()
        try:
            call()
        finally:
            self._began = None

    def _make_latest(self, name: str) -> None:
        with self._lock:
            call = self._latest.pop(name)
        call()

    def _note_error(self, done: "Future[None]") -> None:
        """Runs in the writer's thread, or in that of a `put` whose call was made at once. Keeps the first error."""
        error = done.exception()
        with self._lock:
            self._error = self._error or error

    def _taken_error(self) -> BaseException | None:
        with self._lock:
            if self._keeps_errors:
                return None
            error, self._error = self._error, None
        return error


def _one_thread() -> ThreadPoolExecutor:
    """The thread starts with the first call."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
