"""Quotas of Kueue for runs whose site names a `queue`: on-demand and spot nodes are flavours of one ClusterQueue."""

from deploy.manifests.pods import LABELS, Manifest

_API = "kueue.x-k8s.io/v1beta1"


def queues(*, quotas: dict[str, dict[str, str]], queue: str) -> list[Manifest]:
    """`quotas`: resource to amount, by the flavour, which is also the value of the nodes' label treadwheel/nodes."""
    flavors = [_object("ResourceFlavor", name, {"nodeLabels": {"treadwheel/nodes": name}}) for name in quotas]
    group = {
        "coveredResources": [*next(iter(quotas.values()))],
        "flavors": [
            {"name": name, "resources": [{"name": each, "nominalQuota": amount} for each, amount in quota.items()]}
            for name, quota in quotas.items()
        ],
    }
    cluster_queue = _object("ClusterQueue", "treadwheel", {"namespaceSelector": {}, "resourceGroups": [group]})
    return [*flavors, cluster_queue, _object("LocalQueue", queue, {"clusterQueue": "treadwheel"})]


def _object(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": _API, "kind": kind, "metadata": {"name": name, "labels": dict(LABELS)}, "spec": spec}
