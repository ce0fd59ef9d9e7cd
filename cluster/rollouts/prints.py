"""What judges or environments print, as events: a few lines a heartbeat, so that a print is seen in time, and fills no disk."""

from collections.abc import Iterable

from cluster.contracts.protocols import Events
from cluster.contracts.types import Progress

_MOST_EVENTS = 1000
"""Of a driver, for judges and for environments; from then on prints are in the logs of their actors alone."""


class Prints:
    """Which lines of which actor were told."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._num_events = 0
        self._told: dict[tuple[str, int], int] = {}
        """Lines by the actor's name and process."""

    def note(self, told: Iterable[Progress]) -> None:
        """These are what actors said last: of lines that were told before, nothing is logged."""
        for progress in told:
            place, printed = (progress.actor, progress.pid), progress.printed
            num_new = printed.num_lines - self._told.get(place, 0)
            if num_new <= 0 or self._num_events == _MOST_EVENTS:
                continue
            self._told[place] = printed.num_lines
            self._num_events += 1
            lines = list(printed.lines[-num_new:])
            self._events.event(
                "printed", actor=progress.actor, actor_pid=progress.pid, lines=lines, num_more=num_new - len(lines)
            )
