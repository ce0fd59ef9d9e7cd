"""Everything that makes judged groups, as one: workers, scorers, and the dispatcher that feeds them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from cluster.contracts.errors import DeadlineError
from cluster.contracts.types import ActorKind, Ticket
from cluster.remote.actor import describe
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.destinations import Destination, HeldOutGroups
from cluster.rollouts.dispatcher import Dispatcher, Training
from cluster.rollouts.scoring import Scorers
from cluster.rollouts.tickets import TicketOffice
from cluster.rollouts.worker_pool import WorkerPool
from cluster.supervision.supervisor import SupervisedActor, Supervisor
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
        supervisor: Supervisor,
        destination: Callable[[Buffer], Destination],
    ) -> None:
        """`destination` says which judged groups go into a buffer. Without an `office` there are evaluations only."""
        self.fleet = fleet
        self.services = scorers.services
        self._scorers = scorers
        self._dispatcher = dispatcher
        self._office = office
        self._supervisor = supervisor
        self._destination = destination

    async def start(self) -> None:
        """The first reward service, the other scorers and the first worker are up when this returns; in a deterministic run, all workers.

        Fleet and services are kept at their sizes from now on.
        """
        scorers = (place.ready() for place in self._scorers.places() if place not in self.services.places())
        await together(self.fleet.start(), self.services.start(), *scorers)

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
        """Of tickets, dispatcher, scorers and supervision, since the last call, and how many serve."""
        tickets = self._office.drain_stats() if self._office else {}
        sizes = {
            "rollout/num_workers": float(len(self.fleet.serving())),
            "rollout/num_wanted": float(self.fleet.num_wanted),
            "rollout/num_services": float(len(self.services.serving())),
        }
        drained = self._dispatcher.drain_stats() | self._scorers.drain_stats() | self._supervisor.drain_stats()
        return tickets | sizes | drained

    def places(self) -> list[SupervisedActor]:
        """Where actors are, or will be again."""
        return [*self.fleet.places(), *self._scorers.places()]

    def pool_of(self, kind: ActorKind) -> WorkerPool | None:
        """Where actors of this kind are replaced; None for those whose place cannot be given up."""
        return {ActorKind.ROLLOUT_WORKER: self.fleet, ActorKind.REWARD_SERVICE: self.services}.get(kind)

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
