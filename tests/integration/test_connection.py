"""A local cluster is its command's alone: its token, its priority, and nothing left in the process afterwards."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile

import psutil
import pytest
import ray

from deploy.cluster_up.connection import connected
from tests.integration.commands import command_line

pytestmark = [pytest.mark.ray, pytest.mark.own_process, pytest.mark.timeout(1800)]
JOIN = "import sys, ray; ray.init(sys.argv[1], logging_level='error'); print('joined', ray.cluster_resources())"
WORKER = re.compile(r"ray::IDLE|\S*python[\d.]* .*default_worker\.py")
"""One that waits for a call, or is about to. Ray's own command names the file as well."""
STAYS_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
OURS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_worker_niceness")


def taken_from_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in OURS}


def children() -> list[str]:
    return [command_line(process) for process in psutil.Process().children(recursive=True)]


def join(address: str, **authentication: str) -> subprocess.CompletedProcess[str]:
    """Another process that tries to use the cluster."""
    # Otherwise Ray asks for loopback at the machine's own address, where nothing listens.
    clean = {name: value for name, value in os.environ.items() if name not in OURS} | {STAYS_ON_LOOPBACK: "0"}
    command = [sys.executable, "-c", JOIN, address]
    return subprocess.run(command, env={**clean, **authentication}, capture_output=True, text=True, timeout=1500)


def listening() -> set[str]:
    """Addresses at which the processes of the cluster wait for connections."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        each.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


async def test_a_local_cluster_lets_nobody_in_without_its_token_and_leaves_no_trace_of_it():
    before = taken_from_environment()
    niceness = ray.remote(num_cpus=0)(lambda: os.nice(0))
    tokens: set[str] = set()
    for _ in range(2):  # one after the other in one process, each with a token of its own
        async with connected(None):
            assert not [each for each in children() if WORKER.match(each)], "nobody asked for a worker yet"
            assert await niceness.remote() == os.nice(0), "workers are not behind everything else on the machine"
            running = children()
            assert any("gcs_server" in command for command in running)
            assert not [each for each in running if re.search(r"/(dashboard|monitor|log_monitor)\.py ", each)]
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
            address = ray.get_runtime_context().gcs_address
            if len(tokens) == 1:
                without, guessed, ours = await asyncio.gather(
                    asyncio.to_thread(join, address, RAY_AUTH_MODE="disabled"),
                    asyncio.to_thread(join, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="guessed"),
                    asyncio.to_thread(
                        join, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.environ["RAY_AUTH_TOKEN"]
                    ),
                )
                for refused in (without, guessed):
                    assert refused.returncode != 0 and "joined" not in refused.stdout
                assert "joined" in ours.stdout, ours.stderr
        assert taken_from_environment() == before
    assert len(tokens) == 2


async def test_other_machines_and_other_users_reach_nothing_of_a_local_cluster(monkeypatch):
    """Seen in review: Ray replaced loopback by the address of the machine, and all users could replace its sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # pytest's folders have long names
        os.chmod(shared, 0o755)
        monkeypatch.setenv("RAY_TMPDIR", shared)
        async with connected(None):
            address = await ray.remote(num_cpus=0)(ray.util.get_node_ip_address).remote()
            assert address == "127.0.0.1"
            assert listening() == {"127.0.0.1"}
            sockets = {each.laddr for each in psutil.net_connections("unix") if str(each.laddr).startswith(shared)}
        assert {os.path.basename(each) for each in sockets} == {"raylet", "plasma_store"}
        assert {os.path.relpath(each, shared).split("/")[0] for each in sockets} == {f"ray-{os.getuid()}"}
        assert os.stat(os.path.join(shared, f"ray-{os.getuid()}")).st_mode & 0o777 == 0o700
