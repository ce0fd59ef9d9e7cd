"""The parts of KubeRay's resources that our rules read, typed: what a hand has edited into nonsense is told by its path."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from cluster.contracts.errors import ConfigError


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, strict=True)


class _KubeRays(_Part):
    """All of whose fields are known, so that a typo is told. kubectl's dry run tells those inside pods, which are Kubernetes' own."""

    others: ClassVar[str] = ""
    """Fields of KubeRay 1.7 that no rule reads."""

    @model_validator(mode="before")
    @classmethod
    def _require_known_fields(cls, values: Any) -> Any:
        if isinstance(values, dict) and (unknown := [str(name) for name in values if name not in cls.known()]):
            raise ValueError(f"KubeRay 1.7 has no field {', '.join(unknown)} here; correct the name, or leave it out")
        return values

    @classmethod
    def known(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()} | {*cls.others.split()}


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
    """Of a resource: `4`, `500m`, `8Gi`. Raises ValueError or ArithmeticError for what is none."""
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


class HeadService(_Part):
    metadata: dict[str, Any] = Field(default={})


class Head(_KubeRays):
    ray_start_params: dict[str, str] = Field(default={})
    resources: dict[str, str] = Field(default={})
    labels: dict[str, str] = Field(default={})
    template: Template


class HeadGroup(Head):
    others = "enableIngress ingressOptions serviceType"
    head_service: HeadService = HeadService()


class Group(Head):
    others = "idleTimeoutSeconds numOfHosts scaleStrategy suspend"
    group_name: str
    priority: int | None = None
    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None


class AutoscalerOptions(_KubeRays):
    others = "args command env envFrom idleTimeoutSeconds image imagePullPolicy upscalingMode volumeMounts"
    version: str | None = None
    resources: Resources = Resources()
    security_context: dict[str, Any] = Field(default={})


class AuthOptions(_KubeRays):
    others = "secretName"
    mode: str = "disabled"
    enable_k8s_token_auth: bool = Field(default=False, alias="enableK8sTokenAuth")


class Cluster(_KubeRays):
    others = (
        "gcsFaultToleranceOptions headServiceAnnotations historyServerOptions managedBy "
        "networkPolicy suspend tlsOptions upgradeStrategy"
    )
    ray_version: str = ""
    auth_options: AuthOptions = AuthOptions()
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: AutoscalerOptions = AutoscalerOptions()
    head_group_spec: HeadGroup
    worker_group_specs: list[Group] = Field(default=[])

    def parts(self) -> Iterator[tuple[str, Head]]:
        """Head and groups, each after its path."""
        yield "headGroupSpec", self.head_group_spec
        yield from ((f"workerGroupSpecs {group.group_name}", group) for group in self.worker_group_specs)


class Condition(_KubeRays):
    job_status: str | None = None
    job_deployment_status: str | None = None
    ttl_seconds: int = 0


class DeletionRule(_KubeRays):
    policy: str
    condition: Condition


class DeletionStrategy(_KubeRays):
    on_success: dict[str, Any] | None = None
    on_failure: dict[str, Any] | None = None
    deletion_rules: list[DeletionRule] = Field(default=[])


class Job(_KubeRays):
    others = (
        "clusterSelector entrypointNumCpus entrypointNumGpus entrypointResources jobId "
        "managedBy metadata runtimeEnvYAML submitterConfig submitterPodTemplate suspend"
    )
    entrypoint: str = ""
    submission_mode: str = "K8sJobMode"
    shutdown_after_job_finishes: bool = False
    backoff_limit: int = 0
    active_deadline_seconds: int | None = None
    pre_running_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int = 0
    deletion_strategy: DeletionStrategy | None = None
    ray_cluster_spec: Cluster


class UpgradeStrategy(_KubeRays):
    others = "clusterUpgradeOptions"
    type: str | None = None


class Service(_KubeRays):
    others = (
        "deploymentUnhealthySecondThreshold excludeHeadPodFromServeSvc managedBy "
        "serveService serviceUnhealthySecondThreshold suspend"
    )
    serve_config_v2: str = ""
    upgrade_strategy: UpgradeStrategy = UpgradeStrategy()
    ray_cluster_deletion_delay_seconds: int = 0
    ray_cluster_config: Cluster


class Metadata(_Part):
    name: str


class _JobFile(_Part):
    metadata: Metadata
    spec: Job


class _ClusterFile(_Part):
    metadata: Metadata
    spec: Cluster


class _ServiceFile(_Part):
    metadata: Metadata
    spec: Service


_KINDS: dict[str, type[_JobFile] | type[_ClusterFile] | type[_ServiceFile]] = {
    "RayJob": _JobFile,
    "RayCluster": _ClusterFile,
    "RayService": _ServiceFile,
}


class Resource(_Part):
    """A manifest of KubeRay."""

    kind: str
    name: str
    cluster: Cluster
    job: Job | None = None
    service: Service | None = None


def resources(documents: Sequence[Any], *, source: str) -> list[Resource]:
    """Those of KubeRay among the documents. Raises ConfigError for none, and for one that cannot be read."""
    found: list[Resource] = []
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            continue
        try:
            read = _KINDS[kind].model_validate(document)
        except ValidationError as error:
            problems = [f"{_path(each['loc'])}: {_message(each)}" for each in error.errors()]
            raise ConfigError("\n  ".join([f"{source}: {kind} cannot be read", *problems])) from error
        spec = read.spec
        found.append(
            Resource(
                kind=kind,
                name=read.metadata.name,
                cluster=_cluster_of(spec),
                job=spec if isinstance(spec, Job) else None,
                service=spec if isinstance(spec, Service) else None,
            )
        )
    if not found:
        raise ConfigError(
            f"{source} has no RayJob, RayCluster or RayService; name a file that `treadwheel kubernetes` made"
        )
    return found


def _cluster_of(spec: Job | Cluster | Service) -> Cluster:
    if isinstance(spec, Job):
        return spec.ray_cluster_spec
    return spec if isinstance(spec, Cluster) else spec.ray_cluster_config


def _message(detail: ErrorDetails) -> str:
    ours = "Value error, "
    return detail["msg"].removeprefix(ours) if detail["msg"].startswith(ours) else detail["msg"].lower()


def _path(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
