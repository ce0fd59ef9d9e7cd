"""Pods of a Ray cluster that keep the "restricted" pod standard: no root, no privileges, a read-only root file system."""

import math
from typing import Any

from deploy.manifests.site import DRAIN, STOP_WAIT, Nodes, Site
from deploy.manifests.sizes import Pods

Manifest = dict[str, Any]
USER = 1000
"""User of the image (deploy/images/Dockerfile)."""
LABELS = {"app.kubernetes.io/part-of": "treadwheel"}
"""Labels of all resources of runs. Not app.kubernetes.io/name, by which KubeRay selects the head of a RayService."""
_STAYS = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Annotations of pods outside spot nodes: node autoscalers do not move them to save nodes. A moved learner ends an attempt of the job."""
RUN, CONFIG, HOME = "/treadwheel", "/etc/treadwheel", "/home/treadwheel"
"""Never /run: Kubernetes puts a pod's key to the API server into /var/run, which is a link to /run in Debian images."""
API_KEY = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Folder of the autoscaler's key to the API server. Kubernetes' own mount would give the key to every container of the head, which may run
a model's programs; with the key they could change pods."""
API_KEY_VOLUME = "api-key"
_HEAD_GIB = 8
DRAIN_MARGIN_S = 10
"""Part of a pod's grace period after the drain, in which its processes end."""
_LEAST_GRACE_ON_DEMAND_S = 120
PORTS = {"gcs-server": 6379, "dashboard": 8265, "metrics": 8080, "as-metrics": 44217, "dash-metrics": 44227}
"""Ports of the head. A worker has only the metrics port."""
SERVE_PORT = 8000
"""Ray Serve's port, on all pods of a RayService. It requires no token."""
METRICS_PORTS = ("metrics", "as-metrics", "dash-metrics")
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    # Otherwise, on a volume whose driver supports fsGroup, each pod would wait while the owner of all the run's files is set again.
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def head(
    site: Site, pods: Pods | None, *, image: str, config_map: str | None, stop_wait_s: int | None = None
) -> Manifest:
    """`pods`: actors on the head, besides Ray and the driver. `stop_wait_s`: time for a stopped job to save; None without jobs."""
    cpus, gpus = (pods.cpus, pods.gpus) if pods else (0, 0)
    memory = _HEAD_GIB + (_gib(site, pods) if pods else 0)
    grace_s = _grace_s(site, site.on_demand, saves_in_s=stop_wait_s)
    container = _container(site, "ray-head", image=image, config_map=config_map, grace_s=grace_s)
    container["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    container["resources"] = _resources(site, cpus=cpus + 2, gpus=gpus, memory_gib=memory, upload_gib=0)
    container["env"] += [{"name": STOP_WAIT, "value": str(stop_wait_s)}] if stop_wait_s is not None else []
    volumes = [*_volumes(site, memory_gib=memory, config_map=config_map), _api_key()]
    return _template(site, container, site.on_demand, gpus=gpus, grace_s=grace_s, volumes=volumes)


def worker(
    site: Site, pods: Pods, nodes: Nodes, *, image: str, config_map: str | None, saves_in_s: int | None = None
) -> Manifest:
    """`saves_in_s`: time that its actors need to save; None: they save nothing."""
    memory = _gib(site, pods)
    grace_s = _grace_s(site, nodes, saves_in_s=saves_in_s)
    container = _container(site, "ray-worker", image=image, config_map=config_map, grace_s=grace_s)
    container["ports"] = [{"name": "metrics", "containerPort": PORTS["metrics"]}]
    container["resources"] = _resources(
        site, cpus=pods.cpus, gpus=pods.gpus, memory_gib=memory, upload_gib=pods.upload_gib
    )
    volumes = _volumes(site, memory_gib=memory, config_map=config_map)
    return _template(site, container, nodes, gpus=pods.gpus, grace_s=grace_s, volumes=volumes)


def _grace_s(site: Site, nodes: Nodes, *, saves_in_s: int | None) -> int:
    """Grace period of a pod. A pod on demand has at least the time to save."""
    if nodes is site.spot:
        return site.grace_s
    return max(site.grace_s, _LEAST_GRACE_ON_DEMAND_S, (saves_in_s or 0) + DRAIN_MARGIN_S)


def _container(site: Site, name: str, *, image: str, config_map: str | None, grace_s: int) -> Manifest:
    # Kubernetes refuses a name that is given twice.
    values = {DRAIN: str(grace_s - DRAIN_MARGIN_S), "HOME": HOME, "HF_HOME": f"{RUN}/hf"} | site.env
    env: list[Manifest] = [
        *({"name": name, "value": value} for name, value in values.items() if name not in site.secrets),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}
            for name, each in site.secrets.items()
        ),
    ]
    mounts: list[Manifest] = [
        {"name": "run", "mountPath": RUN},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "home", "mountPath": HOME},
        {"name": "shared-mem", "mountPath": "/dev/shm"},
    ]
    if config_map:
        mounts.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    return {"name": name, "image": image, "env": env, "securityContext": CONTAINER_SECURITY, "volumeMounts": mounts}


def _volumes(site: Site, *, memory_gib: int, config_map: str | None) -> list[Manifest]:
    # Ray's object store takes 30 % of a pod's memory. It lies on disk if the shared memory is smaller.
    shared: Manifest = {"medium": "Memory", "sizeLimit": f"{math.ceil(memory_gib * 3 / 10)}Gi"}
    volumes: list[Manifest] = [
        {"name": "run"}
        | ({"persistentVolumeClaim": {"claimName": site.run_claim}} if site.run_claim else {"emptyDir": {}}),
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shared-mem", "emptyDir": shared},
    ]
    return [*volumes, {"name": "config", "configMap": {"name": config_map}}] if config_map else volumes


def _api_key() -> Manifest:
    """The volume that Kubernetes would mount into all containers of a pod."""
    namespace: Manifest = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources: list[Manifest] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": API_KEY_VOLUME, "projected": {"sources": sources}}


def _template(
    site: Site, container: Manifest, nodes: Nodes, *, gpus: int, grace_s: int, volumes: list[Manifest]
) -> Manifest:
    tolerations = [each.model_dump(exclude_none=True) for each in nodes.tolerations]
    if gpus:
        tolerations.append({"key": site.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    spec: Manifest = {
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }
    spec |= {"nodeSelector": dict(nodes.node_selector)} if nodes.node_selector else {}
    spec |= {"tolerations": tolerations} if tolerations else {}
    metadata: Manifest = {"labels": dict(LABELS)}
    if nodes is not site.spot:
        metadata |= {"annotations": dict(_STAYS)}
    return {"metadata": metadata, "spec": spec}


def _gib(site: Site, pods: Pods) -> int:
    return max(1, round(pods.cpus * site.gib_per_cpu + pods.gpus * site.gib_per_gpu))


def _resources(site: Site, *, cpus: int, gpus: int, memory_gib: int, upload_gib: int) -> Manifest:
    """Requests equal limits: Ray counts the limits as the pod's resources."""
    disk_gib = site.scratch_gib + upload_gib
    amounts = {"cpu": str(cpus), "memory": f"{memory_gib}Gi", "ephemeral-storage": f"{disk_gib}Gi"}
    amounts |= {site.gpu_resource: str(gpus)} if gpus else {}
    return {"requests": dict(amounts), "limits": dict(amounts)}
