"""The site file: facts about a Kubernetes cluster, such as image, volume, secrets and kinds of nodes. The defaults work anywhere."""

import re
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import hidden
from cluster.contracts.settings import Mark, Section
from deploy.config.yaml_text import read_yaml

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Variable: the part of a pod's grace period in which Ray drains it; in the rest its processes end."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
OLDEST, PRIORITIES = (2, 53), (2, 56)
"""The oldest Ray that treadwheel supports, which can require a token, and the oldest whose autoscaler knows priorities of groups. KubeRay
refuses settings that an older Ray lacks."""
_OWN = {DRAIN, STOP_WAIT, "HOME"}
"""Variables that only the manifest sets."""


def _only(pattern: str, *, meaning: str) -> AfterValidator:
    def validated(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {meaning}")
        return text

    return AfterValidator(validated)


_LABEL = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
Variable = Annotated[
    str, _only("[A-Za-z_][A-Za-z0-9_]*", meaning="a variable's name: letters, digits and _, not a digit first")
]
LabelKey = Annotated[
    str,
    _only(
        f"({_SUBDOMAIN}/)?{_LABEL}",
        meaning="a label's key, such as cloud.example.com/pool: letters, digits, '-', '_', '.'",
    ),
]
LabelValue = Annotated[
    str,
    _only(
        f"({_LABEL})?",
        meaning="a label's value: at most 63 letters, digits, '-', '_', '.', a letter or digit at both ends",
    ),
]
SecretName = Annotated[str, _only(_SUBDOMAIN, meaning="a Secret's name: lower-case letters, digits, '-', '.'")]
ObjectName = Annotated[str, _only(_SUBDOMAIN, meaning="a name for Kubernetes: lower-case letters, digits, '-', '.'")]
Namespace = Annotated[
    str,
    _only(
        "(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?",
        meaning="a namespace's name: at most 63 lower-case letters, digits and dashes, no dash at an end",
    ),
]
ResourceName = Annotated[
    str, _only(f"{_SUBDOMAIN}/{_LABEL}", meaning="a resource of a device plug-in, such as nvidia.com/gpu: DOMAIN/NAME")
]
KeyName = Annotated[str, _only("[-._A-Za-z0-9]{1,253}", meaning="a key of a Secret: letters, digits, '-', '_', '.'")]


class Toleration(Section, mark=Mark.RESOURCES):
    key: LabelKey
    operator: Literal["Exists", "Equal"] = "Exists"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """None tolerates all effects."""

    @model_validator(mode="after")
    def _require_equal_for_a_value(self) -> "Toleration":
        if self.value is not None and self.operator == "Exists":
            raise ValueError(f"value={self.value!r} counts only with operator: Equal; write that, or leave value out")
        return self


class Nodes(Section, mark=Mark.RESOURCES):
    """Nodes for pods."""

    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    tolerations: tuple[Toleration, ...] = ()


class SecretKey(Section, mark=Mark.RESOURCES):
    secret: SecretName
    """Secret in the run's namespace."""
    key: KeyName


class Site(Section, mark=Mark.RESOURCES):
    name: str | None = None
    """Name of the job. None: the run file's name."""
    namespace: Namespace | None = None
    """None: kubectl's."""
    image: str | None = None
    """Built from deploy/images/Dockerfile. None: treadwheel:VERSION-cpu, or -gpu if the run asks for GPUs."""
    ray_version: str = Field(default_factory=lambda: version("ray"))
    """Version of Ray in the image."""
    run_claim: ObjectName | None = None
    """PersistentVolumeClaim (ReadWriteMany) that all pods mount at /treadwheel. None: that folder lasts only as long as its pod, and
    learner and services stay on the head pod, which has the run directory."""
    token_secret: SecretName | None = None
    """Secret with the cluster's token under the key auth_token. None: KubeRay makes one."""
    env: dict[Variable, str] = Field(default={})
    """Variables of all pods. They may replace the manifest's HF_HOME. Secrets belong in `secrets`."""
    secrets: dict[Variable, SecretKey] = Field(default={})
    """Variables of all pods, from Secrets: `HF_TOKEN: {secret: hub, key: token}`."""
    on_demand: Nodes = Nodes()
    """Nodes of head, learner and services, and of rollout workers if `spot` is not set."""
    spot: Nodes | None = None
    """Nodes of rollout workers that the cloud may take away at any time. None: no spot nodes."""
    overflow: bool = True
    """Rollout workers go to `on_demand` nodes when there is no spot node."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    largest_pod_gpus: PositiveInt = 8
    largest_pod_cpus: PositiveInt = 64
    """Largest size of a pod with more than one actor."""
    gib_per_cpu: PositiveFloat = 4.0
    gib_per_gpu: PositiveFloat = 64.0
    """Memory of a pod, by its CPUs and GPUs. The head has 8 GiB more."""
    scratch_gib: PositiveInt = 20
    """Disk of a pod, beyond which Kubernetes evicts it: /tmp, and without `run_claim` all of /treadwheel. If `run_dir` is an object store
    and the model a local folder, pods of the learner also have room for a checkpoint. For a model of the hub, add that here."""
    grace_s: Annotated[int, Field(ge=25)] = 120
    """Seconds from a pod's notice to its end. Spot nodes of some clouds have less (GKE: 15; set 25). Workers hand over their groups until
    10 s before the end. Pods that are not on spot nodes have at least 120, to save."""
    idle_timeout_s: PositiveInt = 300
    """A pod without actors is given back after so many seconds."""
    retries: NonNegativeInt = 3
    """New clusters after a failed attempt, each from the last checkpoint. A lost head is not a failed attempt (docs/kubernetes.md)."""
    keep_s: NonNegativeInt = 3600
    """Seconds that the head stays after the run, for its logs."""
    deadline_s: PositiveInt = 604800
    """Seconds after which KubeRay marks an attempt as failed and makes no other. This does not stop the run: it goes on until its cluster
    is deleted, `keep_s` later."""
    queue: ObjectName | None = None
    """Kueue's LocalQueue that admits the job. None: no queue."""

    @field_validator("name")
    @classmethod
    def _require_a_name_for_pods(cls, name: str | None) -> str | None:
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a name for a job and its pods: lower-case letters, digits and dashes, a letter first and no dash last"
            )
        return name

    @field_validator("image")
    @classmethod
    def _require_a_tag(cls, image: str | None) -> str | None:
        if image is not None and may_change(image):
            raise ValueError(f"{image!r} may be another image tomorrow; use a tag other than latest, or a digest")
        return image

    @field_validator("ray_version")
    @classmethod
    def _require_a_ray_with_priorities(cls, text: str) -> str:
        if not is_ray(text, since=PRIORITIES):
            raise ValueError(f"{text!r} does not know priorities of groups; build the image with Ray 2.56 or later")
        return text

    @field_validator("env")
    @classmethod
    def _require_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        secret = next((name for name, value in env.items() if looks_secret(name, value)), None)
        if secret is not None:
            raise ValueError(
                f"{secret} looks like a secret, which every reader of the manifest would see; name a Secret: "
                f"secrets: {{{secret}: {{secret: NAME, key: KEY}}}}"
            )
        if own := sorted(_OWN & env.keys()):
            raise ValueError(f"{own[0]} is set by the manifest, from grace_s or the run; leave it out")
        return env

    @model_validator(mode="after")
    def _require_one_value_of_each(self) -> "Site":
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{both[0]} is in env and in secrets; remove one")
        if own := sorted(_OWN & self.secrets.keys()):
            raise ValueError(f"secrets.{own[0]} is set by the manifest, from grace_s or the run; leave it out")
        return self


def load(path: str | None) -> Site:
    """The site file at `path`; None: the defaults. Raises one ConfigError with all mistakes."""
    if path is None:
        return Site()
    values = read_yaml(path, way_out="name a site file, or leave --site out") or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of settings such as 'image:', got {type(values).__name__}")
    try:
        return Site.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n  ".join(f"{path}: {_explain(detail)}" for detail in error.errors())) from error


def _explain(detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    if detail["type"] == "extra_forbidden":
        return f"{name} is not a setting of a site; there are: {', '.join(Site.model_fields)}"
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}" if name else str(detail["ctx"]["error"])
    return f"{name}={detail['input']!r} is not valid: {detail['msg'].lower()}" if name else detail["msg"].lower()


def is_ray(ray_version: str, *, since: tuple[int, int]) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)\.\d+", ray_version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= since


def looks_secret(name: str, value: Any) -> bool:
    """Whether `value`, or a value inside it, looks like a secret: by itself, or by its name."""
    return hidden(value, name) != value


def may_change(image: str) -> bool:
    """Whether the image has no digest, and no tag or the tag latest."""
    last = image.rpartition("/")[2]
    return "@sha256:" not in image and (":" not in last or last.endswith(":latest"))
