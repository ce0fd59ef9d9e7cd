"""Curves of a run, for report.html and curves.png: lines, evaluations as points with errors, bounds, and interruptions. Pure.

Measurements that are steps apart are not joined by a line: nothing was measured between them.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.viewer.dots import round_numbers
from deploy.viewer.fleet import is_drain, step_of, words
from deploy.viewer.series import Point, latest, means, thinned, values

Step = Mapping[str, Any]
"""A line of metrics.jsonl."""
NUM_COLORS = 6
"""A panel has at most so many lines."""
_MOST_POINTS = 400
_MOST_MARKS = 60
_MOST_WORDS = 200
"""Characters of a mark: each panel repeats all marks."""
_PART = re.compile(r"reward/(?!(?:mean|num_errors|num_timeouts)$)([^/]+)")
_SOURCE = re.compile(r"reward/mean/(.+)")
_PASSES = re.compile(r"eval/(pass_at_\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    label: str
    color: int
    """1 to `NUM_COLORS`."""
    points: tuple[Point, ...]
    """(step, value)."""
    mean: tuple[Point, ...] = ()
    """Mean of each stretch of a long curve. Empty for a short curve, and for a maximum, whose mean has no meaning."""
    is_long: bool = False
    """Its points are drawn pale, under the mean."""
    is_line: bool = True
    """False: measured only at some steps."""
    errors: tuple[float | None, ...] = ()
    """Standard error of each point; empty: not known."""

    @property
    def end(self) -> float:
        """Value at which the label is placed."""
        return (self.mean or self.points)[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str = ""
    curves: tuple[Curve, ...]
    bound: tuple[float, str] | None = None
    """(value, label) of a limit: its curves should stay below."""
    is_log: bool = False
    has_zero: bool = False
    """The axis begins at 0."""
    is_whole: bool = False
    """Values are whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An interruption of the run."""

    step: int
    is_failure: bool
    """True: an actor failed. False: a driver resumed the run."""
    words: str


def panels(steps: Sequence[Step], config: Mapping[str, Any]) -> list[Panel]:
    """Panels with at least one number. `config` has the settings of run.yaml."""
    alarm = (config.get("mismatch") or {}).get("alarm_nats")
    bound = latest(steps, "staleness/bound")
    if bound is None:
        bound = (config.get("buffer") or {}).get("max_off_policy_steps")
    kl = {"learner/kl_reference_k3_mean": "to reference", "learner/kl_rollout_k3_mean": "to rollout"}
    speed = {"speed/sampling_tokens_per_s": "sampling", "speed/learning_tokens_per_s": "learning"}
    seconds = {"time/step_s": "step", "time/learning_s": "learning", "buffer/learner_wait_s": "waiting",
               "time/broadcast_s": "weights"}  # fmt: skip
    parts, sources = _named(steps, _PART), _named(steps, _SOURCE)
    found = (
        Panel(title="Reward", curves=_curves(steps, {"reward/mean": "sampled"}, {"eval/reward": "held out"})),
        Panel(title="Parts of the reward", unit=_number_shown(parts), curves=_curves(steps, parts)),
        Panel(title="Reward by source", unit=_number_shown(sources), curves=_curves(steps, sources)),
        Panel(
            title="Held out",
            unit="share of successes",
            curves=_curves(steps, {}, {"eval/accuracy": "accuracy"} | _named(steps, _PASSES)),
        ),
        Panel(title="Entropy", unit="nats a token", curves=_curves(steps, {"learner/entropy_mean": "policy"})),
        Panel(
            title="Mismatch, rollout to learner",
            unit="nats",
            curves=_curves(steps, {"mismatch/mean_abs_nats": "mean", "mismatch/max_abs_nats": "largest"}),
            bound=None if alarm is None else (float(alarm), f"alarm {alarm:g}"),
            is_log=True,
        ),
        Panel(title="KL", unit="nats", curves=_curves(steps, kl)),
        Panel(
            title="Staleness",
            unit="versions",
            curves=_curves(steps, {"staleness/mean": "mean", "staleness/max": "oldest"}),
            bound=None if bound is None else (float(bound), f"bound {bound:g}"),
            has_zero=True,
            is_whole=True,
        ),
        Panel(title="Throughput", unit="tokens/s", curves=_curves(steps, speed), has_zero=True),
        Panel(title="A step's time", unit="s", curves=_curves(steps, seconds), has_zero=True),
    )
    return [panel for panel in found if panel.curves]


def marks(events: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """Interruptions among `versioned` events, the last `_MOST_MARKS` of them."""
    found: dict[tuple[int, bool], Mark] = {}
    for event in events:
        if event["kind"] in ("resumed", "failure", "hang") and not is_drain(event):
            step, is_failure = step_of(event), event["kind"] != "resumed"
            found[step, is_failure] = Mark(step=step, is_failure=is_failure, words=words(event)[:_MOST_WORDS])
    return sorted(found.values(), key=lambda mark: (mark.step, mark.is_failure))[-_MOST_MARKS:]


def limits(panel: Panel) -> tuple[float, float]:
    """Lowest and highest value of the panel's axis."""
    extent = list(_extent(panel))
    low, high = min(extent), max(extent)
    if panel.is_log:
        return 10 ** math.floor(math.log10(low)), 10 ** (math.floor(math.log10(high)) + 1)
    if panel.has_zero:
        low = min(low, 0.0)
    high = max(high, low + 1.0) if panel.is_whole else high
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if panel.has_zero and low == 0.0 else low - room), high + room


