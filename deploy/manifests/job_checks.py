"""Rules for a RayJob, without those for its cluster."""

import re
import shlex
from collections.abc import Collection, Iterator

from cluster.contracts.errors import ConfigError
from deploy.config.loading import parsed
from deploy.manifests.pods import CONFIG, STOP_WAIT
from deploy.manifests.reading import Job
from deploy.manifests.site import looks_secret
from deploy.manifests.text import has_secret

_RAYS_OWN_WAIT_S = 3
"""Ray's default."""


def problems(job: Job, config_maps: Collection[str]) -> Iterator[str]:
    """`config_maps`: names of the ConfigMaps in the job's file."""
    yield from _submission(job)
    yield from _entrypoint(job, config_maps)
    if has_secret(job.runtime_env):
        yield "runtimeEnvYAML has a secret in plain sight; name a Secret by secretKeyRef in env of the pods"
    if not job.shutdown_after_job_finishes and job.deletion_strategy is None:
        yield "the cluster would stay forever; write shutdownAfterJobFinishes: true, and ttlSecondsAfterFinished"


def _submission(job: Job) -> Iterator[str]:
    if job.submission_mode != "HTTPMode":
        yield f"submissionMode={job.submission_mode!r}: the run would end with its log stream; write HTTPMode"
    wait = job.cluster.head_group_spec.template.spec.containers[0].variable(STOP_WAIT)
    if wait is None or not re.fullmatch("[0-9]{1,9}", wait) or int(wait) <= _RAYS_OWN_WAIT_S:
        yield f"headGroupSpec: env {STOP_WAIT} is {wait or 'left out'}: Ray kills a stopped job before it is saved; write 90"


def _entrypoint(job: Job, config_maps: Collection[str]) -> Iterator[str]:
    try:
        words = shlex.split(job.entrypoint)
    except ValueError as error:
        yield f"entrypoint is not a valid shell command: {error}; correct it"
        return
    if words[:1] != ["treadwheel"]:
        yield f"entrypoint is not treadwheel but {words[0] if words else ''!r}; write treadwheel train RUN.yaml"
    if any(map(_has_secret, words)):
        yield "entrypoint has a secret in plain sight; take it from the environment, and name a Secret by secretKeyRef in env of the pods"
    if not any(word.startswith(f"{CONFIG}/") for word in words):
        return
    spec = job.cluster.head_group_spec.template.spec
    mounted = {mount.name for mount in spec.containers[0].volume_mounts if mount.mount_path == CONFIG}
    named = [volume.config_map.get("name") for volume in spec.volumes if volume.config_map and volume.name in mounted]
    if not named:
        yield f"headGroupSpec: no ConfigMap is mounted at {CONFIG}, the folder of the entrypoint's run file; mount it"
    elif named[0] not in config_maps:
        known = ", ".join(sorted(config_maps)) or "none"
        yield f"headGroupSpec: ConfigMap {named[0]} with the run file is not in this file, which has {known}; name that one"


def _has_secret(word: str) -> bool:
    try:
        name, value = parsed(word)
    except ConfigError:
        name, value = "", word
    return looks_secret(name, value)
