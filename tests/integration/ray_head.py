"""A Ray cluster with token authentication, as `ray start --head` makes it, beside any others on the machine."""

import contextlib
import http.client
import json
import secrets
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.integration.commands import ROOT, command_line, environment
from tests.integration.waiting import until
from tests.ports import free_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    address: str
    """host:port that drivers connect to."""
    dashboard: str
    """URL that `ray job submit` wants."""
    env: dict[str, str]
    """What a client needs: the token."""
    folder: str
    """Of the session: in the command line of each of its processes."""

    def num_nodes(self) -> int:
        """That live on this machine."""
        return sum(
            f"{self.folder}/" in line and "/raylet/raylet " in line for line in map(command_line, psutil.process_iter())
        )


@contextlib.contextmanager
def ray_head(
    *, num_cpus: int = 2, autoscaling: int = 0, options: Sequence[str] = (), more_env: Mapping[str, str] | None = None
) -> Iterator[RayHead]:
    """Up when this is entered; ends what it started and nothing else, which `ray stop` would not.

    With `autoscaling`, Ray's autoscaler makes up to so many nodes of one CPU out of thin air when they are asked for (its fake
    provider), and takes them away when they are idle for three seconds.
    """
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    gcs, dashboard, own_metrics, scalers_metrics, *others = free_ports(8)
    names = ("ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port", "runtime-env-agent-port")
    # Sockets lie below the folder: a long path (as pytest's) does not fit into their addresses.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = ["ray", "start", "--head", "--block", f"--port={gcs}", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--{name}={port}" for name, port in zip(names, others, strict=True)]
    command += options
    if autoscaling:
        config = Path(folder) / "autoscaling.json"
        config.write_text(json.dumps(_autoscaling(f"127.0.0.1:{gcs}", num_cpus=num_cpus, num_nodes=autoscaling)))
        command.append(f"--autoscaling-config={config}")
    own = {
        **environment(),
        **env,
        "DASHBOARD_METRIC_PORT": str(own_metrics),
        "AUTOSCALER_METRIC_PORT": str(scalers_metrics),
        **(more_env or {}),
        **({"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"} if autoscaling else {}),
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT)
        try:
            head = RayHead(
                address=f"127.0.0.1:{gcs}", dashboard=f"http://127.0.0.1:{dashboard}", env=env, folder=folder
            )
            until(lambda: _takes_jobs(head), process=_Starting(process=process, output=output))
            yield head
        finally:
            _end(process, folder)


def _autoscaling(gcs_address: str, *, num_cpus: int, num_nodes: int) -> dict[str, Any]:
    """What `ray.cluster_utils.AutoscalingCluster` would write: its template is not in Ray's wheels, and its end is `ray stop`."""
    provider = {
        "type": "fake_multinode",
        "gcs_address": gcs_address,
        "use_node_id_as_ip": True,  # all nodes have this machine's address
        "disable_node_updaters": True,  # which would log in to them
        "disable_launch_config_check": True,
    }
    kinds = {
        "ray.head.default": {"resources": {"CPU": num_cpus}, "node_config": {}, "max_workers": 0},
        "more": {
            "resources": {"CPU": 1, "object_store_memory": 150 * 1024**2},
            "node_config": {},
            "max_workers": num_nodes,
        },
    }
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "fake",
        "max_workers": num_nodes,
        "idle_timeout_minutes": 0.05,
        "provider": provider,
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in commands},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starting:
    process: subprocess.Popen[bytes]
    output: "tempfile._TemporaryFileWrapper[str]"

    def assert_runs(self) -> None:
        assert self.process.poll() is None, f"ray start ended:\n{self.last_words}"

    @property
    def last_words(self) -> str:
        self.output.seek(0)
        return self.output.read()


def _takes_jobs(head: RayHead) -> bool:
    request = urllib.request.Request(
        f"{head.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {head.env['RAY_AUTH_TOKEN']}"}
    )
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except (OSError, http.client.HTTPException):
        return False
    return True


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    # Not all of Ray's processes are children of the first: their command lines name the session's folder.
    ours = [each for each in psutil.process_iter() if folder in command_line(each)]
    for each in {*started, *ours}:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
