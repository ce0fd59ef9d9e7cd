"""Events with the lines that judges or environments print: a few lines per heartbeat, so that they show in time and do not fill a disk."""

from collections.abc import Iterable

from cluster.contracts.protocols import Events
from cluster.contracts.types import Progress

_MOST_EVENTS = 1000
"""Limit per driver, for judges and for environments each. Later prints are only in the logs of their actors."""


class Prints:
    """Logs the newest printed lines, none of them twice."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._num_events = 0
        self._num_seen: dict[tuple[str, int], int] = {}
        """Number of lines that earlier events covered, by the actor's name and process."""

    def note(self, reports: Iterable[Progress]) -> None:
        """Logs the new lines in the actors' latest progress."""
        for progress in reports:
            place, printed = (progress.actor, progress.pid), progress.printed
            num_new = printed.num_lines - self._num_seen.get(place, 0)
            if num_new <= 0 or self._num_events == _MOST_EVENTS:
                continue
            self._num_seen[place] = printed.num_lines
            self._num_events += 1
            lines = list(printed.lines[-num_new:])
            self._events.event(
                "printed", actor=progress.actor, actor_pid=progress.pid, lines=lines, num_more=num_new - len(lines)
            )
