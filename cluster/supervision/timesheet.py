"""How every actor spent its time: its reported phases and, for each idle phase, the cause that it waited for.

The timesheet decides the cause, because an idle actor cannot know it. It assumes that the clocks of all nodes agree.
"""

import asyncio
import itertools
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

from cluster.contracts.phases import IDLE, WAITING_FOR, Phase, Timeline, coalesced, cut
from cluster.contracts.types import ActorKind
from cluster.remote.actor import ActorSpec

CONTROLLER = "controller"
"""The driver's own name among the actors."""
_LINES_A_TELLING = 64
"""Lines of one `hear`, shared by all actors, but at least 4 for each. Further phases are coalesced."""
_LONGEST_LINE_S = 60.0
"""A longer phase is written in parts, so that a killed driver loses little."""
_MOST_KEPT = 512
_MOST_ABSENT = 4096
"""Most absent actors that are remembered, because they may come back: those that left last. Each worker that joins has a new name."""
_RESTARTING = "restarting"
"""Phase between two actors of one name."""
_NOT_COUNTED = (ActorKind.RECORDER, ActorKind.JUDGE_SERVER)
"""The recorder reserves no resources, and whether a judge server's program is busy is unknown."""
_STAGES = {"starting": "start", "learning": "learner", "saving": "learner", "sending weights": "weights"}
"""Phase of the driver to the cause that other actors wait for. In all other phases the cause is the work on groups."""
_WORKS = {"sampling": "rollouts", "judging": "rewards", "fetching": "prompts"}
"""Work on groups to the cause that other actors wait for."""
_start = attrgetter("start")


class TellingActor(Protocol):
    """A RemoteActor, as the timesheet sees it."""

    @property
    def spec(self) -> ActorSpec: ...

    def drain_phases(self) -> list[Phase]: ...


