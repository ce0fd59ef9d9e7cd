"""Events in words: one sentence for people, with its importance."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

Record = Mapping[str, Any]
_CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?"  # sequences: CSI, OSC, others
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
"""Characters that a terminal executes instead of showing. Judges print text of a model, and errors quote it."""


class Weight(IntEnum):
    """Importance of an event."""

    NOTE = 0
    """Normal."""
    WARNING = 1
    """The run continues; someone may want to look."""
    FAILURE = 2
    """The run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event as a sentence."""

    at: float
    """Unix time, seconds."""
    kind: str
    words: str
    """One line."""
    weight: Weight


def stage(record: Record) -> str | None:
    """The wait that begins with this event and lasts until the next one or the next step; None for an event that begins no wait."""
    words = _STAGES.get(str(record["kind"]))
    return words and words(record)


def printed(record: Record) -> list[str]:
    """Lines that an actor printed, safe for a terminal; none for an event of another kind."""
    if record["kind"] != "printed":
        return []
    actor, num_more = record.get("actor"), record.get("num_more") or 0
    more = [f"{actor}: ({num_more} lines before these are in its log)"] if num_more else []
    return [*more, *(f"{actor}: {_CONTROLS.sub('', str(line))}" for line in record.get("lines", ()))]


def for_terminal(text: str) -> str:
    """Lines without characters that a terminal executes. Half a surrogate pair, which no stream can encode, becomes a question mark."""
    shown = "\n".join(_CONTROLS.sub("", line) for line in text.split("\n"))
    return shown.encode(errors="replace").decode()


def told(record: Record) -> Told | None:
    """The event in words, safe for a terminal; None for an event that only programs read."""
    kind = str(record["kind"])
    sentence = _SENTENCES.get(kind)
    words = record.get("message") or (sentence and sentence(record))
    if not words:
        return None
    return Told(
        at=float(record.get("time") or 0.0),
        kind=kind,
        words=_CONTROLS.sub("", next(iter(str(words).splitlines()), "")),
        weight=_weight(kind, record),
    )


def _weight(kind: str, record: Record) -> Weight:
    if kind == "failed" or record.get("decision") == "abort":
        return Weight.FAILURE
    if kind in _WARNINGS or ("message" in record and kind not in _NOTES):
        return Weight.WARNING
    return Weight.NOTE


def _failure(record: Record) -> str:
    then = {"restart": "; it starts again", "abort": "; the run stops"}.get(str(record.get("decision")), "")
    return f"{_of_actor(record)}{then}"


def _of_actor(record: Record) -> str:
    """The reason, after the actor's name unless it begins with that."""
    actor, reason = str(record.get("actor") or "an actor"), str(record.get("reason") or "it failed")
    return reason if reason.startswith(actor) else f"{actor}: {reason}"


def _recovery(record: Record) -> str:
    again = record.get("steps_learned_again")
    learned = f", {again} steps learned again" if again else ""
    return f"{record.get('actor', 'an actor')} is back after {_seconds(record)}{learned}"


def _seconds(record: Record, name: str = "seconds") -> str:
    return f"{record.get(name) or 0.0:.0f} s"


def _scale(record: Record) -> str:
    actors = str(record.get("actors", "rollout_workers")).replace("_", " ")
    return f"{record.get('num_workers')} {actors} wanted, {record.get('before')} before ({record.get('reason')})"


def _connecting(record: Record) -> str:
    address = record.get("address")
    return f"connects to Ray at {address}" if address else "Ray starts on this machine"


def _checkpoint(record: Record) -> str:
    metric = record.get("metric")
    rated = "" if metric is None else f", rated {metric:.3f}"
    return f"step {record.get('policy_version')} is saved{rated}"


_SENTENCES: dict[str, Callable[[Record], str]] = {
    "checkpoint": _checkpoint,
    "checkpoint_failed": lambda record: f"no checkpoint was saved: {record.get('reason')}",
    "failed": lambda record: f"the run failed: {record.get('reason')}",
    "failure": _failure,
    "finished": lambda _: "the run is finished",
    "groups_lost": lambda record: f"{len(record.get('groups', ()))} groups were lost and are sampled again",
    "hang": lambda record: f"{record.get('actor')} did not answer for {_seconds(record, 'silent_s')} and was ended",
    "ledger_torn": lambda record: f"a crash tore the ledger's last line; step {record.get('recorded_steps')} is whole",
    "mismatch_alarm": lambda record: (
        f"rollout and learner log-probs differ by {record.get('mean_abs_nats') or 0.0:.3g} nats on average"
    ),
    "quarantine": lambda record: f"prompt {record.get('prompt_id')!r} is left out: {record.get('reason')}",
    "recovery": _recovery,
    "resumed": lambda record: f"the run goes on from its record of {record.get('recorded_steps')} steps",
    "scale": _scale,
    "started": lambda record: f"all {len(record.get('actors', ()))} actors are up",
    "steering_failed": lambda record: f"nodes and workers could not be looked after: {record.get('reason')}",
    "stopped": lambda _: "the run was stopped",
    "worker_joined": lambda record: f"{record.get('actor')} joined after {_seconds(record)}",
    "worker_left": lambda record: f"{record.get('actor')} left",
    "worker_not_joined": lambda record: f"{_of_actor(record)}; it did not join",
}
"""Sentences for events without a `message`."""
_STAGES: dict[str, Callable[[Record], str]] = {
    "launched": lambda _: "the record and the model's files are checked",
    "connecting": _connecting,
    "starting": lambda _: "the actors start, the learner loads its model",
    "learner_loaded": lambda _: "the learner is up, the other actors are not yet",
    "evaluating": lambda record: f"{record.get('num_prompts', 'the')} held-out prompts are evaluated",
}
_WARNINGS = frozenset(
    ("checkpoint_failed", "failure", "groups_lost", "hang", "learned_not_recorded", "ledger_torn", "mismatch_alarm", "quarantine",
     "sink_left_out", "steering_failed", "storage_failed", "worker_not_joined")
)  # fmt: skip
_NOTES = frozenset(
    ("compute_type", "groups_handed_over", "groups_saved", "learner_loaded", "nothing_left", "placement", "recorded", "reward_resumed",
     "stopping", "waiting_for_nodes")
)  # fmt: skip
"""Events with a `message` that are not warnings."""
