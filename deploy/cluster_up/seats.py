"""The seats of a run: placement groups on the connected cluster, and the actors in them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.contracts.errors import DeadlineError, TreadwheelError, WorkerError
from cluster.contracts.protocols import Events
from cluster.remote.actor import ActorSpec, RemoteActor, found_no_room
from cluster.remote.nodes import LostGroups, Seat, give_back, is_seat_lost
from cluster.supervision.placement import PlacementPlan, SeatGroup
from cluster.supervision.supervisor import note_waiting
from cluster.supervision.tasks import background
from deploy.cluster_up.waiting import AwaitedNode, leaving_nodes

_SEAT_CHECK_S = 2.0
"""Seconds between two looks of a waiting worker for a vacant seat, and until a run says that it waits for its seats."""


class Seats:
    """The run's placement groups. Starts actors in their seats or outside them."""

    def __init__(self, seats: Mapping[int, Seat], *, start_s: float, events: Events) -> None:
        """`seats` are by the index of their bundle. `start_s` is the deadline for an actor to come up."""
        self._seats = dict(seats)
        self._gone = {index: asyncio.Event() for index in seats}
        """Set when the seat is given back."""
        self._start_s = start_s
        self._events = events
        self._vacant: list[ActorSpec] = []
        self._taken: dict[str, ActorSpec] = {}
        """Formerly vacant seats, by the name of the joined worker."""
        self._waits: dict[str, AwaitedNode] = {}
        """By the name of an actor for which no node came in time, and which may be started again."""

    async def start(self, spec: ActorSpec) -> RemoteActor:
        """Returns a running actor whose object is built. Raises the object's own error, WorkerError or DeadlineError."""
        actor = await self.spawn(spec)
        try:
            await actor.build(deadline_s=self._start_s)
        except BaseException:
            await actor.kill()
            raise
        return actor

    async def spawn(self, spec: ActorSpec) -> RemoteActor:
        """Returns a process without an object: ranks must know each other's address before they are built.

        A joining worker takes a vacant seat of its kind, because nothing else can use its resources. Without a vacant seat, or if its own
        was given back, it looks for a node outside the seats until a seat is vacant. A seat whose node is dead or draining is unusable
        until Ray finds another node for it.
        """
        wait = self._waits.pop(spec.name, None) or AwaitedNode(spec, events=self._events)
        try:
            async with background() as tasks:
                tasks.create_task(wait.news(partial(self._has_no_node, spec), group=partial(self._group_of, spec)))
                return await self._placed(spec, wait)
        except DeadlineError as error:
            if not found_no_room(error):
                raise
            self._waits[spec.name] = wait
            raise wait.too_late(error) from error

    async def _placed(self, spec: ActorSpec, wait: AwaitedNode) -> RemoteActor:
        actor: RemoteActor | None = None
        while actor is None:
            if self._seat_of(spec) is not None or await self._takes_seat(spec):
                actor = await self._spawn_seated(spec)
            else:
                actor = await self._spawn_outside(spec, wait)
        return actor

    def vacate(self, spec: ActorSpec) -> None:
        """The worker has left for good. Its seat, if it had one, goes to a waiting worker, or to the next one that joins."""
        seat = self._seated(spec)
        if self._seat_of(seat) is not None:
            self._vacant.append(seat)
        self._taken.pop(spec.name, None)

    async def give_back_lost(self, alone: Collection[int]) -> None:
        """Gives back the seats among `alone` whose node died and for which Ray has no other node. Each is its own placement group. Their
        workers then look for nodes like joining workers. Returns when no seat is left.

        Otherwise Ray's head searches without a pause for a place that living nodes would have if they were idle: it takes a core and
        answers nobody in time (Ray 2.60; ray-project/ray#65007).
        """
        places = {self._seats[index].group: index for index in alone}
        watched, given_up = LostGroups(places), set[Any]()
        while places or given_up:
            await asyncio.sleep(_SEAT_CHECK_S)
            with contextlib.suppress(TreadwheelError):  # Ray's head node does not answer: the next look asks again
                given_up |= (lost := await watched.take())
                for group in lost:
                    index = places.pop(group)
                    del self._seats[index]
                    self._gone[index].set()
                for group in [*given_up]:
                    await give_back(group)
                    given_up.discard(group)

    async def _has_no_node(self, spec: ActorSpec) -> bool:
        """Whether an actor that has not started yet has no seat, or lost its seat's node."""
        seat = self._seat_of(spec)
        return seat is None or await is_seat_lost(seat)

    def _seated(self, spec: ActorSpec) -> ActorSpec:
        """The actor in the seat that it took; unchanged if it took none."""
        seat = self._taken.get(spec.name)
        return spec if seat is None else replace(spec, bundle=seat.bundle, num_cpus=seat.num_cpus)

    def _seat_of(self, spec: ActorSpec) -> Seat | None:
        """None: it has no seat, or the seat was given back."""
        index = self._seated(spec).bundle
        return None if index is None else self._seats.get(index)

    def _group_of(self, spec: ActorSpec) -> Any:
        seat = self._seat_of(spec)
        return None if seat is None else seat.group

    async def _takes_seat(self, spec: ActorSpec) -> bool:
        """Gives the worker a vacant seat. False if there is none."""
        for seat in [each for each in self._vacant if each.kind is spec.kind]:
            if await self._is_good(seat) and seat in self._vacant:  # another worker may have taken it meanwhile
                self._vacant.remove(seat)
                self._taken[spec.name] = seat
                return True
        return False

    async def _is_good(self, vacant: ActorSpec) -> bool:
        assert vacant.bundle is not None
        seat = self._seats.get(vacant.bundle)
        try:
            return seat is not None and not await is_seat_lost(seat)
        except TreadwheelError:  # unknown: the worker asks again, or finds a node
            return False

    async def _spawn_outside(self, spec: ActorSpec, wait: AwaitedNode) -> RemoteActor | None:
        """None: the worker took a seat before it found a node.

        Waits without a deadline: Ray's autoscaler would handle each new attempt as a new request.
        """
        now = asyncio.get_running_loop().time
        began = said_at = now()
        outside = asyncio.create_task(RemoteActor.spawn(spec, deadline_s=None))
        try:
            while True:
                say_in_s = max(said_at + self._start_s - now(), 0.0)
                if (await asyncio.wait({outside}, timeout=min(say_in_s, _SEAT_CHECK_S)))[0]:
                    return outside.result()
                if now() >= said_at + self._start_s:
                    said_at = now()
                    reason = wait.said_with(f"none was found in {said_at - began:.0f} s")
                    note_waiting(self._events, spec, reason=reason)
                if await self._takes_seat(spec):
                    if not outside.done():
                        return None
                    self.vacate(spec)  # it found a node while it looked
        finally:
            outside.cancel()

    async def _spawn_seated(self, spec: ActorSpec) -> RemoteActor | None:
        """None: the seat was given back before the process was up. Ray would leave the actor waiting, without an error."""
        seated, seat = self._seated(spec), self._seat_of(spec)
        assert seat is not None and seated.bundle is not None
        gone = self._gone[seated.bundle]
        starting = asyncio.create_task(RemoteActor.spawn(seated, seat=seat, deadline_s=self._start_s))
        given_back = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait({starting, given_back}, return_when=asyncio.FIRST_COMPLETED)
            return None if gone.is_set() else starting.result()
        finally:
            starting.cancel()
            given_back.cancel()
            await asyncio.gather(starting, given_back, return_exceptions=True)


