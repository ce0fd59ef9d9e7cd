"""Which steps are saved, and what their checkpoints are rated by."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence

from cluster.contracts.config import RunConfig
from cluster.contracts.types import GroupSummary
from cluster.metrics import mean_reward


class SavingRules:
    """What `checkpoint` says, for one run."""

    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._config = config
        self._clock = clock
        self._last_save_s = clock()

    def is_due(self, version: int) -> bool:
        """Whether it is the last one, or one to save by its number or by the time since the last save."""
        every_steps, every_s = self._config.checkpoint.every_steps, self._config.checkpoint.every_s
        by_steps = every_steps is not None and version % every_steps == 0
        by_time = every_s is not None and self._clock() - self._last_save_s >= every_s
        return version == self._config.num_steps or by_steps or by_time

    def note_save(self) -> None:
        """The time to the next save begins anew."""
        self._last_save_s = self._clock()

    def rated_by(self) -> str:
        """What a checkpoint's rating is of: rewards of training, or this evaluation's. Of two evaluations with other prompts or another
        temperature neither mean says anything about the other."""
        evaluation = self._config.evaluation
        if evaluation.prompts is None:
            return "reward"
        what = evaluation.model_dump(mode="json", include={"prompts", "num_prompts", "temperature"})
        return f"evaluation {hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]}"

    def metric_of(self, summaries: Sequence[GroupSummary]) -> float | None:
        """Of a checkpoint without an evaluation: the mean reward of its step.

        None in a run that evaluates: an evaluation and a step's reward cannot be compared. None in one that learns from recorded
        trajectories: their rewards are another policy's. None where trajectories or prompts are chosen: the choice makes their mean.
        """
        config = self._config
        is_its_own = config.evaluation.prompts is None and config.recorded is None
        is_chosen = config.algorithm.selection or config.algorithm.filters or config.prompts.difficulty
        return mean_reward(summaries) if is_its_own and not is_chosen and summaries else None
