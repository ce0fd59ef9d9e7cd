"""`treadwheel verify`: checks that a run directory is consistent with its ledger. Reads everything and changes nothing."""

from dataclasses import dataclass

import pyarrow.compute as pc

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import CheckpointError, DamagedError, StorageError, TreadwheelError
from cluster.contracts.segments import episodes
from cluster.record.ledger import NAME, Ledger, Record
from cluster.record.recorder import Recorder, num_pruned_steps
from cluster.record.run_directory import CHECKPOINTS, METRICS, RunDirectory
from cluster.record.storage import Storage

_NAMED = 8
"""Largest number of missing steps that a problem names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    num_steps: int = 0
    num_groups: int = 0
    num_trajectories: int = 0
    num_tokens: int = 0
    num_checkpoints: int
    num_pruned_steps: int = 0
    """Steps whose trajectories were removed (`record.keep_trajectories`): only their ledger records are checked."""
    problems: tuple[str, ...]
    """One line each, with file, step and group. Empty: all is well."""

    def __str__(self) -> str:
        counts = (
            f"{self.num_steps} steps, {self.num_groups} groups, {self.num_trajectories} trajectories, "
            f"{self.num_tokens} tokens, {self.num_checkpoints} checkpoints"
        )
        pruned = (
            f"; the trajectories of steps 1 to {self.num_pruned_steps} were removed" if self.num_pruned_steps else ""
        )
        number = len(self.problems)
        is_recorded = self.num_steps or self.num_checkpoints
        clean = "clean" if is_recorded else "nothing is recorded yet"
        return f"{counts}{pruned}: {clean if number == 0 else '1 problem' if number == 1 else f'{number} problems'}"


def verify(run_dir: RunDirectory, config: RunConfig) -> Verdict:
    """Checks digests of trajectories and checkpoints, schema, order, staleness, and that no group was consumed twice."""
    num_checkpoints, problems = _check_checkpoints(run_dir)
    # Read before the ledger, which a living run writes first.
    newest = max(run_dir.checkpoints(), default=0)
    logged, of_metrics = _logged_steps(run_dir)
    try:
        ledger = Ledger(run_dir)
    except TreadwheelError as error:
        return Verdict(num_checkpoints=num_checkpoints, problems=(str(error), *problems))
    if ledger.num_torn_lines and run_dir.owner() is None:  # a living run may be writing it
        problems.append(f"{NAME}: its last line is torn; the next run removes it")
    if newest > ledger.version:
        problems.append(f"{NAME}: it ends at step {ledger.version}, and the newest checkpoint is of step {newest}")
    if (last := max(logged, default=0)) > ledger.version:
        problems.append(f"{NAME}: it ends at step {ledger.version}, and {METRICS} has step {last}")
    recorder = Recorder(run_dir)
    num_groups = num_trajectories = num_tokens = 0
    num_pruned = num_pruned_steps(run_dir)
    for record in ledger.records():
        num_groups += len(record.groups)
        if record.step <= num_pruned:
            continue
        try:
            trajectories, tokens, found = _check_step(record, recorder, config)
        except TreadwheelError as error:
            num_pruned = num_pruned_steps(run_dir)
            if record.step > num_pruned:  # otherwise a living run has removed them meanwhile
                problems.append(f"step {record.step}: {error}")
            continue
        problems += found
        num_trajectories += trajectories
        num_tokens += tokens
    problems += of_metrics
    return Verdict(
        num_steps=ledger.version,
        num_groups=num_groups,
        num_trajectories=num_trajectories,
        num_tokens=num_tokens,
        num_checkpoints=num_checkpoints,
        num_pruned_steps=num_pruned,
        problems=tuple(problems),
    )


def _check_step(record: Record, recorder: Recorder, config: RunConfig) -> tuple[int, int, list[str]]:
    problems: list[str] = []
    groups = recorder.read(record.trajectories, record.trajectories_digest)
    indices = [index for group in groups for index in group["ticket_index"].unique().to_pylist()]
    if indices != list(record.groups):
        problems.append(
            f"step {record.step}: {record.trajectories} holds groups {indices[:8]}, the ledger says {[*record.groups[:8]]}"
        )
    if len(indices) != config.buffer.groups_per_step:
        problems.append(f"step {record.step} consumed {len(indices)} groups, not {config.buffer.groups_per_step}")
    num_tokens = 0
    for group in groups:
        versions = pc.list_flatten(group["policy_versions"])
        num_tokens += len(versions)
        extremes = pc.min_max(pc.filter(versions, pc.list_flatten(group["loss_mask"])))
        oldest, newest = extremes["min"].as_py(), extremes["max"].as_py()
        if oldest is None:
            continue
        is_late = config.recorded is None and record.step - 1 - oldest > config.buffer.max_off_policy_steps
        if is_late or newest > record.step - 1:
            problems.append(
                f"step {record.step}, group {group['group_id'][0]}: tokens of versions {oldest} to {newest} break "
                f"buffer.max_off_policy_steps={config.buffer.max_off_policy_steps}"
            )
    return sum(len(episodes(group)) for group in groups), num_tokens, problems


def _check_checkpoints(run_dir: RunDirectory) -> tuple[int, list[str]]:
    """Number of checkpoints, and for each damaged one the first file that differs from its manifest."""
    from learner.checkpoint import reading

    found = reading.checkpoints(Storage(run_dir.path(CHECKPOINTS)))
    problems: list[str] = []
    for checkpoint in found:
        try:
            reading.verify(checkpoint)
        except (CheckpointError, StorageError) as error:
            if checkpoint.is_there():  # a living run may remove an old one meanwhile
                problems.append(str(error))
    return len(found), problems


def _logged_steps(run_dir: RunDirectory) -> tuple[set[int], list[str]]:
    """Steps of metrics.jsonl and its problems: between the first and the last logged step none may be missing. A run may log no metrics,
    or only from some step on."""
    try:
        logged = {line["policy_version"] for line in run_dir.read_json_lines(METRICS)} - {0}
    except DamagedError as error:
        return set(), [str(error)]
    missing = [step for step in range(min(logged), max(logged)) if step not in logged] if logged else []
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return logged, [f"{METRICS}: steps {missing[:_NAMED]}{more} are missing"] if missing else []
