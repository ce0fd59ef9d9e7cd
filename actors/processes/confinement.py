"""Environment variables and resource limits of a process that runs a user's code.

They guard against leaks and mistakes and are no sandbox: the code runs as the user who started the run, and can read that user's files.
"""

import math
import os
import resource
import time
from collections.abc import Collection, Mapping, Sequence

_PASSED_ON = frozenset(
    ("CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONHASHSEED", "TMPDIR", "TZ", "USER")
)  # fmt: skip
_PREFIXES_PASSED_ON = ("LC_", "MKL_", "OMP_", "OPENBLAS_")
_MAX_FILE_BYTES = 1024**3
_CPU_SHARE = 4
"""Processor seconds for each second of a deadline: the code may compute in threads."""


def environment(of: Mapping[str, str], *, names: Collection[str], search_path: Sequence[str]) -> dict[str, str]:
    """The variables that every process needs, and those in `names`: no tokens, no keys, nothing of Ray's. Modules are searched along
    `search_path`."""
    wanted = _PASSED_ON | {*names}
    passed = {name: value for name, value in of.items() if name in wanted or name.startswith(_PREFIXES_PASSED_ON)}
    return passed | {"PYTHONPATH": os.pathsep.join(path for path in search_path if path)}


def limit_resources(*, max_memory_bytes: int) -> None:
    """Limits memory and the size of written files, and forbids core dumps, for this process and its descendants."""
    limits = {
        # Not the address space: libraries reserve much more of it than they use.
        resource.RLIMIT_DATA: max_memory_bytes,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def limit_cpu(*, deadline_s: float) -> None:
    """Limits processor time from now on, for code with this deadline. Processes that this one starts inherit the limit, even if they leave
    the process group."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + _CPU_SHARE * deadline_s + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
