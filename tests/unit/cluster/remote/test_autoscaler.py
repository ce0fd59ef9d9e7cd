"""What Ray's autoscaler reports, read from Ray's own message."""

import pytest
import ray
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from cluster.remote.autoscaler import _report, report_of


def test_nodes_that_come_that_failed_and_that_cannot_be():
    reply = GetClusterStatusReply()
    state = reply.autoscaling_state
    state.autoscaler_state_version = 7
    state.pending_instances.add(ray_node_type_name="spot")
    state.pending_instances.add(ray_node_type_name="spot")
    state.pending_instance_requests.add(ray_node_type_name="spot", count=3)
    state.pending_instance_requests.add(ray_node_type_name="steady", count=1)
    state.failed_instance_requests.add(ray_node_type_name="large", count=1, reason="out of stock")
    state.infeasible_gang_resource_requests.add(details="c0ffee:PACK|PENDING")
    state.infeasible_resource_requests.add(resources_bundle={"CPU": 2.0, "GPU": 8.0})
    state.infeasible_resource_requests.add(resources_bundle={"CPU": 64.0})
    report = report_of(reply)
    assert report is not None
    assert (report.coming, report.failed) == ({"spot": 5, "steady": 1}, {"large": "out of stock"})
    assert report.impossible == {"c0ffee"}
    assert report.impossible_sizes == {(2.0, 8.0), (64.0, 0.0)}


def test_an_autoscaler_that_never_reported_is_none():
    assert report_of(GetClusterStatusReply()) is None


def test_ray_is_not_started_to_be_asked():
    """Its context would start a cluster of its own in a process that is connected to none."""
    with pytest.raises(AssertionError, match="a cluster of its own"):
        _report()
    assert not ray.is_initialized()
