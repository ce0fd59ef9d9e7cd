"""A RayJob: one run on a cluster of its own, and the ConfigMap that holds its run file."""

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.supervision.placement import Node
from deploy.config import loading
from deploy.config.yaml_text import dumped
from deploy.manifests import ray_cluster
from deploy.manifests.pods import CONFIG, RUN, Manifest
from deploy.manifests.site import NAME, Site, looks_secret
from deploy.manifests.sizes import sizes
from deploy.preflight.settings import check_compute_type

LARGEST_NAME = 47
_PRE_RUNNING_S = 3600
_FOR_NODES, _FOR_CLAIM = ("--wait-for-nodes", "30m"), ("--wait-for-claim", "10m")
"""Options of the command: the wait for the run's pods, unless the run sets its own, and for the driver of an earlier attempt to end."""
_SAVING_MARGIN_S = 30
"""Time for actors to end after the learner's state is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run for Kubernetes."""

    name: str
    """Of the run file, in Kubernetes' characters."""
    text: str
    """The run file's values, without its comments, which may be private."""
    overrides: tuple[str, ...]
    config: RunConfig
    """With the overrides."""
    needs: frozenset[str]
    """The objective's needs."""
    upload_gib: int = 0
    """Disk for a checkpoint on its way to an object store. 0 if none goes there, and for a model that is not a local folder."""

    @property
    def stop_wait_s(self) -> int:
        """Time that Ray gives a stopped job to save. Ray's default is 3 s."""
        return round(self.config.checkpoint.stop_timeout_s) + _SAVING_MARGIN_S


def read(path: str, overrides: Sequence[str]) -> Run:
    """Raises ConfigError for a run that cannot work, or that names a secret."""
    from learner.algorithms.objective import Objective

    config = loading.load(path, overrides)
    values = loading.read(path)
    written = [
        (path, "", values),
        *((f"override {name}", name, value) for name, value in map(loading.parsed, overrides)),
    ]
    if found := [source for source, name, value in written if looks_secret(name, value)]:
        raise ConfigError(
            f"{found[0]} contains a secret, which every reader of the manifest would see; take it from the environment, and name the "
            "variable in `secrets` of the site file"
        )
    needs = frozenset(Objective.of_run(config, keeps_inert=True).needs)
    name = re.sub(r"[^a-z0-9]+", "-", Path(path).stem.lower()).strip("-")
    return Run(
        name=f"run-{name}" if name[:1].isdigit() else name,
        text=dumped(values),
        overrides=tuple(overrides),
        config=config,
        needs=needs,
        upload_gib=_upload_gib(config),
    )


def _upload_gib(config: RunConfig) -> int:
    from learner import memory

    if "://" not in config.run_dir or not (Path(os.path.expanduser(config.model.path)) / "config.json").is_file():
        return 0
    # A checkpoint has the same size with one rank as with several.
    alone = config.model_copy(update={"learner": config.learner.model_copy(update={"num_ranks": 1})})
    return math.ceil(memory.of_run(alone).saved_bytes / 1024**3)


def job(run: Run, site: Site) -> list[Manifest]:
    """ConfigMap and RayJob. Raises ConfigError for a run that samples nothing, for `auto` as its type, and for a run directory that pods
    cannot reach."""
    if run.config.recorded is not None:
        raise ConfigError(
            f"recorded={run.config.recorded!r}: a job trains by sampling, and this run samples nothing; leave it out, or run "
            "`treadwheel learn` on a lasting cluster (--cluster)"
        )
    check_compute_type(run.config)
    name = named(site, run.name, most=LARGEST_NAME)
    run_dir = run_directory(run.config.run_dir)
    config_map = f"{name}-run"
    ours = {"run_dir": run_dir, "elastic.spot": ray_cluster.COMES_AND_GOES}
    theirs = [each for each in run.overrides if each.partition("=")[0] not in ours]
    settings = [*theirs, *(f"{setting}={value}" for setting, value in ours.items())]
    waits = [*(_FOR_NODES if run.config.elastic.wait_for_nodes_s is None else ()), *_FOR_CLAIM]
    command = ["treadwheel", "train", f"{CONFIG}/run.yaml", *settings, *waits]
    spec: Manifest = {
        "entrypoint": shlex.join(command),
        # In the other modes the end of a log stream counts as the end of the run.
        "submissionMode": "HTTPMode",
        # A lost head does not count: the operator waits for another head, and fails the job if none comes in time.
        "backoffLimit": site.retries,
        "activeDeadlineSeconds": site.deadline_s,
        "preRunningDeadlineSeconds": _PRE_RUNNING_S,
        # Idle worker pods are deleted; the head stays for the logs. Deletion rules are no replacement: they exclude this setting,
        # which Kueue needs, and on a scaling cluster they may not delete workers.
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": site.keep_s,
        "metadata": {"run_dir": run_dir, "viewer": shlex.join(["treadwheel", "view", run_dir])},
        "rayClusterSpec": _cluster_spec(run, site, config_map=config_map),
    }
    metadata = ray_cluster.metadata(site, name)
    if site.queue:
        metadata["labels"] |= {"kueue.x-k8s.io/queue-name": site.queue}
        metadata["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": ray_cluster.metadata(site, config_map),
            "data": {"run.yaml": run.text},
        },
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec},
    ]


def cluster(run: Run, site: Site) -> list[Manifest]:
    """A lasting RayCluster of the run's size, for `ray job submit`."""
    name = named(site, run.name, most=ray_cluster.LARGEST_NAME)
    return [
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": ray_cluster.metadata(site, name),
            "spec": _cluster_spec(run, site, config_map=None),
        }
    ]


def _cluster_spec(run: Run, site: Site, *, config_map: str | None) -> Manifest:
    largest = Node(cpus=site.largest_pod_cpus, gpus=site.largest_pod_gpus)
    shares_files = site.run_claim is not None
    sized = sizes(run.config, run.needs, largest=largest, shares_files=shares_files, upload_gib=run.upload_gib)
    pods_image = image(site, needs_gpus=sized.needs_gpus)
    return ray_cluster.spec(site, sized, image=pods_image, config_map=config_map, stop_wait_s=run.stop_wait_s)


def image(site: Site, *, needs_gpus: bool) -> str:
    return site.image or f"treadwheel:{version('treadwheel')}-{'gpu' if needs_gpus else 'cpu'}"


def named(site: Site, default: str, *, most: int) -> str:
    """The resource's name. Pods' names contain it and may have 63 characters, so it is limited to `most`."""
    name = site.name or default
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r} is not one for Kubernetes: lower-case letters, digits and dashes, a letter first and no dash last; set `name` "
            "in the site file"
        )
    if len(name) > most:
        raise ConfigError(
            f"name {name!r} has {len(name)} characters; Kubernetes allows at most {most} here; set a shorter `name` in the site file"
        )
    return name


def run_directory(run_dir: str) -> str:
    """The run directory's path in pods. Raises ConfigError for a folder that is on none of their volumes."""
    if "://" in run_dir:
        return run_dir
    place = PurePosixPath(RUN) / run_dir
    if PurePosixPath(RUN) not in place.parents or ".." in place.parts:
        raise ConfigError(f"run_dir={run_dir!r} is on no volume of the pods; use a relative path, or a folder in {RUN}")
    return str(place)
