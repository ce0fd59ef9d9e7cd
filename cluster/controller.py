"""The loop. It reads like the sentence it is: workers sample, the learner learns, the weights go back. References only."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.contracts.config import EvaluationConfig, RunConfig
from cluster.contracts.errors import DeadlineError, LostError, MismatchError, StalenessError
from cluster.contracts.protocols import PromptSource
from cluster.contracts.types import Group, SamplingParams, StepStats
from cluster.learner_group import LearnerGroup
from cluster.metrics import mean_reward, step_metrics
from cluster.rollouts.buffer import Buffer
from cluster.rollouts.tickets import TicketOffice, evaluation_tickets
from cluster.rollouts.worker_pool import Pool
from cluster.supervision.supervisor import Events
from cluster.weights.broadcast import Weights


class Log(Events, Protocol):
    """Where metrics go, and events."""

    def step(self, version: int, metrics: dict[str, float]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Samples held-out prompts under the weights that serve now."""

    config: EvaluationConfig
    source: PromptSource
    sampling: SamplingParams
    seed: int

    async def run(self, pool: Pool, *, version: int) -> dict[str, float]:
        """Metrics of one evaluation; `eval/reward` is the mean over trajectories whose reward did not fail."""
        tickets = evaluation_tickets(
            self.source,
            num_prompts=self.config.num_prompts,
            num_samples=self.config.num_samples,
            seed=self.seed,
            sampling=self.sampling,
            policy_version=version,
        )
        began = time.monotonic()
        summaries = await pool.evaluate(tickets)
        rewards = [value for summary in summaries for value in summary.known_rewards]
        num_trajectories = sum(summary.num_trajectories for summary in summaries)
        return {
            "eval/reward": sum(rewards) / len(rewards) if rewards else float("nan"),
            "eval/accuracy": sum(value >= 1.0 for value in rewards) / len(rewards) if rewards else float("nan"),
            "eval/num_failed": float(num_trajectories - len(rewards)),
            "eval/num_prompts": float(len(summaries)),
            "time/eval_s": time.monotonic() - began,
        }


async def train(
    config: RunConfig,
    *,
    pool: Pool,
    office: TicketOffice,
    learner: LearnerGroup,
    buffer: Buffer,
    weights: Weights,
    log: Log,
    evaluator: Evaluator | None = None,
) -> None:
    """Trains until `num_steps`. The learner is restored and the workers serve its weights, attested, when this is called."""
    version = learner.version
    if version == 0:
        await evaluate(evaluator, pool, version=version, log=log)
    async with pool.generating(into=buffer, office=office):  # a dead producer raises in take
        while version < config.num_steps:
            began = time.monotonic()
            groups = await _take(config, pool=pool, buffer=buffer)  # start order, inside the staleness bound
            _check_staleness(groups, version=version, bound=config.buffer.max_off_policy_steps)
            try:
                stats = await learner.update(groups)  # advantages -> micro-batches -> loss -> optimizer step
            except LostError as error:  # a node took groups with it: nothing was recorded, they are sampled again
                lost = await learner.lost(groups)
                log.event("groups_lost", groups=sorted(lost), reason=str(error))
                await buffer.put_back(groups, lost=lost)
                pool.sample_again(lost)
                continue
            version = stats.policy_version
            sent = await weights.broadcast(pool)
            timing = {"time/step_s": time.monotonic() - began, **pool.stats(), **buffer.stats(), **weights.stats()}
            metric = None
            if _is_due(config.evaluation.every_steps, version, config.num_steps):
                metric = await evaluate(evaluator, pool, version=version, log=log)
            await buffer.advance(version)  # only now may further rollouts start
            summaries = [group.summary for _, group in groups]
            log.step(version, step_metrics(summaries, stats) | timing)
            log.event("broadcast", policy_version=version, digest=sent.digest, num_workers=len(sent.attestations))
            _check_mismatch(stats, config, log)
            if learner.is_save_due():
                # Rated by its own evaluation alone: an older one would keep the wrong checkpoint as the best.
                await learner.save(metric if evaluator else mean_reward(summaries))


async def evaluate(evaluator: Evaluator | None, pool: Pool, *, version: int, log: Log) -> float | None:
    """Logs an evaluation of the weights that serve now, which are those of `version`; its mean reward, None without an evaluator."""
    if evaluator is None:
        return None
    metrics = await evaluator.run(pool, version=version)
    log.step(version, metrics)
    return metrics["eval/reward"]


async def _take(config: RunConfig, *, pool: Pool, buffer: Buffer) -> list[tuple[int, Group]]:
    """The next step's groups. Each wait below has a deadline of its own: this one is for what they all missed."""
    judging_s = config.reward.timeout_s * config.buffer.trajectories_per_group + 60.0
    stall_s = config.supervision.start_s + config.rollout.timeout_s + config.reference.timeout_s + judging_s
    try:
        return await buffer.take(config.buffer.groups_per_step, stall_s=stall_s)
    except DeadlineError as error:
        raise DeadlineError(f"{error}; {pool.describe()}") from None


def _is_due(every_steps: int | None, version: int, num_steps: int) -> bool:
    return version == num_steps or (every_steps is not None and version % every_steps == 0)


def _check_staleness(groups: Sequence[tuple[int, Group]], *, version: int, bound: int) -> None:
    """The bound, measured on the trajectories themselves."""
    for index, group in groups:
        if version - group.summary.min_policy_version > bound:
            raise StalenessError(
                f"group {index} has a token of policy version {group.summary.min_policy_version}, the learner is at "
                f"{version}, buffer.max_off_policy_steps={bound}: a bug in treadwheel; the run stops before it trains on it"
            )


def _check_mismatch(stats: StepStats, config: RunConfig, log: Log) -> None:
    mismatch = stats.metrics.get("mismatch/mean_abs_nats", 0.0)
    if mismatch > config.mismatch.alarm_nats:
        log.event("mismatch_alarm", policy_version=stats.policy_version, mean_abs_nats=mismatch)
    if config.mismatch.stop_nats is not None and mismatch > config.mismatch.stop_nats:
        raise MismatchError(
            f"rollout and learner log-probs differ by {mismatch:.4g} nats on average in step {stats.policy_version}, more than "
            f"mismatch.stop_nats={config.mismatch.stop_nats:g}; its trajectories are trajectories/step-{stats.policy_version:06d}.arrow"
        )
