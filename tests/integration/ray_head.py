"""A Ray cluster with token authentication, as `ray start --head` makes it, beside any others on the machine."""

import contextlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from tests.integration.commands import ROOT, environment


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    address: str
    """host:port that drivers connect to."""
    dashboard: str
    """URL that `ray job submit` wants."""
    env: dict[str, str]
    """What a client needs: the token."""


@contextlib.contextmanager
def ray_head(*, num_cpus: int = 2) -> Iterator[RayHead]:
    """Up when this is entered; ends what it started and nothing else, which `ray stop` would not."""
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    gcs, dashboard, *others = _free_ports(6)
    names = ("ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port", "runtime-env-agent-port")
    # Sockets lie below the folder: a long path (as pytest's) does not fit into their addresses.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = ["ray", "start", "--head", "--block", f"--port={gcs}", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--{name}={port}" for name, port in zip(names, others, strict=True)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**environment(), **env}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            head = RayHead(address=f"127.0.0.1:{gcs}", dashboard=f"http://127.0.0.1:{dashboard}", env=env)
            _wait_for(head, process, output)
            yield head
        finally:
            _end(process, folder)


def _free_ports(count: int) -> list[int]:
    """Below those that Ray gives to its workers (10002 to 19999) and that the kernel gives to anybody."""
    free: list[int] = []
    while len(free) < count:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    return free


def _wait_for(head: RayHead, process: subprocess.Popen[bytes], output: "tempfile._TemporaryFileWrapper[str]") -> None:
    """Until jobs can be submitted."""
    request = urllib.request.Request(
        f"{head.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {head.env['RAY_AUTH_TOKEN']}"}
    )
    deadline = time.monotonic() + 180
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except (urllib.error.URLError, OSError) as error:
            if process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            output.seek(0)
            raise AssertionError(f"ray start did not come up ({error}):\n{output.read()}") from error


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    # Not all of Ray's processes are children of the first: their command lines name the session's folder.
    ours = [each for each in psutil.process_iter() if folder in _command_line(each)]
    for each in {*started, *ours}:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
