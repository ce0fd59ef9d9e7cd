"""Checks of Kubernetes' restricted pod standard, item by item, and of a read-only root file system. Of several allowed values, only one
passes."""

from collections.abc import Iterator
from typing import Any

from deploy.manifests.pods import CONTAINER_SECURITY
from deploy.manifests.reading import Container, Head

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_DEFAULT_PROFILE = {"type": "RuntimeDefault"}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "privileged": (None, False),
    "procMount": (None, "Default"),
    "seccompProfile": (None, _DEFAULT_PROFILE),
    "appArmorProfile": (None, _DEFAULT_PROFILE),
    "windowsOptions": (None,),
    "sysctls": (None, []),
    "runAsNonRoot": (None, True),
}
"""Allowed values in a security context of a pod or a container."""


def problems(part: Head) -> Iterator[str]:
    spec = part.template.spec
    shared = {"hostNetwork": spec.host_network, "hostPID": spec.host_pid, "hostIPC": spec.host_ipc}
    yield from (f"{name}: the pod would share its node's; leave it out" for name, is_set in shared.items() if is_set)
    for volume in spec.volumes:
        if refused := {*volume.model_dump(by_alias=True, exclude_none=True)} - _VOLUMES - {"name"}:
            yield f"volume {volume.name}: {', '.join(sorted(refused))} is not allowed; use an emptyDir or a claim"
    for name, value in part.template.metadata.annotations.items():
        if name.startswith(_APPARMOR) and value != "runtime/default":
            yield f"annotation {name}={value} replaces the runtime's default profile; leave it out"
    context = spec.security_context
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") in (None, 0):
        yield "securityContext must have runAsNonRoot: true and a runAsUser that is not 0"
    if context.get("fsGroup") in (None, 0):
        yield "securityContext has no fsGroup: a user that is not root could not write to a volume; write the image's"
    if context.get("seccompProfile") != _DEFAULT_PROFILE:
        yield "securityContext must have seccompProfile: {type: RuntimeDefault}"
    yield from _context("pod", context)
    for container in (*spec.init_containers, *spec.containers):
        where = f"container {container.name}"
        yield from container_problems(where, container.security_context)
        yield from _ways_to_the_node(where, container)


def container_problems(where: str, context: dict[str, Any]) -> Iterator[str]:
    for name, value in CONTAINER_SECURITY.items():
        if context.get(name) != value:
            yield f"{where}: securityContext.{name} must be {value}, by the restricted pod standard"
    if context.get("runAsUser") == 0:
        yield f"{where}: securityContext.runAsUser=0 is root; leave it out"
    yield from _context(where, context)


def _context(where: str, context: dict[str, Any]) -> Iterator[str]:
    for name, choices in _CHOICES.items():
        if context.get(name) not in choices:
            yield f"{where}: securityContext.{name} must not be {context[name]!r}; leave it out"
    options = context.get("seLinuxOptions")
    if options is not None and not (isinstance(options, dict) and options.keys() <= {"level"}):
        yield f"{where}: securityContext.seLinuxOptions may have only a level; leave the others out"


def _ways_to_the_node(where: str, container: Container) -> Iterator[str]:
    if any(port.host_port for port in container.ports):
        yield f"{where}: hostPort opens a port of the node; leave it out"
    hooks = [
        container.startup_probe,
        container.liveness_probe,
        container.readiness_probe,
        *container.lifecycle.values(),
    ]
    asked = [hook.get(kind) for hook in hooks if isinstance(hook, dict) for kind in ("httpGet", "tcpSocket")]
    if any(isinstance(each, dict) and each.get("host") for each in asked):
        yield f"{where}: a probe or hook names a host, to which the kubelet would connect; leave it out"
