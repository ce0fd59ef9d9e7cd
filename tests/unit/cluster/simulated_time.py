"""An event loop whose clock jumps to the next timer as soon as nothing else is left to do: hours pass at once, and always alike."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _JumpingClock(selectors.DefaultSelector):
    """What a loop sleeps in: instead of sleeping it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits, and no timer will end it")
        self.now += timeout
        return super().select(0)


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingClock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def compute(self, seconds: float) -> None:
        self._clock.now += seconds


def pass_time(seconds: float) -> None:
    """Takes so long without a wait, as computing does. Inside a simulated loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _SimulatedLoop)
    loop.compute(seconds)


def run_simulated(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end from second 0 on. RuntimeError when it waits for what can never come."""
    with asyncio.Runner(loop_factory=_SimulatedLoop) as runner:
        runner.run(work)


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test whose waits take no time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_simulated(test(*args, **kwargs))

    return run
