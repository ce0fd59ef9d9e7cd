"""Checks of the lines that a run writes: readers compute with their fields. Each returns a mistake in words, or None."""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

Line = Mapping[str, Any]
Types = tuple[type, ...]
_NUMBER: Types = (int, float)
_KNOWN_OR_NOT: Types = (int, float, NoneType)
"""JSON has no NaN: None replaces it."""
_NAMES = {
    _NUMBER: "a number",
    _KNOWN_OR_NOT: "a number or null",
    (int,): "a whole number",
    (str,): "a text",
    (list,): "a list",
    (dict,): "an object",
}
_STEP: dict[str, Types] = {"policy_version": (int,), "time": _NUMBER}
_PHASE: dict[str, Types] = {"actor": (str,), "phase": (str,), "start": _NUMBER, "end": _NUMBER, "step": (int,)}
_EVENT: dict[str, Types] = {
    "kind": (str,),
    "time": _NUMBER,
    "policy_version": (int,),
    "actor": (str,),
    "digest": (str,),
    "failures": (list,),
    "groups": (list,),
    "lines": (list,),
    "metric": _KNOWN_OR_NOT,
    "mean_abs_nats": _KNOWN_OR_NOT,
    "recorded_steps": (int,),
    "seconds": _NUMBER,
    "silent_s": _NUMBER,
    "started_at": _NUMBER,
}
_OF_KIND: dict[str, dict[str, Types]] = {
    "started": {"actors": (dict,)},
    "scale": {"actors": (str,), "num_workers": (int,)},
    "attested": dict.fromkeys(("canary_mean_error", "noise_floor"), _KNOWN_OR_NOT),
}


def wrong_step(line: Line) -> str | None:
    """Of metrics.jsonl: all values are numbers."""
    if why := _wrong(line, _STEP, needed=("policy_version",)):
        return why
    others = (name for name, value in line.items() if not isinstance(value, _KNOWN_OR_NOT))
    return next((_has(name, line, _KNOWN_OR_NOT) for name in others), None)


def wrong_event(line: Line) -> str | None:
    """Of events.jsonl."""
    return _wrong(line, _EVENT, needed=("kind",)) or _wrong(line, _OF_KIND.get(line["kind"], {}))


def wrong_phase(line: Line) -> str | None:
    """Of phases.jsonl."""
    return _wrong(line, _PHASE, needed=("actor", "phase", "start", "end"))


def wrong_verdict(line: Line) -> str | None:
    """Of verdicts.jsonl."""
    return _wrong(line, {"key": (str,)}, needed=("key", "verdict"))


def _wrong(line: Line, types: Mapping[str, Types], *, needed: Sequence[str] = ()) -> str | None:
    if missing := [name for name in needed if name not in line]:
        return f"has no {missing[0]!r}"
    for name, allowed in types.items():
        if name in line and not isinstance(line[name], allowed):
            return _has(name, line, allowed)
    return None


def _has(name: str, line: Line, allowed: Types) -> str:
    return f"has {name}={line[name]!r:.60}, which is not {_NAMES[allowed]}"
