"""Waits of tests: for a condition, however busy the machine is, and no longer than the process lives that is to bring it about."""

import time
from collections.abc import Callable
from typing import Any, Protocol


class Watched(Protocol):
    """What a test waits beside."""

    def assert_runs(self) -> None: ...

    @property
    def last_words(self) -> str:
        """What a failed wait shows."""
        ...


def until(condition: Callable[[], Any], *, process: Watched | None = None) -> None:
    """Polls finely: moments such as `while a checkpoint is written` are short. Takes no more than a fifth of a core for it, but never
    pauses for more than a second: where the machine stood still while it asked, four times as long would miss the moment.

    The deadline is for conditions that never come true: a busy machine needs a multiple of what a quiet one does.
    """
    deadline = time.monotonic() + 500.0
    while True:
        asked = time.monotonic()
        if condition():
            return
        assert asked < deadline, f"the condition never came true:\n{process.last_words if process else ''}"
        if process is not None:
            try:
                process.assert_runs()
            except AssertionError:
                if condition():  # it came true after it was asked, and the process ended well
                    return
                raise
        time.sleep(min(1.0, max(0.005, 4 * (time.monotonic() - asked))))
