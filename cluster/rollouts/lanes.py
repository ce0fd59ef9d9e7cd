"""What each worker has under way, and how tickets are dealt to the free places."""

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.contracts.types import Ticket
from cluster.rollouts.destinations import Destination
from cluster.rollouts.worker_pool import Member


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One attempt to finish a group."""

    ticket: Ticket
    destination: Destination

    @property
    def num_sequences(self) -> int:
        return self.ticket.num_trajectories + self.ticket.num_extra_trajectories

    @property
    def is_wanted(self) -> bool:
        return self.destination.wants(self.ticket)

    def again(self) -> "Job":
        """The next attempt, after this one failed."""
        return Job(ticket=self.ticket, destination=self.destination)

    def drop(self, why: str) -> None:
        self.destination.drop(self.ticket, why=why)


def place_in_queue(job: Job) -> tuple[bool, int]:
    """Evaluations (negative indices) first, then groups in the order in which the learner takes them."""
    return job.ticket.index >= 0, abs(job.ticket.index)


class Lane:
    """One worker's share of the work."""

    def __init__(self, member: Member, *, max_sequences: int) -> None:
        self.member = member
        self.under_way: dict[int, Job] = {}
        self.num_sequences = 0
        self._max_sequences = max_sequences

    @property
    def num_free(self) -> int:
        """Sequences that fit beside those under way. A group is started when one place is free, so that none stays empty."""
        return max(self._max_sequences - self.num_sequences, 0)

    def take(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.under_way[job.ticket.index] = job
            self.num_sequences += job.num_sequences

    def pop(self, index: int) -> Job | None:
        """The job is not under way here any more; None when it was not. The caller reports it."""
        job = self.under_way.pop(index, None)
        if job is not None:
            self.num_sequences -= job.num_sequences
        return job

    def left_of(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of `jobs` that are still under way."""
        return [job for job in jobs if self.under_way.get(job.ticket.index) is job]

    def pop_all(self, jobs: Sequence[Job]) -> list[Job]:
        left = self.left_of(jobs)
        for job in left:
            self.pop(job.ticket.index)
        return left


def deal(jobs: Sequence[Job], lanes: Sequence[Lane]) -> list[tuple[Lane, list[Job]]]:
    """Gives each job in turn to the lane with most free places, while any has one. Pure: the lanes are not changed."""
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
    """Seconds in which at least one group was under way, and the tokens that were sampled."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._seconds = 0.0
        self._since: float | None = None

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def note(self, *, is_sampling: bool) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if is_sampling else None

    def drain(self) -> tuple[int, float]:
        """(tokens, seconds) since the last call."""
        self.note(is_sampling=self._since is not None)
        drained = self._num_tokens, self._seconds
        self._num_tokens, self._seconds = 0, 0.0
        return drained
