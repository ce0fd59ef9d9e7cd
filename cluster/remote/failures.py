"""Translates Ray's errors into ours: a message for people, and the kind, the actor and the stage for code.

Five results are possible: a deliberate error of ours (raised as it was), `WorkerError` (the actor died, or has a bug), `UnreachableError`
(its node was lost), `DeadlineError`, `LostError` (an argument was lost with its node).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from cluster.contracts.errors import (
    DeadlineError,
    FailureKind,
    LostError,
    TreadwheelError,
    UnreachableError,
    WorkerError,
    headline,
)
from cluster.remote.deaths import how_it_died, where_it_printed

T = TypeVar("T")

_NODE_DIED = "its node has died"
"""Ray gives no other sign of it."""


async def answer_of(
    call: Awaitable[T],
    *,
    actor: str,
    stage: str,
    deadline_s: float | None,
    when_late: Callable[[], Awaitable[str]] | None = None,
    limit: asyncio.Timeout | None = None,
) -> T:
    """The result of a call of `actor`. When the deadline has passed, asks for `when_late` and ends the DeadlineError with it.

    `limit`: the timeout of `deadline_s`, for a caller that may put it off.
    """
    limit = limit or asyncio.timeout(deadline_s)
    with translated(actor, stage):
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            state = f"; {await when_late()}" if when_late else ""
            late = f"{actor} did not finish {stage!r} within {deadline_s:g} s{state}"
            raise DeadlineError(late, actor=actor, stage=stage) from None


@contextlib.contextmanager
def translated(actor: str, stage: str) -> Iterator[None]:
    """Raises our error instead of Ray's, which stays its cause."""
    try:
        yield
    except ObjectLostError as error:  # before the others: a task whose argument is lost raises both
        raise _lost(actor, stage, error) from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TreadwheelError):
            cause.actor, cause.stage = cause.actor or actor, cause.stage or stage
            raise cause from None
        # The actor that made an argument died before its stream ended: Ray takes its items back.
        if isinstance(cause, RayActorError):
            raise _lost(actor, stage, cause) from error
        what = f"{actor} failed in {stage!r}: {type(cause).__name__}: {headline(cause)}"
        raise WorkerError(what, actor=actor, stage=stage, details=str(error)) from error
    except RayActorError as error:
        # A node reports a dead process at once. Without a report the node is lost too, which Ray says only much later.
        if isinstance(error, ActorUnavailableError):
            what = f"{actor} died in {stage!r}: its node does not answer"
            raise UnreachableError(what, actor=actor, stage=stage, details=str(error)) from error
        what = f"{actor} died in {stage!r}: {how_it_died(str(error))}"
        if _NODE_DIED in str(error):
            raise UnreachableError(what, actor=actor, stage=stage, details=str(error)) from error
        details = f"{error}\n{where_it_printed(str(error))}".rstrip()
        raise WorkerError(what, kind=FailureKind.DEATH, actor=actor, stage=stage, details=details) from error
    except RayError as error:
        what = f"{actor} failed in {stage!r}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise WorkerError(what, actor=actor, stage=stage, details=str(error)) from error


def _lost(actor: str, stage: str, error: RayError) -> LostError:
    what = f"{actor}, {stage!r}: its input was lost with the node or actor that held it"
    return LostError(what, actor=actor, stage=stage, details=str(error))
