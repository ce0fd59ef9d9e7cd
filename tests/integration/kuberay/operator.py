"""KubeRay's operator and the kubelet, as far as worker pods go: what the RayCluster asks for becomes raylets of this machine.

Pods start one after the other: two raylets that start in the same instant on one machine collide.
"""

import contextlib
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from tests.integration.commands import ROOT
from tests.integration.kuberay.api_server import CLUSTER, Objects
from tests.ports import free_ports

_TICK_S = 0.1
_REQUEUE_S = 2.0
"""A pod that ended by itself is replaced when KubeRay's operator looks again. The autoscaler drains a node before it deletes the pod."""
_START_S = 300.0
"""A raylet that is not up by then is left to itself: the next one may start."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pod:
    name: str
    group: dict[str, Any]
    address: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    """None while it is pending."""
    is_deleted: bool = False
    """Told to end."""
    is_scaled_down: bool = False
    """By the autoscaler."""
    ended_at: float | None = None
    """By itself or by a signal; on the monotonic clock."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and "Ray runtime started" in self.log.read_text()

    def look(self) -> None:
        if self.ended_at is None and self.process is not None and self.process.poll() is not None:
            self.ended_at = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def actors(self) -> list[str]:
        """Classes of the Ray actors that live in it."""
        titles = [_title(process) for process in self.processes()]
        names = [title.removeprefix("ray::") for title in titles if title.startswith("ray::")]
        return [name for name in names if name != "IDLE" and not name.endswith("Agent")]

    def kill(self) -> None:
        """As when its machine fails: all of it at once, without a word."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def terminate(self) -> None:
        """Its first process is told; what is left of it after the manifest's grace period is killed."""
        self.is_deleted = True
        if self.process is not None and self.ended_at is None:
            self.process.send_signal(signal.SIGTERM)
            grace_s = self.group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
            timer = threading.Timer(grace_s, self.kill)
            timer.daemon = True
            timer.start()

    def manifest(self) -> dict[str, Any]:
        labels = {"cluster": CLUSTER, "node-type": "worker", "group": self.group["groupName"]}
        metadata: dict[str, Any] = {"name": self.name, "labels": {f"ray.io/{k}": v for k, v in labels.items()}}
        if self.is_deleted:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if self.process is None:
            return {"metadata": metadata, "status": {"phase": "Pending"}}
        container = {"state": {"running": {}}}
        return {"metadata": metadata, "status": {"podIP": self.address, "containerStatuses": [container]}}


class Operator:
    def __init__(self, objects: Objects, *, gcs_address: str, env: Mapping[str, str], folder: Path) -> None:
        self._objects = objects
        self._gcs_address = gcs_address
        self._env = env
        self._folder = folder
        self._numbers = itertools.count(1)
        self._starting: tuple[Pod, float] | None = None
        self._is_over = threading.Event()
        self.quota: int | None = None
        """Pods that may run at a time; others stay pending."""
        self.pods: list[Pod] = []
        """All there ever were, oldest first."""

    def living(self) -> list[Pod]:
        """Running or pending, not told to end."""
        return [pod for pod in self.pods if not pod.is_deleted and pod.ended_at is None]

    def preempt(self, pod: Pod) -> None:
        """As when a cloud takes its spot machine away, with a notice; another pod is made in its place at once."""
        with self._objects.lock:
            pod.terminate()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            for pod in self.pods:
                pod.kill()
                if pod.process is not None:
                    pod.process.wait()

    def _run(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._objects.lock:
                for pod in self.pods:
                    pod.look()
                for group in self._objects.groups:
                    self._delete(group)
                    self._create(group)
                self._start_next()
                self._show()

    def _delete(self, group: dict[str, Any]) -> None:
        for pod in self.pods:
            if pod.name in group.get("scaleStrategy", {}).get("workersToDelete", ()) and not pod.is_scaled_down:
                pod.is_scaled_down = True
                pod.terminate()

    def _create(self, group: dict[str, Any]) -> None:
        since = time.monotonic() - _REQUEUE_S
        places = [
            pod
            for pod in self.pods
            if pod.group is group and not pod.is_deleted and (pod.ended_at is None or pod.ended_at > since)
        ]
        for _ in range(group["replicas"] - len(places)):
            number = next(self._numbers)
            name = f"{CLUSTER}-{group['groupName']}-{number}"
            log = self._folder / f"{name}.log"
            self.pods.append(Pod(name=name, group=group, address=f"127.0.0.{1 + number}", log=log))

    def _start_next(self) -> None:
        living = self.living()
        if self._starting is not None:
            pod, since = self._starting
            if pod in living and not pod.is_up and time.monotonic() < since + _START_S:
                return
            self._starting = None
        pending = [pod for pod in living if pod.process is None]
        if pending and (self.quota is None or len(living) - len(pending) < self.quota):
            self._start(pending[0])
            self._starting = pending[0], time.monotonic()

    def _start(self, pod: Pod) -> None:
        env = {
            **self._env,
            **rays_environment(pod.group["template"]),
            "RAY_CLOUD_INSTANCE_ID": pod.name,
            "RAY_NODE_TYPE_NAME": pod.group["groupName"],
        }
        command = ["ray", "start", "--block", f"--address={self._gcs_address}", f"--node-ip-address={pod.address}"]
        command += start_options(self._objects.ray_cluster, pod.group["groupName"])
        # Pods have a network of their own; these share the machine's.
        names = ("dashboard-agent-listen-port", "metrics-export-port", "runtime-env-agent-port")
        command += [f"--{name}={port}" for name, port in zip(names, free_ports(3), strict=True)]
        with pod.log.open("wb") as log:
            pod.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _show(self) -> None:
        for pod in self.pods:
            if pod.ended_at is not None or (pod.is_deleted and pod.process is None):
                self._objects.pods.pop(pod.name, None)
            else:
                self._objects.pods[pod.name] = pod.manifest()


def start_options(ray_cluster: Mapping[str, Any], group: str) -> list[str]:
    """For `ray start`, as KubeRay's operator makes them: the group's resources, as Ray's autoscaler understands them, and its labels."""
    node_type = _derive_autoscaling_config_from_ray_cr(dict(ray_cluster))["available_node_types"][group]
    cpus, gpus, memory = (node_type["resources"].get(name, 0) for name in ("CPU", "GPU", "memory"))
    options = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--object-store-memory=100000000"]
    options += [f"--memory={memory}"] if memory else []
    labels = ",".join(f"{name}={value}" for name, value in node_type["labels"].items())
    return [*options, f"--labels={labels}"] if labels else options


def rays_environment(template: Mapping[str, Any]) -> dict[str, str]:
    """What a pod's manifest sets for Ray. Its other variables name folders of the image."""
    variables = template["spec"]["containers"][0].get("env", ())
    return {each["name"]: each["value"] for each in variables if "value" in each and each["name"].startswith("RAY_")}


def _title(process: psutil.Process) -> str:
    """As Ray sets it: padded with spaces, and behind an actor's class the name of its method that runs."""
    try:
        return process.cmdline()[0].split(".")[0].strip()
    except (psutil.Error, IndexError):
        return ""
