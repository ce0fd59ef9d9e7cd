"""Rules for a RayService beside those for its cluster."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from deploy.config.yaml_text import NO_VALUE, StrictLoader
from deploy.manifests.pods import SERVE_PORT
from deploy.manifests.reading import Cluster, Service

_UPGRADES = (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade")


def problems(service: Service) -> Iterator[str]:
    cluster = service.ray_cluster_config
    yield from _applications(service.serve_config_v2, cluster)
    if cluster.head_group_spec.head_service.metadata.get("name"):
        yield "headGroupSpec.headService.metadata.name is refused: KubeRay names the services itself; leave it out"
    if service.upgrade_strategy.type not in _UPGRADES:
        yield f"upgradeStrategy.type={service.upgrade_strategy.type!r}: write NewCluster, or None for no second cluster"
    if service.ray_cluster_deletion_delay_seconds < 0:
        yield "rayClusterDeletionDelaySeconds must not be negative"


def _applications(text: str, cluster: Cluster) -> Iterator[str]:
    try:
        config: Any = yaml.load(text, Loader=StrictLoader)
        applications = [{"route_prefix": "/", **each} for each in config["applications"]]
        names = [each[field] for each in applications for field in ("name", "import_path", "route_prefix")]
        port = config.get("http_options", {}).get("port", SERVE_PORT)
    except (yaml.YAMLError, TypeError, *NO_VALUE) as error:
        told = " ".join(str(error).split())
        yield f"serveConfigV2 has no list of applications with name and import_path: {type(error).__name__}: {told}"
        return
    if not all(isinstance(each, str | None) for each in names):
        yield "serveConfigV2: name, import_path and route_prefix of an application are texts; correct the one that is none"
        return
    if not names:
        yield "serveConfigV2 has no applications; name what is served"
    for field in ("name", "route_prefix"):
        counts = Counter(each[field] for each in applications)
        yield from (
            f"serveConfigV2: {field} {value!r} is there {n} times; change one" for value, n in counts.items() if n > 1
        )
    for where, part in cluster.parts():
        ports = {(each.name, each.container_port) for each in part.template.spec.containers[0].ports}
        if ("serve", port) not in ports:
            yield f"{where}: no port serve with the number {port}, by which the service finds the pod; name it"
