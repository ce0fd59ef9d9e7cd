"""Assigns shares of machines to actors. Pure arithmetic.

On a cluster that is large enough every actor gets the resources that it asks for. On a smaller one all CPU shares are scaled down together,
and the plan says so. Shares place actors and do not limit them, so a run without enough CPUs is slower and nothing else. GPUs are shared
only as requested. The controller moves object refs and needs no share.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.types import ActorKind

_SMALLEST_SHARE = 0.01
_GPUS = {
    ActorKind.LEARNER: "learner.gpus_per_rank",
    ActorKind.ROLLOUT_WORKER: "rollout.gpus_per_worker",
    ActorKind.REWARD_SERVICE: "reward.gpus_per_service",
    ActorKind.REFERENCE_SCORER: "reference.gpus",
    ActorKind.REWARD_MODEL: "reward.models.<name>.gpus",
    ActorKind.JUDGE_SERVER: "reward.servers.<name>.gpus",
}
"""Setting of the GPUs, by kind of actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine's resources."""

    cpus: float
    gpus: float = 0.0
    is_spot: bool = False
    """The cloud may take it away. Only rollout workers may be there."""
    is_leaving: bool = False
    """It announced its end. Ray starts no actor there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    nodes: tuple[Node, ...]

    @property
    def staying(self) -> "ClusterResources":
        """Those of nodes that have not announced their end."""
        return ClusterResources(nodes=tuple(node for node in self.nodes if not node.is_leaving))

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    def most_threads(self, *, gpus: float, may_be_on_spot: bool) -> int:
        """Cores of the largest node where an actor with this many GPUs may be."""
        fitting = [node.cpus for node in self.nodes if node.gpus >= gpus and (may_be_on_spot or not node.is_spot)]
        return max(1, math.floor(max(fitting, default=0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One actor's seat: a bundle of a Ray placement group."""

    kind: ActorKind
    index: int
    """Learner rank, or number among the actors of its kind."""
    cpus: float
    """Reserved in Ray; at most the CPUs of the configuration."""
    gpus: float
    num_threads: int
    """Compute threads of each of its processes, independent of the reservation."""
    party: int | None = None
    """Bundles with the same number share one place and its GPU. None: a place of its own."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"

    @property
    def may_be_on_spot(self) -> bool:
        return self.kind is ActorKind.ROLLOUT_WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatGroup:
    """Seats of one placement group: Ray reserves all of them or none."""

    seats: tuple[int, ...]
    """Indices among the plan's bundles."""
    places: tuple[int, ...]
    """Index of each seat's bundle in the placement group. Actors of a party have one bundle in common and so the same GPU, because Ray
    binds a bundle with a GPU, or with a part of one, to a certain GPU."""
    resources: list[dict[str, float]]
    """Resources of each bundle."""
    strategy: str
    node_labels: dict[str, str]
    """Ray's label selector of the allowed nodes. Empty: any node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    bundles: tuple[Bundle, ...]
    spreads_workers: bool = False
    """Rollout workers are a group of their own that is spread over the nodes. All other actors are packed, and without this flag the
    workers too. Ranks exchange data in every layer, workers only load weights."""
    is_time_shared: bool
    """True when CPU shares were scaled down."""
    num_missing_workers: int
    """Rollout workers without room, which join when nodes do (elastic runs only)."""
    off_spot: dict[str, str] = field(default_factory=dict[str, str])
    """Ray's label selector of the nodes that stay. Empty: no nodes are spot nodes."""
    largest_first: bool = False
    """Places with the largest GPU shares come first in their group, so that Ray gives them out first."""

    def of(self, kind: ActorKind) -> tuple[Bundle, ...]:
        return tuple(bundle for bundle in self.bundles if bundle.kind is kind)

    def notes(self) -> list[str]:
        """Messages about requested resources that the run does not get."""
        notes: list[str] = []
        if self.is_time_shared:
            notes.append("fewer CPUs than asked for: actors share them")
        if self.num_missing_workers:
            notes.append(f"{self.num_missing_workers} more rollout worker(s) join when nodes do")
        return notes

    def groups(self) -> list[SeatGroup]:
        """Placement groups in the order in which to reserve them. Normally one for all seats. With `spreads_workers` one for the other
        actors and then one for the workers. With spot nodes one for the actors that must stay off them, then one for each worker.

        Ray gives the seats of a group to nodes by size and ignores labels. A large worker would take the only place where a small learner
        may be, and the group would never be placed though it has room. A worker's own group can be given back when its node is lost,
        without effect on other workers.
        """
        all_seats = range(len(self.bundles))
        staying = [seat for seat in all_seats if not self.bundles[seat].may_be_on_spot]
        workers = [seat for seat in all_seats if self.bundles[seat].may_be_on_spot]
        if self.off_spot:
            alone = (self._group([worker], "PACK", {}) for worker in workers)
            return [self._group(staying, "PACK", self.off_spot), *alone]
        if self.spreads_workers:
            return [self._group(staying, "PACK", {}), self._group(workers, "SPREAD", {})]
        return [self._group(all_seats, "PACK", {})]

    def _group(self, seats: Sequence[int], strategy: str, node_labels: dict[str, str]) -> SeatGroup:
        found = parties([self.bundles[seat] for seat in seats])
        if self.largest_first:
            found.sort(key=lambda party: -_total(each.gpus for each in party))
        place_of = {id(each): place for place, party in enumerate(found) for each in party}
        sums = [(_total(each.cpus for each in party), _total(each.gpus for each in party)) for party in found]
        return SeatGroup(
            seats=tuple(seats),
            places=tuple(place_of[id(self.bundles[seat])] for seat in seats),
            resources=[{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus, gpus in sums],
            strategy=strategy,
            node_labels=node_labels,
        )


def parties(bundles: Iterable[Bundle]) -> list[tuple[Bundle, ...]]:
    """Bundles that share a place, in the order of the first bundle of each place."""
    found: dict[tuple[str, int], list[Bundle]] = {}
    for number, bundle in enumerate(bundles):
        key = ("alone", number) if bundle.party is None else ("party", bundle.party)
        found.setdefault(key, []).append(bundle)
    return [tuple(party) for party in found.values()]


def plan(config: RunConfig, available: ClusterResources, *, needs: Collection[str]) -> PlacementPlan:
    """The seats of a run on these nodes. `needs`: inputs of the objective (`Objective.needs`). A user's loss may need reference log-probs
    without a KL coefficient. Raises ConfigError, with the setting and a way out, when the cluster has too few GPUs or no room.
    """
    ask = partial(asked_bundles, config, available=available, needs=needs)
    fewest = fewest_workers(config)
    _check_gpus(config, ask(num_workers=fewest), available)
    for num_workers in range(_most_workers(config, available, others=ask(num_workers=0)), fewest - 1, -1):
        asked = ask(num_workers=num_workers)
        if fitted := _fit(asked, available, config):
            placed = PlacementPlan(
                bundles=fitted,
                spreads_workers=num_workers > 1 and not config.rollout.colocated and _has_room_apart(fitted, available),
                is_time_shared=_is_less(fitted, asked),
                num_missing_workers=config.rollout.num_workers - num_workers,
                off_spot=config.elastic.off_spot,
            )
            if ordered := _in_an_order_that_fits(placed, available):
                return ordered
    raise _no_room(config, ask(num_workers=fewest), available)


def plan_learning(
    config: RunConfig, available: ClusterResources, *, needs: Collection[str], with_reference: bool = True
) -> PlacementPlan:
    """As `plan`, for a run that samples nothing: seats of the learner's ranks and of the reference scorer if one is needed."""
    scored_by = needs if with_reference else ()
    all_bundles = asked_bundles(config, available=available, needs=scored_by, num_workers=0)
    judging = (ActorKind.REWARD_SERVICE, ActorKind.REWARD_MODEL, ActorKind.JUDGE_SERVER)
    asked = tuple(each for each in all_bundles if each.kind not in judging)
    _check_gpus(config, asked, available)
    if fitted := _fit(asked, available, config):
        is_less, off_spot = _is_less(fitted, asked), config.elastic.off_spot
        placed = PlacementPlan(bundles=fitted, is_time_shared=is_less, num_missing_workers=0, off_spot=off_spot)
        if ordered := _in_an_order_that_fits(placed, available):
            return ordered
    raise _no_room(config, asked, available)


def needs_reference(config: RunConfig, *, needs: Collection[str]) -> bool:
    """Whether the objective needs reference log-probs that the learner cannot compute itself by switching its adapter off."""
    return "reference_logprobs" in needs and not config.learner_scores_reference


def asked_bundles(
    config: RunConfig, *, available: ClusterResources | None, needs: Collection[str], num_workers: int
) -> tuple[Bundle, ...]:
    """Every actor's bundle, with all the CPUs that the run asks for. `available` None: there are no nodes yet."""
    learner, rollout, reward, reference = config.learner, config.rollout, config.reward, config.reference
    most_threads = cache(available.most_threads) if available else None  # called for each of thousands of workers

    def bundle(
        kind: ActorKind, index: int, cpus: float, gpus: float, num_threads: int | None, *, num_processes: int = 1
    ) -> Bundle:
        if num_threads is None:
            num_threads = math.ceil(cpus)
            if most_threads:
                of_nodes = most_threads(gpus=gpus, may_be_on_spot=kind is ActorKind.ROLLOUT_WORKER)
                num_threads = min(num_threads, of_nodes)
        takes_turns = rollout.colocated and kind in (ActorKind.LEARNER, ActorKind.ROLLOUT_WORKER)
        return Bundle(
            kind=kind,
            index=index,
            cpus=cpus,
            gpus=gpus,
            num_threads=max(1, num_threads // num_processes),
            party=index if takes_turns else None,
        )

    ranks = [
        bundle(ActorKind.LEARNER, rank, learner.cpus_per_rank, learner.gpus_per_rank, learner.num_threads)
        for rank in range(learner.num_ranks)
    ]
    of_worker = (rollout.cpus_per_worker, rollout.gpus_per_worker, rollout.num_threads)
    workers = [
        bundle(ActorKind.ROLLOUT_WORKER, i, *of_worker, num_processes=rollout.tensor_parallel_size)
        for i in range(num_workers)
    ]
    services = [
        bundle(ActorKind.REWARD_SERVICE, i, reward.cpus_per_service, reward.gpus_per_service, 1)
        for i in range(reward.num_services)
    ]
    services += [
        bundle(ActorKind.REWARD_MODEL, i, model.cpus, model.gpus, model.num_threads)
        for i, model in enumerate(reward.models.values())
    ]
    servers = [server for server in reward.servers.values() for _ in range(server.num_servers)]
    services += [
        bundle(ActorKind.JUDGE_SERVER, i, server.cpus, server.gpus, server.num_threads)
        for i, server in enumerate(servers)
    ]
    if needs_reference(config, needs=needs):
        services.append(bundle(ActorKind.REFERENCE_SCORER, 0, reference.cpus, reference.gpus, reference.num_threads))
    return (*ranks, *workers, *services)


def fewest_workers(config: RunConfig) -> int:
    """Workers without which the run does not start: all of them, unless it is elastic."""
    if config.elastic.max_workers is None:
        return config.rollout.num_workers
    return min(config.elastic.min_workers, config.rollout.num_workers)


def _most_workers(config: RunConfig, available: ClusterResources, *, others: Sequence[Bundle]) -> int:
    """All workers, or in an elastic run those that have CPUs of their own besides the `others`: the rest waits for nodes."""
    takes_turns = config.buffer.max_off_policy_steps == 0
    other_cpus = sum(each.cpus for each in others if not (takes_turns and each.kind is ActorKind.LEARNER))
    num_with_cpus = int(_total([(available.cpus - other_cpus) / config.rollout.cpus_per_worker]))
    return min(config.rollout.num_workers, max(num_with_cpus, fewest_workers(config)))


def _check_gpus(config: RunConfig, fewest: Sequence[Bundle], available: ClusterResources) -> None:
    asked = _total(bundle.gpus for bundle in fewest)
    if asked <= available.gpus:
        return
    settings = Counter(f"{_gpu_setting(config, each)}={each.gpus:g}" for each in fewest if each.gpus)
    names = ", ".join(f"{setting} x {number}" for setting, number in settings.items())
    raise ConfigError(
        f"{names}: {asked:g} GPUs asked for, the cluster has {available.gpus:g}; "
        "use fewer ranks or workers, fractions of a GPU, or a larger cluster (--address)"
    )


def _gpu_setting(config: RunConfig, bundle: Bundle) -> str:
    servers = config.reward.servers
    names = {
        ActorKind.REWARD_MODEL: [*config.reward.models],
        ActorKind.JUDGE_SERVER: [name for name, server in servers.items() for _ in range(server.num_servers)],
    }
    setting, named = _GPUS[bundle.kind], names.get(bundle.kind)
    return setting.replace("<name>", named[bundle.index]) if named else setting


def _fit(bundles: Sequence[Bundle], available: ClusterResources, config: RunConfig) -> tuple[Bundle, ...] | None:
    """The bundles with the largest common share of their CPUs with which they fit into the nodes; None if no share fits."""
    if _total(bundle.gpus for bundle in bundles) > available.gpus:  # no CPU share helps
        return None
    fits = _total(bundle.cpus for bundle in bundles) <= available.cpus
    share = 1.0 if fits else available.cpus / sum(bundle.cpus for bundle in bundles)
    # Each try gives up a twentieth: the loss to nodes of uneven size is small compared with the scaling itself.
    while share >= _SMALLEST_SHARE:
        digits = 4 if share == 1.0 else 3  # Ray's precision; scaled shares are coarser
        scaled = tuple(replace(bundle, cpus=_rounded(bundle.cpus * share, digits=digits)) for bundle in bundles)
        if not without_room(scaled, available, staying_first=config.elastic.spot is not None):
            return scaled
        share *= 0.95
    return None


def _has_room_apart(bundles: Sequence[Bundle], available: ClusterResources) -> bool:
    """Whether there are several nodes, and room for the workers after all others, on whatever kind of node Ray packs those."""
    kinds = dict.fromkeys((node.cpus, node.gpus) for node in available.nodes)
    orders = (sorted(available.nodes, key=lambda node: (node.cpus, node.gpus) != kind) for kind in kinds)
    return len(available.nodes) > 1 and not any(
        without_room(bundles, ClusterResources(nodes=tuple(order)), staying_first=True) for order in orders
    )


def _in_an_order_that_fits(placed: PlacementPlan, available: ClusterResources) -> PlacementPlan | None:
    """The plan, with `largest_first` if Ray needs that order. None when neither order finds a GPU for each share.

    Free parts of two GPUs do not add up: Ray would wait for ever, with room for the sum. The check is exact when one node has all GPUs.
    Which of several nodes Ray takes for a share is not known; then None means that no order finds GPUs.
    """
    nodes = [node.gpus for node in available.nodes if node.gpus]
    for each in (placed, replace(placed, largest_first=True)):
        shares = [share for group in each.groups() for place in group.resources if (share := place.get("GPU", 0.0))]
        if _finds_gpus(shares, num_gpus=nodes[0]) if len(nodes) == 1 else _may_find_gpus(shares, nodes):
            return each
    return None


def _finds_gpus(shares: Sequence[float], *, num_gpus: float) -> bool:
    """Whether Ray finds GPUs for all shares, one after the other. It takes the GPUs with the least room that is enough."""
    free = _each_gpu(num_gpus)
    for share in shares:
        part, number = min(share, 1.0), math.ceil(share)
        roomy = sorted((gpu for gpu, left in enumerate(free) if _total((left, -part)) >= 0), key=free.__getitem__)
        if len(roomy) < number:
            return False
        for gpu in roomy[:number]:
            free[gpu] = _total((free[gpu], -part))
    return True


def _may_find_gpus(shares: Sequence[float], nodes: Iterable[float]) -> bool:
    """Whether the GPUs have room for the shares, checked for each size alone: a GPU holds one share of 0.6, or three of 0.3."""
    gpus = Counter(gpu for num_gpus in nodes for gpu in _each_gpu(num_gpus))
    parts = Counter(part for share in shares for part in [min(share, 1.0)] * math.ceil(share))

    def held(counts: Counter[float], size: float) -> int:
        return sum(number * int(_total([each / size])) for each, number in counts.items())

    return all(held(parts, size) <= held(gpus, size) for size in parts)


def _each_gpu(num_gpus: float) -> list[float]:
    """Sizes of a node's GPUs. A fractional one comes last."""
    whole = int(num_gpus)
    return [1.0] * whole + ([num_gpus - whole] if num_gpus > whole else [])


def _is_less(given: Sequence[Bundle], asked: Sequence[Bundle]) -> bool:
    """Whether any bundle has fewer CPUs than asked for, by more than Ray's precision."""
    return any(other.cpus - one.cpus > 1e-4 for one, other in zip(given, asked, strict=True))


def without_room(bundles: Sequence[Bundle], available: ClusterResources, *, staying_first: bool) -> list[Bundle]:
    """Bundles for which `first_fit` finds no node."""
    seated = first_fit(bundles, available, staying_first=staying_first)
    return [bundle for bundle, place in seated if place is None]


def first_fit(
    bundles: Sequence[Bundle], available: ClusterResources, *, staying_first: bool
) -> list[tuple[Bundle, int | None]]:
    """Each bundle with the index of its node (None: no room), in the order of seating: largest parties first, by GPUs and then CPUs.
    `staying_first`: actors that must not be on spot nodes come before all workers."""
    free, seated = list(available.nodes), list[tuple[Bundle, int | None]]()
    asked = [
        (_total(each.gpus for each in party), _total(each.cpus for each in party), party) for party in parties(bundles)
    ]

    def may_be_on_spot(party: Sequence[Bundle]) -> bool:
        return all(each.may_be_on_spot for each in party)

    for gpus, cpus, party in sorted(asked, key=lambda it: (staying_first and may_be_on_spot(it[2]), -it[0], -it[1])):
        place = next(
            (
                place
                for place, node in enumerate(free)
                if node.gpus >= gpus and node.cpus >= cpus and (may_be_on_spot(party) or not node.is_spot)
            ),
            None,
        )
        seated += [(bundle, place) for bundle in party]
        if place is not None:
            node = free[place]
            free[place] = replace(node, gpus=_total((node.gpus, -gpus)), cpus=_total((node.cpus, -cpus)))
    return seated


def _total(shares: Iterable[float]) -> float:
    """Sum at Ray's precision: 3 times 0.1 is 0.3, and 1 - 0.8 is 0.2."""
    return round(sum(shares), 4)


def _rounded(cpus: float, *, digits: int) -> float:
    """Rounded down, but never to 0."""
    # In binary, 2.01 x 1000 is slightly less than 2010.
    return max(math.floor(round(cpus * 10**digits, 6)), 1) / 10**digits


def _no_room(config: RunConfig, bundles: Sequence[Bundle], available: ClusterResources) -> ConfigError:
    """The error for a bundle whose GPUs no single node has, or for too many actors for any CPU share."""
    largest = max(bundles, key=lambda bundle: bundle.gpus)
    asked = f"learner.num_ranks={config.learner.num_ranks} and rollout.num_workers={config.rollout.num_workers}"
    if largest.gpus:
        asked = f"{_gpu_setting(config, largest)}={largest.gpus:g}"
    nodes = ", ".join(
        f"{node.cpus:g} CPUs and {node.gpus:g} GPUs{' on spot' if node.is_spot else ''}" for node in available.nodes
    )
    staying = " that are not spot" if any(node.is_spot for node in available.nodes) else ""
    return ConfigError(
        f"{asked}: no way to place {len(bundles)} actors on the cluster's {len(available.nodes)} nodes ({nodes}); "
        f"use fewer GPUs per actor, fewer actors, or larger nodes{staying}"
    )
