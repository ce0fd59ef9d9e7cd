"""Takes groups away from a worker: for good, or for other workers to continue."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.contracts.errors import DeadlineError, TreadwheelError, WorkerError
from cluster.remote.actor import RemoteActor
from cluster.rollouts.lanes import Job

Copy = Callable[..., Awaitable[Any]]
"""Takes an object ref and `deadline_s`. Returns an object ref of a copy on the driver's node; None for an object that is None."""

_ABORT_S = 30.0
"""Deadline of the call `abort`. Missing it costs capacity, nothing else."""


async def stop_sampling(actor: RemoteActor | None, jobs: Sequence[Job]) -> bool:
    """Whether the worker confirmed the abort. A worker that does not is dead or hangs, which the stream of its groups will show."""
    with contextlib.suppress(WorkerError, DeadlineError):
        if actor is not None:
            await actor.call("abort", [job.ticket.group_id for job in jobs], deadline_s=_ABORT_S)
            return True
    return False


async def hand_over(actor: RemoteActor, jobs: Sequence[Job], *, copy: Copy, deadline_s: float) -> Mapping[int, Any]:
    """Partial samples of each group by index, on the driver's node. Groups without samples are left out.

    Empty when the worker fails: its groups restart.
    """
    group_ids = [job.ticket.group_id for job in jobs]
    try:
        refs = await actor.call_for_object_refs("hand_over", group_ids, deadline_s=deadline_s)
        sampled = await asyncio.gather(*(copy(ref, deadline_s=deadline_s) for ref in refs))
    except TreadwheelError:
        return {}
    return {job.ticket.index: each for job, each in zip(jobs, sampled, strict=True) if each is not None}
