"""Settings of checkpoints, supervision, elasticity, the record and metrics."""

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
"""A node's label, as Kubernetes and Ray write it."""


class CheckpointConfig(Section, mark=Mark.RESOURCES):
    every_steps: PositiveInt | None = 20
    """Steps between two checkpoints: the most that a learner's death undoes. None does not save by steps; the last step is always saved."""
    every_s: PositiveFloat | None = 600.0
    """Also saves when the last save is this many seconds ago, for runs with long steps. None does not save by time."""
    stop_timeout_s: NonNegativeFloat = 60.0
    """Longest time to finish and save the step under way when a run is stopped (Ctrl-C, SIGTERM), and to finish the checkpoint under way
    when a run fails. 0 does neither."""
    timeout_s: PositiveFloat = 7200.0
    """Longest time that training waits until a checkpoint is written or read, or an export is written. Ranks that take longer count as
    hung: they are restarted, learn again from the previous checkpoint, and save anew. Without a background save, and in an export, several
    ranks also wait at most `learner.timeout_s` for the first one to write a file."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keeps the checkpoint with the best evaluation, or with the best reward in a run that does not evaluate. Without an evaluation,
    there is no best one if `algorithm.selection`, `algorithm.filters` or `prompts.difficulty` choose what is trained, and with it the
    reward. If a resumed run evaluates in another way, the best one of each way is kept."""
    asynchronous: bool = True
    """Copies the state and writes it while training continues. Training waits if a learner rank has no memory for its copy."""


class SupervisionConfig(Section, mark=Mark.RESOURCES):
    max_restarts: NonNegativeInt = 8
    """Restarts of one actor within `window_s`; one more stops the run. Learner ranks count as one actor, their deaths with a node as
    one. In whatever time, the learner may also restart at most this often without a new step, and a worker, reward service or scorer
    without a finished group. Lost nodes count only for the learner."""
    window_s: PositiveFloat = 600.0
    """Time for which restarts and failures count."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before an actor's second restart in the window; the first comes at once. Each further restart doubles it, up to a minute."""
    heartbeat_s: PositiveFloat = 5.0
    """Interval at which actors are asked what they do."""
    hang_s: PositiveFloat = 60.0
    """An actor that does not answer for this long is killed and replaced. An actor that answers but makes no progress is found by the
    deadline of its call (`timeout_s` of its section)."""
    start_s: PositiveFloat = 300.0
    """Deadline for the start of an actor, model loading included. A worker that joins in mid-run waits for its node without limit, reports
    it every `start_s` and on news from Ray's autoscaler (event `worker_waits`), and then has `start_s` to load."""
    max_prompt_failures: PositiveInt = 3
    """A prompt that an actor worked on at this many failures, alone at the last one, is not sampled again (event `quarantine`)."""


class MismatchConfig(Section, mark=Mark.RESOURCES):
    """Limits on the mean |learner log-prob - rollout log-prob| over a step's newest tokens: those sampled by the current weights or, if a
    late asynchronous step has none of them, by the newest weights that sampled any. Of several `learner.mini_batches` only the first
    is measured, unless a pass before the updates sees all: with `algorithm.proximal: recompute`, `learner.stop_at_kl` or
    `optimizer.target_kl`."""

    alarm_nats: PositiveFloat = 0.5
    """A larger mean is logged as event `mismatch_alarm`."""
    stop_nats: PositiveFloat | None = None
    """A larger mean stops the run; the error names the step's trajectories. None never stops."""


class ElasticConfig(Section, mark=Mark.LAYOUT):
    min_workers: PositiveInt = 1
    """Minimum number of rollout workers of an elastic run."""
    max_workers: NumActors | None = None
    """Maximum number of rollout workers, whose number then follows the learner's wait for groups. None: it does not change by itself. The
    number of reward services never does."""
    scale_up_wait_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Workers are added when the learner waits for groups for a larger share of its time. The measured shares of waiting and idle time
    decide how many (docs/scaling.md)."""
    max_step_factor: Annotated[float, Field(gt=1)] = 2.0
    """Growth requests at most this many times the serving workers, or one more worker if all of them serve. Workers that are coming count
    as requested and do not raise the limit."""
    scale_down_full_steps: PositiveInt = 10
    """After this many consecutive steps with a full buffer, workers are removed: as many as the measured idle time shows to be too many."""
    spot: Resources[str | None] = None
    """`key=value`, the label of spot nodes, which may be taken away, for example `ray.io/market-type=spot`. Rollout workers may run there;
    all other actors run on other nodes. None: no node is a spot node."""
    wait_for_nodes_s: Resources[PositiveFloat | None] = None
    """Waits this long at the start for nodes with room for the whole run; an elastic run waits for room for `min_workers` workers
    (docs/scaling.md). Later, when no worker is left, the run waits for the next worker's node without limit. None: the run is planned for
    the nodes that exist when it starts, and is refused if they have too little room."""

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
            raise ValueError(f"{spot!r} is not a label; write key=value, such as ray.io/market-type=spot")
        return spot

    @property
    def off_spot(self) -> dict[str, str]:
        """Ray's label selector for nodes that are not spot nodes; empty without `spot`."""
        if self.spot is None:
            return {}
        key, _, value = self.spot.partition("=")
        return {key: f"!{value}"}

    def is_spot(self, node_labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is a spot node."""
        key, _, value = (self.spot or "").partition("=")
        return self.spot is not None and node_labels.get(key) == value


class RecordConfig(Section, mark=Mark.RESOURCES):
    keep_trajectories: PositiveInt | None = None
    """Number of steps whose trajectories stay in the run directory; None keeps all. The steps since the oldest of the last
    `checkpoint.keep_last` checkpoints are always kept, since a restart may learn them again. A replay needs all steps."""
    learned_groups: NonNegativeInt | None = 8
    """Number of groups at the start of each step for which the learner records what the objective saw of each token (docs/record.md): 20
    bytes a token. None records all groups, 0 none. `treadwheel replay --learned` makes the record of any step later."""


class MetricsConfig(Section, mark=Mark.RESOURCES):
    """Receivers of the metrics and events of a run. Events always go to events.jsonl too."""

    sinks: tuple[Plugin, ...] = (Plugin(name="console"), Plugin(name="jsonl"), Plugin(name="tensorboard"))
    """Names below cluster.sinks with their parameters, or your own as 'my_package.module:name'."""
