"""Rules for a RayJob beside those for its cluster."""

import shlex
from collections.abc import Collection, Iterator

from deploy.manifests.pods import CONFIG, STOP_WAIT
from deploy.manifests.reading import DeletionStrategy, Job


def problems(job: Job, config_maps: Collection[str]) -> Iterator[str]:
    """`config_maps` are those in the job's file."""
    yield from _submission(job)
    yield from _entrypoint(job, config_maps)
    yield from _deletion(job)


def _submission(job: Job) -> Iterator[str]:
    if job.submission_mode != "HTTPMode":
        yield f"submissionMode={job.submission_mode!r}: the end of a log stream would end the run; write HTTPMode"
    if job.backoff_limit < 0 or (job.active_deadline_seconds is not None and job.active_deadline_seconds <= 0):
        yield "backoffLimit must not be negative, and activeDeadlineSeconds must be positive"
    if job.pre_running_deadline_seconds is not None and job.pre_running_deadline_seconds <= 0:
        yield "preRunningDeadlineSeconds must be positive"
    if (job.ray_cluster_spec.head_group_spec.template.spec.containers[0].variable(STOP_WAIT) or "3") == "3":
        yield f"headGroupSpec: env {STOP_WAIT} is left out: Ray kills a stopped job after 3 s, before it is saved; write 90"


def _entrypoint(job: Job, config_maps: Collection[str]) -> Iterator[str]:
    try:
        words = shlex.split(job.entrypoint)
    except ValueError as error:
        yield f"entrypoint is no line for a shell: {error}; correct it"
        return
    if words[:1] != ["treadwheel"]:
        yield f"entrypoint begins with {words[0] if words else 'nothing'!r}; write treadwheel train RUN.yaml"
    if not any(word.startswith(f"{CONFIG}/") for word in words):
        return
    spec = job.ray_cluster_spec.head_group_spec.template.spec
    mounted = {mount.name for mount in spec.containers[0].volume_mounts if mount.mount_path == CONFIG}
    named = [volume.config_map.get("name") for volume in spec.volumes if volume.config_map and volume.name in mounted]
    if not named:
        yield f"headGroupSpec: no ConfigMap is mounted at {CONFIG}, where the entrypoint looks for its run file; mount it"
    elif named[0] not in config_maps:
        there = ", ".join(sorted(config_maps)) or "none"
        yield f"headGroupSpec: ConfigMap {named[0]} with the run file is not in this file, which has {there}; name that one"


def _deletion(job: Job) -> Iterator[str]:
    if job.ttl_seconds_after_finished < 0:
        yield "ttlSecondsAfterFinished must not be negative"
    strategy = job.deletion_strategy
    if strategy is None:
        if not job.shutdown_after_job_finishes:
            yield "the cluster would stay for ever; write shutdownAfterJobFinishes: true, and ttlSecondsAfterFinished"
        return
    has_both_ends = strategy.on_success is not None and strategy.on_failure is not None
    if bool(strategy.deletion_rules) == (strategy.on_success is not None or strategy.on_failure is not None) or not (
        has_both_ends or strategy.deletion_rules
    ):
        yield "deletionStrategy: write either deletionRules or both onSuccess and onFailure"
    if strategy.deletion_rules and job.shutdown_after_job_finishes:
        yield "deletionStrategy.deletionRules and shutdownAfterJobFinishes exclude one another; leave one out"
    yield from _deletion_rules(strategy, is_scaling=job.ray_cluster_spec.enable_in_tree_autoscaling)


def _deletion_rules(strategy: DeletionStrategy, *, is_scaling: bool) -> Iterator[str]:
    found: dict[str | None, dict[str, int]] = {}
    for index, rule in enumerate(strategy.deletion_rules):
        where, status = f"deletionRules[{index}]", rule.condition.job_status
        if (status is None) == (rule.condition.job_deployment_status is None):
            yield f"{where}: write one of jobStatus and jobDeploymentStatus"
        if rule.condition.ttl_seconds < 0:
            yield f"{where}: ttlSeconds must not be negative"
        if is_scaling and rule.policy == "DeleteWorkers":
            yield f"{where}: DeleteWorkers is refused where the cluster scales; idle workers go by themselves"
        key = status or rule.condition.job_deployment_status
        if rule.policy in found.setdefault(key, {}):
            yield f"{where}: {rule.policy} at {key} is there twice"
        found[key][rule.policy] = rule.condition.ttl_seconds
    for status, seconds in found.items():
        order = [seconds[policy] for policy in ("DeleteWorkers", "DeleteCluster", "DeleteSelf") if policy in seconds]
        if order != sorted(order):
            yield f"deletionRules at {status}: workers go first, then the cluster, then the job; correct ttlSeconds"
