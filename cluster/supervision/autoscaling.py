"""How many rollout workers a run should have. Deciding is pure; the pool starts and retires them, Ray's autoscaler finds nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.contracts.config import ElasticConfig

_WINDOW = 3
"""Steps whose mean decides to grow: one slow step is not a trend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """How one step used its time."""

    step_seconds: float
    wait_seconds: float
    """Of those, the learner waited for groups."""
    is_buffer_full: bool
    """Every group that the staleness bound allows was finished when the step was taken: sampling waits for the learner."""


def most_loads(config: ElasticConfig) -> int:
    """Loads that `decide` looks at; older ones need not be kept."""
    return max(_WINDOW, config.scale_down_full_steps)


def decide(loads: Sequence[StepLoad], *, num_workers: int, num_coming: int, config: ElasticConfig) -> int:
    """The number of workers to have, given the steps since it last changed; `num_workers` when nothing speaks for a change.

    While `num_coming` of them are not there yet no more are asked for: nodes take minutes, steps do not.
    """
    if config.max_workers is None:
        return num_workers
    bounded = min(max(num_workers, config.min_workers), config.max_workers)
    if bounded != num_workers or not loads:
        return bounded
    recent = list(loads)[-_WINDOW:]
    waited = sum(load.wait_seconds for load in recent) / max(sum(load.step_seconds for load in recent), 1e-9)
    if not num_coming and len(recent) == _WINDOW and waited > config.scale_up_wait_share:
        return min(num_workers + 1, config.max_workers)
    full = list(loads)[-config.scale_down_full_steps :]
    if len(full) == config.scale_down_full_steps and all(load.is_buffer_full for load in full):
        return max(num_workers - 1, config.min_workers)
    return num_workers
