"""What keeps a run going and on record: checkpoints, supervision, limits, sizes, metrics."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mark, NumActors, Resources, Section

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"([A-Za-z0-9.-]+/)?{_NAME}={_NAME}")
"""As Kubernetes and Ray write labels of nodes."""


class CheckpointConfig(Section, mark=Mark.RESOURCES):
    every_steps: PositiveInt | None = 20
    """A learner that dies learns so many steps again, at most. None does not save by steps. The last step is always saved."""
    every_s: PositiveFloat | None = 600.0
    """Also saves when the last save is so long ago, for runs whose steps take long. None does not save by time."""
    stop_timeout_s: NonNegativeFloat = 60.0
    """Longest that a run which is stopped (Ctrl-C, SIGTERM) takes to finish its step and save it, and one that fails to finish the
    checkpoint that is being written; 0 does neither."""
    timeout_s: PositiveFloat = 7200.0
    """Longest that training waits for a checkpoint to be written or read, or an export to be written. Ranks that take longer count as hung:
    they are restarted, learn again from the checkpoint before, and save anew."""
    keep_last: PositiveInt = 2
    """Checkpoints that stay."""
    keep_best: bool = True
    """Also keeps the checkpoint with the best evaluation, or with the best reward in a run that does not evaluate; none where
    `algorithm.selection`, `algorithm.filters` or `prompts.difficulty` choose what is trained, and with it the reward. Where a resumed run
    evaluates in another way, the best one of each way stays."""
    asynchronous: bool = True
    """Copies the state, and writes it while training goes on. Training waits where a learner rank has no memory for its copy."""


class SupervisionConfig(Section, mark=Mark.RESOURCES):
    max_restarts: NonNegativeInt = 8
    """Restarts of one actor within `window_s`, beyond which the run stops. The learner's ranks count as one actor, and their
    deaths with one node as one."""
    window_s: PositiveFloat = 600.0
    backoff_s: NonNegativeFloat = 1.0
    """Wait before an actor's second restart in the window; the first comes at once. It doubles with each further one, up to a minute."""
    heartbeat_s: PositiveFloat = 5.0
    """How often actors are asked what they do."""
    hang_s: PositiveFloat = 60.0
    """An actor that does not answer for so long is killed and replaced. An actor that answers but makes no progress is found by the
    deadline of the call that it works on (`timeout_s` of its section)."""
    start_s: PositiveFloat = 300.0
    """Deadline for an actor to come up, model loading included. A worker that joins in mid-run waits for its node without end, says so
    every `start_s` and when Ray's autoscaler has news (event `worker_waits`), and has `start_s` to load."""
    max_prompt_failures: PositiveInt = 3
    """A prompt whose groups failed so often is not sampled again."""


class MismatchConfig(Section, mark=Mark.RESOURCES):
    """Limits on |learner log-prob - rollout log-prob|, averaged over a step's newest tokens: those that the current weights sampled, or
    where a late asynchronous step has none of them, the newest weights that sampled any."""

    alarm_nats: PositiveFloat = 0.5
    """A larger difference is logged as event `mismatch_alarm`."""
    stop_nats: PositiveFloat | None = None
    """A larger difference stops the run, with the name of the step's trajectories. None never stops."""


class ElasticConfig(Section, mark=Mark.LAYOUT):
    min_workers: PositiveInt = 1
    max_workers: NumActors | None = None
    """Of rollout workers, whose number follows the learner's wait for groups; None does not scale by itself. The number of reward
    services changes by `treadwheel scale` alone."""
    scale_up_wait_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Workers are added when the learner waits for groups for a larger share of its time: as many as the measured shares of waiting and
    idle time ask for (docs/scaling.md)."""
    max_step_factor: Annotated[float, Field(gt=1)] = 2.0
    """Growth asks for at most this many times the workers that serve; if all of them serve, for one more worker at least. Workers that are
    coming count as asked for, and do not raise this limit."""
    scale_down_full_steps: PositiveInt = 10
    """Workers that the measured idle time does not need are removed after so many steps in a row with a full buffer."""
    spot: Resources[str | None] = None
    """`key=value`, the label of nodes that may be taken away, for example `ray.io/market-type=spot`. Rollout workers may run there; all
    other actors stay on other nodes. None: no node is such a one."""
    wait_for_nodes_s: Resources[PositiveFloat | None] = None
    """The run is planned on what it asks for, and waits so long for nodes with room for all of it, an elastic one for `min_workers` of
    its workers (docs/scaling.md). Later, when no worker is left, it waits for the next one's node without end. None plans on the nodes that
    are there when it starts, and refuses what they have no room for."""

    @model_validator(mode="after")
    def _require_ordered_bounds(self) -> "ElasticConfig":
        if self.max_workers is not None and self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers={self.min_workers} is more than max_workers={self.max_workers}; lower it, or raise max_workers"
            )
        return self

    @field_validator("spot")
    @classmethod
    def _require_a_label(cls, spot: str | None) -> str | None:
        if spot is not None and not _LABEL.fullmatch(spot):
            raise ValueError(f"{spot!r} is no label; write key=value, such as ray.io/market-type=spot")
        return spot

    @property
    def off_spot(self) -> dict[str, str]:
        """Ray's selector of nodes that stay; empty when every node does."""
        if self.spot is None:
            return {}
        key, _, value = self.spot.partition("=")
        return {key: f"!{value}"}

    def is_spot(self, node_labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels may be taken away."""
        key, _, value = (self.spot or "").partition("=")
        return self.spot is not None and node_labels.get(key) == value


class RecordConfig(Section, mark=Mark.RESOURCES):
    keep_trajectories: PositiveInt | None = None
    """Steps whose trajectories stay in the run directory; None keeps all. Those of all steps since the oldest of the last
    `checkpoint.keep_last` checkpoints stay in any case: a restart may learn them again. A replay needs all of them."""
    learned_groups: NonNegativeInt | None = 8
    """Groups of each step, its first ones, whose tokens are recorded as the objective saw them (docs/record.md): 20 bytes a token. None
    records all, 0 none; what is learned is the same. `treadwheel replay --learned` makes the record of any step."""


class MetricsConfig(Section, mark=Mark.RESOURCES):
    """Where the numbers of each step go. Events always go to events.jsonl too."""

    sinks: tuple[Plugin, ...] = (Plugin(name="console"), Plugin(name="jsonl"), Plugin(name="tensorboard"))
