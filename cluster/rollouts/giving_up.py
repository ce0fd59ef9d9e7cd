"""Groups that a worker gives up: for good, or for other workers to go on with."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.contracts.errors import DeadlineError, TreadwheelError, WorkerError
from cluster.remote.actor import RemoteActor
from cluster.rollouts.lanes import Job

Copy = Callable[..., Awaitable[Any]]
"""Takes an object ref and `deadline_s`; a copy on the driver's node, None of a None."""

_ABORT_S = 30.0
"""Deadline for a worker to hear that groups are given up. Missing it costs capacity, nothing else."""


async def stop_sampling(actor: RemoteActor | None, jobs: Sequence[Job]) -> bool:
    """Whether the worker heard it. One that does not is dead or hangs: the stream of its groups finds out."""
    with contextlib.suppress(WorkerError, DeadlineError):
        if actor is not None:
            await actor.call("abort", [job.ticket.group_id for job in jobs], deadline_s=_ABORT_S)
            return True
    return False


async def hand_over(actor: RemoteActor, jobs: Sequence[Job], *, copy: Copy, deadline_s: float) -> Mapping[int, Any]:
    """What the worker sampled of each group, by index, on the driver's node; without the groups of which it has nothing.

    Empty where the worker fails meanwhile: its groups begin anew.
    """
    group_ids = [job.ticket.group_id for job in jobs]
    try:
        refs = await actor.call_for_object_refs("hand_over", group_ids, deadline_s=deadline_s)
        sampled = await asyncio.gather(*(copy(ref, deadline_s=deadline_s) for ref in refs))
    except TreadwheelError:
        return {}
    return {job.ticket.index: each for job, each in zip(jobs, sampled, strict=True) if each is not None}
