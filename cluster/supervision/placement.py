"""Which actor gets which share of which machine: pure arithmetic. Launch carries the plan out; `treadwheel check` prints it.

A cluster as large as the run asks for gives every actor what it asks. A smaller one is time-shared where that costs little:
synchronous runs sample and learn in turns, so they need the larger of the two and not the sum. CPU shares are then scaled down
together (they place actors, they do not limit them); GPUs never are. The controller moves references and needs nothing.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import ActorKind

REWARD_SERVICE_CPUS = 0.25
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine's resources."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    nodes: tuple[Node, ...]

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One actor's place."""

    kind: ActorKind
    index: int
    """Learner rank, or number of the rollout worker; 0 for services."""
    cpus: float
    """Reserved in Ray; at most what the configuration asks."""
    gpus: float
    num_threads: int
    """Compute threads, whatever the reservation."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Bundles in the order of their indices in Ray's placement group."""

    bundles: tuple[Bundle, ...]
    strategy: str
    """Ray's name: PACK keeps ranks and small runs together; SPREAD gives each worker a node of its own as far as they go."""
    is_time_shared: bool
    """True when CPU shares were scaled down."""
    num_missing_workers: int
    """Rollout workers that find no room yet and join when nodes do (elastic runs only)."""

    def of(self, kind: ActorKind) -> tuple[Bundle, ...]:
        return tuple(bundle for bundle in self.bundles if bundle.kind is kind)

    def resources(self) -> list[dict[str, float]]:
        """For Ray's placement group."""
        return [{"CPU": bundle.cpus, **({"GPU": bundle.gpus} if bundle.gpus else {})} for bundle in self.bundles]


def needs_reference(config: RunConfig, *, needs: Collection[str]) -> bool:
    """True when something computes with reference log-probs that the learner cannot make itself from an adapter switched off.

    `needs` is what the objective asks for (`Objective.needs`): a loss of the user's may want them though the KL has no coefficient.
    """
    is_base = config.learner.lora is not None and config.reference.path is None
    return "reference_logprobs" in needs and not is_base


def plan(config: RunConfig, available: ClusterResources, *, needs: Collection[str]) -> PlacementPlan:
    """Raises ConfigError when the run asks for more than the cluster has, naming the setting and the way out. `needs`: as above."""
    has_reference = needs_reference(config, needs=needs)
    _check_gpus(config, available, has_reference=has_reference)
    _check_cpus(config, available)
    num_workers = _most_workers(config, available)
    fitted = _fit(_asked(config, num_workers=num_workers, has_reference=has_reference), available)
    while fitted is None and num_workers > _fewest_workers(config):
        num_workers -= 1
        fitted = _fit(_asked(config, num_workers=num_workers, has_reference=has_reference), available)
    asked = _asked(config, num_workers=num_workers, has_reference=has_reference)
    if fitted is None:
        raise _no_room(asked, available)
    return PlacementPlan(
        bundles=fitted,
        strategy="SPREAD" if len(available.nodes) > 1 and num_workers > 1 else "PACK",
        is_time_shared=any(given.cpus < wanted.cpus for given, wanted in zip(fitted, asked, strict=True)),
        num_missing_workers=config.rollout.num_workers - num_workers,
    )


def _asked(config: RunConfig, *, num_workers: int, has_reference: bool) -> tuple[Bundle, ...]:
    learner, rollout, reference = config.learner, config.rollout, config.reference

    def bundle(kind: ActorKind, index: int, cpus: float, gpus: float, num_threads: int | None) -> Bundle:
        return Bundle(kind=kind, index=index, cpus=cpus, gpus=gpus, num_threads=num_threads or math.ceil(cpus))

    ranks = [
        bundle(ActorKind.LEARNER, rank, learner.cpus_per_rank, learner.gpus_per_rank, learner.num_threads)
        for rank in range(learner.num_ranks)
    ]
    workers = [
        bundle(ActorKind.ROLLOUT_WORKER, i, rollout.cpus_per_worker, rollout.gpus_per_worker, rollout.num_threads)
        for i in range(num_workers)
    ]
    services = [bundle(ActorKind.REWARD_SERVICE, 0, REWARD_SERVICE_CPUS, 0.0, 1)]
    if has_reference:
        services.append(bundle(ActorKind.REFERENCE_SCORER, 0, reference.cpus, reference.gpus, reference.num_threads))
    return (*ranks, *workers, *services)


def _fewest_workers(config: RunConfig) -> int:
    """An elastic run starts with what is there; any other one with what it asks."""
    if config.elastic.max_workers is None:
        return config.rollout.num_workers
    return min(config.elastic.min_workers, config.rollout.num_workers)