def steps_of(shown: Iterable[Panel]) -> tuple[int, int]:
    """First and last step of all panels."""
    steps = [step for panel in shown for curve in panel.curves for step, _ in curve.points]
    return min(steps), max(steps)


def height(value: float, low: float, high: float, *, is_log: bool) -> float:
    """Height on an axis from `low` to `high`: 0 at the bottom, 1 at the top."""
    if is_log:
        return math.log(max(value, low) / low) / math.log(high / low)
    return (value - low) / (high - low)


def bound_shown(panel: Panel) -> tuple[float, str] | None:
    """The bound, if it lies on the axis."""
    low, high = limits(panel)
    return panel.bound if panel.bound and low <= panel.bound[0] <= high else None


def ticks(panel: Panel) -> list[float]:
    """Round numbers on the panel's axis."""
    low, high = limits(panel)
    if panel.is_log:
        exponents = range(round(math.log10(low)), round(math.log10(high)) + 1)
        return [10.0**exponent for exponent in exponents[:: len(exponents) // 5 or 1]]
    return round_numbers(low, high, is_whole=panel.is_whole)


def tick_words(value: float, *, is_log: bool) -> str:
    """`0.25`, `30 k`, `1e-6`."""
    if is_log:
        return f"1e{round(math.log10(value))}" if not 0.01 <= value <= 1000 else f"{value:g}"
    return f"{value / 1000:g} k" if abs(value) >= 10_000 else f"{value:g}"


def spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Places close to the wanted ones and at least `gap` apart, between `low` and `high` as far as there is room."""
    order = sorted(range(len(wanted)), key=lambda each: wanted[each])
    places: dict[int, float] = {}
    last = low - gap
    for each in order:
        last = places[each] = max(wanted[each], last + gap)
    ceiling = high + gap
    for each in reversed(order):
        ceiling = places[each] = min(places[each], ceiling - gap)
    return [places[each] for each in range(len(wanted))]


def _curves(
    steps: Sequence[Step], lines: Mapping[str, str], points: Mapping[str, str] | None = None
) -> tuple[Curve, ...]:
    """`lines` and `points` map metrics to labels. A metric of `lines` is drawn as a line if most steps have a number."""
    found: list[Curve] = []
    for metric, label in {**lines, **(points or {})}.items():
        if (known := values(steps, metric)) and len(found) < NUM_COLORS:
            is_line = metric in lines and _is_dense(known)
            found.append(_curve(steps, metric, known, label=label, color=len(found) + 1, is_line=is_line))
    return tuple(found)


def _curve(steps: Sequence[Step], metric: str, known: list[Point], *, label: str, color: int, is_line: bool) -> Curve:
    if not is_line:
        errors = dict(values(steps, f"{metric}_stderr"))
        kept = known[-_MOST_POINTS:]
        of_points = tuple(errors.get(step) for step, _ in kept) if errors else ()
        return Curve(label=label, color=color, points=tuple(kept), is_line=False, errors=of_points)
    is_long = len(known) > _MOST_POINTS // 2
    mean = tuple(means(known, _MOST_POINTS // 8)) if is_long and "max" not in metric else ()
    points = tuple(thinned(known, _MOST_POINTS))
    return Curve(label=label, color=color, points=points, mean=mean, is_long=is_long)


def _is_dense(known: Sequence[Point]) -> bool:
    """Whether more than about half of the steps have a value."""
    return len(known) * 2 > known[-1][0] - known[0][0]


def _named(steps: Sequence[Step], pattern: re.Pattern[str]) -> dict[str, str]:
    """Metrics that match the whole pattern, in order, with its first group as the label."""
    names = dict.fromkeys(itertools.chain.from_iterable(steps))
    return {name: found[1] for name in names if (found := pattern.fullmatch(name))}


def _number_shown(names: Mapping[str, str]) -> str:
    """`6 of 9` if some are left out for want of colours; else empty."""
    return f"{NUM_COLORS} of {len(names)}" if len(names) > NUM_COLORS else ""


def _extent(panel: Panel) -> Iterator[float]:
    """Values that the axis must include. A bound far above a logarithmic curve is left out."""
    highest = -math.inf
    for curve in panel.curves:
        errors = curve.errors or (None,) * len(curve.points)
        for (_, value), error in zip(curve.points, errors, strict=True):
            if not panel.is_log:
                yield from (value - (error or 0.0), value + (error or 0.0))
            elif value > 0:
                yield value
                highest = max(highest, value)
    if panel.bound is not None and (not panel.is_log or panel.bound[0] < highest * 100):
        yield panel.bound[0]
    if panel.is_log and highest < 0:
        yield 1.0
