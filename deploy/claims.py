"""Waiting for a run directory that another driver has: `--wait-for-claim`."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from cluster.contracts.errors import InUseError
from cluster.record.run_directory import RunDirectory

_POLL_S, _STORE_POLL_S = 0.5, 5.0
_TELL_EVERY_S = 60.0
Result = TypeVar("Result")


def once_free(
    run_dir: str,
    work: Callable[[], Result],
    *,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """What `work` returns, which takes the directory. Begins when no driver has it, and again when another one that waits was faster.

    Raises the InUseError of `work` when a driver has it still after `wait_s`.
    """
    deadline = clock() + wait_s
    while True:
        if wait_s:
            _wait(RunDirectory(run_dir), deadline=deadline, clock=clock, sleep=sleep)
        try:
            return work()
        except InUseError:
            if clock() >= deadline:
                raise


def _wait(
    directory: RunDirectory, *, deadline: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Says who has it, at once and every minute."""
    next_told = clock()
    while (owner := directory.owner()) and clock() < deadline:
        if clock() >= next_told:
            left_s = max(0.0, deadline - clock())
            told = f"treadwheel: {directory.url} is in use by {owner}; waits up to {left_s:.0f} s for it"
            print(told, file=sys.stderr, flush=True)
            next_told += _TELL_EVERY_S
        sleep(_POLL_S if directory.is_local else _STORE_POLL_S)
