"""Checks a run on hardware that is not at hand: placement finds room, and the memory of each GPU and node suffices.

Prompts, judges and tokenizers are not checked, and all sizes are estimates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.supervision.placement import PlacementPlan, asked_bundles, plan
from deploy.preflight.demands import Demands, demands
from deploy.preflight.hardware import Hardware, Seats, seat
from deploy.preflight.machine import gib
from deploy.preflight.problems import Problems
from deploy.preflight.report import Rows

if TYPE_CHECKING:
    from learner.memory import MemoryEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """The run as it would be placed."""

    hardware: Hardware
    placement: PlacementPlan
    seats: Seats
    demands: Demands

    def on_gpus(self) -> dict[tuple[int, int], list[str]]:
        """Names of the actors by node and GPU. Idle GPUs have an empty list."""
        every = [(node, gpu) for node in range(self.hardware.num_nodes) for gpu in range(self.hardware.gpus)]
        found: dict[tuple[int, int], list[str]] = {place: [] for place in every}
        for name, gpus in self.seats.gpus_of.items():
            for gpu in gpus:
                found[self.seats.node_of[name], gpu].append(name)
        return found

    def on_node(self, node: int) -> list[str]:
        return [name for name, place in self.seats.node_of.items() if place == node]

    def gpu_bytes(self, names: Sequence[str]) -> int:
        """Peak memory of these actors on one GPU. If actors take turns, that of the largest turn."""
        found = [self.demands.of_actors[name] for name in names]
        turns = {each.turn for each in found}
        return max(
            (sum(each.gpu if each.turn in (None, turn) else each.asleep for each in found) for turn in turns), default=0
        )

    def host_bytes(self, names: Sequence[str]) -> int:
        """Memory of these actors on one node. The object store keeps a version of the weights until the next is complete, so the node of
        the first rank holds two."""
        receives = any(name.startswith("rollout_worker") for name in names)
        num_copies = 2 if "learner-0" in names else int(receives)
        own = sum(self.demands.of_actors[name].host for name in names)
        return own + num_copies * self.demands.published


def assume(config: RunConfig, hardware: Hardware, *, needs: frozenset[str], problems: Problems) -> Assumed | None:
    """None if the run cannot be placed or its demands are unknown, which is a problem then."""
    asked = asked_bundles(config, available=None, needs=needs, num_workers=config.rollout.num_workers)
    resources = hardware.resources(asked_cpus=sum(each.cpus for each in asked))
    placement = problems.attempt(plan, config, resources, needs=needs)
    taken = problems.attempt(demands, config, gpu_bytes=hardware.gpu_bytes, needs=needs, problems=problems)
    if placement is None or taken is None:
        return None
    staying_first = config.elastic.spot is not None or placement.spreads_workers
    seats = problems.attempt(seat, placement.bundles, hardware, resources, staying_first=staying_first)
    if seats is None:
        return None
    found = Assumed(hardware=hardware, placement=placement, seats=seats, demands=taken)
    problems.attempt(_check_shared_gpus, found)
    problems.attempt(_check_nodes, found)
    return found


def _check_shared_gpus(found: Assumed) -> None:
    """Raises ConfigError for actors that do not fit on one GPU together. `demands` checks an actor that is alone on its GPU."""
    for (node, gpu), names in found.on_gpus().items():
        if len(names) > 1 and (size := found.gpu_bytes(names)) > found.hardware.gpu_bytes:
            actors = ", ".join(f"{name} {gib(found.gpu_bytes([name]))}" for name in names)
            raise ConfigError(
                f"GPU {gpu} of node {node}: {actors} take {gib(size)} of {gib(found.hardware.gpu_bytes)} GiB; lower "
                "rollout.gpu_memory_utilization if an engine is among them, or ask for a whole GPU for each"
            )


def _check_nodes(found: Assumed) -> None:
    if (memory_bytes := found.hardware.memory_bytes) is None:
        return
    for node in range(found.hardware.num_nodes):
        names = found.on_node(node)
        if (size := found.host_bytes(names)) > memory_bytes:
            raise ConfigError(
                f"node {node}: its {len(names)} actors take about {gib(size)} of {gib(memory_bytes)} GiB of its memory, with copies for "
                "checkpoints and published weights; use more nodes with fewer actors each, or nodes with more memory"
            )


def rows(found: Assumed, config: RunConfig) -> Rows:
    hardware, taken = found.hardware, found.demands
    yield "assumed", "hardware", _in_words(hardware)
    yield "assumed", "not checked", "prompts, judges, tokenizers; sizes are estimates that no GPU has confirmed"
    for note in found.placement.notes():
        yield "placement", "note", note
    if found.placement.spreads_workers:
        yield "placement", "one way to fit", "Ray spreads the rollout workers over the nodes, and packs all others"
    # All nodes are alike, and placement takes the first with room: the nodes after the last used one have no actor.
    num_used = 1 + max(found.seats.node_of.values())
    on_gpus = {place: names for place, names in found.on_gpus().items() if place[0] < num_used}
    places = [(f"node {node}", gpu, ", ".join(names)) for (node, gpu), names in on_gpus.items()]
    for (node, names), alike in groupby(places, key=lambda place: (place[0], place[2])):
        gpus = [gpu for _, gpu, _ in alike]
        yield "placement", f"{node}, {_numbers('GPU', gpus)}", names or "idle"
    for node in range(num_used):
        others = [name for name in found.on_node(node) if not found.seats.gpus_of[name]]
        if others:
            yield "placement", f"node {node}, CPUs only", ", ".join(others)
    if idle := range(num_used, hardware.num_nodes):
        yield "placement", _numbers("node", idle), "idle"
    rank = taken.rank
    yield "memory", "parameters", f"{rank.num_parameters / 1e9:,.2f} billion, {config.model.dtype}"
    yield (
        "memory",
        "learner rank",
        f"{_peak(rank)}: weights {gib(rank.weights_bytes)}, gradients {gib(rank.gradients_bytes)}, optimizer "
        f"{gib(rank.optimizer_bytes)}, activations {gib(rank.activations_bytes)}, logits {gib(rank.head_bytes)}, masks "
        f"or copies {gib(rank.attention_bytes)}, gathered {gib(rank.gathered_bytes)}",
    )
    if (engine := taken.engine) is not None:
        yield (
            "memory",
            "engine, each GPU",
            f"{gib(engine.taken_bytes)} GiB: weights {gib(engine.weights_bytes)}, passes {gib(engine.passes_bytes)}, cache for "
            f"{engine.num_tokens:,} tokens: {engine.num_tokens // taken.max_context:,} sequences of {taken.max_context:,} at once",
        )
    for name, demand in taken.of_actors.items():
        if not name.startswith(("learner", "rollout_worker", "reward_service")):
            yield "memory", name, f"{gib(demand.gpu or demand.host)} GiB"
    fullest = max(on_gpus.values(), key=found.gpu_bytes, default=[])
    if fullest:
        size = gib(found.gpu_bytes(fullest))
        yield "memory", "fullest GPU", f"{size} of {gib(hardware.gpu_bytes)} GiB: {', '.join(fullest)}"
    for node in range(num_used):
        limit = "" if hardware.memory_bytes is None else f" of {gib(hardware.memory_bytes)}"
        yield "memory", f"node {node}", f"{gib(found.host_bytes(found.on_node(node)))}{limit} GiB"


def _peak(rank: "MemoryEstimate") -> str:
    if rank.step_bytes < rank.loading_bytes:
        return f"{gib(rank.loading_bytes)} GiB while it loads, then {gib(rank.step_bytes)}"
    return f"{gib(rank.step_bytes)} GiB"


def _in_words(hardware: Hardware) -> str:
    gpus = f"{hardware.gpus} GPUs of {gib(hardware.gpu_bytes)} GiB" if hardware.gpus else "no GPU"
    cpus = "CPUs as asked for" if hardware.cpus is None else f"{hardware.cpus} CPUs"
    memory = "memory not checked" if hardware.memory_bytes is None else f"{gib(hardware.memory_bytes)} GiB"
    return f"{hardware.num_nodes} node(s), each with {gpus}, {cpus}, {memory}"


def _numbers(name: str, numbers: Sequence[int]) -> str:
    return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {numbers[0]}-{numbers[-1]}"
