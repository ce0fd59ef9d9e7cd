"""Ends a run when a node that it cannot do without announces its end: the driver's, or the node of a learner rank."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from cluster.contracts.errors import ClaimLostError, PreemptedError, TreadwheelError
from cluster.controller import Log
from cluster.remote.actor import RemoteActor
from cluster.remote.nodes import draining_nodes, drivers_node
from cluster.rollouts.departures import notice_of
from cluster.supervision.tasks import background

_LOOK_S = 1.0
"""Seconds between two questions to Ray's head node."""


@contextlib.asynccontextmanager
async def ended_by_notices(ranks: Callable[[], Sequence[RemoteActor]], *, log: Log) -> AsyncIterator[None]:
    """If the node of the driver or of one of the learner's `ranks` announces its end, the block is cancelled and PreemptedError raised."""

    async def look() -> None:
        check_notices(await draining_nodes(), ranks(), log=log)

    async with background() as tasks:
        tasks.create_task(every(_LOOK_S, look, log=log))
        yield


def check_notices(draining: Mapping[str, float | None], ranks: Sequence[RemoteActor], *, log: Log) -> None:
    """Raises PreemptedError, and logs it, if the node of the driver or of one of the learner's `ranks` is among the `draining` nodes.
    `draining` as from `draining_nodes`."""
    driver = drivers_node()
    for node_id in {driver, *(rank.node_id for rank in ranks)} & draining.keys():
        owner, deadline = "the driver's" if node_id == driver else "a learner's", draining[node_id]
        left_s, notice = notice_of(node_id, deadline, now=time.time())
        message = f"{owner} {notice}"
        # An earlier event that the disk did not take must not come up in place of the preemption.
        log.keep_errors()
        log.event("preempted", node_id=node_id, deadline=deadline, seconds_left=left_s, message=message)
        raise PreemptedError(message, deadline=deadline)


async def every(seconds: float, look: Callable[[], Awaitable[None]], *, log: Log) -> None:
    """Looks again and again, as `tried`."""
    while True:
        await asyncio.sleep(seconds)
        await tried(look, log=log)


async def tried(look: Callable[[], Awaitable[None]], *, log: Log) -> None:
    """Logs an error of `look`, and raises only those that end the run."""
    try:
        await look()
    except (PreemptedError, ClaimLostError):
        raise
    except TreadwheelError as error:  # the next look tries again: the run does not depend on it
        log.event("steering_failed", reason=f"{type(error).__name__}: {error}")
