"""Rules for KubeRay resources that no other tool checks in time: values that Ray's autoscaler cannot use, and the safety of a run.

Pure: manifests in, problems out, each with its path and the way out.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import yaml

from cluster.contracts.errors import ConfigError
from deploy.config.yaml_text import NO_VALUE, StrictLoader
from deploy.manifests import job_checks, pod_standard, ray_cluster, ray_job
from deploy.manifests.pods import API_KEY, DRAIN_MARGIN_S, HOME, PORTS, SERVE_PORT
from deploy.manifests.reading import (
    AnyResource,
    Cluster,
    Container,
    Group,
    Head,
    Job,
    PodSpec,
    Service,
    Variable,
    amount,
    resources,
)
from deploy.manifests.site import DRAIN, NAME, OLDEST, is_ray, looks_secret, may_change
from deploy.manifests.text import has_secret

Problems = Iterator[str]
_MOST_CHARACTERS = {
    "RayJob": ray_job.LARGEST_NAME,
    "RayService": ray_job.LARGEST_NAME,
    "RayCluster": ray_cluster.LARGEST_NAME,
}
"""Longest names. KubeRay appends a suffix for the clusters of jobs and services."""


def check(documents: Sequence[Any], *, source: str, installed_ray: str | None = None) -> list[AnyResource]:
    """Returns KubeRay's resources among the documents. Raises one ConfigError with all their problems.

    `installed_ray`: the required rayVersion; None: any version that treadwheel supports.
    """
    found = resources(documents, source=source)
    config_maps = {each["metadata"]["name"]: each.get("data") for each in documents if _is_config_map(each)}
    problems = [
        *(f"ConfigMap {name}: {problem}" for name, data in config_maps.items() for problem in _config_map(data)),
        *(
            f"{each.kind} {each.name}: {problem}"
            for each in found
            for problem in _problems(each, config_maps, installed_ray)
        ),
    ]
    if problems:
        raise ConfigError("\n  ".join([f"{source}: {len(problems)} problem(s)", *problems]))
    return found


def _is_config_map(document: Any) -> bool:
    match document:
        case {"kind": "ConfigMap", "metadata": {"name": str()}}:
            return True
        case _:
            return False


def _config_map(data: Any) -> Problems:
    for key, written in data.items() if isinstance(data, dict) else ():
        if isinstance(written, str) and has_secret(written):
            yield f"data.{key} has a secret in plain sight; take it from the environment of the pods, and name a Secret by secretKeyRef"


def _problems(resource: AnyResource, config_maps: Collection[str], installed_ray: str | None) -> Problems:
    yield from _name(resource)
    for rule in _CLUSTER_RULES:
        yield from rule(resource.cluster)
    if installed_ray is not None and resource.cluster.ray_version != installed_ray:
        yield (
            f"rayVersion={resource.cluster.ray_version!r} is not the installed Ray {installed_ray}; build the image with that version, "
            "and write it"
        )
    if isinstance(resource.spec, Job):
        yield from job_checks.problems(resource.spec, config_maps)
    if isinstance(resource.spec, Service):
        yield from _service(resource.spec)


def _service(service: Service) -> Problems:
    """Rules for a service, without those for its cluster. Ray Serve itself reports problems of an application."""
    try:
        config: Any = yaml.load(service.serve_config_v2, Loader=StrictLoader)
        num_applications = len(config["applications"])
        port = config.get("http_options", {}).get("port", SERVE_PORT)
    except (yaml.YAMLError, TypeError, *NO_VALUE) as error:
        yield f"serveConfigV2 has no list of applications: {type(error).__name__}: {' '.join(str(error).split())}"
        return
    if looks_secret("", config):
        yield "serveConfigV2 has a secret in plain sight; name a Secret by secretKeyRef in env of the pods"
    if not num_applications:
        yield "serveConfigV2 has no applications; name one"
    for where, part in service.cluster.parts():
        ports = {(each.name, each.container_port) for each in part.template.spec.containers[0].ports}
        if ("serve", port) not in ports:
            yield f"{where}: no port is named serve with the number {port}, by which the service finds the pod; add it"


def _name(resource: AnyResource) -> Problems:
    name, most = resource.name, _MOST_CHARACTERS[resource.kind]
    if len(name) > most:
        yield f"metadata.name has {len(name)} characters, and at most {most} leave room for its pods' names; shorten it"
    if not NAME.fullmatch(name):
        yield f"metadata.name={name!r} is not valid; use lower-case letters, digits and dashes, a letter first and no dash last"


def _auth(cluster: Cluster) -> Problems:
    if cluster.auth_options.mode != "token":
        yield "authOptions.mode is not token: everyone who reaches the head could run programs there; write authOptions: {mode: token}"
    if not is_ray(cluster.ray_version, since=OLDEST):
        yield f"rayVersion={cluster.ray_version!r} is not supported by treadwheel; write the image's version, 2.53.0 or later"


def _autoscaler(cluster: Cluster) -> Problems:
    if not cluster.enable_in_tree_autoscaling:
        yield "enableInTreeAutoscaling is not true: no pods would start for the run's actors; set it"
    elif cluster.autoscaler_options.version != "v2":
        yield f"autoscalerOptions.version={cluster.autoscaler_options.version!r}: only v2 drains pods before it deletes them; write v2"
    yield from pod_standard.container_problems("autoscalerOptions", cluster.autoscaler_options.security_context)
    yield from _variables("autoscalerOptions", cluster.autoscaler_options.env)
    asked = cluster.autoscaler_options.resources.requests
    if missing := [name for name in ("cpu", "memory") if name not in asked]:
        yield (
            f"autoscalerOptions: resources.requests has no {' and no '.join(missing)}, and a full node would end the autoscaler; write it"
        )


def _groups(cluster: Cluster) -> Problems:
    names = Counter(group.group_name for group in cluster.worker_group_specs)
    yield from (
        f"workerGroupSpecs: {count} groups are named {name!r}; rename one" for name, count in names.items() if count > 1
    )
    for group in cluster.worker_group_specs:
        yield from (f"workerGroupSpecs {group.group_name}: {problem}" for problem in _group(group))


def _group(group: Group) -> Problems:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", group.group_name):
        yield "groupName is not valid; use at most 63 lower-case letters, digits and dashes"
    counts = {"minReplicas": group.min_replicas, "replicas": group.replicas, "maxReplicas": group.max_replicas}
    if missing := [name for name, count in counts.items() if count is None]:
        yield f"{', '.join(missing)} left out: Ray's autoscaler reads replicas, minReplicas and maxReplicas; write all three"
    elif not 0 <= (group.min_replicas or 0) <= (group.replicas or 0) <= (group.max_replicas or 0):
        yield f"{counts}: each must be at least the one before, and minReplicas at least 0"


def _heads_and_workers(cluster: Cluster) -> Problems:
    for where, part in cluster.parts():
        yield from (f"{where}: {problem}" for rule in _POD_RULES for problem in rule(part))
    images = {part.template.spec.containers[0].image for _, part in cluster.parts()}
    if len(images) > 1:
        yield f"pods have different images, {', '.join(sorted(images))}, and a cluster needs one Ray; name one image"


def _head(cluster: Cluster) -> Problems:
    names = {port.name for port in cluster.head_group_spec.template.spec.containers[0].ports}
    if missing := [name for name in PORTS if name not in names]:
        yield f"headGroupSpec: no ports are named {', '.join(missing)}, by which services and monitors find them; name them"
    if cluster.head_group_spec.ray_start_params.get("dashboard-host") != "0.0.0.0":
        yield "headGroupSpec: rayStartParams.dashboard-host is not 0.0.0.0: the operator could not reach the dashboard; write it"


def _api_key(cluster: Cluster) -> Problems:
    if API_KEY not in {mount.mount_path for mount in cluster.autoscaler_options.volume_mounts}:
        yield (
            f"autoscalerOptions: no volume is mounted at {API_KEY}, the folder of the autoscaler's key to the API server; mount a "
            "projected volume, as `treadwheel kubernetes` does"
        )
    for where, part in cluster.parts():
        if part.template.spec.automount_service_account_token:
            yield (
                f"{where}: containers that run generated programs would have a key to the API server; write "
                "automountServiceAccountToken: false"
            )


def _ray_start(part: Head) -> Problems:
    for name in ("num-cpus", "num-gpus"):
        if not re.fullmatch("[0-9]{1,9}", written := part.ray_start_params.get(name, "0")):
            yield f"rayStartParams.{name}={written!r} is not a whole number; write one, such as '4'"


def _restart(part: Head) -> Problems:
    policy = part.template.spec.restart_policy
    if policy not in (None, "Never"):
        yield f"restartPolicy={policy!r}: autoscaler v2 needs Never, the default; leave it out"


def _drain(part: Head) -> Problems:
    spec = part.template.spec
    expected = spec.termination_grace_period_seconds - DRAIN_MARGIN_S
    drain = spec.containers[0].variable(DRAIN)
    if drain != str(expected) or expected <= 0:
        yield (
            f"env {DRAIN}={drain} does not fit terminationGracePeriodSeconds={spec.termination_grace_period_seconds}: the pod is killed "
            f"during its drain or long after; write {max(expected, 15)}"
            + ("" if expected > 0 else ", and at least 25 s of grace")
        )
    if any("preStop" in each.lifecycle for each in spec.containers):
        yield "lifecycle.preStop delays the notice of a pod's end, and pods hang; leave it out"


def _secrets(part: Head) -> Problems:
    for container in _containers(part.template.spec):
        yield from _variables(f"container {container.name}", container.env)


def _variables(where: str, env: Sequence[Variable]) -> Problems:
    for each in env:
        if each.value and looks_secret(each.name, each.value):
            yield f"{where}: env {each.name} looks like a secret in plain sight; name a Secret by secretKeyRef"


def _image(part: Head) -> Problems:
    for container in _containers(part.template.spec):
        if may_change(container.image):
            yield (
                f"container {container.name}: image {container.image!r} may be another image tomorrow; use a tag other than latest, "
                "or a digest"
            )


def _room(part: Head) -> Problems:
    spec, container = part.template.spec, part.template.spec.containers[0]
    for name in ("cpu", "memory", "ephemeral-storage"):
        if name not in container.resources.requests:
            yield f"container {container.name}: resources.requests has no {name}, and a full node would end the pod; write it"
    for name in ("cpu", "memory"):
        if _amount(container.resources.limits.get(name)) != _amount(container.resources.requests.get(name)):
            yield (
                f"container {container.name}: resources.limits.{name} differs from its request, and Ray counts the limit; make them equal"
            )
    shared = {mount.name for mount in container.volume_mounts if mount.mount_path == "/dev/shm"}
    if not any(
        each.name in shared and each.empty_dir and each.empty_dir.get("medium") == "Memory" for each in spec.volumes
    ):
        yield f"container {container.name}: /dev/shm is not an emptyDir in Memory, so Ray's object store would be on disk; mount one"
    writable = {mount.mount_path for mount in container.volume_mounts if not mount.read_only}
    for place in ("/tmp", container.variable("HOME") or HOME):
        if place not in writable:
            yield f"container {container.name}: {place} is not writable; mount an emptyDir there"


def _amount(written: str | float | None) -> str | float | None:
    """A number, so that 4 equals "4", and 1Gi equals 1024Mi. An invalid amount stays as written."""
    try:
        return None if written is None else amount(written)
    except (ValueError, ArithmeticError):
        return written


def _mounts(part: Head) -> Problems:
    for container in part.template.spec.containers:
        for mount in container.volume_mounts:
            if mount.mount_path.rstrip("/") in ("", "/run", "/var", "/var/run"):
                yield (
                    f"container {container.name}: a volume at {mount.mount_path} would contain the key to the API server, which Kubernetes "
                    "puts into /var/run; mount it elsewhere"
                )


def _containers(spec: PodSpec) -> list[Container]:
    return [*spec.init_containers, *spec.containers]


_CLUSTER_RULES: tuple[Callable[[Cluster], Problems], ...] = (
    _auth,
    _autoscaler,
    _groups,
    _heads_and_workers,
    _head,
    _api_key,
)
_POD_RULES: tuple[Callable[[Head], Problems], ...] = (
    _ray_start,
    _restart,
    _drain,
    pod_standard.problems,
    _secrets,
    _image,
    _room,
    _mounts,
)
