"""The optimizer updates of a step: their trajectories, their results, and what later steps take from them."""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import DataError
from cluster.contracts.protocols import Demonstrations
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.statistics import Statistics
from learner.assemble import Batch
from learner.forward_backward import MiniBatch, Passes
from learner.guard import NonFiniteGuard, are_finite
from learner.learned import LearnedRows
from learner.model.packing import TokenRow
from learner.model.policy import token_row
from learner.optimizer import Optimizer
from learner.progress import Laps, Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of one update."""

    statistics: Statistics
    """Of all ranks."""
    gradient_norms: Mapping[str, float]
    """Before clipping, by model: see `Optimizer.gradient_norms`."""
    learning_rate: float | None = None
    """None: no weight was changed."""
    is_skipped: bool = False
    """Not made: its loss or gradient was not finite."""
    is_empty: bool = False
    """Not made: filters and corrections left no token to train on, and no critic, KL, entropy, teacher, routers' loss or demonstration
    trains either."""
    stops_step: bool = False
    """Not made, nor any later one of the step: the policy had already moved too far."""
    num_tokens: int
    """Prompt and completion tokens of its trajectories and demonstrations."""
    num_passes: int
    """Micro-batches of each rank; of ranks that share passes, only one counts those of demonstrations."""

    @property
    def is_made(self) -> bool:
        return self.learning_rate is not None


def split(group_index_N: Sequence[int], config: RunConfig, *, policy_version: int) -> list[list[list[int]]]:
    """For every epoch its mini-batches, each as the rows that it trains on, in the batch's order.

    Groups, or trajectories, are shuffled in every epoch, by seed, policy version and epoch only: all ranks, a resumed run and a replay
    split alike. Sizes of mini-batches differ by at most one group, or trajectory. If failed rewards leave fewer of them than
    `learner.mini_batches`, each is a mini-batch, and fewer updates are made.
    """
    units: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(group_index_N):
        units[group if config.learner.split_by == "groups" else row].append(row)
    count = min(config.learner.mini_batches, len(units))
    epochs: list[list[list[int]]] = []
    for epoch in range(config.learner.epochs):
        dealt = list(units.values())
        random.Random(f"{config.seed}/{policy_version}/{epoch}").shuffle(dealt)
        epochs.append([sorted(row for unit in dealt[i::count] for row in unit) for i in range(count)])
    return epochs


class Updater:
    """Makes the updates of a step, one after the other."""

    def __init__(
        self,
        passes: Passes,
        *,
        objective: Objective,
        optimizer: Optimizer,
        guard: NonFiniteGuard,
        config: RunConfig,
        demonstrations: Demonstrations | None,
        vocabulary_size: int,
        phases: Phases,
    ) -> None:
        self._passes, self._objective, self._optimizer, self._guard = passes, objective, optimizer, guard
        self._config, self._demonstrations, self._phases = config, demonstrations, phases
        self._vocabulary_size = vocabulary_size
        critic = config.algorithm.value
        self._num_warmup_steps = 0 if critic is None else critic.warmup_steps

    def make(
        self,
        batch: Batch,
        prepared: Prepared,
        mini_batch: MiniBatch,
        *,
        version: int,
        before: Sequence[Update],
        demonstrated: Sequence[TokenRow],
        learned: LearnedRows,
        laps: Laps,
    ) -> Update:
        """Computes the gradients of the mini-batch and of the demonstrations, then makes the update, or not: see `Update`.

        `before` are the updates of the step so far. Raises NumericsError after too many updates in a row that were not finite.
        """
        begins_step = not any(update.is_made for update in before)
        trains_policy = self._trains_policy(version)
        self._phases.enter("learning", step=version + 1)
        part = self._objective.mini_batch(prepared, mini_batch.rows, begins_step=begins_step)
        self._optimizer.zero()
        losses, seen = self._passes.accumulate(part, mini_batch, learned=learned, trains_policy=trains_policy)
        imitated = self._passes.imitate(demonstrated) if demonstrated else []
        seen += imitated
        gradient_norms = self._optimizer.gradient_norms()
        statistics = self._passes.of_all_ranks(seen)
        laps.lap("time/gradient_s")
        self._phases.enter("optimizing", step=version + 1)
        rate, is_finite = None, True
        limit = self._config.learner.stop_at_kl
        stops_step = not begins_step and limit is not None and _moved(statistics) > limit
        # Weight decay and momentum alone are not an update. The guard handles gradients that are not finite: comparisons with NaN would
        # make the update look empty.
        is_empty = not demonstrated and are_finite(gradient_norms) and not self._objective.trains(part, statistics)
        if not is_empty and not stops_step:
            is_finite = self._guard.admits(
                batch, mini_batch, losses=losses, gradient_norms=gradient_norms, place=(version, len(before) + 1)
            )
            rate = self._optimizer.step(version, gradient_norms=gradient_norms) if is_finite else None
        self._optimizer.zero()
        laps.lap("time/optimizer_s")
        return Update(
            statistics=statistics,
            gradient_norms={name: float(norm) for name, norm in gradient_norms.items()},
            learning_rate=rate,
            is_skipped=not is_finite,
            is_empty=is_empty,
            stops_step=stops_step,
            num_tokens=sum(row.num_tokens for row in (*(batch.rows[row] for row in mini_batch.rows), *demonstrated)),
            num_passes=len(mini_batch.micro_batches) + len(imitated),
        )

    def demonstrated(self, version: int, *, num_updates: int) -> list[list[TokenRow]]:
        """The demonstrations of each update of the step; empty without `algorithm.sft`. Raises DataError for an invalid demonstration."""
        if self._demonstrations is None or not self._trains_policy(version):
            return [[]] * num_updates
        # Counted from the first step that imitates: demonstrations of the critic's warm-up would be trained an epoch later, or never.
        first = (version - self._num_warmup_steps) * self._config.learner.updates_per_step
        found = (self._demonstrations.of_update(number) for number in range(first, first + num_updates))
        return [[_row(*pair, vocabulary_size=self._vocabulary_size) for pair in pairs] for pairs in found]

    def observe(self, report: Mapping[str, float], updates: Sequence[Update], *, version: int) -> None:
        """Passes the numbers of a step to the KL coefficients of the objective and to the learning rate that follows a KL."""
        if self._trains_policy(version) and any(update.is_made for update in updates):
            self._objective.observe(report)
            # Before the first update the policy has not moved: a KL of 0 that says nothing about the learning rate.
            if any(update.is_made for update in updates[:-1]):
                self._optimizer.observe_kl(_moved(updates[-1].statistics))

    def _trains_policy(self, version: int) -> bool:
        """False while the critic warms up."""
        return version >= self._num_warmup_steps


def _row(prompt: Sequence[int], completion: Sequence[int], *, vocabulary_size: int) -> TokenRow:
    """Raises DataError for a demonstration without a loss, or with tokens that the model does not have."""
    if not prompt or not completion:
        raise DataError("algorithm.sft: the prompt or completion of a demonstration has no tokens; leave its row out")
    bad = next((token for token in (*prompt, *completion) if not 0 <= token < vocabulary_size), None)
    if bad is not None:
        raise DataError(
            f"algorithm.sft: token {bad} of a demonstration is outside the learner's vocabulary of {vocabulary_size}; tokenizer and "
            "learner must have the same model"
        )
    return token_row(prompt, completion)


def _moved(statistics: Statistics) -> float:
    """KL to the policy at the start of the step, the mean of ρ − 1 − log ρ over the tokens of an update; NaN without tokens."""
    return statistics.compute().get("kl_step_k3_mean", math.nan)
