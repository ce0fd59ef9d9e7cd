"""The report of Ray's autoscaler on the nodes that it starts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  compiled
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # pyright: ignore[reportAttributeAccessIssue]

from cluster.remote.nodes import SharedAnswer

_ANSWER_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerReport:
    coming: Mapping[str, int]
    """Requested nodes that are not there yet, by type."""
    failed: Mapping[str, str]
    """Reason why the last node of a type did not come, by type."""
    impossible: frozenset[str]
    """Ids of placement groups for which no nodes within its limits would have room."""
    impossible_sizes: frozenset[tuple[float, float]]
    """(CPUs, GPUs) of actors outside a group for which no node within its limits would have room."""


async def autoscaler_report() -> AutoscalerReport | None:
    """None if no autoscaler of version 2 reports to Ray. Raises our errors when the head node does not answer."""
    return await _REPORT.get()


def _report() -> AutoscalerReport | None:
    assert ray.is_initialized(), "Ray would start a cluster of its own to answer"
    reply: Any = GetClusterStatusReply()
    # Ray's own `get_cluster_status` leaves out what is impossible.
    reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status(timeout_s=_ANSWER_S))
    return report_of(reply)


_REPORT = SharedAnswer(_report)


def report_of(reply: Any) -> AutoscalerReport | None:
    """`reply` is a `GetClusterStatusReply` of Ray's."""
    state = reply.autoscaling_state
    if not state.autoscaler_state_version:
        return None
    coming = Counter[str](each.ray_node_type_name for each in state.pending_instances)
    for request in state.pending_instance_requests:
        coming[request.ray_node_type_name] += request.count
    # `<id of the group>:<its strategy>|<its state>`
    impossible = frozenset(each.details.partition(":")[0] for each in state.infeasible_gang_resource_requests)
    bundles = [each.resources_bundle for each in state.infeasible_resource_requests]
    failed = {each.ray_node_type_name: each.reason for each in state.failed_instance_requests}
    return AutoscalerReport(
        coming=dict(coming),
        failed=failed,
        impossible=impossible,
        impossible_sizes=frozenset((bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)) for bundle in bundles),
    )
