"""When the judge that runs now must have its verdict: what it calls can give up in time, and say why."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_span: ContextVar[tuple[float, float] | None] = ContextVar("span", default=None)
"""When the judgement began, and when it ends."""


@contextmanager
def verdict_within(seconds: float) -> Iterator[None]:
    """The tasks that start inside have the same deadline. An inner one never lengthens an outer one."""
    left_s = remaining_s()
    now = time.monotonic()
    token = _span.set((now, now + (seconds if left_s is None else min(seconds, left_s))))
    try:
        yield
    finally:
        _span.reset(token)


def remaining_s() -> float | None:
    """None outside a judge's call."""
    span = _span.get()
    return None if span is None else max(0.0, span[1] - time.monotonic())


def is_late() -> bool:
    """Whether over half of its time has passed: what has no answer by its end may be no slower than what came before."""
    span = _span.get()
    return span is not None and time.monotonic() > sum(span) / 2
