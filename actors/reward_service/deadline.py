"""When the judge that runs now must have its verdict: what it calls can give up in time, and say why."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ends_at: ContextVar[float | None] = ContextVar("ends_at", default=None)


@contextmanager
def verdict_within(seconds: float) -> Iterator[None]:
    """The tasks that start inside have the same deadline. An inner one never lengthens an outer one."""
    left_s = remaining_s()
    token = _ends_at.set(time.monotonic() + (seconds if left_s is None else min(seconds, left_s)))
    try:
        yield
    finally:
        _ends_at.reset(token)


def remaining_s() -> float | None:
    """None outside a judge's call."""
    ends_at = _ends_at.get()
    return None if ends_at is None else max(0.0, ends_at - time.monotonic())
