"""Decides what follows a failure: `decide(failure, history)` is pure and returns Restart or Abort.

Every actor has a restart budget of its own. Actors that die together with their node are one failure. An actor also restarts only so often
without progress, in whatever time; losses of nodes do not count for that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.contracts.config import SupervisionConfig
from cluster.contracts.errors import FailureKind
from cluster.contracts.types import ActorKind

_NODE_LOSS_S = 30.0
"""Deaths and hangs on one node within this many seconds count as the loss of that node: calls and heartbeats notice them one by one."""
_PROGRESS: Mapping[ActorKind, str] = {
    ActorKind.LEARNER: "a new step",
    ActorKind.ROLLOUT_WORKER: "a finished group",
    ActorKind.REWARD_SERVICE: "a finished group",
    ActorKind.REWARD_MODEL: "a finished group",
    ActorKind.REFERENCE_SCORER: "a finished group",
}
"""The progress after which earlier restarts of an actor are forgiven. The other kinds report none."""
_MOST_DOUBLINGS = 1023
"""Most doublings of a back-off: one more is too large for a float, and a run of weeks may allow thousands of restarts."""


def unit_of(actor: str, kind: ActorKind) -> str:
    """Name of the unit that restarts: the actor, or the whole learner, whose ranks restart together."""
    return "the learner" if kind is ActorKind.LEARNER else actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    actor: str
    actor_kind: ActorKind
    kind: FailureKind
    reason: str
    at: float
    """Seconds, of the same clock for all failures."""
    node_id: str | None = None
    """Where the actor ran; None when it never came up."""
    is_lost_node: bool = False
    """Whether the node is dead or does not answer."""

    @property
    def description(self) -> str:
        """The actor and the reason. Most reasons begin with the actor already."""
        return self.reason if self.reason.startswith(self.actor) else f"{self.actor}: {self.reason}"

    @property
    def unit(self) -> str:
        return unit_of(self.actor, self.actor_kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    actor: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    reason: str


@dataclass(slots=True)
class History:
    """Past failures of this run: the only state of supervision."""

    failures: list[Failure] = field(default_factory=list[Failure])
    futile: dict[str, list[Failure]] = field(default_factory=dict[str, list[Failure]])
    """Failures of each unit since its last progress, however old."""

    def add(self, failure: Failure, *, window_s: float = float("inf")) -> None:
        """Remembers `failure` and forgets those older than `window_s`, which decide nothing any more."""
        self.failures = [past for past in self.failures if failure.at - past.at <= window_s]
        self.failures.append(failure)
        if failure.actor_kind in _PROGRESS:
            self.futile.setdefault(failure.unit, []).append(failure)

    def note_success(self, unit: str) -> None:
        """The unit made a step that it had not made before, or finished a group."""
        self.futile.pop(unit, None)


def decide(failure: Failure, history: History, config: SupervisionConfig) -> Restart | Abort:
    """Decides whether `failure` restarts its actor or ends the run. `history` holds the failures before it."""
    if failure.kind is FailureKind.REFUSAL:
        return Abort(reason=failure.description)
    recent = [
        past for past in history.failures if past.unit == failure.unit and failure.at - past.at <= config.window_s
    ]
    num_restarts = _num_incidents([*recent, failure]) - 1
    if num_restarts >= config.max_restarts:
        return _spent(failure, num_restarts, f"within {config.window_s:g} s", config)
    # Slow starts or calls keep the restarts from fitting into `window_s`, and would otherwise be repeated forever.
    num_futile = _num_futile(failure, history.futile.get(failure.unit, ()))
    if (progress := _PROGRESS.get(failure.actor_kind)) and num_futile >= config.max_restarts:
        return _spent(failure, num_futile, f"without {progress}", config)
    # The first restart is immediate, because most deaths are single. Only repeated failures back off.
    delay_s = config.backoff_s * 2.0 ** min(num_restarts - 1, _MOST_DOUBLINGS) if num_restarts else 0.0
    return Restart(actor=failure.actor, delay_s=min(delay_s, 60.0))


def _spent(failure: Failure, num_restarts: int, since: str, config: SupervisionConfig) -> Abort:
    return Abort(
        reason=f"{failure.description}; the restart budget is spent: {num_restarts} restarts of "
        f"{failure.unit} {since} (supervision.max_restarts={config.max_restarts})"
    )


def _num_futile(failure: Failure, past: Sequence[Failure]) -> int:
    """Restarts that brought no progress, of which `failure` ended the last. Lost nodes do not count, except for the learner."""
    failures = [*past, failure]
    if failure.actor_kind is ActorKind.LEARNER:
        return _num_incidents(failures) - 1
    failures = [each for each in failures if not each.is_lost_node]
    # A process can die, or fall silent, before its node does. Only an actor that fails on the same node again shows that the node lived on.
    return len(failures) - len({each.node_id for each in failures})


def _num_incidents(failures: Sequence[Failure]) -> int:
    """Number of failures. Deaths and hangs of different actors on one node within `_NODE_LOSS_S` count as one."""
    count = 0
    losses: dict[str, tuple[float, set[str]]] = {}
    for failure in failures:
        if failure.node_id is None or failure.kind not in (FailureKind.DEATH, FailureKind.HANG):
            count += 1
            continue
        began, dead = losses.get(failure.node_id, (-math.inf, set[str]()))
        if failure.at - began > _NODE_LOSS_S or failure.actor in dead:
            count += 1
            began, dead = failure.at, set[str]()
        losses[failure.node_id] = began, dead | {failure.actor}
    return count
