"""NetworkPolicies by hand, which any KubeRay takes: nothing reaches a run's pods, and they reach nothing, but what is named here.

Ray's metrics ports ask for no token, so they are open to Prometheus alone. Neither does a served model's, which is open to its namespace.
"""

from deploy.manifests.pods import LABELS, METRICS_PORTS, PORTS, SERVE_PORT, Manifest


def policies() -> list[Manifest]:
    ours = {"podSelector": {"matchLabels": LABELS}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    return [
        _policy("deny", policyTypes=["Ingress", "Egress"]),
        _policy("among-themselves", ingress=[{"from": [ours]}], egress=[{"to": [ours]}]),
        _policy("operator", ingress=[{"from": [operator], "ports": _ports(PORTS["dashboard"], SERVE_PORT)}]),
        _policy("served", ingress=[{"from": [{"podSelector": {}}], "ports": _ports(SERVE_PORT)}]),
        _policy("metrics", ingress=[{"from": [prometheus], "ports": _ports(*(PORTS[each] for each in METRICS_PORTS))}]),
        _policy("names", egress=[{"ports": [{"protocol": kind, "port": 53} for kind in ("UDP", "TCP")]}]),
        # The model hub, object stores, and the API server, which the head's autoscaler asks for pods (behind its service: 6443).
        _policy("outside", egress=[{"ports": _ports(443, 6443)}]),
    ]


def _policy(name: str, **rules: object) -> Manifest:
    kinds = [kind for kind in ("Ingress", "Egress") if kind.lower() in rules]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"treadwheel-{name}", "labels": dict(LABELS)},
        "spec": {"podSelector": {"matchLabels": LABELS}, "policyTypes": kinds, **rules},
    }


def _ports(*numbers: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
