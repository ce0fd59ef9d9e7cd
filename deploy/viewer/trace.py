"""`treadwheel trace`: a run's phases and events as a Chrome trace. Each actor is a process, each phase a slice, each event an instant."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.contracts.errors import ConfigError
from cluster.contracts.phases import Phase
from cluster.record.run_directory import EVENTS, METRICS, PHASES, RunDirectory
from cluster.supervision.timesheet import CONTROLLER
from deploy.step_range import step_range
from deploy.viewer import fleet

Line = Mapping[str, Any]
_TID = 1
"""An actor does one thing at a time."""


def trace(directory: RunDirectory, *, steps: str | None = None) -> dict[str, Any]:
    """`steps` is `12` or `10-20`; None: the whole run. Raises ConfigError if the run or the steps have no records."""
    directory.reach()
    phases, events = directory.read_json_lines(PHASES), fleet.versioned(directory.read_json_lines(EVENTS))
    if not phases:
        raise ConfigError(f"{directory.url!r} has no {PHASES}; name a run that trains, or trained, with this version")
    begin, end = _window(directory, phases, steps) if steps else (min(each["start"] for each in phases), float("inf"))
    return {
        "traceEvents": trace_events(phases, events, begin=begin, end=end),
        "displayTimeUnit": "ms",
        "otherData": {"run": directory.path(), "begins_at_unix_s": begin},
    }


def trace_events(
    phases: Sequence[Line], events: Sequence[Line], *, begin: float, end: float = float("inf")
) -> list[dict[str, Any]]:
    """Trace events between `begin` and `end`, in Unix seconds. Their own times are microseconds since `begin`."""
    by_actor: defaultdict[str, list[Line]] = defaultdict(list)
    for line in sorted(phases, key=lambda each: each["start"]):
        by_actor[line["actor"]].append(line)
    marks = [each for each in fleet.marks(events) if begin <= each["time"] <= end]
    actors = {*by_actor, *(mark["actor"] or CONTROLLER for mark in marks)}
    pids = {actor: pid for pid, actor in enumerate(sorted(actors, key=fleet.natural), start=1)}
    found = [
        {"ph": "M", "name": what, "pid": pid, "tid": _TID, "args": {"name": name}}
        for name, pid in pids.items()
        for what in ("process_name", "thread_name")
    ]
    for actor, lines in by_actor.items():
        found += _slices(lines, pid=pids[actor], begin=begin, end=end)
    return found + [_instant(mark, pid=pids[mark["actor"] or CONTROLLER], begin=begin) for mark in marks]


def _slices(lines: Sequence[Line], *, pid: int, begin: float, end: float) -> list[dict[str, Any]]:
    """Slices in order and without overlap: after a restart the clocks of two machines may disagree."""
    found: list[dict[str, Any]] = []
    until = 0
    for line in lines:
        starts = max(_microseconds(line["start"] - begin), until)
        ends = _microseconds(min(line["end"], end) - begin)
        if ends <= starts:
            continue
        cause = Phase(name=line["phase"], start=0.0, end=0.0).cause
        args = {"cause": cause} | ({"step": line["step"]} if "step" in line else {})
        times = {"ts": starts, "dur": ends - starts}
        found.append({"ph": "X", "name": line["phase"], "cat": cause, "pid": pid, "tid": _TID, **times, "args": args})
        until = ends
    return found


def _instant(mark: Line, *, pid: int, begin: float) -> dict[str, Any]:
    scope, at = "p" if mark["actor"] else "g", _microseconds(mark["time"] - begin)
    args = {"step": mark["step"], "says": mark["words"]}
    where = {"pid": pid, "tid": _TID, "ts": at}
    return {"ph": "i", "s": scope, "name": mark["kind"], "cat": "event", **where, "args": args}


def _window(directory: RunDirectory, phases: Sequence[Line], steps: str) -> tuple[float, float]:
    """From the time when the step before the first was logged to the time when the last was."""
    first, last = step_range(steps)
    logged = {line["policy_version"]: line["time"] for line in directory.read_json_lines(METRICS)}
    if not (found := [version for version in logged if max(first, 1) <= version <= last]):
        known = f"it logged steps {min(logged)} to {max(logged)}" if logged else "it has logged none yet"
        raise ConfigError(f"--steps={steps!r}: {directory.url!r} has none of them; {known}")
    before = (at for version, at in logged.items() if version < min(found))
    return max(before, default=min(each["start"] for each in phases)), logged[max(found)]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
