"""Makes judged groups: the workers, the scorers, and the dispatcher that feeds them."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from cluster.contracts.errors import DeadlineError
from cluster.contracts.types import ActorKind, Ticket
from cluster.remote.actor import describe
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.departures import Departures
from cluster.rollouts.destinations import Destination, HeldOutGroups, Training
from cluster.rollouts.dispatcher import Dispatcher
from cluster.rollouts.prints import Prints
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
        may_wait_for_nodes: bool = False,
    ) -> None:
        """`destination` makes the Destination that fills a buffer. `office` None: only evaluations. `may_wait_for_nodes`: without a serving
        worker the run waits for a node without limit."""
        self.fleet = fleet
        self.services = scorers.services
        self._scorers = scorers
        self._dispatcher = dispatcher
        self._office = office
        self._supervisor = supervisor
        self._destination = destination
        self._may_wait_for_nodes = may_wait_for_nodes
        self._prints = Prints(supervisor.events)
        """Lines that environments print."""
        self._departures = Departures(fleet=self.fleet, groups=dispatcher, supervisor=supervisor)

    async def start(self, *, reference_waits_for: asyncio.Event | None = None) -> None:
        """Returns when one reward service, all other scorers and one worker are up; in a deterministic run, all workers.

        Fleet and services are kept at their sizes from now on.
        """

        async def ready(place: SupervisedActor) -> None:
            if place.spec.kind is ActorKind.REFERENCE_SCORER and reference_waits_for is not None:
                await reference_waits_for.wait()
            await place.ready()

        scorers = (ready(place) for place in self._scorers.places() if place not in self.services.places())
        await together(self.fleet.start(), self.services.start(), *scorers)

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Deals tickets, for as long as `tasks` run."""
        tasks.create_task(self._dispatcher.run())

    def generating(self, *, into: Buffer) -> AbstractAsyncContextManager[None]:
        """While this is open, every group that the buffer lets start is under way."""
        assert self._office is not None, "only a run that trains generates"
        training = Training(buffer=into, office=self._office, destination=self._destination(into))
        return self._dispatcher.generating(training)

    def sample_again(self, indices: Collection[int]) -> None:
        """Restarts groups that were lost after they were taken, under the current weights."""
        self._dispatcher.sample_again(indices)

    async def evaluate(self, tickets: Sequence[Ticket], *, stall_s: float) -> HeldOutGroups:
        """Samples and judges groups that are not trained on. Raises DeadlineError when nothing moves for `stall_s`, unless it
        `waits_for_nodes`."""
        try:
            return await self._dispatcher.evaluate(tickets, stall_s=stall_s, goes_on=self.waits_for_nodes)
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {self.describe()}") from None

    def waits_for_nodes(self) -> bool:
        """Whether no worker serves and the run waits for a node, which it logs. All other steps of a worker's start have deadlines."""
        if not self._may_wait_for_nodes or self.fleet.serving():
            return False
        message = f"no rollout worker serves, {self.fleet.num_coming} are to come: the run goes on when one has a node"
        self._supervisor.events.event("waiting_for_nodes", message=message)
        return True

    async def leave(self, draining: Mapping[str, float | None]) -> None:
        """As `Departures.leave`."""
        await self._departures.leave(draining)

    def drain_stats(self) -> dict[str, float]:
        """Metrics of tickets, dispatcher, scorers and supervision since the last call, and the numbers of serving actors."""
        tickets = self._office.drain_stats() if self._office else {}
        sizes = {
            "rollout/num_workers": float(len(self.fleet.serving())),
            "rollout/num_wanted": float(self.fleet.num_wanted),
            "rollout/num_coming": float(self.fleet.num_coming),
            "rollout/num_services": float(len(self.services.serving())),
        }
        if self.fleet.join_seconds is not None:
            sizes["time/join_s"] = self.fleet.join_seconds
        sizes |= self._engine_use()
        drained = self._dispatcher.drain_stats() | self._scorers.drain_stats() | self._supervisor.drain_stats()
        return tickets | sizes | drained | self._departures.drain_stats()

    def _engine_use(self) -> dict[str, float]:
        """Engine metrics of the serving workers' last heartbeats."""
        reports = [member.actor.last_progress for member in self.fleet.serving() if member.actor]
        uses = [progress.engine for progress in reports if progress and progress.engine]
        if not uses:
            return {}
        return {
            "engine/num_running": float(sum(use.num_running for use in uses)),
            "engine/num_waiting": float(sum(use.num_waiting for use in uses)),
            "engine/cache_share": max(use.cache_share for use in uses),
        }

    def places(self) -> list[SupervisedActor]:
        """Places of all workers and scorers."""
        return [*self.fleet.places(), *self._scorers.places()]

    def pool_of(self, kind: ActorKind) -> WorkerPool | None:
        """The pool of actors of this kind; None for kinds that have none."""
        return {ActorKind.ROLLOUT_WORKER: self.fleet, ActorKind.REWARD_SERVICE: self.services}.get(kind)

    def note_progress(self) -> None:
        """All actors have reported their progress."""
        self._scorers.note_progress()
        self._prints.note(progress for place in self.fleet.places() if (progress := place.progress()))

    def describe(self) -> str:
        """The progress of every actor, for a DeadlineError."""
        return "; ".join(describe(place.spec.name, place.progress()) for place in self.places())

    async def stop(self) -> None:
        if self._office is not None:
            self._office.close()
        await asyncio.gather(*(place.stop() for place in self.places()))
