"""Decides when an episode's turn goes to the engine: at once, or, in a deterministic run, together with the turns of all others."""

import asyncio
import heapq
from collections.abc import Callable, Sequence

from cluster.contracts.protocols import EngineRequest

Submit = Callable[[Sequence[EngineRequest]], None]
Place = tuple[int, int]
"""Number of the call, and the episode's place in it."""


class Lockstep:
    """The rounds of one worker. In each, the engine gets the next turns of all episodes in their order, once every episode has asked for
    one or has ended. Episodes of a later call begin when all of an earlier one have ended.

    So the engine's batches depend on the environments' actions, not on their speed.
    """

    def __init__(self, *, num_places: int) -> None:
        """`num_places`: most episodes that play at the same time. Each further one begins when another has ended."""
        self._num_places = num_places
        self._playing: set[Place] = set()
        self._asking: dict[Place, tuple[EngineRequest, Submit]] = {}
        self._queue: list[tuple[Place, asyncio.Event]] = []

    async def enter(self, place: Place) -> None:
        """Waits until this episode may play."""
        may_play = asyncio.Event()
        heapq.heappush(self._queue, (place, may_play))
        self._advance()
        try:
            await may_play.wait()
        except asyncio.CancelledError:
            self._queue = [each for each in self._queue if each[0] != place]
            heapq.heapify(self._queue)
            self.leave(place)
            raise

    def ask(self, place: Place, request: EngineRequest, submit: Submit) -> None:
        """The episode waits for this turn; `submit` is its call's."""
        self._asking[place] = request, submit
        self._advance()

    def withdraw(self, place: Place) -> None:
        """Takes the episode's turn back. The others wait for its next one, or its end."""
        self._asking.pop(place, None)

    def leave(self, place: Place) -> None:
        """The episode has ended or was cancelled."""
        self._playing.discard(place)
        self._asking.pop(place, None)
        self._advance()

    def _advance(self) -> None:
        while self._queue and len(self._playing) < self._num_places and self._is_of_this_call(self._queue[0][0]):
            place, may_play = heapq.heappop(self._queue)
            self._playing.add(place)
            may_play.set()
        if self._asking and self._asking.keys() == self._playing:
            asking, self._asking = self._asking, {}
            places = sorted(asking)
            _, submit = asking[places[0]]  # all belong to one call
            submit([asking[place][0] for place in places])

    def _is_of_this_call(self, place: Place) -> bool:
        return not self._playing or place[0] == next(iter(self._playing))[0]


class AtOnce:
    """Each turn goes to the engine as soon as an episode asks for it."""

    def __init__(self, *, num_places: int) -> None:
        """`num_places` as for `Lockstep`."""
        self._free = asyncio.Semaphore(num_places)

    async def enter(self, place: Place) -> None:
        """Waits until this episode may play."""
        await self._free.acquire()

    def ask(self, place: Place, request: EngineRequest, submit: Submit) -> None:
        submit([request])

    def withdraw(self, place: Place) -> None:
        """Does nothing: the turn is already in the engine."""

    def leave(self, place: Place) -> None:
        """The episode has ended or was cancelled."""
        self._free.release()
