"""The run in the terminal: one live line (rich); where there is no terminal, one plain line a step."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from cluster.record.run_directory import RunDirectory

_SHOWN: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("reward", ("reward/mean",), "{:.3f}".format),
    ("KL", ("learner/kl_reference_k3_mean", "learner/kl_old_k3_mean"), "{:.4f}".format),
    ("sampling", ("speed/sampling_tokens_per_s",), "{:,.0f} tok/s".format),
    ("learning", ("speed/learning_tokens_per_s",), "{:,.0f} tok/s".format),
    ("staleness", ("staleness/max",), "{:.0f}".format),
    ("eval", ("eval/accuracy",), "{:.3f}".format),
)
"""Label, metric names (the first that is there), format."""


def line_of(metrics: Mapping[str, float]) -> str:
    """What a step shows: `reward 0.612  KL 0.0031  sampling 3,412 tok/s`."""
    parts: list[str] = []
    for label, names, shown in _SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            parts.append(f"{label} {shown(value)}")
    return "  ".join(parts)


class TimeLeft:
    """Seconds to the end from the pace so far. A resumed run counts from where it resumed."""

    def __init__(self, num_steps: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._num_steps = num_steps
        self._now = now
        self._first: tuple[int, float] | None = None

    def after(self, version: int) -> float | None:
        """None until two steps are known."""
        if self._first is None or version <= self._first[0]:
            self._first = (version, self._now())
            return None
        start, began = self._first
        return (self._now() - began) / (version - start) * max(self._num_steps - version, 0)


class PlainLines:
    """For logs, CI and `ray job submit`."""

    def __init__(self, num_steps: int, *, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._time_left = TimeLeft(num_steps, now=now)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        left = self._time_left.after(version)
        ending = "" if left is None else f"  left {clock(left)}"
        self._print(f"step {version}/{self._num_steps}  {line_of(metrics)}{ending}")

    def event(self, record: Mapping[str, Any]) -> None:
        if "message" in record:
            self._print(f"{record['kind']}: {record['message']}")

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveLine:
    """A progress bar with the step's numbers; events scroll by above it."""

    def __init__(self, num_steps: int, *, console: Console) -> None:
        self._num_steps = num_steps
        self._time_left = TimeLeft(num_steps)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._shown: dict[str, float] = {}

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        # Not every step evaluates: the last known value of each stays on the line.
        self._shown.update(metrics)
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=self._num_steps, left="")
        left = self._time_left.after(version)
        ending = "" if left is None else f"left {clock(left)}"
        self._progress.update(self._task, completed=version, description=line_of(self._shown), left=ending)

    def event(self, record: Mapping[str, Any]) -> None:
        if "message" in record:
            self._progress.console.print(
                escape(f"{record['kind']}: {record['message']}"), style="yellow", highlight=False
            )

    def close(self) -> None:
        self._progress.stop()


def console(*, directory: RunDirectory, num_steps: int) -> PlainLines | LiveLine:
    terminal = Console(stderr=False)
    return LiveLine(num_steps, console=terminal) if terminal.is_terminal else PlainLines(num_steps, stream=sys.stdout)


def clock(seconds: float) -> str:
    """`1m32s`, `2h05m`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
