"""The optimizer updates of a step: which trajectories each trains on, what each did, and what they come to together."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.contracts.config import LearnerConfig
from learner.algorithms.objective.statistics import Statistics

_OF_AN_UPDATE = ("loss", "kl_old_k3_mean", "clip_fraction", "value_clip_fraction", "ratio_min", "ratio_max")
"""Statistics that are told of every update of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update did."""

    statistics: Statistics
    """Of all ranks."""
    gradient_norm: float
    learning_rate: float | None = None
    """None: no weight was changed."""
    is_skipped: bool = False
    """Its loss or gradient was not finite."""
    stops_step: bool = False
    """The policy had moved so far before it that it was not made, and none is after it."""
    num_tokens: int
    """Prompt and completion tokens of its trajectories."""
    num_passes: int
    """Micro-batches of each rank."""

    @property
    def is_made(self) -> bool:
        return self.learning_rate is not None


def split(
    group_index_N: Sequence[int], *, config: LearnerConfig, seed: int, policy_version: int
) -> list[list[list[int]]]:
    """For every epoch its mini-batches, each the rows it trains on, in the batch's order.

    Groups, or trajectories, are dealt anew in every epoch, by seed, policy version and epoch alone: all ranks, a resumed run and a
    replay split alike. The sizes of mini-batches differ by one group, or trajectory, at most. Where a step has fewer of them than
    `learner.mini_batches`, because rewards failed, each is a mini-batch, and fewer updates are made.
    """
    units: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(group_index_N):
        units[group if config.split_by == "groups" else row].append(row)
    count = min(config.mini_batches, len(units))
    epochs: list[list[list[int]]] = []
    for epoch in range(config.epochs):
        dealt = list(units.values())
        random.Random(f"{seed}/{policy_version}/{epoch}").shuffle(dealt)
        epochs.append([sorted(row for unit in dealt[i::count] for row in unit) for i in range(count)])
    return epochs


def moved_too_far(statistics: Statistics, *, stop_at_kl: float | None) -> bool:
    """Whether KL(π_old ‖ π), the mean of ρ − 1 − log ρ over the tokens of an update, is beyond `learner.stop_at_kl`."""
    return stop_at_kl is not None and statistics.compute().get("kl_old_k3_mean", 0.0) > stop_at_kl


def told(updates: Sequence[Update]) -> Sequence[Update]:
    """The updates whose numbers are the step's: those that were made; all where none was."""
    return [update for update in updates if update.is_made] or updates


def metrics_of(updates: Sequence[Update]) -> dict[str, float]:
    """What the learner logs of a step's updates, beyond their statistics."""
    norms = [update.gradient_norm for update in told(updates)]
    rates = [update.learning_rate for update in updates if update.learning_rate is not None]
    metrics = {
        "learner/gradient_norm": sum(norms) / len(norms),
        "learner/gradient_norm_max": max(norms),
        "learner/learning_rate": rates[-1] if rates else 0.0,
        "learner/updates": float(len(rates)),
        "learner/skipped": float(sum(update.is_skipped for update in updates)),
        "learner/stopped_at_kl": float(updates[-1].stops_step),
    }
    return metrics | (_one_by_one(updates) if len(updates) > 1 else {})


def _one_by_one(updates: Sequence[Update]) -> dict[str, float]:
    found: dict[str, float] = {}
    for number, update in enumerate(updates, 1):
        report = update.statistics.compute()
        numbers = {name: report[name] for name in _OF_AN_UPDATE if name in report}
        numbers |= {"gradient_norm": update.gradient_norm, "skipped": float(update.is_skipped)}
        found |= {f"updates/{name}/{number}": value for name, value in numbers.items()}
    return found