class Timesheet:
    """The timesheet of one driver. `ask` sets `asked`, which brings the next heartbeat forward."""

    def __init__(
        self, write: Callable[[Sequence[Mapping[str, Any]]], None], *, now: Callable[[], float] = time.time
    ) -> None:
        """`write` takes lines of phases.jsonl, and must not block."""
        self._write = write
        self._stage = Timeline("starting", now=now, most=_MOST_KEPT)
        self._work = Timeline("", now=now, most=_MOST_KEPT)
        self._unwritten: dict[str, Phase] = {}
        """Last reported phase by actor. It may go on."""
        self._seconds = defaultdict[tuple[ActorKind, str], float](float)
        """Seconds by kind and cause, since the last `drain_stats`."""
        self._known: set[tuple[ActorKind, str]] = set()
        """All kinds and causes that have occurred."""
        self._gpu_seconds = defaultdict[bool, float](float)
        """GPU seconds of busy actors (True) and of others."""
        self.asked = asyncio.Event()

    # The driver's phases

    def enter(self, stage: str, *, step: int | None = None) -> None:
        self._stage.enter(stage, step=step)

    def note_work(self, *works: str) -> None:
        """`works`: those of `sampling`, `judging` and `fetching` (prompts) that are in progress from now on."""
        self._work.enter(",".join(works))

    def ask(self) -> None:
        """The next heartbeat comes now."""
        self.asked.set()

    # The actors' phases

    def hear(self, actors: Sequence[TellingActor]) -> None:
        """Writes and counts the new phases of these actors and of the driver."""
        reported = [(actor.spec, phases) for actor in actors if (phases := actor.drain_phases())]
        began = min((phases[0].start for _, phases in reported), default=0.0)
        stages, works = self._stage.after(0.0), cut(self._work.after(0.0), start=began)
        most = max(_LINES_A_TELLING // (len(actors) + 1), 4)
        lines = self._take(CONTROLLER, self._since_last(CONTROLLER, stages), most=most)
        stages = cut(stages, start=began)
        for spec, of_actor in reported:
            phases = [each for phase in of_actor for each in explained(phase, spec.kind, stages=stages, works=works)]
            phases = self._since_last(spec.name, phases)
            self._count(spec, phases)
            lines += self._take(spec.name, phases, most=most)
        lines += self._take_of_absent({CONTROLLER, *(actor.spec.name for actor in actors)})
        if lines:
            self._write(lines)

    def drain_stats(self) -> dict[str, float]:
        """Seconds of actors by kind and cause since the last call, and GPU hours. A cause that has occurred stays in the result."""
        seconds, self._seconds = self._seconds, defaultdict[tuple[ActorKind, str], float](float)
        gpus, self._gpu_seconds = self._gpu_seconds, defaultdict[bool, float](float)
        return {
            **{f"cost/{kind}/{cause}_s": seconds[kind, cause] for kind, cause in sorted(self._known)},
            "cost/gpu_hours": sum(gpus.values()) / 3600,
            "cost/idle_gpu_hours": gpus[False] / 3600,
        }

    def close(self) -> None:
        """Writes the phases that go on, as far as they were reported."""
        self.hear([])
        unwritten, self._unwritten = self._unwritten, {}
        self._write([_line(actor, phase) for actor, phase in unwritten.items() if phase.seconds])

    def _since_last(self, actor: str, phases: Sequence[Phase]) -> Sequence[Phase]:
        """`phases` without those that were reported before. A gap is a restart: an actor's own timeline has no gaps."""
        if (last := self._unwritten.get(actor)) is None:
            return phases
        if not (new := cut(phases, start=last.end)) or new[0].start == last.end:
            return new
        return [Phase(name=_RESTARTING, start=last.end, end=new[0].start), *new]

    def _take(self, actor: str, phases: Sequence[Phase], *, most: int) -> list[dict[str, Any]]:
        """Lines of the phases that have ended."""
        if not phases:
            return []
        *ended, last = coalesced([*([self._unwritten[actor]] if actor in self._unwritten else []), *phases], most=most)
        if last.seconds > _LONGEST_LINE_S:
            ended.append(last)
            last = replace(last, start=last.end)
        self._unwritten[actor] = last
        return [_line(actor, phase) for phase in ended if phase.seconds]

    def _take_of_absent(self, present: Set[str]) -> list[dict[str, Any]]:
        """Lines of absent actors' last phases: these actors report nothing more, and a killed driver would not write them."""
        absent = {actor: last for actor, last in self._unwritten.items() if actor not in present}
        ended = {actor: last for actor, last in absent.items() if last.seconds}
        self._unwritten |= {actor: replace(last, start=last.end) for actor, last in ended.items()}
        if len(absent) > _MOST_ABSENT:
            for actor in sorted(absent, key=lambda actor: absent[actor].end)[:-_MOST_ABSENT]:
                del self._unwritten[actor]
        return [_line(actor, last) for actor, last in ended.items()]

    def _count(self, spec: ActorSpec, phases: Sequence[Phase]) -> None:
        for phase in phases if spec.kind not in _NOT_COUNTED else ():
            self._known.add((spec.kind, phase.cause))
            self._seconds[spec.kind, phase.cause] += phase.seconds
            if phase.name != _RESTARTING:  # no actor had its GPUs then
                self._gpu_seconds[phase.cause == "busy"] += spec.num_gpus * phase.seconds


def explained(phase: Phase, kind: ActorKind, *, stages: Sequence[Phase], works: Sequence[Phase]) -> list[Phase]:
    """An idle phase, cut where the driver's phase or the work on groups changes, and named by its causes. Any other phase as it is."""
    if phase.name not in IDLE or kind is ActorKind.JUDGE_SERVER:
        return [phase]
    moments = sorted({phase.start, phase.end, *_starts_within(phase, stages), *_starts_within(phase, works)})
    return [
        replace(
            phase,
            name=f"{WAITING_FOR}{awaited(kind, stage=_at(stages, start), works=_at(works, start).split(','))}",
            start=start,
            end=end,
        )
        for start, end in itertools.pairwise(moments)
    ]


def awaited(kind: ActorKind, *, stage: str, works: Sequence[str]) -> str:
    """The cause that an actor of this kind waits for, by `_WORKS` and `_STAGES`."""
    of_stage, of_work = _STAGES.get(stage), next((_WORKS[work] for work in _WORKS if work in works), None)
    if kind is ActorKind.ROLLOUT_WORKER and "fetching" in works:
        return "prompts"
    is_before_groups = kind in (ActorKind.ROLLOUT_WORKER, ActorKind.LEARNER)
    return (of_stage or of_work if is_before_groups else of_work or of_stage) or "rollouts"


def _starts_within(phase: Phase, others: Sequence[Phase]) -> list[float]:
    first, last = bisect_right(others, phase.start, key=_start), bisect_left(others, phase.end, key=_start)
    return [each.start for each in others[first:last]]


def _at(phases: Sequence[Phase], moment: float) -> str:
    """Name of the phase at this moment; of the first phase if all begin later."""
    return phases[max(bisect_right(phases, moment, key=_start) - 1, 0)].name if phases else ""


def _line(actor: str, phase: Phase) -> dict[str, Any]:
    """A line of phases.jsonl."""
    step = {} if phase.step is None else {"step": phase.step}
    return {"actor": actor, "phase": phase.name, "start": round(phase.start, 3), "end": round(phase.end, 3), **step}