def _most_workers(config: RunConfig, available: ClusterResources) -> int:
    """Workers that have CPUs of their own: an elastic run waits for nodes instead of squeezing the rest in."""
    learning = 0.0 if _takes_turns(config) else config.learner.cpus_per_rank * config.learner.num_ranks
    roomy = int((available.cpus - learning) / config.rollout.cpus_per_worker)
    return min(config.rollout.num_workers, max(roomy, _fewest_workers(config)))


def _takes_turns(config: RunConfig) -> bool:
    return config.buffer.max_off_policy_steps == 0


def _check_gpus(config: RunConfig, available: ClusterResources, *, has_reference: bool) -> None:
    fewest = _asked(config, num_workers=_fewest_workers(config), has_reference=has_reference)
    asked = sum(bundle.gpus for bundle in fewest)
    if asked <= available.gpus:
        return
    settings = {
        "learner.gpus_per_rank": (config.learner.gpus_per_rank, f"x {config.learner.num_ranks} ranks"),
        "rollout.gpus_per_worker": (config.rollout.gpus_per_worker, f"x {config.rollout.num_workers} workers"),
        "reference.gpus": (config.reference.gpus if has_reference else 0.0, ""),
    }
    names = ", ".join(f"{name}={value:g} {times}".strip() for name, (value, times) in settings.items() if value)
    raise ConfigError(
        f"{names}: {asked:g} GPUs asked for, the cluster has {available.gpus:g}; "
        "use fewer ranks or workers, fractions of a GPU, or a larger cluster (--address)"
    )


def _check_cpus(config: RunConfig, available: ClusterResources) -> None:
    """What cannot be time-shared without halving somebody's speed is refused."""
    learning = config.learner.cpus_per_rank * config.learner.num_ranks
    sampling = config.rollout.cpus_per_worker * _fewest_workers(config)
    in_turns = _takes_turns(config)
    asked = max(learning, sampling) if in_turns else learning + sampling
    if asked <= available.cpus:
        return
    ranks = f"learner.cpus_per_rank={config.learner.cpus_per_rank:g} x {config.learner.num_ranks} ranks"
    workers = f"rollout.cpus_per_worker={config.rollout.cpus_per_worker:g} x {config.rollout.num_workers} workers"
    if in_turns:
        names = ranks if learning >= sampling else workers
        way_out = "ask for less, or use a larger cluster (--address)"
    else:
        names = f"{ranks} and {workers}"
        way_out = "ask for less, use a larger cluster (--address), or take turns with buffer.max_off_policy_steps=0"
    raise ConfigError(f"{names}: {asked:g} CPUs asked for, the cluster has {available.cpus:g}; {way_out}")


def _fit(bundles: Sequence[Bundle], available: ClusterResources) -> tuple[Bundle, ...] | None:
    """The bundles with the largest common share of their CPUs that packs into the nodes; None when none does."""
    share = min(1.0, available.cpus / sum(bundle.cpus for bundle in bundles))
    # Each try gives up a twentieth: what is lost to nodes of uneven size is small beside the scaling itself.
    while share >= _SMALLEST_SHARE:
        scaled = tuple(replace(bundle, cpus=_rounded(bundle.cpus * share)) for bundle in bundles)
        if _packs(scaled, available):
            return scaled
        share *= 0.95
    return None


def _packs(bundles: Sequence[Bundle], available: ClusterResources) -> bool:
    """First fit, largest first, GPUs before CPUs."""
    free = [[node.gpus, node.cpus] for node in available.nodes]
    for bundle in sorted(bundles, key=lambda each: (-each.gpus, -each.cpus)):
        place = next((node for node in free if node[0] >= bundle.gpus and node[1] >= bundle.cpus), None)
        if place is None:
            return False
        place[0] -= bundle.gpus
        place[1] -= bundle.cpus
    return True


def _rounded(cpus: float) -> float:
    """Down, to Ray's precision with some to spare; never nothing."""
    return max(math.floor(cpus * 1000) / 1000, 0.001)


def _no_room(bundles: Sequence[Bundle], available: ClusterResources) -> ConfigError:
    largest = max(bundles, key=lambda bundle: (bundle.gpus, bundle.cpus))
    fields = {ActorKind.LEARNER: "learner.gpus_per_rank", ActorKind.ROLLOUT_WORKER: "rollout.gpus_per_worker"}
    field = fields.get(largest.kind, "reference.gpus")
    nodes = ", ".join(f"{node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in available.nodes)
    return ConfigError(
        f"{field}={largest.gpus:g}: no way to place {len(bundles)} actors on the cluster's {len(available.nodes)} nodes ({nodes}); "
        "use fewer GPUs per actor, fewer actors, or larger nodes"
    )
