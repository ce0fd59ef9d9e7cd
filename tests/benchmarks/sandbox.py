"""Programs a second that the sandbox runs, one after the other, against starting a bare interpreter for each."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from actors.sandbox.sandbox import Sandbox, SandboxConfig

PROGRAM = "print(sum(map(int, input().split())))"
NUM_RUNS, ROUNDS = 50, 5


def rows() -> list[dict[str, Any]]:
    """Rounds alternate, and each side's best counts: other work on the machine only slows."""
    sandbox = Sandbox(SandboxConfig())
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(_per_s(lambda: sandbox.run(PROGRAM, stdin="1 2 3").stdout))
        theirs.append(_per_s(_bare))
    sandbox.close()
    return [
        {
            "name": f"sandbox runs ({sandbox.confined_by})",
            "value": max(ours),
            "unit": "programs/s",
            "baseline": "a bare interpreter each, python -I -S",
            "baseline_value": max(theirs),
            "ratio": max(ours) / max(theirs),
            "aim": ">= 1.0",
        }
    ]


def _bare() -> str:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    return subprocess.run(command, input="1 2 3", capture_output=True, text=True, check=True).stdout


def _per_s(run: Callable[[], str]) -> float:
    began = time.perf_counter()
    for _ in range(NUM_RUNS):
        assert run() == "6\n"
    return NUM_RUNS / (time.perf_counter() - began)


if __name__ == "__main__":
    print(rows())
