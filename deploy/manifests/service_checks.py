"""The rule for a RayService beside those for its cluster. Ray Serve itself tells what is wrong with an application."""

from collections.abc import Iterator
from typing import Any

import yaml

from deploy.config.yaml_text import NO_VALUE, StrictLoader
from deploy.manifests.pods import SERVE_PORT
from deploy.manifests.reading import Service
from deploy.manifests.site import looks_secret


def problems(service: Service) -> Iterator[str]:
    try:
        config: Any = yaml.load(service.serve_config_v2, Loader=StrictLoader)
        num_applications = len(config["applications"])
        port = config.get("http_options", {}).get("port", SERVE_PORT)
    except (yaml.YAMLError, TypeError, *NO_VALUE) as error:
        told = " ".join(str(error).split())
        yield f"serveConfigV2 has no list of applications: {type(error).__name__}: {told}"
        return
    if looks_secret("", config):
        yield "serveConfigV2 has a secret in plain sight; name a Secret by secretKeyRef in env of the pods"
    if not num_applications:
        yield "serveConfigV2 has no applications; name what is served"
    for where, part in service.ray_cluster_config.parts():
        ports = {(each.name, each.container_port) for each in part.template.spec.containers[0].ports}
        if ("serve", port) not in ports:
            yield f"{where}: no port serve with the number {port}, by which the service finds the pod; name it"
