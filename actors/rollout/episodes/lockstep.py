"""When an episode's turn goes to the engine: at once, or in a deterministic run together with those of all others."""

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.contracts.protocols import EngineRequest

Submit = Callable[[Sequence[EngineRequest]], None]


@dataclass(slots=True)
class Lockstep:
    """Round after round: the engine gets the next turns of all episodes in their order, once each of them asks for one or has ended.

    So what is computed together depends on what environments do, and not on how long they take for it.
    """

    submit: Submit
    num_places: int
    """Episodes that play at once; the others begin when one has ended, between two rounds."""
    _playing: set[int] = field(default_factory=set[int])
    _asking: dict[int, EngineRequest] = field(default_factory=dict[int, EngineRequest])
    _queue: list[tuple[int, asyncio.Event]] = field(default_factory=list[tuple[int, asyncio.Event]])

    async def enter(self, place: int) -> None:
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

    def ask(self, place: int, request: EngineRequest) -> None:
        """The episode waits for this turn."""
        self._asking[place] = request
        self._advance()

    def withdraw(self, place: int) -> None:
        """The episode does not want this turn any more; the others wait for its next one, or its end."""
        self._asking.pop(place, None)

    def leave(self, place: int) -> None:
        """The episode has ended, or is not wanted any more."""
        self._playing.discard(place)
        self._asking.pop(place, None)
        self._advance()

    def _advance(self) -> None:
        if self._asking.keys() != self._playing:
            return
        if self._queue and len(self._playing) < self.num_places:
            place, may_play = heapq.heappop(self._queue)
            self._playing.add(place)
            may_play.set()
            return
        asking, self._asking = self._asking, {}
        if asking:
            self.submit([asking[place] for place in sorted(asking)])


@dataclass(slots=True)
class AtOnce:
    """Each turn as soon as it is asked for."""

    submit: Submit

    async def enter(self, place: int) -> None:
        """May play."""

    def ask(self, place: int, request: EngineRequest) -> None:
        self.submit([request])

    def withdraw(self, place: int) -> None:
        """It is under way."""

    def leave(self, place: int) -> None:
        """Nobody waits for it."""
