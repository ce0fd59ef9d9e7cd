"""Metrics of a step and its updates."""

from collections.abc import Mapping, Sequence

from cluster.contracts.types import StepStats
from learner.algorithms.objective import Objective
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.statistics import Statistics
from learner.assemble import Batch
from learner.progress import Laps
from learner.updates import Update

_OF_AN_UPDATE = ("loss", "kl_old_k3_mean", "kl_step_k3_mean", "clip_fraction", "value_clip_fraction", "ratio_min",
                 "ratio_max")  # fmt: skip
"""Statistics that are reported for every update of a step."""
_NORMS = {"policy": "gradient_norm", "critic": "critic_gradient_norm"}
"""The metric of each model's gradient."""


def statistics_of(objective: Objective, prepared: Prepared, updates: Sequence[Update]) -> dict[str, float]:
    """The reported statistics of the whole step."""
    of_the_batch = Statistics(objective.statistics(prepared).moments_Q5.cpu())
    of_the_updates = [update.statistics for update in _reported(updates)]
    return Statistics.merge([of_the_batch, *of_the_updates]).compute(num_updates=len(of_the_updates))


def stats_of(
    batch: Batch,
    report: Mapping[str, float],
    updates: Sequence[Update],
    *,
    laps: Laps,
    policy_version: int,
    num_parts: int,
    more: Mapping[str, float],
) -> StepStats:
    """All metrics of a step. `report`: its statistics; `num_parts`: ranks, or groups of ranks, with passes of their own; `more`: other
    metrics."""
    metrics = {f"learner/{name}": value for name, value in report.items()} | metrics_of(updates) | dict(more)
    metrics |= {
        "learner/failed_rewards": float(batch.num_failed),
        "learner/aborted": float(batch.num_aborted),
        "learner/micro_batches": float(sum(update.num_passes for update in updates) * num_parts),
        "speed/learning_tokens_per_s": sum(update.num_tokens for update in updates) / laps.total,
        **laps.seconds,
    }
    if batch.num_without_experts is not None:
        metrics["learner/without_experts"] = float(batch.num_without_experts)
    if "mismatch_mean" in report:
        metrics |= {
            "mismatch/mean_abs_nats": report["mismatch_mean"],
            "mismatch/max_abs_nats": report["mismatch_max"],
            "mismatch/off_policy_steps": report["mismatch_off_policy_steps_min"],
        }
    return StepStats(
        policy_version=policy_version,
        metrics=metrics,
        num_trained_tokens=int(batch.tensors.loss_mask_NT.sum()),
        seconds=laps.total,
    )


def metrics_of(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics of a step's updates, beyond their statistics."""
    rates = [update.learning_rate for update in updates if update.learning_rate is not None]
    metrics = {
        "learner/learning_rate": rates[-1] if rates else 0.0,
        "learner/updates": float(len(rates)),
        "learner/skipped": float(sum(update.is_skipped for update in updates)),
        "learner/empty_updates": float(sum(update.is_empty for update in updates)),
        "learner/stopped_at_kl": float(updates[-1].stops_step),
    }
    for name in _norms(updates[0]):
        norms = [_norms(update)[name] for update in _reported(updates)]
        metrics |= {f"learner/{name}": sum(norms) / len(norms), f"learner/{name}_max": max(norms)}
    return metrics | (_one_by_one(updates) if len(updates) > 1 else {})


def _one_by_one(updates: Sequence[Update]) -> dict[str, float]:
    found: dict[str, float] = {}
    for number, update in enumerate(updates, 1):
        report = update.statistics.compute()
        numbers = {name: report[name] for name in _OF_AN_UPDATE if name in report}
        numbers |= _norms(update) | {"skipped": float(update.is_skipped)}
        found |= {f"updates/{name}/{number}": value for name, value in numbers.items()}
    return found


def _norms(update: Update) -> dict[str, float]:
    """Gradient norms by metric."""
    return {_NORMS[name]: norm for name, norm in update.gradient_norms.items()}


def _reported(updates: Sequence[Update]) -> Sequence[Update]:
    """The updates that the step's metrics describe: those that were made, or all if none was."""
    return [update for update in updates if update.is_made] or updates
