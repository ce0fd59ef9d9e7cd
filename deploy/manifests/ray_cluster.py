"""A RayCluster: a head, and groups of workers that Ray's autoscaler creates and deletes. All pods require the token."""

from deploy.manifests import pods
from deploy.manifests.pods import Manifest
from deploy.manifests.site import Nodes, Site
from deploy.manifests.sizes import Pods, Sizes

LARGEST_NAME = 53
_MARKET = "ray.io/market-type"
"""Ray's label with the kind of a node: spot or on-demand."""
_GOES, _GOES_VALUE = "treadwheel/pods", "rollout"
COMES_AND_GOES = f"{_GOES}={_GOES_VALUE}"
"""`elastic.spot`: label of pods only for rollout workers, on spot nodes or on demand. Learner and services avoid all of them: Ray's
autoscaler takes the group that a request fills best, whatever the priorities."""
LABEL_IN_WORDS = (
    f"Runs here set elastic.spot={COMES_AND_GOES}: it keeps learner and services off pods that come and go."
)
_FIRST, _SECOND, _LAST = 20, 10, 0
"""Priorities of groups that fit equally well: the base before rollout workers, spot nodes before others."""
_AUTOSCALER_ENV = {
    # A missing node is given up after 15 minutes, not 60: another group may have one.
    "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S": "900",
    # Requested nodes that are no longer wanted are given back. By default Ray waits for them.
    "RAY_AUTOSCALER_PENDING_NODE_IDLE_TIMEOUT_S": "300",
}
_SERVING_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer compiles its sampler when an engine starts, and the image has no nvcc (vllm#49497).
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def spec(site: Site, sizes: Sizes, *, image: str, config_map: str | None, stop_wait_s: int) -> Manifest:
    """The cluster's spec, for a RayCluster or a RayJob."""
    on_head = sizes.base if sizes.base_is_on_head else None
    head = pods.head(site, on_head, image=image, config_map=config_map, stop_wait_s=stop_wait_s)
    groups = _groups(site, sizes, image=image, config_map=config_map, stop_wait_s=stop_wait_s)
    return _spec(site, head, on_head, groups=groups)


def for_service(site: Site, server: Pods, *, image: str) -> Manifest:
    """The cluster's spec for a RayService: servers on demand, at least one at any time."""
    template = pods.worker(site, server, site.on_demand, image=image, config_map=None)
    group = _group(site, "server", server, template, labels={_MARKET: "on-demand"}, priority=_FIRST, fewest=1)
    head = pods.head(site, None, image=image, config_map=None)
    for container in (head["spec"]["containers"][0], template["spec"]["containers"][0]):
        container["ports"].append({"name": "serve", "containerPort": pods.SERVE_PORT})
        container["env"] += [
            {"name": name, "value": value}
            for name, value in _SERVING_ENV.items()
            if name not in site.env.keys() | site.secrets.keys()
        ]
    return _spec(site, head, None, groups=[group])


def _spec(site: Site, head: Manifest, on_head: Pods | None, *, groups: list[Manifest]) -> Manifest:
    return {
        "rayVersion": site.ray_version,
        "authOptions": {"mode": "token"} | ({"secretName": site.token_secret} if site.token_secret else {}),
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": site.idle_timeout_s,
            "resources": {kind: {"cpu": "500m", "memory": "1Gi"} for kind in ("requests", "limits")},
            "securityContext": pods.CONTAINER_SECURITY,
            "volumeMounts": [
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "home", "mountPath": pods.HOME},
                {"name": pods.API_KEY_VOLUME, "mountPath": pods.API_KEY, "readOnly": True},
            ],
            "env": [
                {"name": "HOME", "value": pods.HOME},
                *({"name": name, "value": value} for name, value in _AUTOSCALER_ENV.items()),
            ],
        },
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": str(on_head.cpus if on_head else 0),
                "dashboard-host": "0.0.0.0",
                **_gpus(site, on_head),
            },
            "labels": {_MARKET: "on-demand"},
            "template": head,
        },
        "workerGroupSpecs": groups,
    }


def metadata(site: Site, name: str) -> Manifest:
    where = {"namespace": site.namespace} if site.namespace else {}
    return {"name": name, **where, "labels": {**pods.LABELS, "app.kubernetes.io/instance": name}}


def _groups(site: Site, sizes: Sizes, *, image: str, config_map: str | None, stop_wait_s: int) -> list[Manifest]:
    """Groups of workers. All begin with 0 pods: the run's actors ask for them."""

    def group(name: str, shape: Pods, nodes: Nodes, labels: Manifest, priority: int) -> Manifest:
        saves_in_s = stop_wait_s if shape is not sizes.rollout else None
        template = pods.worker(site, shape, nodes, image=image, config_map=config_map, saves_in_s=saves_in_s)
        return _group(site, name, shape, template, labels=labels, priority=priority, fewest=0)

    on_demand = {_MARKET: "on-demand"}
    goes = {_GOES: _GOES_VALUE}
    groups = [] if sizes.base_is_on_head else [group("learner", sizes.base, site.on_demand, on_demand, _FIRST)]
    if sizes.without_gpus:
        groups.append(group("without-gpus", sizes.without_gpus, site.on_demand, on_demand, _FIRST))
    if site.spot is None:
        return [*groups, group("rollout", sizes.rollout, site.on_demand, on_demand | goes, _LAST)]
    groups.append(group("rollout-spot", sizes.rollout, site.spot, {_MARKET: "spot"} | goes, _SECOND))
    if site.overflow:
        groups.append(group("rollout-on-demand", sizes.rollout, site.on_demand, on_demand | goes, _LAST))
    return groups


def _group(
    site: Site, name: str, shape: Pods, template: Manifest, *, labels: Manifest, priority: int, fewest: int
) -> Manifest:
    return {
        "groupName": name,
        "replicas": fewest,
        "minReplicas": fewest,
        "maxReplicas": shape.most,
        "priority": priority,
        "labels": labels,
        "rayStartParams": _gpus(site, shape),
        "template": template,
    }


def _gpus(site: Site, shape: Pods | None) -> Manifest:
    """Ray's autoscaler recognises GPUs by a resource name that ends with "gpu". For others, such as nvidia.com/mig-3g.40gb, it gets the
    number."""
    if shape is None or not shape.gpus or site.gpu_resource.endswith("gpu"):
        return {}
    return {"num-gpus": str(shape.gpus)}
