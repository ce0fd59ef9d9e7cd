"""`treadwheel learn`: learns from recorded trajectories. No engine starts; learner, record, metrics and checkpoints are as in `train`.

Another policy sampled the data, and the recorded log-probs are that policy's. The tokens count as sampled by version 0: staleness grows
by one with each step, without a bound. Correction weights (`corrections`) and `proximal: recompute` account for the difference.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import pyarrow as pa
import ray

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError, LostError
from cluster.contracts.schema import summarize
from cluster.contracts.types import Group, GroupSummary, StepStats
from cluster.controller import Log
from cluster.learner_group import LearnerGroup
from cluster.metrics import MetricLog, step_metrics
from cluster.record.run_directory import CHECKPOINTS, EVENTS, PASSPORT, RunDirectory
from cluster.supervision.supervisor import SupervisedActor
from deploy.cluster_up.ahead import named
from deploy.cluster_up.connection import connected
from deploy.cluster_up.start_up import learner_alone, note_passport, restore
from deploy.cluster_up.stopping import saved_when_stopped
from deploy.launch import as_a_run, is_done, note_resumed, noting_the_end, open_ledger, save_the_end
from deploy.named_files import refuse_other_files
from deploy.recorded import RecordedGroups
from deploy.replay import weights_digest
from deploy.reports.provenance import RunProvenance
from deploy.reports.summary import Summary


def learn(config: RunConfig, *, data: RecordedGroups | None = None, address: str | None = None) -> Summary:
    """Learns `config.num_steps` steps from `config.recorded`, or resumes the run. `data`: the groups of `config.recorded`, if they are
    open already. Raises as `launch.train`."""
    return as_a_run(config, partial(_learn, data=data), address=address)


async def _learn(
    config: RunConfig,
    run_dir: RunDirectory,
    log: MetricLog,
    *,
    data: RecordedGroups | None,
    interrupted: asyncio.Event,
    address: str | None,
) -> None:
    from learner.algorithms.objective import Objective

    objective = Objective.of_run(config, keeps_inert=True)
    data = RecordedGroups.of_run(config, objective) if data is None else data
    ledger = open_ledger(run_dir, log)
    if ledger.version:
        _refuse_other_data(config.recorded, data, run_dir)
    else:
        run_dir.remove(PASSPORT)  # of a driver that learned nothing, perhaps with other files
    message = f"learns from {len(data)} groups of {config.recorded}"
    log.event("recorded", num_groups=len(data), digest=data.digest, message=message)
    if await is_done(config, run_dir, ledger, log):
        return
    note_resumed(ledger, log)
    if ledger.version:
        await asyncio.to_thread(refuse_other_files, run_dir, config)
    if ignored := _ignored(config):
        message = f"nothing is sampled, and these sections act on nothing: {', '.join(ignored)}; `treadwheel eval` evaluates a checkpoint"
        log.event("ignored", sections=ignored, message=message)
    log.add(provenance := RunProvenance(run_dir))
    alone = learner_alone(config, run_dir, ledger, log, checkpoints=run_dir.path(CHECKPOINTS), provenance=provenance.at)
    log.event("connecting", address=named(address))
    async with (
        connected(address, run_dir=run_dir),
        noting_the_end(log),
        alone as (learner, reference),
        saved_when_stopped(learner, interrupted=interrupted, timeout_s=config.checkpoint.stop_timeout_s, log=log),
    ):
        await restore(config, run_dir, learner, log)
        digest = await _published(config, learner, log)
        await note_passport(run_dir, config, learner, weights_digest=digest)
        while learner.version < config.num_steps:
            began = time.monotonic()
            scorer = reference if objective.wants_reference(learner.version) else None
            first = ledger.next_index
            indices = range(first, first + config.buffer.groups_per_step)
            summaries, stats = await _step(indices, data, config, reference=scorer, learner=learner, log=log)
            metrics = step_metrics(summaries, stats)
            log.step(stats.policy_version, metrics | {"time/step_s": time.monotonic() - began})
            if learner.is_save_due():
                await learner.save(None)
                await _published(config, learner, log)
        if learner.saved_version != learner.version:
            await save_the_end(learner, metric=None)
            await _published(config, learner, log)


def _ignored(config: RunConfig) -> list[str]:
    """Sections of the run file that differ from their defaults and that `learn` does not read: one file serves `train` and `learn`."""
    sections = ["evaluation", "rollout", "elastic", "mismatch"]
    if not config.reward.parts:  # advantages over recorded components read the weights of the parts
        sections.insert(1, "reward")
    return [name for name in sections if getattr(config, name) != RunConfig.model_fields[name].default]


def _refuse_other_data(recorded: str | None, data: RecordedGroups, run_dir: RunDirectory) -> None:
    """Raises ConfigError if the files have changed since the run began: the order of the groups depends on all files."""
    # The first version logged no digest.
    before = [event for event in run_dir.read_json_lines(EVENTS) if event["kind"] == "recorded" and "digest" in event]
    # Files of one digest may have fewer groups: an older version kept aborted trajectories.
    if not before or (before[-1]["digest"], before[-1]["num_groups"]) == (data.digest, len(data)):
        return
    raise ConfigError(
        f"recorded={recorded!r} has changed since this run began: {before[-1]['num_groups']} groups of digest "
        f"{before[-1]['digest'][:12]} then, {len(data)} of {data.digest[:12]} now; give the run its old data, or name another run_dir"
    )


async def _published(config: RunConfig, learner: LearnerGroup, log: MetricLog) -> str:
    """Digest of the current weights, with which a replay compares its own."""
    digest = await weights_digest(config.weights, learner)
    log.event("published", policy_version=learner.version, digest=digest)
    return digest


async def _step(
    indices: Sequence[int],
    data: RecordedGroups,
    config: RunConfig,
    *,
    reference: SupervisedActor | None,
    learner: LearnerGroup,
    log: Log,
) -> tuple[list[GroupSummary], StepStats]:
    """Learns one step; returns the summaries of its groups and its statistics."""
    while True:
        try:
            groups = await _groups([data.group(index) for index in indices], reference, config)
            stats = await learner.update(list(zip(indices, groups, strict=True)))
            return [group.summary for group in groups], stats
        except LostError as error:
            # Groups were lost with a node before anything was recorded: make them again from the data.
            log.event("groups_lost", groups=list(indices), reason=str(error))


async def _groups(
    batches: Sequence[pa.RecordBatch], reference: SupervisedActor | None, config: RunConfig
) -> list[Group]:
    """The batches as groups, with log-probs of `reference` if there is one."""
    groups = [Group(pieces=(ray.put(batch),), summary=summarize(batch)) for batch in batches]
    if reference is None:
        return groups
    pieces = [piece for group in groups for piece in group.pieces]
    deadline_s = config.reference.timeout_s * len(groups)
    columns, added = await reference.call_for_batches("score", *pieces, num_batches=len(groups), deadline_s=deadline_s)
    return [group.with_columns(*found) for group, *found in zip(groups, columns, added, strict=True)]
