"""The run in the terminal: one live line (rich); where there is no terminal, one plain line a step."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn

from cluster.record.run_directory import RunDirectory

_PACE_S = 3600.0
"""The time left is told from the pace of the steps in so many seconds."""
_SHOWN: tuple[tuple[tuple[tuple[str, str], ...], Callable[[float], str]], ...] = (
    ((("reward", "reward/mean"),), "{:.3f}".format),
    (
        (
            ("KL to reference", "learner/kl_reference_k3_mean"),
            ("KL to old policy", "learner/kl_old_k3_mean"),
        ),
        "{:.4f}".format,
    ),
    ((("sampling", "speed/sampling_tokens_per_s"),), "{:,.0f} tok/s".format),
    ((("learning", "speed/learning_tokens_per_s"),), "{:,.0f} tok/s".format),
    ((("staleness", "staleness/max"),), "{:.0f}".format),
    ((("eval", "eval/accuracy"),), "{:.3f}".format),
)
"""Label and metric, the first that is there; and its format."""


def line_of(metrics: Mapping[str, float]) -> str:
    """What a step shows: `reward 0.612  KL to reference 0.0031  sampling 3,412 tok/s`."""
    parts: list[str] = []
    for choices, shown in _SHOWN:
        found = next(((label, metrics[name]) for label, name in choices if name in metrics), None)
        if found is not None:
            parts.append(f"{found[0]} {shown(found[1])}")
    return "  ".join(parts)


class PlainLines:
    """For logs, CI and `ray job submit`."""

    def __init__(self, num_steps: int, *, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._progress = Progress(disable=True, get_time=now, speed_estimate_period=_PACE_S)
        self._column = TimeRemainingColumn()
        self._task = self._progress.add_task("", total=num_steps)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        task = _advance(self._progress, version, metrics)
        ending = "" if task.time_remaining is None else f"  left {self._column.render(task)}"
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
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_PACE_S,
        )
        self._task = self._progress.add_task("", total=num_steps)
        self._shown: dict[str, float] = {}

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        # Not every step evaluates: the last known value of each stays on the line.
        self._shown.update(metrics)
        self._progress.start()
        _advance(self._progress, version, metrics)
        self._progress.update(self._task, description=line_of(self._shown))

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


def _advance(progress: Progress, version: int, metrics: Mapping[str, float]) -> Task:
    """Only a step that was sampled tells the pace: one that is learned again from the record takes a fraction of its time."""
    (task,) = progress.tasks
    if "time/step_s" in metrics:
        progress.update(task.id, completed=version)
    else:
        progress.reset(task.id, completed=version)
    return task
