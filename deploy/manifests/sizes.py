"""Sizes of a run's pods, computed from its actors' resources.

Base pods hold learner, reward services, reference scorer and judge servers. Those without GPUs have pods of their own where the pods with
GPUs have no room for all of them. Rollout workers have their own pods, which come and go.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import ActorKind
from cluster.supervision.placement import Bundle, Node, asked_bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Pods of one shape."""

    cpus: int
    gpus: int
    most: int
    """Largest number of them at one time."""
    upload_gib: int = 0
    """Disk for checkpoints before they go to an object store, in addition to the site's `scratch_gib`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    base: Pods
    base_is_on_head: bool
    """The head pod holds the base, because only the head has the run directory."""
    without_gpus: Pods | None
    """Of the base's actors without GPUs. None: they are in the base."""
    rollout: Pods

    @property
    def needs_gpus(self) -> bool:
        return self.base.gpus + self.rollout.gpus > 0


def sizes(
    config: RunConfig, needs: Collection[str], *, largest: Node, shares_files: bool, upload_gib: int = 0
) -> Sizes:
    """`needs` as in `plan`. `largest`: the largest pod. `shares_files`: all pods mount one volume.

    Raises ConfigError for an actor larger than a pod, for several base pods that cannot share the run directory, and for colocated workers.
    """
    if config.rollout.colocated:
        raise ConfigError(
            "rollout.colocated=true: these manifests give rollout workers their own pods, and a colocated worker must be in the pod of its "
            "rank; leave it out, or use a cluster of your own (--address)"
        )
    bundles = asked_bundles(config, available=None, needs=needs, num_workers=config.rollout.num_workers)
    workers = [each for each in bundles if each.kind is ActorKind.ROLLOUT_WORKER]
    base = [each for each in bundles if each.kind is not ActorKind.ROLLOUT_WORKER]
    whole = _packed(base, largest)
    base_is_on_head = not shares_files and "://" not in config.run_dir
    if base_is_on_head and whole.most > 1:
        raise ConfigError(
            f"learner.num_ranks={config.learner.num_ranks}: learner and services take {whole.most} pods, which do not share "
            f"run_dir={config.run_dir!r}; name a volume that all pods mount (run_claim in the site file), or lower their resources"
        )
    with_gpus = _packed([each for each in base if each.gpus], largest)
    # A pod more with idle GPUs would cost more than one without.
    is_apart = 0 < with_gpus.most < whole.most
    without_gpus = _packed([each for each in base if not each.gpus], largest) if is_apart else None
    num_workers = max(config.rollout.num_workers, config.elastic.max_workers or 0)
    return Sizes(
        base=replace(with_gpus if is_apart else whole, upload_gib=upload_gib),
        base_is_on_head=base_is_on_head,
        without_gpus=replace(without_gpus, upload_gib=upload_gib) if without_gpus else None,
        rollout=_rollout(workers[0], num_workers, largest),
    )


def _packed(bundles: Sequence[Bundle], largest: Node) -> Pods:
    """Packs bundles into equal pods by first fit, largest first."""
    pods: list[list[Bundle]] = []
    for bundle in sorted(bundles, key=lambda each: (-each.gpus, -each.cpus)):
        _refuse_larger(bundle, largest)
        fits = (pod for pod in pods if _has_room([*pod, bundle], largest))
        pod = next(fits, None)
        if pod is None:
            pods.append(pod := [])
        pod.append(bundle)
    return Pods(cpus=max(map(_num_cpus, pods), default=0), gpus=max(map(_num_gpus, pods), default=0), most=len(pods))


def _has_room(bundles: Sequence[Bundle], largest: Node) -> bool:
    return sum(each.cpus for each in bundles) <= largest.cpus and _num_gpus(bundles) <= largest.gpus


def _num_cpus(bundles: Sequence[Bundle]) -> int:
    return math.ceil(sum(each.cpus for each in bundles))


def _num_gpus(bundles: Sequence[Bundle]) -> int:
    """GPUs for bundles in descending order. A fraction must fit on one GPU."""
    shared: list[float] = []
    for share in (each.gpus for each in bundles if 0 < each.gpus < 1):
        # Rounded: three thirds are one GPU.
        place = next((gpu for gpu, taken in enumerate(shared) if round(taken + share, 6) <= 1), None)
        if place is None:
            shared.append(share)
        else:
            shared[place] += share
    return len(shared) + sum(math.ceil(each.gpus) for each in bundles if each.gpus >= 1)


def _rollout(worker: Bundle, num_workers: int, largest: Node) -> Pods:
    """One worker a pod, or as many as share a GPU and fit into the pod's CPUs."""
    _refuse_larger(worker, largest)
    per_pod = min(math.floor(1 / worker.gpus), math.floor(largest.cpus / worker.cpus)) if 0 < worker.gpus < 1 else 1
    return Pods(
        cpus=math.ceil(worker.cpus * per_pod),
        gpus=math.ceil(worker.gpus * per_pod),
        most=math.ceil(num_workers / per_pod),
    )


def _refuse_larger(bundle: Bundle, largest: Node) -> None:
    if bundle.cpus > largest.cpus or bundle.gpus > largest.gpus:
        raise ConfigError(
            f"{bundle.name} asks for {bundle.cpus:g} CPUs and {bundle.gpus:g} GPUs, and the site's largest pod has {largest.cpus:g} and "
            f"{largest.gpus:g}; ask for less, or raise largest_pod_cpus or largest_pod_gpus in the site file"
        )
