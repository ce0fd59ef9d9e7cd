"""Time, GPU-hours and tokens of a run: sums over its steps and its drivers. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPENT = {
    "time/sampling_s": "workers sampled groups",
    "time/learning_s": "the learner learned",
    "buffer/learner_wait_s": "the learner waited for groups",
    "time/broadcast_s": "weights were sent to workers",
    "time/eval_s": "held-out prompts were evaluated",
}
_BESIDE_STEPS = ("time/eval_s",)
_OF_ACTORS = re.compile(r"cost/([^/]+)/(.+)_s")
_SHOWN_AS = {"restart": "start or restart"}
"""Causes of waits under another name than their metric's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfActors:
    """How all actors of a kind spent their time, as far as they reported it."""

    kind: str
    seconds: float
    busy: float
    """Share of the time."""
    waits: tuple[tuple[str, float], ...]
    """Causes of waits with their shares of the time, the longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    driven_s: float
    """Sum over drivers, from the start of each to its last step or event."""
    num_drivers: int
    steps_s: float
    """Wall-clock seconds of all steps, without start-up, evaluations and saves. A step in which a driver died was learned again at the
    next start, and is not in it."""
    spent: tuple[tuple[str, float, float | None], ...]
    """(activity, seconds, share of `steps_s`). The share is None for evaluations, which lie outside the steps. Sampling, learning and
    broadcasts may overlap."""
    of_actors: tuple[OfActors, ...]
    gpu_hours: float
    idle_gpu_hours: float
    """GPU-hours of actors that were not busy."""
    sampled_tokens: float
    """Tokens of the groups that steps consumed; those of dropped groups are not counted."""
    trained_tokens: float


def costs(steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Costs:
    """`steps` are lines of metrics.jsonl, one per version."""
    steps_s, timed = total(steps, "time/step_s"), [step for step in steps if step.get("time/step_s") is not None]
    stretches = list(_driven(steps, events))
    return Costs(
        driven_s=sum(stretches),
        num_drivers=len(stretches),
        steps_s=steps_s,
        spent=tuple(
            (words, seconds, None if metric in _BESIDE_STEPS else seconds / steps_s if steps_s else 0.0)
            for metric, words in _SPENT.items()
            if (seconds := total(steps if metric in _BESIDE_STEPS else timed, metric))
        ),
        of_actors=tuple(of_actors(steps)),
        gpu_hours=total(steps, "cost/gpu_hours"),
        idle_gpu_hours=total(steps, "cost/idle_gpu_hours"),
        sampled_tokens=total(steps, "tokens/sampled"),
        trained_tokens=total(steps, "tokens/trained"),
    )


def of_actors(steps: Sequence[Mapping[str, Any]]) -> Iterator[OfActors]:
    """One for each kind of actor with recorded time."""
    by_kind: dict[str, dict[str, float]] = {}
    for metric in dict.fromkeys(name for step in steps for name in step):
        if found := _OF_ACTORS.fullmatch(metric):
            by_kind.setdefault(found[1], {})[found[2]] = total(steps, metric)
    for kind, causes in by_kind.items():
        if whole := sum(causes.values()):
            shares = {_SHOWN_AS.get(cause, cause): seconds / whole for cause, seconds in causes.items()}
            busy = shares.pop("busy", 0.0)
            waits = sorted(shares.items(), key=lambda wait: -wait[1])
            yield OfActors(kind=kind.replace("_", " "), seconds=whole, busy=busy, waits=tuple(waits))


def _driven(steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Seconds from each driver's start to its last step or event."""
    begun = [event for event in events if event["kind"] == "launched"]
    signs = sorted(each["time"] for each in (*events, *steps) if each.get("time") is not None)
    ends = [*(event["time"] for event in begun[1:]), float("inf")]
    for event, until in zip(begun, ends, strict=False):
        last = max((sign for sign in signs if event["time"] <= sign < until), default=event["time"])
        yield last - min(event.get("started_at", event["time"]), event["time"])


def total(steps: Sequence[Mapping[str, Any]], metric: str) -> float:
    """Sum over all steps that have the metric."""
    return sum(step.get(metric) or 0.0 for step in steps)
