"""Deals tickets to workers by their free places, and follows each group to its destination.

Each group goes from a worker to the reward service and on to its destination. Only object refs and rewards pass through the dispatcher,
never trajectories. When a worker fails, its unfinished tickets return to the queue. Training and evaluation share one queue; evaluations go
first.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

from cluster.contracts.errors import (
    DataError,
    DeadlineError,
    FailureKind,
    LostError,
    WeightsError,
    WorkerError,
    failure_of_its_actor,
)
from cluster.contracts.protocols import Events
from cluster.contracts.types import Group, Refusal, Ticket
from cluster.remote.actor import RemoteActor
from cluster.rollouts.destinations import HeldOutGroups, Training
from cluster.rollouts.giving_up import Copy, hand_over, stop_sampling
from cluster.rollouts.judging import Judging
from cluster.rollouts.lanes import ByIndex, Dealing, Job, Lane, SamplingClock, ToFreePlaces
from cluster.rollouts.quarantine import Suspects, may_be_their_doing
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.worker_pool import Member, WorkerPool

_PAUSE = 50
"""Pause after a dealing, as a multiple of its duration: dealings take a fiftieth of the driver's time."""
_LONGEST_PAUSE_S = 0.05


class Dispatcher:
    """Keeps the workers' places filled."""

    def __init__(
        self,
        *,
        fleet: WorkerPool,
        scorers: Scorers,
        suspects: Suspects,
        events: Events,
        tasks: asyncio.TaskGroup,
        max_sequences_per_worker: int,
        sequences_per_group: int,
        timeout_s: float,
        is_deterministic: bool = False,
        note_work: Callable[..., None] = lambda *works: None,
    ) -> None:
        """`timeout_s` bounds the wait for a worker's next group. In a deterministic run a ticket's index alone decides its worker.
        `note_work` is called with the kinds of work in progress, as `Timesheet.note_work`."""
        self._fleet = fleet
        self._suspects = suspects
        self._events = events
        self._tasks = tasks
        self._max_sequences = max_sequences_per_worker
        self._timeout_s = timeout_s
        self._is_deterministic = is_deterministic
        self._dealing: Dealing = (
            ByIndex(suspects, num_workers=fleet.num_wanted)
            if is_deterministic
            else ToFreePlaces(suspects, sequences_per_group=sequences_per_group)
        )
        self._training: Training | None = None
        self._num_fetching = 0
        self._queue: list[Job] = []
        self._judging = Judging(scorers=scorers, tasks=tasks, lost=self._lost_in_judging, wake=self.wake)
        self._lanes: dict[Member, Lane] = {}
        self._clock = SamplingClock()
        self._note_work = note_work
        self._num_aborted = 0
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        """Wakes evaluations that wait. `_wake` wakes `run`."""
        fleet.subscribe(self.wake)

    def wake(self) -> None:
        """Something changed: a worker or a place is free, or groups may start."""
        self._wake.set()
        self._moved.set()

    async def run(self) -> None:
        """Deals until it is cancelled.

        Each dealing looks at the whole fleet, so changes within the pause after it are handled together in the next one. A deterministic
        run makes no pause: which groups are sampled together must not depend on how long a dealing took.
        """
        now = asyncio.get_running_loop().time
        next_at = 0.0
        while True:
            await self._wake.wait()
            if (pause_s := next_at - now()) > 0:
                await asyncio.sleep(pause_s)
            began = now()
            lanes = self._serving_lanes()
            while self._deal(lanes):  # its jobs, and dropped ones, may leave places for new groups
                pass
            self._note_sampling()
            self._wake.clear()  # the dealing set it too, and left nothing that could start now
            if not self._is_deterministic:
                next_at = now() + min((now() - began) * _PAUSE, _LONGEST_PAUSE_S)

    @contextlib.asynccontextmanager
    async def generating(self, training: Training) -> AsyncIterator[None]:
        """While this is open, every group that the buffer lets start is under way."""
        self._training = training
        training.buffer.subscribe(self._buffer_changed)
        self.wake()
        try:
            yield
        finally:
            self._training = None

    def sample_again(self, indices: Collection[int]) -> None:
        """Restarts groups that were lost with a node after they were taken, under the current weights."""
        assert self._training is not None, "groups are lost while generating"
        self._fetch(indices, self._training)

    async def evaluate(
        self, tickets: Sequence[Ticket], *, stall_s: float, goes_on: Callable[[], bool]
    ) -> HeldOutGroups:
        """Samples and judges held-out tickets. Returns when each is judged or dropped.

        When for `stall_s` no worker comes and no group, held out or not, is sampled, judged or dropped, asks `goes_on` and raises
        DeadlineError if that is false.
        """
        held_out = HeldOutGroups(len(tickets))
        self._enqueue([Job(ticket=ticket, destination=held_out) for ticket in tickets])
        with self._clock.standing():
            while held_out.num_open:
                self._moved.clear()
                try:
                    async with asyncio.timeout(stall_s):
                        await self._moved.wait()
                except TimeoutError:
                    if goes_on():
                        continue
                    raise DeadlineError(
                        f"the evaluation waits for {held_out.num_open} of {len(tickets)} groups; nothing moved for {stall_s:g} s"
                    ) from None
        return held_out

    # Groups that wait for the learner

    def waiting(self) -> dict[int, Group]:
        """Sampled groups that the learner has not taken, by index, including those being judged."""
        ready = self._training.buffer.ready() if self._training else {}
        return self._judging.groups() | ready

    def move(self, index: int, copies: Mapping[Any, Any]) -> bool:
        """Replaces objects of a waiting group by their `copies`. False when the group no longer waits."""
        is_ready = self._training is not None and self._training.buffer.move(index, copies)
        return is_ready or self._judging.move(index, copies)

    async def hand_over(self, actor: RemoteActor, *, copy: Copy, deadline_s: float) -> list[int]:
        """The leaving worker gives up its unfinished groups. Returns the indices of those that other workers continue; the rest restart."""
        lane = next((lane for lane in self._lanes.values() if lane.member.actor is actor and lane.under_way), None)
        if lane is None:
            return []
        handing_over = hand_over(actor, [*lane.under_way.values()], copy=copy, deadline_s=deadline_s)
        return sorted(await lane.hand_over(handing_over))

    def drain_stats(self) -> dict[str, float]:
        """Since the last call, without evaluations: seconds with a group under way, tokens per second, surplus trajectories, idle share."""
        num_tokens, seconds, idle_share = self._clock.drain()
        num_aborted, self._num_aborted = self._num_aborted, 0
        return {
            "time/sampling_s": seconds,
            "speed/sampling_tokens_per_s": num_tokens / seconds if seconds else 0.0,
            "rollout/num_aborted": float(num_aborted),
            "rollout/idle_share": idle_share,
        }

    # New groups

    def _start_groups(self, lanes: Sequence[Lane]) -> None:
        if self._training is None:
            return
        limit = self._dealing.num_wanted(self._queue, lanes, num_fetching=self._num_fetching)
        if limit > 0 and (indices := self._training.buffer.start(limit)):
            self._fetch(indices, self._training)

    def _fetch(self, indices: Collection[int], training: Training) -> None:
        wanted, version = sorted(indices), training.buffer.version
        if (tickets := training.office.made_ahead(wanted, policy_version=version)) is not None:
            return self._enqueue([Job(ticket=ticket, destination=training.destination) for ticket in tickets])
        self._num_fetching += len(wanted)
        self._tasks.create_task(self._fetch_tickets(wanted, training))

    async def _fetch_tickets(self, indices: Sequence[int], training: Training) -> None:
        tickets = await training.office.tickets(indices, policy_version=training.buffer.version)
        self._num_fetching -= len(indices)
        jobs = [Job(ticket=ticket, destination=training.destination) for ticket in tickets]
        for job in jobs:
            if not job.is_wanted:
                self._note_straggler(job)
        self._enqueue(jobs)

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not job.is_wanted:
                job.drop("straggler")  # it was dropped while it was fetched, or stopped at its worker
            else:
                self._queue.append(job)
        self._queue.sort(key=lambda job: job.ticket.place)
        self.wake()

    def _drop_guilty(self) -> bool:
        """Drops queued jobs whose prompts are proven guilty. Returns whether there were any."""
        if not self._suspects.knows_guilty:
            return False
        guilty = [job for job in self._queue if self._suspects.is_guilty(job.ticket)]
        for job in guilty:
            self._queue.remove(job)
            job.drop("quarantined")
            self.wake()
        return bool(guilty)

    # Dealing

    def _deal(self, lanes: Sequence[Lane]) -> bool:
        """Whether any job was started or dropped."""
        self._start_groups(lanes)
        dropped = self._drop_guilty()
        dealt = self._dealing.deal(self._queue, lanes, num_fetching=self._num_fetching)
        if started := {job for _, jobs in dealt for job in jobs}:
            self._queue = [job for job in self._queue if job not in started]
        for lane, jobs in dealt:
            self._start(lane, jobs)
        return dropped or bool(dealt)

    def _start(self, lane: Lane, jobs: Sequence[Job]) -> None:
        actor = lane.member.actor
        assert actor is not None, "a worker that serves has an actor"
        alone = self._suspects.has(jobs[0].ticket)  # suspects are dealt one by one
        lane.take(jobs)
        self._tasks.create_task(self._sample(lane, actor, jobs, alone=alone))

    def _serving_lanes(self) -> list[Lane]:
        serving = self._fleet.serving()
        busy = {member: lane for member, lane in self._lanes.items() if lane.under_way}  # leaving workers too
        known = self._lanes
        self._lanes = busy | {
            member: known.get(member) or Lane(member, max_sequences=self._max_sequences) for member in serving
        }
        return [self._lanes[member] for member in serving]

    # Sampling

    async def _sample(self, lane: Lane, actor: RemoteActor, jobs: Sequence[Job], *, alone: bool) -> None:
        keeps_sampled = True
        with lane.member.in_use():
            while True:
                try:
                    await self._stream(lane, actor, jobs)
                    break
                except LostError as error:
                    keeps_sampled = False  # the lost object may be a hand-over
                    left = lane.left_of(jobs)
                    self._note_lost(left, error)
                    await stop_sampling(actor, left)
                    if self._is_deterministic and left:
                        continue
                    break
                except (WorkerError, DeadlineError, DataError, WeightsError) as error:
                    keeps_sampled = not isinstance(error, DataError)
                    failure = failure_of_its_actor(error)  # it broke the schema, or refuses to serve
                    left = [job.ticket for job in lane.left_of(jobs) if job.is_wanted]
                    # A leaving worker's end was announced by its node.
                    is_nodes_end = lane.member.is_leaving and error.kind is FailureKind.DEATH
                    if not is_nodes_end and may_be_their_doing(error, given_up=lane.member.place.failure_of(actor)):
                        self._suspects.blame(left, failure, alone=alone)
                    if self._is_deterministic and left and not alone and not self._suspects.any_of(left):
                        # Which groups are sampled together must not depend on when a worker failed: repeat the whole call.
                        actor = await self._fleet.replaced(lane.member, actor, failure)
                        continue
                    self._fleet.replace(actor, failure)
                    break
            sampled = await lane.handed_over()
        left = lane.pop_all(jobs)
        self._enqueue(
            [job.again(sampled.get(job.ticket.index, job.sampled if keeps_sampled else None)) for job in left]
        )

    async def _stream(self, lane: Lane, actor: RemoteActor, jobs: Sequence[Job]) -> None:
        """Passes each finished group on to judging."""
        tickets = [job.ticket for job in jobs]
        sampled = [job.sampled for job in jobs] if any(job.sampled is not None for job in jobs) else []
        async for summary, object_ref in actor.stream_batches(
            "generate", tickets, *sampled, num_items=len(tickets), deadline_s=self._timeout_s
        ):
            job = lane.pop(int(summary.group_id))
            if job is None:  # finished by an earlier attempt of this call, or given up
                continue
            lane.member.place.note_success()
            if isinstance(summary, Refusal):
                self._suspects.quarantine(job.ticket, reason=summary.reason)
                self._drop(job, "refused")
            elif not job.is_wanted:
                self._drop(job, "straggler")
            else:
                self._suspects.absolve(job.ticket)
                self._clock.count(summary.num_tokens)
                self._num_aborted += job.ticket.num_extra_trajectories
                job.destination.hold(job.ticket, summary.size_bytes)
                self._judging.start(job, Group(pieces=(object_ref,), summary=summary))
                del object_ref  # else it is held until the next one comes, even after it is learned
            self.wake()

    def _drop(self, job: Job, why: str) -> None:
        """At once, because a group that is in no place could become a straggler without an event."""
        try:
            job.drop(why)
        except DataError as error:  # it ends the run, and must not count as the worker's failure
            self._tasks.create_task(_raised(error))

    def _lost_in_judging(self, job: Job, error: LostError) -> None:
        self._note_lost([job], error)
        self._enqueue([job.again()])

    def _note_lost(self, jobs: Sequence[Job], error: LostError) -> None:
        self._events.event("groups_lost", groups=[job.ticket.index for job in jobs], reason=str(error))

    # Stragglers

    def _buffer_changed(self) -> None:
        # Stragglers are given up at the moment the buffer drops them, before any is reported.
        self._give_up_stragglers()
        self.wake()

    def _give_up_stragglers(self) -> None:
        """Removes stragglers from the queue and aborts their sampling. Those being judged are judged to the end, and hold their bytes."""
        if self._training is None or not (late := self._training.buffer.drain_stragglers()):
            return
        queued = {job.ticket.index: job for job in self._queue}
        for index in late:
            lane = next((lane for lane in self._lanes.values() if index in lane.under_way), None)
            job = queued.get(index) or self._judging.job(index) or (lane.under_way[index] if lane else None)
            if job is None:  # its ticket is still being fetched
                continue
            self._note_straggler(job)
            if index in queued:
                self._queue.remove(job)
                job.drop("straggler")
            elif lane is not None:
                self._tasks.create_task(self._abort(lane, job))

    def _note_straggler(self, job: Job) -> None:
        ticket = job.ticket
        self._events.event("drop", group_id=ticket.group_id, prompt_id=ticket.prompt.prompt_id, reason="straggler")

    async def _abort(self, lane: Lane, job: Job) -> None:
        is_heard = await stop_sampling(lane.member.actor, [job])
        # Otherwise it keeps its place until its stream ends, or a worker that hangs would get group after group.
        if is_heard and lane.pop(job.ticket.index) is job:
            job.drop("straggler")

    def _note_sampling(self) -> None:
        self._clock.note(self._lanes.values())
        works = {
            "sampling": any(lane.under_way for lane in self._lanes.values()),
            "judging": self._judging.is_any,
            "fetching": bool(self._num_fetching),
        }
        self._note_work(*(work for work, is_done in works.items() if is_done))


async def _raised(error: Exception) -> None:
    raise error
