"""What a Kubernetes cluster has that a run file does not say: image, volume, secrets, kinds of nodes. The defaults work anywhere."""

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
"""Variable: how long Ray takes of a pod's grace to drain it; the rest is for its processes to end."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
OLDEST, PRIORITIES = (2, 53), (2, 56)
"""The first Rays that treadwheel runs on, which can ask for a token, and whose autoscaler knows priorities of groups. KubeRay refuses what
an older one lacks."""
_OWN = {DRAIN, STOP_WAIT, "HOME"}
"""Variables that the manifest sets itself."""


def _only(pattern: str, *, meaning: str) -> AfterValidator:
    def validated(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {meaning}")
        return text

    return AfterValidator(validated)


_LABEL = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
Variable = Annotated[
    str, _only("[A-Za-z_][A-Za-z0-9_]*", meaning="a variable's name: letters, digits and _, no digit first")
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
            raise ValueError(f"value={self.value!r} is compared by operator: Equal alone; write it, or leave value out")
        return self


class Nodes(Section, mark=Mark.RESOURCES):
    """Where pods may go."""

    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    tolerations: tuple[Toleration, ...] = ()


class SecretKey(Section, mark=Mark.RESOURCES):
    secret: SecretName
    """Name of a Secret in the run's namespace."""
    key: KeyName


class Site(Section, mark=Mark.RESOURCES):
    name: str | None = None
    """Of the job; None takes the run file's."""
    namespace: Namespace | None = None
    """None leaves it to kubectl."""
    image: str | None = None
    """Made from deploy/images/Dockerfile; None is treadwheel:VERSION-cpu, or -gpu where the run asks for GPUs."""
    ray_version: str = Field(default_factory=lambda: version("ray"))
    """Of the Ray in the image."""
    run_claim: ObjectName | None = None
    """PersistentVolumeClaim (ReadWriteMany) that all pods mount at /treadwheel. Without it that folder lasts as long as its pod, and
    learner and services stay on the head pod, where the run directory then is."""
    token_secret: SecretName | None = None
    """Secret with the cluster's token under the key auth_token; None lets KubeRay make one."""
    env: dict[Variable, str] = Field(default={})
    """Variables of all pods, in place of the manifest's own HF_HOME too. Secrets go below `secrets`."""
    secrets: dict[Variable, SecretKey] = Field(default={})
    """Variables of all pods, from Secrets: `HF_TOKEN: {secret: hub, key: token}`."""
    on_demand: Nodes = Nodes()
    """For head, learner and services, and for rollout workers where `spot` is not set."""
    spot: Nodes | None = None
    """For rollout workers: nodes that may be taken away at any time. None has none."""
    overflow: bool = True
    """Rollout workers go on demand when no spot node is to be had."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    largest_pod_gpus: PositiveInt = 8
    largest_pod_cpus: PositiveInt = 64
    """Pods that hold more than one actor are no larger than this."""
    gib_per_cpu: PositiveFloat = 4.0
    gib_per_gpu: PositiveFloat = 64.0
    """Memory of a pod, by what it holds; the head has 8 GiB besides."""
    scratch_gib: PositiveInt = 20
    """Disk of a pod, beyond which it is evicted: /tmp, and all of /treadwheel without `run_claim`. Where `run_dir` is an object store and
    the model's folder is at hand, pods of the learner have room for a checkpoint besides; for a model of the hub, add it here."""
    grace_s: Annotated[int, Field(ge=25)] = 120
    """From a pod's notice to its end; spot nodes of some clouds leave 25. Workers hand over what they have until 10 s before. Pods that
    are not on spot nodes have 120 at least, to save."""
    idle_timeout_s: PositiveInt = 300
    """A pod that holds no actor for so long is given back."""
    retries: NonNegativeInt = 3
    """New clusters after a failed attempt; each goes on from the last checkpoint. A lost head is no failed attempt (docs/kubernetes.md)."""
    keep_s: NonNegativeInt = 3600
    """The head stays for so long after the run, for its logs."""
    deadline_s: PositiveInt = 604800
    """KubeRay calls an attempt that takes longer failed, and makes no other. That stops nothing: the run goes on until its cluster is
    deleted, `keep_s` later."""
    queue: ObjectName | None = None
    """Kueue's LocalQueue that admits the job; None does not queue."""

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
            raise ValueError(f"{image!r} may be another image tomorrow; give it a tag other than latest, or a digest")
        return image

    @field_validator("ray_version")
    @classmethod
    def _require_a_ray_with_priorities(cls, text: str) -> str:
        if not is_ray(text, since=PRIORITIES):
            raise ValueError(f"{text!r} has no priorities of groups; build the image with Ray 2.56 or later")
        return text

    @field_validator("env")
    @classmethod
    def _require_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        secret = next((name for name, value in env.items() if looks_secret(name, value)), None)
        if secret is not None:
            raise ValueError(
                f"{secret} looks like a secret, which everyone who reads the manifest would see; name a Secret: "
                f"secrets: {{{secret}: {{secret: NAME, key: KEY}}}}"
            )
        if own := sorted(_OWN & env.keys()):
            raise ValueError(f"{own[0]} is what the manifest sets itself, by grace_s or the run; leave it out")
        return env

    @model_validator(mode="after")
    def _require_one_value_of_each(self) -> "Site":
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{both[0]} is in env and in secrets; leave one out")
        if own := sorted(_OWN & self.secrets.keys()):
            raise ValueError(f"secrets.{own[0]} is what the manifest sets itself, by grace_s or the run; leave it out")
        return self


def load(path: str | None) -> Site:
    """The defaults without a path. Raises one ConfigError with all mistakes."""
    if path is None:
        return Site()
    values = read_yaml(path, way_out="name a site file, or leave --site out") or {}
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
    """Of a value, with all below it, of this name."""
    return hidden(value, name) != value


def may_change(image: str) -> bool:
    """Without a digest, and without a tag that says which."""
    last = image.rpartition("/")[2]
    return "@sha256:" not in image and (":" not in last or last.endswith(":latest"))
