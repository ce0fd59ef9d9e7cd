"""The weights that each worker serves, and the proof: version, digest, canary."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from deploy.viewer import fleet, series
from deploy.viewer.page import page
from deploy.viewer.runs import Run

_MOST_BROADCASTS = 200
_SENT = ("policy_version", "digest", "num_workers", "time")
_PROVED = ("policy_version", "canary_mean_error", "noise_floor", "distinguishable")
_PANELS = (
    ("Canary", "nats, worst worker", True, (("weights/canary_error", "mean"), ("weights/canary_max_error", "largest token"),
                                            ("weights/noise_floor", "noise floor"))),
    ("Broadcast", "s", False, (("time/broadcast_s", "all"), ("time/publish_s", "of it publishing"), ("weights/pause_s", "longest pause"))),
    ("Speed", "bytes/s", False, (("weights/bytes_per_s", "over all workers"),)),
    ("Proofs that failed", "since the start", False, (("weights/num_refused", "refused"),)),
)  # fmt: skip


def weights(run: Run, request: Request) -> dict[str, Any]:
    mark = run.mark()
    steps, events, state = run.metrics(), run.events(), run.state()
    found = fleet.actors(events, run.status(), state=state)
    return {
        "run": run.name,
        "mark": mark,
        "workers": workers(found, events),
        "broadcasts": broadcasts(events)[-_MOST_BROADCASTS:][::-1],
        "panels": [panel for each in _PANELS if (panel := series.panel(steps, *each))],
    }


def workers(found: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rollout workers, each with the version that it serves, its digest, and `behind`, the number of newer versions.

    `canary` is the proof of a worker that joined late, when it caught up. The canary of a broadcast, the worst of all workers, is in the
    curves.
    """
    digests = {sent["policy_version"]: sent["digest"] for sent in broadcasts(events)}
    newest = max(digests, default=None)
    proofs = {event["actor"]: event for event in events if event["kind"] == "attested"}
    rows: list[dict[str, Any]] = []
    for actor in found:
        if not actor["name"].startswith("rollout"):
            continue
        version, proof = actor["policy_version"], proofs.get(actor["name"])
        rows.append(
            {
                "actor": actor["name"],
                "state": actor["state"],
                "policy_version": version,
                "digest": digests.get(version),
                "behind": None if version is None or newest is None else max(newest - version, 0),
                "canary": proof and {name: proof.get(name) for name in _PROVED},
            }
        )
    return rows


def broadcasts(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every version that was sent, once and in order. Of a step that was learned again, the later broadcast counts."""
    sent = {event["policy_version"]: event for event in events if event["kind"] in ("broadcast", "published")}
    return [{name: sent[version].get(name) for name in _SENT} for version in sorted(sent)]


ROUTES = page("/run/{run}/weights", weights, template="weights.html")
