"""Actors and their history, from a run's events and status: which are alive, which died and came back, what happened when. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from cluster.metrics import ENDS

Event = Mapping[str, Any]
_TONES = {
    "bad": ("failure", "hang", "failed", "mismatch_alarm", "checkpoint_failed", "storage_failed", "storage_silent", "groups_lost",
            "worker_not_joined", "steering_failed", "learned_not_recorded", "ledger_torn", "quarantine", "sink_left_out"),
    "good": ("recovery", "worker_joined", "finished"),
}  # fmt: skip
_TONE_OF = {kind: tone for tone, kinds in _TONES.items() for kind in kinds}
"""All other kinds are `plain`."""
_QUIET = ("broadcast", "published", "attested", "drop", "printed")
"""Routine kinds, which lists of events leave out: curves and the page Weights have their numbers, and logs the printed lines."""
_OF_THE_STEP_BEFORE = ("checkpoint", "mismatch_alarm", "finished", "stopped")
"""Kinds logged after the step that made their policy version. All others happen while the next step is made."""


@dataclass(slots=True, kw_only=True)
class Actor:
    name: str
    state: str = "healthy"
    """`healthy`, `dead` (failed, not replaced yet), `left`, or `ended` (the run has ended)."""
    phase: str | None = None
    phase_since: float | None = None
    """Unix seconds."""
    policy_version: int | None = None
    pid: int | None = None
    num_restarts: int = 0
    trouble: str | None = None
    """Its last failure or hang, in words."""
    trouble_at: float | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Stretches of its life, in order and without gaps: `state`, `start`, `end` (None: not over), `words`."""


def actors(events: Iterable[Event], status: Mapping[str, Any], *, state: str) -> list[dict[str, Any]]:
    """All actors of the run so far, sorted by name."""
    found: dict[str, Actor] = {}
    last = 0.0
    for event in events:
        last = max(last, event["time"])
        _apply(found, event)
    for doing in status.get("actors", ()):
        actor = found.setdefault(doing["actor"], Actor(name=doing["actor"]))
        actor.policy_version = doing["policy_version"]
        if state == "running":
            actor.phase, actor.phase_since = doing["phase"], doing["since"]
    if state != "running":
        for actor in found.values():
            _turn(actor, "ended", max(last, status.get("time", 0.0)), None)
    return [asdict(found[name]) for name in sorted(found, key=natural)]


def last_told(events: Sequence[Event]) -> Event | None:
    """The event of the last driver's end, or its `launched` event if it logged no end; None before the first driver."""
    return next((event for event in reversed(events) if event["kind"] in (*ENDS, "launched")), None)


def versioned(events: Sequence[Event]) -> list[Event]:
    """All events of a run. Those that a resumed driver logged before its first step get the version of its record."""
    drivers = list(accumulate(event["kind"] == "launched" for event in events))
    begun = {
        driver: event["recorded_steps"]
        for driver, event in zip(drivers, events, strict=True)
        if "recorded_steps" in event
    }
    return [
        event if event.get("policy_version") else {**event, "policy_version": begun.get(driver, 0)}
        for driver, event in zip(drivers, events, strict=True)
    ]


def marks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The `versioned` events without routine ones, each with its step, tone (`bad`, `good`, `plain`) and words."""
    return [
        {
            "step": step_of(event),
            "time": event["time"],
            "kind": event["kind"],
            "actor": event.get("actor"),
            "tone": _TONE_OF.get(event["kind"], "plain"),
            "words": words(event),
        }
        for event in events
        if not _is_routine(event)
    ]


def step_of(event: Event) -> int:
    """The step to which a `versioned` event belongs."""
    return event["policy_version"] + (event["kind"] not in _OF_THE_STEP_BEFORE)


def is_drain(event: Event) -> bool:
    """Whether an actor leaves a node that goes away. It is logged like a failure, and is none."""
    return event.get("decision") == "drain"


def words(event: Event) -> str:
    """One line for people."""
    reason = str(event.get("message") or event.get("reason") or "").strip().partition("\n")[0]
    match event["kind"]:
        case "failure":
            return f"{_led_by(event['actor'], reason, event['failure'])}; decided: {event['decision']}"
        case "recovery":
            return f"{event['actor']} serves again after {event['seconds']:.1f} s"
        case "hang":
            return f"{event['actor']} was silent for {event['silent_s']:.0f} s"
        case "worker_joined":
            after = f" after {event['seconds']:.1f} s" if "seconds" in event else ""
            return f"{event['actor']} joined{after}"
        case "worker_left":
            return f"{event['actor']} left"
        case "scale":
            actors = event.get("actors", "rollout_workers").replace("_", " ")
            return f"{event['before']} to {event['num_workers']} {actors}: {reason}"
        case "checkpoint":
            return f"checkpoint of step {event['policy_version']}"
        case "resumed":
            return f"resumed after {event['recorded_steps']} recorded steps"
        case "launched":
            return "a driver started"
        case "started":
            return f"{len(event['actors'])} actors serve"
        case "broadcast":
            return f"{event['num_workers']} workers serve {event['digest'][:12]}"
        case kind:
            return reason or kind.replace("_", " ")


def _is_routine(event: Event) -> bool:
    """Failed rewards have a message where a kind of failure is new: the others would fill the lists. The page Rewards has them all."""
    return event["kind"] in _QUIET or (event["kind"] == "reward_failure" and not event.get("message"))


def _led_by(actor: str, reason: str, kind: str) -> str:
    """The reason alone if it begins with the actor's name; otherwise actor and kind before it."""
    return reason if reason.startswith(f"{actor} ") else f"{actor}: {kind}, {reason}"


def _apply(found: dict[str, Actor], event: Event) -> None:
    kind, at = event["kind"], event["time"]
    if kind == "launched" or kind in ENDS:
        for actor in found.values():
            _turn(actor, "ended", at, None)
    elif kind == "started":
        for name, pid in event["actors"].items():
            _turn(_named(found, name, pid), "healthy", at, "started")
    elif kind in ("recovery", "worker_joined"):
        actor = _named(found, event["actor"], event.get("actor_pid"))
        actor.num_restarts += kind == "recovery"
        _turn(actor, "healthy", at, words(event))
    elif kind in ("failure", "hang"):
        actor = _named(found, event["actor"], event.get("actor_pid"))
        actor.trouble, actor.trouble_at = words(event), at
        if not is_drain(event):
            _turn(actor, "dead", at, words(event))
    elif kind in ("worker_left", "worker_not_joined"):
        _turn(_named(found, event["actor"], None), "left", at, words(event))


def _named(found: dict[str, Actor], name: str, pid: int | None) -> Actor:
    actor = found.setdefault(name, Actor(name=name))
    actor.pid = pid or actor.pid
    return actor


def _turn(actor: Actor, state: str, at: float, why: str | None) -> None:
    """Begins a new span, unless the state is the same: a dead actor that fails again while it is replaced stays dead."""
    if actor.spans and actor.spans[-1]["end"] is None:
        if actor.spans[-1]["state"] == state:
            return
        actor.spans[-1]["end"] = at
    actor.state = state
    if state in ("healthy", "dead"):
        actor.spans.append({"state": state, "start": at, "end": None, "words": why})


def natural(name: str) -> list[Any]:
    """Sort key that puts `rollout-10` after `rollout-9`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.replace("-", "- ").split()]


def without_spans(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For pages that show only the current state of actors."""
    return [{name: value for name, value in actor.items() if name != "spans"} for actor in found]
