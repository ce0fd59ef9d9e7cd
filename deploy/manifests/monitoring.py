"""Monitors for Prometheus's operator (heads have three ports, workers one), its alerts, and Grafana's dashboard."""

import json
from pathlib import Path

from deploy.manifests.pods import LABELS, METRICS_PORTS, Manifest
from deploy.monitoring.alerts import groups

_DASHBOARD = Path(__file__).parents[1] / "grafana" / "treadwheel.json"


def rules() -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "treadwheel", "labels": dict(LABELS)},
        "spec": {"groups": groups()},
    }


def dashboard() -> Manifest:
    """Without white space: kubectl keeps a copy in an annotation, and annotations are limited to 256 KiB."""
    shown = json.loads(_DASHBOARD.read_text(encoding="utf-8"))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "treadwheel-dashboard", "labels": {**LABELS, "grafana_dashboard": "1"}},
        "data": {_DASHBOARD.name: json.dumps(shown, separators=(",", ":"))},
    }


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
