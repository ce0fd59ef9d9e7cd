"""Types for the parts of KubeRay's resources that our rules read. Errors name the path of an invalid part."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from cluster.contracts.errors import ConfigError


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, strict=True)


class Variable(_Part):
    name: str
    value: str | None = None


class Port(_Part):
    name: str | None = None
    container_port: int
    host_port: int = 0


class Mount(_Part):
    name: str
    mount_path: str
    read_only: bool = False


class Resources(_Part):
    requests: dict[str, str | int | float] = Field(default={})
    limits: dict[str, str | int | float] = Field(default={})


def amount(written: str | int | float) -> float:
    """Number of a resource's amount: `4`, `500m`, `8Gi`. Raises ValueError or ArithmeticError for any other text."""
    from ray.autoscaler._private.kuberay.utils import parse_quantity

    found = float(parse_quantity(written))
    if not 0 <= found < math.inf:
        raise ValueError(written)
    return found


class Container(_Part):
    name: str = ""
    image: str = ""
    env: list[Variable] = Field(default=[])
    ports: list[Port] = Field(default=[])
    resources: Resources = Resources()
    security_context: dict[str, Any] = Field(default={})
    lifecycle: dict[str, Any] = Field(default={})
    startup_probe: dict[str, Any] = Field(default={})
    liveness_probe: dict[str, Any] = Field(default={})
    readiness_probe: dict[str, Any] = Field(default={})
    volume_mounts: list[Mount] = Field(default=[])

    def variable(self, name: str) -> str | None:
        return next((each.value for each in self.env if each.name == name), None)


class Volume(_Part, extra="allow"):
    name: str
    empty_dir: dict[str, Any] | None = None
    config_map: dict[str, Any] | None = None


class PodSpec(_Part):
    containers: list[Container] = Field(min_length=1)
    init_containers: list[Container] = Field(default=[])
    volumes: list[Volume] = Field(default=[])
    restart_policy: str | None = None
    termination_grace_period_seconds: int = 30
    security_context: dict[str, Any] = Field(default={})
    automount_service_account_token: bool = True
    host_network: bool = False
    host_pid: bool = Field(default=False, alias="hostPID")
    host_ipc: bool = Field(default=False, alias="hostIPC")


class TemplateMetadata(_Part):
    annotations: dict[str, str] = Field(default={})


class Template(_Part):
    metadata: TemplateMetadata = TemplateMetadata()
    spec: PodSpec


class Head(_Part):
    ray_start_params: dict[str, str] = Field(default={})
    labels: dict[str, str] = Field(default={})
    template: Template


class Group(Head):
    group_name: str
    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None


class AutoscalerOptions(_Part):
    version: str | None = None
    resources: Resources = Resources()
    security_context: dict[str, Any] = Field(default={})
    env: list[Variable] = Field(default=[])
    volume_mounts: list[Mount] = Field(default=[])


class AuthOptions(_Part):
    mode: str = "disabled"


class Cluster(_Part):
    ray_version: str = ""
    auth_options: AuthOptions = AuthOptions()
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: AutoscalerOptions = AutoscalerOptions()
    head_group_spec: Head
    worker_group_specs: list[Group] = Field(default=[])

    def parts(self) -> Iterator[tuple[str, Head]]:
        """Head and groups, each with its path."""
        yield "headGroupSpec", self.head_group_spec
        yield from ((f"workerGroupSpecs {group.group_name}", group) for group in self.worker_group_specs)


class Job(_Part):
    entrypoint: str = ""
    runtime_env: str = Field(default="", alias="runtimeEnvYAML")
    submission_mode: str = "K8sJobMode"
    shutdown_after_job_finishes: bool = False
    deletion_strategy: dict[str, Any] | None = None
    cluster: Cluster = Field(alias="rayClusterSpec")


class Service(_Part):
    serve_config_v2: str = ""
    cluster: Cluster = Field(alias="rayClusterConfig")


class Metadata(_Part):
    name: str


Spec = TypeVar("Spec", Job, Cluster, Service)


class Resource(_Part, Generic[Spec]):
    """A manifest of KubeRay."""

    kind: str
    metadata: Metadata
    spec: Spec

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def cluster(self) -> Cluster:
        return self.spec if isinstance(self.spec, Cluster) else self.spec.cluster


AnyResource = Resource[Job] | Resource[Cluster] | Resource[Service]
_KINDS: dict[str, type[AnyResource]] = {
    "RayJob": Resource[Job],
    "RayCluster": Resource[Cluster],
    "RayService": Resource[Service],
}


def resources(documents: Sequence[Any], *, source: str) -> list[AnyResource]:
    """KubeRay's resources among the documents. Raises ConfigError if there are none, and for one that cannot be read."""
    found: list[AnyResource] = []
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            continue
        try:
            found.append(_KINDS[kind].model_validate(document))
        except ValidationError as error:
            problems = [f"{_path(each['loc'])}: {each['msg'].lower()}" for each in error.errors()]
            raise ConfigError("\n  ".join([f"{source}: {kind} cannot be read", *problems])) from error
    if not found:
        raise ConfigError(
            f"{source} has no RayJob, RayCluster or RayService; name a file that `treadwheel kubernetes` made"
        )
    return found


def _path(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