Reserved = Callable[[Any, SeatGroup], Awaitable[None]]
"""Returns when Ray has reserved the placement group for the seats. Raises WorkerError if it does not."""


@contextlib.asynccontextmanager
async def seats(
    placement: PlacementPlan, *, start_s: float, events: Events, reserved: Reserved | None = None
) -> AsyncIterator[Seats]:
    """Reserves the plan's seats, and gives them back at the end. `start_s` is the deadline for an actor to come up. Without `reserved` it
    is also the deadline for the cluster to free its resources: raises WorkerError after it."""
    reserved = reserved or partial(_freed, within_s=start_s, events=events)
    groups: list[Any] = []
    found: dict[int, Seat] = {}
    first, *others = placement.groups()
    try:
        for together in ([first], others):
            start = len(groups)
            for asked in together:
                groups.append(_asked(asked))
            for group, asked in zip(groups[start:], together, strict=True):
                await reserved(group, asked)
                found |= {seat: Seat(group, place) for seat, place in zip(asked.seats, asked.places, strict=True)}
        taken = Seats(found, start_s=start_s, events=events)
        async with background() as tasks:
            tasks.create_task(taken.give_back_lost([each.seats[0] for each in others if len(each.seats) == 1]))
            yield taken
    finally:
        # Without Ray's head, the error that ends the run matters more. Groups end with their driver anyway.
        with contextlib.suppress(RayError):
            for group in groups:
                remove_placement_group(group)


def _asked(asked: SeatGroup) -> Any:
    """Asks Ray for a placement group, which is reserved later."""
    labels = [asked.node_labels] * len(asked.resources)
    return placement_group(asked.resources, strategy=asked.strategy, bundle_label_selector=labels)


async def _freed(group: Any, asked: SeatGroup, *, within_s: float, events: Events) -> None:
    try:
        async with asyncio.timeout(within_s), background() as tasks:
            tasks.create_task(_say_if_it_waits(asked, within_s=within_s, events=events))
            await group.ready()
    except TimeoutError:
        raise WorkerError(
            f"the cluster did not free {asked.resources} within {within_s:g} s; other programs hold its resources{await leaving_nodes()}: "
            "wait longer (supervision.start_s, or --wait-for-nodes 2h), or ask for less"
        ) from None


async def _say_if_it_waits(asked: SeatGroup, *, within_s: float, events: Events) -> None:
    await asyncio.sleep(_SEAT_CHECK_S)
    message = f"waits up to {within_s:g} s for the cluster to free {asked.resources}"
    events.event("waiting_for_nodes", message=message)
