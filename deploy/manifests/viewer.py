"""The viewer as a pod beside the runs: it mounts their volume read only, and asks every reader for a token from a Secret."""

from deploy.manifests.pods import CONTAINER_SECURITY, HOME, POD_SECURITY, RUN, Manifest

NAME = "treadwheel-viewer"
_LABELS = {"app.kubernetes.io/name": NAME}
"""Not a run's: what may talk to a run's pods may not be what people open."""
_PORT = 8000
_TOKEN = "VIEWER_TOKEN"


def viewer(*, image: str, claim: str, hosts: list[str]) -> list[Manifest]:
    """Of the runs on the volume `claim`. `hosts` are the names by which browsers reach it."""
    meta = {"name": NAME, "labels": dict(_LABELS)}
    deployment: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": dict(_LABELS)},
            "template": {"metadata": {"labels": dict(_LABELS)}, "spec": _pod(image, claim, hosts)},
        },
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"selector": dict(_LABELS), "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }
    return [deployment, service]


def _pod(image: str, claim: str, hosts: list[str]) -> Manifest:
    amounts = {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "1Gi"}
    trusted = [argument for host in hosts for argument in ("--trusted-host", host)]
    command = ["treadwheel", "view", RUN, "--host", "0.0.0.0", "--port", str(_PORT), "--token-env", _TOKEN, *trusted]
    container: Manifest = {
        "name": "viewer",
        "image": image,
        "command": command,
        "env": [
            {"name": _TOKEN, "valueFrom": {"secretKeyRef": {"name": NAME, "key": "token"}}},
            {"name": "HOME", "value": HOME},
        ],
        "ports": [{"name": "http", "containerPort": _PORT}],
        # A request would have to bring the token.
        "readinessProbe": {"tcpSocket": {"port": "http"}},
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "run", "mountPath": RUN, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "home", "mountPath": HOME},
        ],
    }
    return {
        "securityContext": POD_SECURITY,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "home", "emptyDir": {}},
        ],
    }
