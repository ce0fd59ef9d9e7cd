"""Real sockets under a simulated clock: deadlines and pauses of clients and servers in one event loop take no time, and a slow machine
cannot miss them.

As `tests.unit.cluster.simulated_time`, where nothing has sockets. The clock jumps to the next timer when nothing is left to do. Both ends
of a connection are in this process, so a message that was sent is there, or will be in a moment.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

_MOMENT_S = 0.02
"""A busy kernel delivers a message later than it takes it."""
_MOST_READS = 1_000_000
"""How often the clock is read at one moment: a test does it thousands of times."""
_CLOCKS = ("actors.http.time", "actors.reward_service.deadline.time")
"""Modules that read the machine's clock."""


class _JumpingClock(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self._now, self._num_reads = 1000.0, 0

    def time(self) -> float:
        self._num_reads += 1
        if self._num_reads > _MOST_READS:
            raise RuntimeError("something is tried again and again without a pause")
        return self._now

    def select(self, timeout: float | None = None) -> list[Any]:
        if (ready := super().select(0)) or (timeout is not None and timeout <= 0):
            return ready
        if not (ready := super().select(_MOMENT_S)):
            if timeout is None:
                raise RuntimeError("everything waits, and neither a timer nor a message will end it")
            self._now, self._num_reads = self._now + timeout, 0
        return ready


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingClock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.time()


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test whose waits take no time. It reads the clock as `asyncio.get_running_loop().time()`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=_SimulatedLoop) as runner, pytest.MonkeyPatch.context() as patched:
            for clock in _CLOCKS:
                patched.setattr(clock, SimpleNamespace(monotonic=runner.get_loop().time))
            runner.run(test(*args, **kwargs))

    return run
