"""Decides which steps are saved, and how their checkpoints are rated."""

import time
from collections.abc import Callable, Mapping, Sequence

from cluster.contracts.config import RunConfig
from cluster.contracts.types import GroupSummary
from cluster.metrics import mean_reward


class SavingRules:
    """The settings `checkpoint`, applied to one run."""

    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._config = config
        self._clock = clock
        self._last_save_s = clock()

    def is_due(self, version: int) -> bool:
        """Whether this version is the last one, or is to be saved by its number or by the time since the last save."""
        every_steps, every_s = self._config.checkpoint.every_steps, self._config.checkpoint.every_s
        by_steps = every_steps is not None and version % every_steps == 0
        by_time = every_s is not None and self._clock() - self._last_save_s >= every_s
        return version == self._config.num_steps or by_steps or by_time

    def note_save(self) -> None:
        """Restarts the time to the next save."""
        self._last_save_s = self._clock()

    def rated_by(self) -> str:
        """The origin of ratings: rewards of training, or an evaluation. Evaluations with other prompts or temperatures are not
        comparable."""
        identity = self._config.evaluation.identity
        return "reward" if identity is None else f"evaluation {identity}"

    def own_rating(self, metric: float | None, *, rated_by: str) -> float | None:
        """The metric of a checkpoint if it was rated as this run rates. Checkpoints of earlier versions do not say: `rated_by` is empty."""
        return metric if rated_by in ("", self.rated_by()) else None

    def evaluation_in(self, metrics: Mapping[str, float]) -> float | None:
        """Rating by a step's held-out metrics. None in a run that does not evaluate: they are from before it stopped evaluating."""
        return None if self._config.evaluation.prompts is None else metrics.get("eval/reward")

    def metric_of(self, summaries: Sequence[GroupSummary]) -> float | None:
        """Rating of a checkpoint without an evaluation: the mean reward of its step.

        None in a run that evaluates, since the two are not comparable; in one that learns from recorded trajectories, whose rewards are
        another policy's; and in one that selects trajectories or prompts, since the selection determines the mean.
        """
        config = self._config
        is_its_own = config.evaluation.prompts is None and config.recorded is None
        is_chosen = config.algorithm.selection or config.algorithm.filters or config.prompts.difficulty
        return mean_reward(summaries) if is_its_own and not is_chosen and summaries else None
