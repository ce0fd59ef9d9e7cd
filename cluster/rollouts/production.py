"""Everything that makes judged groups, as one: workers, scorers, and the dispatcher that feeds them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from cluster.contracts.errors import DeadlineError
from cluster.contracts.types import Ticket
from cluster.remote.actor import describe
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.destinations import Destination, HeldOutGroups
from cluster.rollouts.dispatcher import Dispatcher, Training
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import SupervisedActor
from cluster.supervision.tasks import together


class Production:
    """The rollouts of one run, as the controller sees them."""

    def __init__(
        self,
        *,
        fleet: WorkerPool,
        scorers: Scorers,
        dispatcher: Dispatcher,
        office: TicketOffice | None,
        destination: Callable[[Buffer], Destination],
    ) -> None:
        """`destination` says which judged groups go into a buffer. Without an `office` there are evaluations only."""
        self.fleet = fleet
        self._scorers = scorers
        self._dispatcher = dispatcher
        self._office = office
        self._destination = destination

    async def start(self) -> None:
        """Reward, reference and the first worker are up when this returns; in a deterministic run, all workers.

        The fleet is kept at its size from now on.
        """
        await together(self.fleet.start(), *(place.ready() for place in self._scorers.places()))

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Deals tickets, for as long as `tasks` run."""
        tasks.create_task(self._dispatcher.run())

    @contextlib.asynccontextmanager
    async def generating(self, *, into: Buffer) -> AsyncIterator[None]:
        """While this is open, every group that the buffer lets start is under way."""
        assert self._office is not None, "only a run that trains generates"
        training = Training(buffer=into, office=self._office, destination=self._destination(into))
        async with self._dispatcher.generating(training):
            yield

    def sample_again(self, indices: Collection[int]) -> None:
        """These groups were lost after they were taken: they start again, under the weights that serve now."""
        self._dispatcher.sample_again(indices)

    async def evaluate(self, tickets: Sequence[Ticket], *, stall_s: float) -> HeldOutGroups:
        """Samples and judges groups that are not trained on. Raises DeadlineError when nothing moves for `stall_s`."""
        try:
            return await self._dispatcher.evaluate(tickets, stall_s=stall_s)
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {self.describe()}") from None

    def drain_stats(self) -> dict[str, float]:
        """Of tickets, dispatcher, fleet and scorers, since the last call."""
        tickets = self._office.drain_stats() if self._office else {}
        return tickets | self._dispatcher.drain_stats() | self.fleet.drain_stats() | self._scorers.drain_stats()

    def places(self) -> list[SupervisedActor]:
        """Where actors are, or will be again."""
        return [*self.fleet.places(), *self._scorers.places()]

    def note_progress(self) -> None:
        """All actors have said what they do."""
        self._scorers.note_holds()

    def describe(self) -> str:
        """What every actor does, for the error of a wait that was too long."""
        return "; ".join(describe(place.spec.name, place.progress()) for place in self.places())

    async def stop(self) -> None:
        if self._office is not None:
            self._office.close()
        await asyncio.gather(*(place.stop() for place in self.places()))
