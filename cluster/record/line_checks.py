"""Checks of the lines that a run writes, and of its status: readers compute with their fields. Each returns a mistake in words, or None.

A field is needed if readers need it and every version of the product has written it.
"""

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
_NEEDED_OF_KIND: dict[str, tuple[str, ...]] = {
    "attested": ("actor",),
    "broadcast": ("policy_version", "digest"),
    "drop": ("reason",),
    "failed": ("reason",),
    "failure": ("actor", "failure", "decision"),
    "hang": ("actor", "silent_s"),
    "published": ("policy_version", "digest"),
    "quarantine": ("reason",),
    "recovery": ("actor", "seconds"),
    "resumed": ("recorded_steps",),
    "scale": ("num_workers", "before"),
    "started": ("actors",),
    "worker_joined": ("actor",),
    "worker_left": ("actor",),
    "worker_not_joined": ("actor",),
}
_FAILURE: dict[str, Types] = {"kind": (str,), "message": (str,), "count": (int,)}
_STATUS: dict[str, Types] = {"time": _NUMBER, "actors": (list,)}
_DOING: dict[str, Types] = {"actor": (str,), "phase": (str,), "since": _NUMBER, "policy_version": (int,)}


def wrong_step(line: Line) -> str | None:
    """Of metrics.jsonl: all values are numbers."""
    if why := _wrong(line, _STEP, needed=_STEP):
        return why
    others = (name for name, value in line.items() if not isinstance(value, _KNOWN_OR_NOT))
    return next((_has(name, line[name], _KNOWN_OR_NOT) for name in others), None)


def wrong_event(line: Line) -> str | None:
    """Of events.jsonl."""
    if why := _wrong(line, _EVENT, needed=("kind", "time")):
        return why
    needed = _NEEDED_OF_KIND.get(line["kind"], ())
    return _wrong(line, _OF_KIND.get(line["kind"], {}), needed=needed) or _wrong_in_list(line, "failures", _FAILURE)


def wrong_phase(line: Line) -> str | None:
    """Of phases.jsonl."""
    return _wrong(line, _PHASE, needed=("actor", "phase", "start", "end"))


def wrong_verdict(line: Line) -> str | None:
    """Of verdicts.jsonl."""
    return _wrong(line, {"key": (str,)}, needed=("key", "verdict"))


def wrong_status(status: Line) -> str | None:
    """Of status.json. It is empty until the run has written it."""
    if not status:
        return None
    return _wrong(status, _STATUS, needed=_STATUS) or _wrong_in_list(status, "actors", _DOING)


def _wrong_in_list(line: Line, name: str, types: Mapping[str, Types]) -> str | None:
    """A mistake in the objects of a list, which have all fields of `types`."""
    for place, each in enumerate(line.get(name, ())):
        label = f"{name}[{place}]"
        if not isinstance(each, dict):
            return _has(label, each, (dict,))
        if why := _wrong(each, types, needed=types, within=f"{label}."):
            return why
    return None


def _wrong(
    line: Line, types: Mapping[str, Types], *, needed: Sequence[str] | Mapping[str, Types], within: str = ""
) -> str | None:
    """`within` is written before names of fields."""
    if missing := [name for name in needed if name not in line]:
        return f"has no {within + missing[0]!r}"
    for name, allowed in types.items():
        if name in line and not isinstance(line[name], allowed):
            return _has(within + name, line[name], allowed)
    return None


def _has(name: str, value: Any, allowed: Types) -> str:
    return f"has {name}={value!r:.60}, which is not {_NAMES[allowed]}"
