"""The deadline of the running judge's verdict, for its clients: they can give up in time and report why."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class _Judgement:
    began: float
    ends_at: float
    is_answered: bool = False
    """The judge has received an answer from a server."""


_judgement: ContextVar[_Judgement | None] = ContextVar("judgement", default=None)


@contextmanager
def verdict_within(seconds: float) -> Iterator[None]:
    """Sets the deadline, also for tasks that start inside. An inner deadline never extends an outer one."""
    left_s, now = remaining_s(), time.monotonic()
    token = _judgement.set(_Judgement(now, now + (seconds if left_s is None else min(seconds, left_s))))
    try:
        yield
    finally:
        _judgement.reset(token)


def remaining_s() -> float | None:
    """None outside a judge's call."""
    judgement = _judgement.get()
    return None if judgement is None else max(0.0, judgement.ends_at - time.monotonic())


def note_answer() -> None:
    if judgement := _judgement.get():
        judgement.is_answered = True


def is_late() -> bool:
    """Whether the judge has received an answer and has less than half of its time left: then the judge may be slow, not the server."""
    judgement = _judgement.get()
    return (
        judgement is not None and judgement.is_answered and 2 * time.monotonic() > judgement.began + judgement.ends_at
    )
