"""The volume that all pods of a run mount at /treadwheel: run directory, hub cache."""

from deploy.manifests.pods import LABELS, Manifest


def claim(name: str, *, size: str) -> Manifest:
    """On a storage class that many nodes mount at once and that carries flock to them (NFSv4 does): a run has one driver by it."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": dict(LABELS)},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
    }
