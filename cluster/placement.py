"""Which actor gets which share of which machine: pure arithmetic. Launch carries the plan out; `treadwheel check` prints it.

A cluster as large as the run asks for gives every actor what it asks. A smaller one is time-shared where that costs little:
synchronous runs sample and learn in turns, so they need the larger of the two and not the sum. CPU shares are then scaled down
together (they place actors, they do not limit them); GPUs never are. The controller moves references and needs nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError

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

    @classmethod
    def of(cls, nodes: Sequence[Mapping[str, Any]]) -> "ClusterResources":
        """What `ray.nodes()` says of the living ones."""
        living = [node["Resources"] for node in nodes if node["Alive"]]
        return cls(nodes=tuple(Node(cpus=each.get("CPU", 0.0), gpus=each.get("GPU", 0.0)) for each in living))

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One actor's place."""

    name: str
    """`learner-0` (rank), `rollout-0`, `reward`, `reference`, `recorder`."""
    num_cpus: float
    """Reserved in Ray; at most what the configuration asks."""
    num_gpus: float
    num_threads: int
    """Compute threads, whatever the reservation."""
    bundle: int | None = None
    """Index in Ray's placement group; None lets the actor wait outside of it for a node that joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Seats, and the placement group that reserves them."""

    seats: tuple[Seat, ...]
    """Those with a bundle, in the order of their bundles; then the others."""
    strategy: str
    """Ray's name: PACK keeps ranks and small runs together; SPREAD gives each worker a node of its own as far as they go."""
    is_time_shared: bool
    """True when CPU shares were scaled down."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """For Ray's placement group."""
        reserved = [seat for seat in self.seats if seat.bundle is not None and seat.num_cpus + seat.num_gpus > 0]
        return [{"CPU": seat.num_cpus, **({"GPU": seat.num_gpus} if seat.num_gpus else {})} for seat in reserved]

    def has(self, name: str) -> bool:
        return any(seat.name == name for seat in self.seats)

    def seat(self, name: str) -> Seat:
        """A rollout worker beyond the planned ones (`treadwheel scale`) gets another's share, outside of the group."""
        found = next((seat for seat in self.seats if seat.name == name), None)
        if found is None and name.startswith("rollout-"):
            return replace(self.seat("rollout-0"), name=name, bundle=None)
        if found is None:
            raise KeyError(name)
        return found


def needs_reference(config: RunConfig) -> bool:
    """True when something computes with reference log-probs that the learner cannot make itself from an adapter switched off."""
    return config.algorithm.kl.coefficient > 0 and config.learner.lora is None


def plan(config: RunConfig, available: ClusterResources) -> PlacementPlan:
    """Raises ConfigError when the run asks for more than the cluster has, naming the setting and the way out."""
    _check_gpus(config, available)
    _check_cpus(config, available)
    num_workers = _most_workers(config, available)
    fitted = _fit(_asked(config, num_workers=num_workers), available)
    while fitted is None and num_workers > _fewest_workers(config):
        num_workers -= 1
        fitted = _fit(_asked(config, num_workers=num_workers), available)
    asked = _asked(config, num_workers=config.rollout.num_workers)
    if fitted is None:
        raise _no_room(asked, available)
    reserved = tuple(replace(seat, bundle=index) for index, seat in enumerate(fitted))
    names = {seat.name for seat in reserved}
    # It lies down beside rank 0, whose checkpoints go to the same directory, and needs no share of its own.
    recorder = Seat(name="recorder", num_cpus=0.0, num_gpus=0.0, num_threads=1, bundle=0)
    return PlacementPlan(
        seats=(*reserved, recorder, *(seat for seat in asked if seat.name not in names)),
        strategy="SPREAD" if len(available.nodes) > 1 and num_workers > 1 else "PACK",
        is_time_shared=sum(seat.num_cpus for seat in reserved) < sum(s.num_cpus for s in asked if s.name in names),
    )


def _asked(config: RunConfig, *, num_workers: int) -> tuple[Seat, ...]:
    learner, rollout, reference = config.learner, config.rollout, config.reference

    def seat(name: str, num_cpus: float, num_gpus: float, num_threads: int | None) -> Seat:
        return Seat(name=name, num_cpus=num_cpus, num_gpus=num_gpus, num_threads=num_threads or math.ceil(num_cpus))

    ranks = [
        seat(f"learner-{rank}", learner.cpus_per_rank, learner.gpus_per_rank, learner.num_threads)
        for rank in range(learner.num_ranks)
    ]
    workers = [
        seat(f"rollout-{number}", rollout.cpus_per_worker, rollout.gpus_per_worker, rollout.num_threads)
        for number in range(num_workers)
    ]
    services = [seat("reward", REWARD_SERVICE_CPUS, 0.0, 1)]
    if needs_reference(config):
        services.append(seat("reference", reference.cpus, reference.gpus, reference.num_threads))
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


def _check_gpus(config: RunConfig, available: ClusterResources) -> None:
    asked = sum(seat.num_gpus for seat in _asked(config, num_workers=_fewest_workers(config)))
    if asked <= available.gpus:
        return
    settings = {
        "learner.gpus_per_rank": (config.learner.gpus_per_rank, f"x {config.learner.num_ranks} ranks"),
        "rollout.gpus_per_worker": (config.rollout.gpus_per_worker, f"x {config.rollout.num_workers} workers"),
        "reference.gpus": (config.reference.gpus if needs_reference(config) else 0.0, ""),
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


def _fit(seats: Sequence[Seat], available: ClusterResources) -> tuple[Seat, ...] | None:
    """The seats with the largest common share of their CPUs that packs into the nodes; None when none does."""
    share = min(1.0, available.cpus / sum(seat.num_cpus for seat in seats))
    # Each try gives up a twentieth: what is lost to nodes of uneven size is small beside the scaling itself.
    while share >= _SMALLEST_SHARE:
        scaled = tuple(replace(seat, num_cpus=_rounded(seat.num_cpus * share)) for seat in seats)
        if _packs(scaled, available):
            return scaled
        share *= 0.95
    return None


def _packs(seats: Sequence[Seat], available: ClusterResources) -> bool:
    """First fit, largest first, GPUs before CPUs."""
    free = [[node.gpus, node.cpus] for node in available.nodes]
    for seat in sorted(seats, key=lambda each: (-each.num_gpus, -each.num_cpus)):
        place = next((node for node in free if node[0] >= seat.num_gpus and node[1] >= seat.num_cpus), None)
        if place is None:
            return False
        place[0] -= seat.num_gpus
        place[1] -= seat.num_cpus
    return True


def _rounded(num_cpus: float) -> float:
    """Down, to Ray's precision with some to spare; never nothing."""
    return max(math.floor(num_cpus * 1000) / 1000, 0.001)


def _no_room(seats: Sequence[Seat], available: ClusterResources) -> ConfigError:
    largest = max(seats, key=lambda seat: (seat.num_gpus, seat.num_cpus))
    fields = {"learner": "learner.gpus_per_rank", "rollout": "rollout.gpus_per_worker"}
    field = fields.get(largest.name.partition("-")[0], "reference.gpus")
    nodes = ", ".join(f"{node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in available.nodes)
    return ConfigError(
        f"{field}={largest.num_gpus:g}: no way to place {len(seats)} actors on the cluster's {len(available.nodes)} nodes ({nodes}); "
        "use fewer GPUs per actor, fewer actors, or larger nodes"
    )
