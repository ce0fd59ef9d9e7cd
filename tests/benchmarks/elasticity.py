"""Simulated runs whose workers take 30 to 600 s to join: time to finish and worker-seconds of the elastic rule against a rule that adds and
removes one worker at a time.

Runs of 240 steps of 30 s under four loads: 4 and 14.5 workers, rising from 3 to 9, falling from 10 to 3. Joins take 30, 120, 300 and
600 s, give or take 30%. Groups are a fluid that serving workers make, inside the staleness bound; the learner takes a step's worth at a
time. A worker costs from the moment in which it is asked for. All is arithmetic on the rule's own code: the same on any machine.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

from cluster.contracts.config import ElasticConfig
from cluster.supervision.autoscaling import Decision, Fleet, StepLoad, decide

JOIN_S = (30, 120, 300, 600)
WORK: dict[str, Callable[[float], float]] = {
    "4 workers": lambda done: 4.0,
    "14.5 workers": lambda done: 14.5,
    "3 workers, 9 at the end": lambda done: 3 + 6 * done,
    "10 workers, 3 in the second half": lambda done: 10.0 if done < 0.5 else 3.0,
}
"""Workers that keep the learner fed, by the share of the run that is done."""
NUM_STEPS = 240
LEARNING_S = 30.0
BOUND = 1
CONFIG = ElasticConfig(max_workers=32)
Rule = Callable[[Sequence[StepLoad], Fleet, ElasticConfig], Decision]


def one_at_a_time(loads: Sequence[StepLoad], fleet: Fleet, config: ElasticConfig) -> Decision:
    """The baseline: one worker more when the learner waits for more than the share, one less after the full steps."""
    recent, full = list(loads)[-3:], list(loads)[-config.scale_down_full_steps :]
    waited = sum(load.wait_seconds for load in recent) / max(sum(load.step_seconds for load in recent), 1e-9)
    number = fleet.num_workers
    if not fleet.num_coming and len(recent) == 3 and waited > config.scale_up_wait_share:
        number += 1
    elif len(full) == config.scale_down_full_steps and all(load.is_buffer_full for load in full):
        number -= 1
    return Decision(num_workers=min(max(number, config.min_workers), config.max_workers or number))


@dataclass(slots=True)
class Run:
    """One simulated run, from one worker that serves to the last step, in ticks of a second."""

    work: Callable[[float], float]
    join_s: float
    rule: Rule
    dice: random.Random
    now: float = 0.0
    worker_seconds: float = 0.0
    _asked: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    """(asked at, serves from), of each worker, the longest there first."""
    _loads: list[StepLoad] = field(default_factory=list[StepLoad])
    _num_coming: int = 0
    _made: float = 0.0
    """Steps' worth of groups."""
    _join_seconds: float | None = None

    def to_end(self) -> "Run":
        for version in range(NUM_STEPS):
            began, busy_s, serving_s = self.now, 0.0, 0.0
            learns_until: float | None = None
            while learns_until is None or self.now < learns_until:
                if learns_until is None and self._made >= version + 1:
                    waited, learns_until = self.now - began, self.now + LEARNING_S
                num_serving = sum(serves <= self.now for _, serves in self._asked)
                seconds_a_step = LEARNING_S * self.work(version / NUM_STEPS)
                made = min(num_serving / seconds_a_step, version + BOUND + 1 - self._made)
                self._made += made
                busy_s += made * seconds_a_step
                serving_s += num_serving
                self.worker_seconds += len(self._asked)
                self.now += 1
                self._steer(version)
            self._loads.append(
                StepLoad(
                    step_seconds=self.now - began,
                    wait_seconds=waited,
                    num_workers=serving_s / (self.now - began),
                    idle_share=1 - busy_s / serving_s,
                    is_buffer_full=self._made >= version + 1 + BOUND - 1e-9,
                )
            )
        return self

    def _steer(self, version: int) -> None:
        num_coming = sum(serves > self.now for _, serves in self._asked)
        if num_coming != self._num_coming:
            self._join_seconds = next((serves - asked for asked, serves in self._asked[::-1] if serves <= self.now))
        self._num_coming = num_coming
        fleet = Fleet(
            num_workers=len(self._asked),
            num_coming=num_coming,
            join_seconds=self._join_seconds,
            num_steps_left=NUM_STEPS - version,
        )
        wanted = self.rule(self._loads, fleet, CONFIG).num_workers
        if wanted != len(self._asked):
            self._loads.clear()
        for _ in range(len(self._asked), wanted):
            self._asked.append((self.now, self.now + self.join_s * self.dice.uniform(0.7, 1.3)))
        del self._asked[wanted:]


def rows() -> list[dict[str, Any]]:
    """Means over all loads, one pair of rows for each join time and one for all."""
    ratios: dict[int, list[tuple[float, float]]] = {join_s: [] for join_s in JOIN_S}
    for join_s, (name, work) in product(JOIN_S, WORK.items()):
        ours, theirs = (
            Run(work=work, join_s=join_s, rule=rule, dice=random.Random(name)).to_end()
            for rule in (decide, one_at_a_time)
        )
        ratios[join_s].append((ours.now / theirs.now, ours.worker_seconds / theirs.worker_seconds))
    of_all = [pair for pairs in ratios.values() for pair in pairs]
    return [
        *_rows("", of_all, aims=("<= 0.9", "<= 1.02")),
        *(row for join_s, pairs in ratios.items() for row in _rows(f", joins of {join_s} s", pairs, aims=(None, None))),
    ]


def _rows(
    what: str, pairs: Sequence[tuple[float, float]], *, aims: tuple[str | None, str | None]
) -> list[dict[str, Any]]:
    times, worker_seconds = zip(*pairs, strict=True)
    return [
        {
            "name": f"elasticity{what}: {name}",
            "value": fmean(values),
            "unit": "of the baseline's",
            "baseline": "one worker more or less at a time",
            "baseline_value": 1.0,
            "ratio": fmean(values),
            "aim": aim,
        }
        for (name, values), aim in zip(
            (("time to finish", times), ("worker-seconds", worker_seconds)), aims, strict=True
        )
    ]
