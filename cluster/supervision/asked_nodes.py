"""A run that waits for its nodes: its plan, made from the requested resources, and a text about the missing nodes."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.contracts.config import RunConfig
from cluster.supervision.placement import Bundle, PlacementPlan, asked_bundles, fewest_workers

if TYPE_CHECKING:
    from cluster.remote.autoscaler import AutoscalerReport  # imports ray


def plan_asked(config: RunConfig, *, needs: Collection[str]) -> PlacementPlan:
    """As `plan`, on nodes that would have all requested resources. Seats are for the fewest workers; others join later.

    All seats are packed, because autoscalers count nodes that way.
    """
    num_workers = fewest_workers(config)
    return PlacementPlan(
        bundles=asked_bundles(config, available=None, needs=needs, num_workers=num_workers),
        is_time_shared=False,
        num_missing_workers=config.rollout.num_workers - num_workers,
        off_spot=config.elastic.off_spot,
    )


def what_is_missing(
    missing: Sequence[Bundle],
    *,
    num_seats: int,
    num_nodes: int,
    report: "AutoscalerReport | None",
    coming_for_s: Mapping[str, float],
    is_impossible: bool,
) -> str:
    """`missing`: seats for which the present nodes have no room. `coming_for_s`: seconds since nodes of a type were requested, by type.
    `is_impossible`: the autoscaler has no nodes for the seats that wait now."""
    nodes = "1 node is" if num_nodes == 1 else f"{num_nodes} nodes are"
    room = f"all {num_seats} seats would fit and are not reserved yet, others may hold the resources"
    if missing:
        room = f"no room for {len(missing)} of {num_seats} seats: {_counted(missing)}"
    lacking = "these seats" if is_impossible else None
    return f"{nodes} there, {room}; {autoscaler_in_words(report, coming_for_s, lacking=lacking)}"


def _counted(bundles: Sequence[Bundle]) -> str:
    seats = Counter((str(each.kind).replace("_", " "), each.cpus, each.gpus) for each in bundles)
    return ", ".join(
        f"{number} {kind}{'s' if number > 1 else ''} with {cpus:g} CPUs{f' and {gpus:g} GPUs' if gpus else ''}"
        for (kind, cpus, gpus), number in seats.items()
    )


def autoscaler_in_words(
    report: "AutoscalerReport | None", coming_for_s: Mapping[str, float], *, lacking: str | None
) -> str:
    """`lacking`: demands for which the autoscaler has no node type. None: no such demand is known."""
    if report is None:
        return "no autoscaler reports, so nodes have to be started by hand"
    coming = [f"{number} of {kind!r} for {coming_for_s.get(kind, 0):.0f} s" for kind, number in report.coming.items()]
    parts = [f"the autoscaler brings {', '.join(coming)}" if coming else "the autoscaler brings none"]
    parts += [f"{kind!r} failed: {reason}" for kind, reason in report.failed.items()]
    if lacking:
        parts.append(f"it has no nodes for {lacking}, by size, by labels or by its limits")
    return "; ".join(parts)
