"""What Prometheus's operator scrapes: heads on three ports, workers on one."""

from deploy.manifests.pods import LABELS, METRICS_PORTS, Manifest


def monitors() -> list[Manifest]:
    return [_monitor("head", METRICS_PORTS), _monitor("worker", ("metrics",))]


def _monitor(kind: str, ports: tuple[str, ...]) -> Manifest:
    cluster = {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": f"treadwheel-{kind}", "labels": dict(LABELS)},
        "spec": {
            "selector": {"matchLabels": {**LABELS, "ray.io/node-type": kind}},
            "podMetricsEndpoints": [{"port": port, "relabelings": [cluster]} for port in ports],
        },
    }
