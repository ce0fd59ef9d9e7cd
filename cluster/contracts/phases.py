"""Timelines: which phases an actor went through and when, one after another without gaps.

An answer may be lost, so each request says up to when it has the phases, and receives all later ones. Times are of the actor's clock.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

CAUSES = ("busy", "learner", "rollouts", "rewards", "prompts", "weights", "restart")
"""Uses of an actor's time: its own work, or a wait for one of these."""
IDLE = frozenset({"idle", "waiting", "serving"})
"""Phases of actors that have nothing to do and cannot know the cause."""
WAITING_FOR = "waiting for "
_CAUSE_OF = {
    "loading weights": "weights",
    "publishing": "weights",
    "starting": "restart",
    "restarting": "restart",
    "restoring": "restart",
    f"{WAITING_FOR}start": "restart",
}
_MOST_KEPT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    start: float
    """Unix seconds."""
    end: float
    step: int | None = None
    """The step that the learner works for, or whose weights a worker samples under; None for other phases."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def cause(self) -> str:
        """One of `CAUSES`."""
        is_wait = self.name.startswith(WAITING_FOR)
        return _CAUSE_OF.get(self.name, self.name.removeprefix(WAITING_FOR) if is_wait else "busy")


class Timeline:
    """The phases of one actor. Several threads may use it. Of too many the oldest are merged in pairs, under the longer one's name."""

    def __init__(self, first: str, *, now: Callable[[], float] = time.time, most: int = _MOST_KEPT) -> None:
        """Keeps up to `most` phases between two requests."""
        self._now, self._most = now, most
        self._present = Phase(name=first, start=(began := now()), end=began)
        self._past: list[Phase] = []
        self._lock = threading.Lock()

    @property
    def phase(self) -> tuple[str, float]:
        """The present phase, and its start."""
        return self._present.name, self._present.start

    def enter(self, name: str, *, step: int | None = None) -> None:
        """Begins a phase, unless it is the present one."""
        with self._lock:
            if (self._present.name, self._present.step) == (name, step):
                return
            ended = self._so_far()
            self._past.append(ended)
            self._present = Phase(name=name, step=step, start=ended.end, end=ended.end)
            if len(self._past) > self._most:
                newest = self._most // 2
                self._past = [*_in_pairs(self._past[:-newest]), *self._past[-newest:]]

    def after(self, known: float) -> tuple[Phase, ...]:
        """The phases from `known` until now. Earlier ones are forgotten."""
        with self._lock:
            self._past = [phase for phase in self._past if phase.end > known]
            return cut([*self._past, self._so_far()], start=known)

    def lead_with(self, earlier: "Timeline") -> None:
        """Adds the phases of a timeline that the same actor kept before this one began."""
        with self._lock:
            began = min(phase.start for phase in (*self._past, self._present))
            self._past = [*cut(earlier.after(0.0), end=began), *self._past]

    def _so_far(self) -> Phase:
        return replace(self._present, end=max(self._now(), self._present.start))  # a clock may be set back


def cut(phases: Sequence[Phase], *, start: float = float("-inf"), end: float = float("inf")) -> tuple[Phase, ...]:
    """The parts of phases between `start` and `end`, in their order."""
    within = (replace(phase, start=max(phase.start, start), end=min(phase.end, end)) for phase in phases)
    return tuple(phase for phase in within if phase.end > phase.start)


def coalesced(phases: Sequence[Phase], *, most: int) -> list[Phase]:
    """The same time in `most` phases. Equal neighbours become one; then the shortest phase is merged into its longer neighbour."""
    kept = _joined(phases)
    while len(kept) > 4 * max(most, 1):
        kept = _joined(_in_pairs(kept))
    while len(kept) > max(most, 1):
        place = min(range(len(kept)), key=lambda index: kept[index].seconds)
        sides = [side for side in (place - 1, place + 1) if 0 <= side < len(kept)]
        longer = max(sides, key=lambda side: kept[side].seconds)
        first, last = sorted((place, longer))
        kept[first : last + 1] = [replace(kept[longer], start=kept[first].start, end=kept[last].end)]
        kept = _joined(kept)
    return kept


def _in_pairs(phases: Sequence[Phase]) -> list[Phase]:
    """Half as many phases: two neighbours become one, under the longer one's name. In one pass, since the actor waits for it."""
    pairs = (phases[place : place + 2] for place in range(0, len(phases), 2))
    return [replace(max(pair, key=lambda each: each.seconds), start=pair[0].start, end=pair[-1].end) for pair in pairs]


def _joined(phases: Sequence[Phase]) -> list[Phase]:
    kept: list[Phase] = []
    for phase in phases:
        if kept and (kept[-1].name, kept[-1].step) == (phase.name, phase.step):
            kept[-1] = replace(kept[-1], end=phase.end)
        else:
            kept.append(phase)
    return kept
