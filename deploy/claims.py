"""`--wait-for-claim`: waits until another driver releases the run directory."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from cluster.contracts.errors import InUseError
from cluster.record.run_directory import RunDirectory

_POLL_S, _STORE_POLL_S = 0.5, 5.0
_PRINT_EVERY_S = 60.0
Result = TypeVar("Result")


def once_free(
    run_dir: str,
    work: Callable[[], Result],
    *,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Calls `work`, which claims the directory, once no driver has it; returns its result. Waits again if another driver claims it first.

    Raises the InUseError of `work` if a driver still has the directory after `wait_s`.
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
    """Prints the owner at once and every minute."""
    next_print = clock()
    while (owner := directory.owner()) and clock() < deadline:
        if clock() >= next_print:
            left_s = max(0.0, deadline - clock())
            line = f"treadwheel: {directory.url} is in use by {owner}; waits up to {left_s:.0f} s for it"
            print(line, file=sys.stderr, flush=True)
            next_print += _PRINT_EVERY_S
        sleep(_POLL_S if directory.is_local else _STORE_POLL_S)
