"""Two machines on this one, for root: each has a network, processes, memory for Ray's objects and a name of its own, a wire joins them, and
both mount all files of this machine."""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.integration.commands import ROOT, environment, run
from tests.integration.waiting import until

ADDRESSES = {"alpha": "10.213.77.1", "beta": "10.213.77.2"}
NAMES = tuple(ADDRESSES)
_SLURM = """\
ClusterName=two
SlurmctldHost=alpha
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
KillWait=5
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=alpha,beta CPUs=6 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=alpha,beta Default=YES MaxTime=INFINITE State=UP
"""


class Machines:
    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids

    def run(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> str:
        """What the command prints, started in the repository's root."""
        done = run(*self._inside(name, *command), env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ends_well(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> bool:
        return run(*self._inside(name, *command), env=env).returncode == 0

    def silence(self, name: str) -> None:
        """From now on it does not answer: what it sends is lost, and nobody is told."""
        for address in _others(name):
            self.run(name, "ip", "route", "add", "blackhole", f"{address}/32")

    def unsilence(self, name: str) -> None:
        for address in _others(name):
            self.run(name, "ip", "route", "delete", "blackhole", f"{address}/32")

    def start(self, name: str, *command: str, env: Mapping[str, str]) -> None:
        """A service that ends with its machine."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(self._inside(name, *command), cwd=ROOT, env={**environment(), **env}, **quiet)

    def _inside(self, name: str, *command: str) -> list[str]:
        namespaces = ("--mount", "--uts", "--net", "--pid")
        return ["nsenter", "--target", str(self._pids[name]), *namespaces, f"--wdns={ROOT}", *command]


@contextlib.contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """In the checkout, which both machines see: the daemons' sockets need a short path that no one else may write to."""
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=ROOT / "build"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _others(name: str) -> list[str]:
    return [address for other, address in ADDRESSES.items() if other != name]


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Two machines that know each other by name. Skips the test where none can be made. `folder` takes their files."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items()))
    Path("/tmp/ray").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        pids = {name: stack.enter_context(_machine()) for name in NAMES}
        found = Machines(pids)
        ends = [["eth0", "netns", str(pid)] for pid in pids.values()]
        _require("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, address in ADDRESSES.items():
            # A route to everywhere: by it Ray finds the machine's own address.
            found.run(
                name,
                "sh",
                "-ec",
                f"""
                hostname {name}
                mount -t tmpfs tmpfs /tmp/ray
                mount -t tmpfs tmpfs /dev/shm
                mount --bind {hosts} /etc/hosts
                ip link set lo up
                ip link set eth0 up
                ip address add {address}/24 dev eth0
                ip route add default dev eth0
            """,
            )
        yield found


@contextlib.contextmanager
def _machine() -> Iterator[int]:
    """The id of its first process, whose end ends all others."""
    separate = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    _require("unshare", *separate, "true")
    outside = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", *separate, "sleep", "infinity"])
    try:
        until(lambda: [child.name() for child in psutil.Process(outside.pid).children()] == ["sleep"])
        yield psutil.Process(outside.pid).children()[0].pid
    finally:
        outside.kill()
        outside.wait()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Machines]:
    """Two machines with SLURM's daemons, and its commands on `alpha`. Skips the test where they cannot run."""
    (folder / "slurm.conf").write_text(_SLURM.format(folder=folder))
    keys = folder / "munge"
    keys.mkdir()
    (keys / "key").write_bytes(bytes(range(128)))
    (keys / "key").chmod(0o600)
    conf = {"SLURM_CONF": str(folder / "slurm.conf")}
    with machines(folder) as found:
        files = [f"--{each}-file={keys / each}" for each in ("key", "pid", "log", "seed")]
        found.start("alpha", "munged", "--foreground", "--force", f"--socket={keys / 'socket'}", *files, env={})
        until((keys / "socket").exists)
        (folder / "state").mkdir()
        found.start("alpha", "slurmctld", "-D", env=conf)
        for name in NAMES:
            (folder / f"spool-{name}").mkdir()
            found.start(name, "slurmd", "-D", "-N", name, env=conf)
        try:
            until(lambda: "2 idle" in _nodes(found, conf))
        except AssertionError:
            logs = [file.read_text().splitlines()[-1:] for file in sorted(folder.glob("slurm*.log"))]
            pytest.skip(f"SLURM's daemons do not come up here: {logs}")
        yield found


def _nodes(found: Machines, conf: Mapping[str, str]) -> str:
    with contextlib.suppress(AssertionError):  # its controller comes up
        return found.run("alpha", "sinfo", "--noheader", "--format=%D %T", env=conf)
    return ""


def _require(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no machines can be made here: {' '.join(command[:2])}: {done.stderr.strip()}")
