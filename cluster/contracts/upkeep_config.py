"""What keeps a run going and on record: checkpoints, supervision, limits, sizes, metrics."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Mark, Section


class CheckpointConfig(Section, mark=Mark.RESOURCES):
    every_steps: PositiveInt | None = 20
    """A learner that dies learns so many steps again, at most. None does not save by steps. The last step is always saved."""
    every_s: PositiveFloat | None = 600.0
    """Also saves when the last save is so long ago, for runs whose steps take long. None does not save by time."""
    stop_timeout_s: NonNegativeFloat = 60.0
    """Longest that a run which is stopped (Ctrl-C, SIGTERM) takes to finish its step and save it; 0 saves nothing then."""
    keep_last: PositiveInt = 2
    """Checkpoints that stay."""
    keep_best: bool = True
    """Also keeps the checkpoint with the best evaluation, or with the best reward in a run that does not evaluate."""
    asynchronous: bool = True
    """Copies the state, and writes it while training goes on."""


class SupervisionConfig(Section, mark=Mark.RESOURCES):
    max_restarts: NonNegativeInt = 8
    """Restarts of one actor within `window_s`, beyond which the run stops. The learner's ranks count as one actor, and so do all ranks
    that die with one node."""
    window_s: PositiveFloat = 600.0
    backoff_s: NonNegativeFloat = 1.0
    """Wait before a restart. It doubles with each restart in the window."""
    heartbeat_s: PositiveFloat = 5.0
    """How often actors are asked what they do."""
    hang_s: PositiveFloat = 60.0
    """An actor that does not answer for so long is killed and replaced. An actor that answers but makes no progress is found by the
    deadline of the call that it works on (`timeout_s` of its section)."""
    start_s: PositiveFloat = 300.0
    """Deadline for an actor to come up, model loading included."""
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
    max_workers: PositiveInt | None = None
    """Of rollout workers, whose number follows the learner's wait for groups; None does not scale by itself. The number of reward
    services changes by `treadwheel scale` alone."""
    scale_up_wait_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Workers are added while the learner waits for groups for a larger share of its time."""
    scale_down_full_steps: PositiveInt = 10
    """One worker is removed after so many steps in a row with a full buffer."""


class RecordConfig(Section, mark=Mark.RESOURCES):
    keep_trajectories: PositiveInt | None = None
    """Steps whose trajectories stay in the run directory; None keeps all. Those of all steps since the oldest of the last
    `checkpoint.keep_last` checkpoints stay in any case: a restart may learn them again. A replay needs all of them."""


class MetricsConfig(Section, mark=Mark.RESOURCES):
    """Where the numbers of each step go. Events always go to events.jsonl too."""

    sinks: tuple[Plugin, ...] = (Plugin(name="console"), Plugin(name="jsonl"), Plugin(name="tensorboard"))
