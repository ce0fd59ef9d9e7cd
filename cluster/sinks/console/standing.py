"""The state of a run, computed from its steps, events and status, for a table that is redrawn repeatedly."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.metrics import ENDS
from cluster.sinks.console.words import Told, stage, told

_PACE_STEPS = 50
"""The pace is measured over this many last steps, evaluations and saves included."""
_LONGEST_S = 1e10
"""Maximum of the time left: three centuries, since dates have a limit."""
_MOST_TOLD = 20
_MOST_POINTS = 4000
"""Rewards kept for the curve. Beyond that, every second one is dropped."""


class Pace:
    """Seconds from step to step. Only sampled steps count: learning a recorded step again takes a fraction of the time."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def step(self, version: int, at: float, *, is_sampled: bool) -> None:
        if not is_sampled or (self._steps and self._steps[-1][0] >= version):
            self._steps.clear()
        if is_sampled:
            self._steps.append((version, at))

    def forget(self) -> None:
        """Forgets the steps of an earlier driver. The time between drivers is not a step's."""
        self._steps.clear()

    @property
    def seconds_per_step(self) -> float | None:
        """None before two steps in a row."""
        if len(self._steps) < 2:
            return None
        (first, began), (last, ended) = self._steps[0], self._steps[-1]
        return (ended - began) / (last - first)

    @property
    def last_at(self) -> float | None:
        return self._steps[-1][1] if self._steps else None

    def seconds_left(self, num_steps: int, *, now: float | None = None) -> float | None:
        """Seconds until the last of `num_steps`. With `now` it counts down within a step, and stays at zero if that takes longer."""
        pace = self.seconds_per_step
        if pace is None:
            return None
        version, at = self._steps[-1]
        gone = 0.0 if now is None else min(max(now - at, 0.0), pace)
        return min(max((num_steps - version) * pace - gone, 0.0), _LONGEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """The present phase of an actor."""

    actor: str
    phase: str
    since: float
    """Unix time, seconds."""

    @property
    def is_up(self) -> bool:
        return self.phase not in ("starting", "restarting")


class Standing:
    """The state of one run. The thread that updates or draws it holds `lock`."""

    def __init__(
        self, *, title: str, num_steps: int, max_off_policy_steps: int | None, now: Callable[[], float]
    ) -> None:
        """`now` is Unix time. `max_off_policy_steps` is the staleness bound; None if not known."""
        self.title, self.num_steps, self.max_off_policy_steps = title, num_steps, max_off_policy_steps
        self.now = now
        self.lock = threading.Lock()
        self.began = now()
        """Start of this driver; a resumed run has had earlier ones."""
        self.up_since: float | None = None
        """When all of its actors were up; None before."""
        self.version = 0
        self.is_learning_again = False
        """Whether the last step came from the record."""
        self.numbers: dict[str, float] = {}
        """The last known value of each metric: not every step has all."""
        self.rewards: list[tuple[int, float]] = []
        self.held_out_rewards: list[tuple[int, float]] = []
        self.pace = Pace()
        self.told: deque[Told] = deque(maxlen=_MOST_TOLD)
        self.actors: tuple[Doing, ...] = ()
        self.num_restarts = 0
        self.num_wanted: int | None = None
        self.phase = "starting"
        """starting, running, stopping, or how the run ended: finished, stopped, failed, gone."""
        self.stage: str | None = None
        """The thing that the run waits for; None while steps follow each other."""
        self.ended: float | None = None
        self.is_preempted = False
        self._away: set[str] = set()

    # Updates

    def step(self, version: int, metrics: Mapping[str, float], *, at: float) -> None:
        self.version = version
        self.stage = None
        self.numbers.update(metrics)
        if version:
            is_sampled = "time/step_s" in metrics
            self.is_learning_again = not is_sampled
            self.pace.step(version, at, is_sampled=is_sampled)
            self.phase = "running" if self.phase == "starting" else self.phase
        _put(self.rewards, version, metrics.get("reward/mean"))
        _put(self.held_out_rewards, version, metrics.get("eval/reward"))
        if "rollout/num_wanted" in metrics:
            self.num_wanted = int(metrics["rollout/num_wanted"])

    def event(self, record: Mapping[str, Any]) -> Told | None:
        """Updates the state with an event, and returns the event in words."""
        kind = record["kind"]
        self.stage = None if kind == "started" else stage(record) or self.stage
        if kind == "launched":
            self.pace.forget()
            self.phase, self.began, self.up_since = "starting", float(record.get("time") or self.now()), None
            self._away.clear()
            self.is_preempted = False
        elif kind == "started":
            self.phase, self.up_since = "running", float(record.get("time") or self.now())
        elif kind in ("stopping", *ENDS):
            self.phase = str(kind)
            self.ended = float(record.get("time") or self.now())
        elif kind == "preempted":
            self.is_preempted = True
        elif kind == "scale" and record.get("actors") == "rollout_workers":
            self.num_wanted = int(record["num_workers"])
        elif kind == "failure" and record.get("decision") == "restart":
            self.num_restarts += 1
            self._away.add(str(record.get("actor")))
        elif kind in ("recovery", "worker_joined", "worker_left"):
            self._away.discard(str(record.get("actor")))
        if sentence := told(record):
            self.told.append(sentence)
        return sentence

    def status(self, status: Mapping[str, Any]) -> None:
        """Updates the state with status.json, which may be empty. Actors of an earlier driver are ignored."""
        actors: Sequence[Mapping[str, Any]] = status["actors"] if status.get("time", 0.0) >= self.began else ()
        self.actors = tuple(
            Doing(actor=str(each["actor"]), phase=str(each["phase"]), since=float(each["since"])) for each in actors
        )

    # The state

    @property
    def is_over(self) -> bool:
        return self.phase in (*ENDS, "gone")

    @property
    def num_serving(self) -> int | None:
        """Rollout workers that serve; None before that is known."""
        if workers := [each for each in self.actors if each.actor.startswith("rollout")]:
            return sum(each.is_up and each.actor not in self._away for each in workers)
        if "rollout/num_workers" not in self.numbers:
            return None
        away = sum(actor.startswith("rollout") for actor in self._away)
        return max(int(self.numbers["rollout/num_workers"]) - away, 0)

    @property
    def num_known(self) -> int:
        """Known rollout workers, serving or not."""
        seen = sum(each.actor.startswith("rollout") for each in self.actors)
        return max(self.num_wanted or 0, self.num_serving or 0, seen)

    @property
    def not_up(self) -> list[Doing]:
        """Actors that start or restart, the longest first."""
        return sorted((each for each in self.actors if not each.is_up), key=lambda each: each.since)


def _put(points: list[tuple[int, float]], version: int, value: float | None) -> None:
    """Adds a point. If the run comes back to an earlier version, the later value counts."""
    if value is None or value != value:
        return
    while points and points[-1][0] >= version:
        points.pop()
    points.append((version, value))
    if len(points) > _MOST_POINTS:
        del points[1:-1:2]
