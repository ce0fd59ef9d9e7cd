"""The jobs of each worker, and how jobs are dealt to free places."""

import asyncio
import contextlib
import heapq
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.contracts.types import Ticket
from cluster.rollouts.destinations import Destination
from cluster.rollouts.quarantine import Suspects
from cluster.rollouts.worker_pool import Member


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One attempt to finish a group."""

    ticket: Ticket
    destination: Destination
    sampled: Any = None
    """Object ref of the partial samples of a worker that left. None: nothing to continue."""

    @property
    def num_sequences(self) -> int:
        return self.ticket.num_trajectories + self.ticket.num_extra_trajectories

    @property
    def is_wanted(self) -> bool:
        return self.destination.wants(self.ticket)

    def again(self, sampled: Any = None) -> "Job":
        """The next attempt. It continues the partial samples `sampled`, if there are any."""
        return Job(ticket=self.ticket, destination=self.destination, sampled=sampled)

    def drop(self, why: str) -> None:
        self.destination.drop(self.ticket, why=why)


class Lane:
    """One worker's jobs."""

    def __init__(self, member: Member, *, max_sequences: int) -> None:
        self.member = member
        self.under_way: dict[int, Job] = {}
        self.num_sequences = 0
        self._max_sequences = max_sequences
        self._handed_over: asyncio.Future[Mapping[int, Any]] | None = None

    @property
    def num_free(self) -> int:
        """Free places for sequences. A group starts when one place is free, even if it needs more, so that no place stays empty."""
        return max(self._max_sequences - self.num_sequences, 0)

    def take(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.under_way[job.ticket.index] = job
            self.num_sequences += job.num_sequences
        self.member.num_groups = len(self.under_way)

    def pop(self, index: int) -> Job | None:
        """Removes the job and returns it, for the caller to report. None when it was not under way here."""
        job = self.under_way.pop(index, None)
        if job is not None:
            self.num_sequences -= job.num_sequences
            self.member.num_groups = len(self.under_way)
        return job

    async def hand_over(self, handing_over: Coroutine[Any, Any, Mapping[int, Any]]) -> Mapping[int, Any]:
        """Runs the hand-over of a leaving worker's groups; returns their partial samples by index, as `handed_over` does."""
        self._handed_over = asyncio.ensure_future(handing_over)
        return await self._handed_over

    async def handed_over(self) -> Mapping[int, Any]:
        """Empty while the worker keeps its groups."""
        return await asyncio.shield(self._handed_over) if self._handed_over else {}

    def left_of(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of `jobs` that are still under way."""
        return [job for job in jobs if self.under_way.get(job.ticket.index) is job]

    def pop_all(self, jobs: Sequence[Job]) -> list[Job]:
        left = self.left_of(jobs)
        for job in left:
            self.pop(job.ticket.index)
        return left


class Dealing(Protocol):
    """Decides which worker samples which job. `lanes` are those of the serving workers, and are not changed.

    `num_fetching`: groups that have started and are not in the queue yet.
    """

    def num_wanted(self, queue: Sequence[Job], lanes: Sequence[Lane], *, num_fetching: int) -> int:
        """New groups that the workers have places for."""
        ...

    def deal(
        self, queue: Sequence[Job], lanes: Sequence[Lane], *, num_fetching: int
    ) -> list[tuple[Lane, Sequence[Job]]]:
        """Jobs of the queue that start now, and their lanes."""
        ...


class ToFreePlaces:
    """Deals each job to the worker with the most free places. One worker tries the suspects while the others go on."""

    def __init__(self, suspects: Suspects, *, sequences_per_group: int) -> None:
        self._suspects = suspects
        self._sequences_per_group = sequences_per_group
        self._quarantine: Lane | None = None
        """It samples only suspects, one by one."""

    def num_wanted(self, queue: Sequence[Job], lanes: Sequence[Lane], *, num_fetching: int) -> int:
        self._end_trials(queue, lanes)
        free = sum(lane.num_free for lane in lanes if lane is not self._quarantine)
        # Suspects that wait for their trial take no place of these lanes.
        return -(-free // self._sequences_per_group) - len(self._parted(queue)[1]) - num_fetching

    def deal(
        self, queue: Sequence[Job], lanes: Sequence[Lane], *, num_fetching: int
    ) -> list[tuple[Lane, Sequence[Job]]]:
        suspects, innocent = self._parted(queue)
        trial = self._trial(suspects, lanes)
        return [*trial, *by_free_places(innocent, [lane for lane in lanes if lane is not self._quarantine])]

    def _parted(self, queue: Sequence[Job]) -> tuple[Sequence[Job], Sequence[Job]]:
        """(suspects, innocents). Returns early without suspects: an evaluation queues thousands of jobs, and few runs have any."""
        if not self._suspects.any_of(job.ticket for job in queue):
            return (), queue
        suspects = {job for job in queue if self._suspects.has(job.ticket)}
        return [job for job in queue if job in suspects], [job for job in queue if job not in suspects]

    def _trial(self, suspects: Sequence[Job], lanes: Sequence[Lane]) -> list[tuple[Lane, Sequence[Job]]]:
        """One suspect at a time, on the worker that had the least to do when the first one came."""
        self._end_trials(suspects, lanes)
        if self._quarantine is None and suspects and lanes:
            self._quarantine = min(lanes, key=lambda lane: lane.num_sequences)
        if self._quarantine is None or self._quarantine.under_way:
            return []
        return [(self._quarantine, suspects[:1])]

    def _end_trials(self, queue: Sequence[Job], lanes: Sequence[Lane]) -> None:
        """Forgets the worker that tries suspects if it is gone or none are left. Called before places are counted, to count its own."""
        kept = self._quarantine
        is_over = kept and not kept.under_way and not self._suspects.any_of(job.ticket for job in queue)
        if kept not in lanes or is_over:
            self._quarantine = None


class ByIndex:
    """A ticket's index alone decides its worker, so that timing does not decide which groups are sampled together."""

    def __init__(self, suspects: Suspects, *, num_workers: int) -> None:
        self._suspects = suspects
        self._num_workers = num_workers

    def num_wanted(self, queue: Sequence[Job], lanes: Sequence[Lane], *, num_fetching: int) -> int:
        """No limit, or no group."""
        if not self._is_complete(lanes) or num_fetching or self._suspects.any_of(job.ticket for job in queue):
            return 0
        return 2**31

    def deal(
        self, queue: Sequence[Job], lanes: Sequence[Lane], *, num_fetching: int
    ) -> list[tuple[Lane, Sequence[Job]]]:
        if not queue or not self._is_complete(lanes) or num_fetching:
            return []
        if self._suspects.has(queue[0].ticket):
            is_idle = not any(lane.under_way for lane in lanes)
            return [(lanes[queue[0].ticket.index % len(lanes)], queue[:1])] if is_idle else []
        if self._suspects.any_of(job.ticket for lane in lanes for job in lane.under_way.values()):
            return []
        shares: dict[int, list[Job]] = {}
        for job in queue:
            if not self._suspects.has(job.ticket):
                shares.setdefault(job.ticket.index % len(lanes), []).append(job)
        return [(lanes[place], share) for place, share in sorted(shares.items())]

    def _is_complete(self, lanes: Sequence[Lane]) -> bool:
        return len(lanes) >= self._num_workers


def by_free_places(jobs: Sequence[Job], lanes: Sequence[Lane]) -> list[tuple[Lane, Sequence[Job]]]:
    """Gives each job in turn to the lane with the most free places, while any lane has one."""
    if not jobs:
        return []
    heap = [(-lane.num_free, place) for place, lane in enumerate(lanes) if lane.num_free > 0]
    heapq.heapify(heap)
    shares: dict[int, list[Job]] = {}
    for job in jobs:
        if not heap:
            break
        minus_free, place = heapq.heappop(heap)
        shares.setdefault(place, []).append(job)
        if minus_free + job.num_sequences < 0:
            heapq.heappush(heap, (minus_free + job.num_sequences, place))
    return [(lanes[place], share) for place, share in sorted(shares.items())]


class SamplingClock:
    """Measures seconds with at least one group under way, sampled tokens, and idle time of the serving workers."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._seconds = 0.0
        self._idle_s = 0.0
        self._serving_s = 0.0
        self._lanes: tuple[bool, int, int] = (False, 0, 0)
        self._since = 0.0
        self._stands = False

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Stops the clock while it is open: an evaluation is not part of a step."""
        self._pass(self._lanes)
        self._stands = True
        try:
            yield
        finally:
            self._pass(self._lanes)
            self._stands = False

    def count(self, num_tokens: int) -> None:
        self._num_tokens += 0 if self._stands else num_tokens

    def note(self, lanes: Collection[Lane]) -> None:
        """Counts time by the present state of `lanes` until the next call."""
        serving = [lane for lane in lanes if lane.member.is_serving]
        num_idle = sum(not lane.under_way for lane in serving)
        self._pass((any(lane.under_way for lane in lanes), num_idle, len(serving)))

    def drain(self) -> tuple[int, float, float]:
        """(tokens, seconds, idle share of the serving workers) since the last call."""
        self._pass(self._lanes)
        idle_share = self._idle_s / self._serving_s if self._serving_s else 0.0
        drained = self._num_tokens, self._seconds, idle_share
        self._num_tokens, self._seconds, self._idle_s, self._serving_s = 0, 0.0, 0.0, 0.0
        return drained

    def _pass(self, lanes: tuple[bool, int, int]) -> None:
        now = asyncio.get_running_loop().time()
        is_sampling, num_idle, num_serving = self._lanes
        seconds = 0.0 if self._stands else now - self._since
        self._seconds += seconds * is_sampling
        self._idle_s += seconds * num_idle
        self._serving_s += seconds * num_serving
        self._lanes, self._since = lanes, now
