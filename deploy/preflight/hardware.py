"""Hardware that is not at hand (`--assume gpus=8x80GB,nodes=2`), and the GPUs on which a run's actors would be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.contracts.errors import ConfigError
from cluster.supervision.placement import Bundle, ClusterResources, Node, first_fit, parties

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?)([MGT]i?B)"
_FORMS = {"gpus": rf"(\d+)x{_SIZE}", "nodes": r"(\d+)", "cpus": r"(\d+)", "memory": _SIZE}
_WAY_OUT = (
    "write gpus=8x80GB (of each node), nodes=2, cpus=96 (of each node), memory=1TB (of each node), with commas between them; "
    "sizes are in MB, GB, TB, MiB, GiB or TiB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Nodes, all alike."""

    num_nodes: int
    gpus: int
    """Of each node."""
    gpu_bytes: int
    cpus: int | None
    """Of each node. None: enough for the whole run."""
    memory_bytes: int | None
    """Of each node. None: it is not checked."""

    def resources(self, *, asked_cpus: float) -> ClusterResources:
        """The resources for placement. `asked_cpus`: CPUs of all actors of the run."""
        cpus = max(asked_cpus, 1.0) if self.cpus is None else float(self.cpus)
        return ClusterResources(nodes=(Node(cpus=cpus, gpus=float(self.gpus)),) * self.num_nodes)


def parse(texts: Sequence[str]) -> Hardware:
    """Parses texts such as `gpus=8x80GB,nodes=2`. MB, GB and TB are powers of ten, MiB, GiB and TiB powers of two: a GPU sold with 80 GB
    has a little more than that. Raises ConfigError for any other text."""
    found: dict[str, re.Match[str]] = {}
    for part in ",".join(texts).split(","):
        name, _, value = part.strip().partition("=")
        match = re.fullmatch(_FORMS.get(name, ""), value, re.IGNORECASE)
        if not value or match is None or name in found:
            raise ConfigError(f"--assume {part.strip()!r}: {f'{name} is given twice' if name in found else _WAY_OUT}")
        found[name] = match
    gpus, memory = found.get("gpus"), found.get("memory")
    hardware = Hardware(
        num_nodes=int(found["nodes"][1]) if "nodes" in found else 1,
        gpus=int(gpus[1]) if gpus else 0,
        gpu_bytes=_bytes(gpus[2], gpus[3]) if gpus else 0,
        cpus=int(found["cpus"][1]) if "cpus" in found else None,
        memory_bytes=_bytes(memory[1], memory[2]) if memory else None,
    )
    is_without_bytes = hardware.memory_bytes == 0 or (hardware.gpus > 0 and hardware.gpu_bytes == 0)
    if hardware.num_nodes == 0 or hardware.cpus == 0 or is_without_bytes:
        raise ConfigError(f"--assume {','.join(texts)!r}: nothing runs on 0 nodes, CPUs or bytes; {_WAY_OUT}")
    return hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """One way to place a plan's actors. Ray may find another."""

    node_of: dict[str, int]
    """By the bundle's name."""
    gpus_of: dict[str, tuple[int, ...]]
    """GPUs on that node, by the bundle's name; empty for an actor without GPUs."""


def seat(bundles: Sequence[Bundle], hardware: Hardware, resources: ClusterResources, *, staying_first: bool) -> Seats:
    """Places bundles on nodes by the plan's own first fit, in its order (`staying_first`). On a node, fractions fill one GPU after the
    other.

    Raises ConfigError if the GPUs of a node suffice in sum, but fractions leave too few single GPUs with room.
    """
    seated = first_fit(bundles, resources, staying_first=staying_first)
    assert all(node is not None for _, node in seated), "the plan has room for all"
    node_of = {bundle.name: node for bundle, node in seated if node is not None}
    gpus_of: dict[str, tuple[int, ...]] = {}
    free = [[1.0] * hardware.gpus for _ in range(hardware.num_nodes)]
    for party in parties(bundle for bundle, _ in seated):
        names, left = [each.name for each in party], free[node_of[party[0].name]]
        asked = sum(each.gpus for each in party)
        wanted = max(1, int(asked)) if asked else 0
        share = min(asked, 1.0)
        # Fractions are rounded: three thirds are one GPU.
        roomy = [gpu for gpu, part in enumerate(left) if round(part - share, 6) >= 0]
        roomy.sort(key=left.__getitem__)
        if len(roomy) < wanted:
            raise ConfigError(
                f"{' and '.join(names)} asks for {asked:g} GPUs, and too few single GPUs of its node have room beside other fractions; "
                "use fractions that add up to 1, or whole GPUs"
            )
        for gpu in roomy[:wanted]:
            left[gpu] -= share
        gpus_of |= dict.fromkeys(names, tuple(sorted(roomy[:wanted])))
    return Seats(node_of=node_of, gpus_of=gpus_of)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit.upper()])
