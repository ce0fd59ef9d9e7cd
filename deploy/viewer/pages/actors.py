"""A Gantt chart of the actors' lives and phases, with restarts, joins and departures."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from cluster.contracts.phases import IDLE, WAITING_FOR
from deploy.viewer import fleet
from deploy.viewer.page import page
from deploy.viewer.runs import Run

_MOST_BARS = 6000
"""On one page, for all actors: in a long window, neighbouring phases are merged."""
_WINDOWS = (60, 300, 1800, 7200)
"""Windows that the page offers, in seconds back from the run's end, in addition to the whole run."""
_COLORS = {
    "sampling": ("sampling",),
    "learning": ("assembling", "scoring the reference", "first look", "learning", "optimizing"),
    "judging": ("judging", "score"),
    "evaluation": ("evaluation",),
    "loading": ("loading weights", "publishing", "sending weights"),
    "saving": ("saving", "finish_saving", "record", "exporting"),
}
_COLOR_OF = {phase: color for color, phases in _COLORS.items() for phase in phases}
"""Waits have their own colour, and all other phases have that of a start."""


def actors(run: Run, request: Request) -> dict[str, Any]:
    """The query's `window` is a number of seconds back from now, or from the run's end, or `all`."""
    mark = run.mark()
    events, status, state = run.events(), run.status(), run.state()
    found = fleet.actors(events, status, state=state)
    phases = run.phases()
    ends = [each["time"] for each in events[-1:]] + [each["end"] for each in phases[-50:]]
    end = time.time() if state == "running" else max(ends, default=status.get("time", 1.0))
    asked = request.query_params.get("window", str(_WINDOWS[1]))
    window = int(asked) if re.fullmatch(r"\d{1,12}", asked) else None
    begin = min([each["time"] for each in events[:1]] + [each["start"] for each in phases[:1]], default=0.0)
    if window is not None:
        begin = max(begin, end - window)
    return {
        "run": run.name,
        "mark": mark,
        "window": "all" if window is None else str(window),
        "windows": [*map(str, _WINDOWS), "all"],
        "begin": begin,
        "end": end,
        "actors": fleet.without_spans(found),
        "rows": rows(found, [*phases, *present(found, phases, end=end)], begin=begin, end=end),
        "marks": [each for each in fleet.marks(fleet.versioned(events)) if each["actor"]][-500:][::-1],
        "has_phases": bool(phases),
    }


def rows(
    found: Sequence[Mapping[str, Any]], phases: Sequence[Mapping[str, Any]], *, begin: float, end: float
) -> list[dict[str, Any]]:
    """Each actor's bars between `begin` and `end`: its life (`healthy`, `dead`) and, above it, its phases."""
    by_actor: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for phase in phases:
        if phase["end"] > begin and phase["start"] < end:
            by_actor[phase["actor"]].append(phase)
    lives = {actor["name"]: actor["spans"] for actor in found}
    most = max(_MOST_BARS // max(len(by_actor), 1), 50)
    return [
        {
            "actor": name,
            "life": _cut(lives.get(name, ()), begin=begin, end=end),
            "bars": [{**bar, "color": _color(bar["phase"])} for bar in merged(by_actor[name], (end - begin) / most)],
        }
        for name in [*lives, *sorted(by_actor.keys() - lives.keys())]
    ]


def present(
    found: Sequence[Mapping[str, Any]], phases: Sequence[Mapping[str, Any]], *, end: float
) -> list[dict[str, Any]]:
    """Current phases of living actors: a phase is written to phases.jsonl only at its end."""
    until = {phase["actor"]: phase["end"] for phase in phases}
    return [
        {"actor": actor["name"], "phase": actor["phase"], "start": start, "end": end}
        for actor in found
        if actor["phase"] and (start := max(actor["phase_since"], until.get(actor["name"], 0.0))) < end
    ]


def merged(phases: Sequence[Mapping[str, Any]], shortest_s: float) -> list[dict[str, Any]]:
    """Bars in order. Neighbours that together last at most `shortest_s` become one bar of the phase that took most of that time."""
    bars: list[dict[str, Any]] = []
    gathered: list[Mapping[str, Any]] = []
    for phase in sorted(phases, key=lambda each: each["start"]):
        if gathered and phase["end"] - gathered[0]["start"] > shortest_s:
            bars.append(_one(gathered))
            gathered = []
        gathered.append(phase)
    return [*bars, *([_one(gathered)] if gathered else [])]


def _one(phases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    took: defaultdict[str, float] = defaultdict(float)
    for phase in phases:
        took[phase["phase"]] += phase["end"] - phase["start"]
    most = max(took, key=lambda name: took[name])
    return {
        "phase": most,
        "start": phases[0]["start"],
        "end": max(phase["end"] for phase in phases),
        "step": phases[-1].get("step"),
        "number": len(phases),
    }


def _color(phase: str) -> str:
    return "waiting" if phase in IDLE or phase.startswith(WAITING_FOR) else _COLOR_OF.get(phase, "start")


def _cut(spans: Sequence[Mapping[str, Any]], *, begin: float, end: float) -> list[dict[str, Any]]:
    """Spans cut to the window. A span that is not over ends with the window."""
    cut = ({**span, "start": max(span["start"], begin), "end": min(span["end"] or end, end)} for span in spans)
    return [span for span in cut if span["end"] > span["start"]]


ROUTES = page("/run/{run}/actors", actors, template="actors.html")
