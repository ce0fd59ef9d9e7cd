"""Pods of a run, from what its actors ask for: pure arithmetic.

The base holds learner, reward services, reference scorer and judge servers; rollout workers have pods of their own, which come and go.
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
    """As many as the run may have at one time."""
    upload_gib: int = 0
    """Disk for what the learner writes before it goes to an object store, besides the site's `scratch_gib`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    base: Pods
    base_is_on_head: bool
    """The head pod holds the base, since it has the run directory and shares it with no other pod."""
    rollout: Pods

    @property
    def needs_gpus(self) -> bool:
        return self.base.gpus + self.rollout.gpus > 0


def sizes(
    config: RunConfig, needs: Collection[str], *, largest: Node, shares_files: bool, upload_gib: int = 0
) -> Sizes:
    """`needs` as in `plan`, `largest` the largest pod; `shares_files` where all pods mount one volume.

    Raises ConfigError for an actor that is larger, for a base in several pods that cannot share the run directory, and for workers beside
    the learner's ranks.
    """
    if config.rollout.colocated:
        raise ConfigError(
            "rollout.colocated=true: these manifests give rollout workers pods of their own, and a worker must be in the pod of its rank; "
            "leave it out, or use a cluster of your own (--address)"
        )
    bundles = asked_bundles(config, available=None, needs=needs, num_workers=config.rollout.num_workers)
    workers = [each for each in bundles if each.kind is ActorKind.ROLLOUT_WORKER]
    base = _packed([each for each in bundles if each.kind is not ActorKind.ROLLOUT_WORKER], largest)
    base_is_on_head = not shares_files and "://" not in config.run_dir
    if base_is_on_head and base.most > 1:
        raise ConfigError(
            f"learner.num_ranks={config.learner.num_ranks}: learner and services take {base.most} pods, which do not share "
            f"run_dir={config.run_dir!r}; name a volume that all pods mount (run_claim in the site file), or ask for less"
        )
    base = replace(base, upload_gib=upload_gib)
    num_workers = max(config.rollout.num_workers, config.elastic.max_workers or 0)
    return Sizes(base=base, base_is_on_head=base_is_on_head, rollout=_rollout(workers[0], num_workers, largest))


def _packed(bundles: Sequence[Bundle], largest: Node) -> Pods:
    """First fit, largest first, into equal pods."""
    pods: list[list[Bundle]] = []
    for bundle in sorted(bundles, key=lambda each: (-each.gpus, -each.cpus)):
        _refuse_larger(bundle, largest)
        fits = (pod for pod in pods if _has_room([*pod, bundle], largest))
        pod = next(fits, None)
        if pod is None:
            pods.append(pod := [])
        pod.append(bundle)
    return Pods(cpus=max(map(_num_cpus, pods)), gpus=max(map(_num_gpus, pods)), most=len(pods))


def _has_room(bundles: Sequence[Bundle], largest: Node) -> bool:
    return sum(each.cpus for each in bundles) <= largest.cpus and _num_gpus(bundles) <= largest.gpus


def _num_cpus(bundles: Sequence[Bundle]) -> int:
    return math.ceil(sum(each.cpus for each in bundles))


def _num_gpus(bundles: Sequence[Bundle]) -> int:
    """For bundles of which the largest come first: a share of a GPU does not reach over two."""
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
    """One worker a pod, or as many as share a GPU and find their CPUs beside it."""
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
            f"{bundle.name} asks for {bundle.cpus:g} CPUs and {bundle.gpus:g} GPUs, the site's largest pod has {largest.cpus:g} and "
            f"{largest.gpus:g}; ask for less, or raise largest_pod_cpus or largest_pod_gpus in the site file"
        )
