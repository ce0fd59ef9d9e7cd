"""Draws the state of a run for a terminal of any width: a panel with its numbers, and its last events below."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.sinks.console.standing import Standing
from cluster.sinks.console.words import Told, Weight

_WIDE = 84
"""Width from which the numbers are in two columns."""
_WIDEST = 112
_SPARK_WIDTH = 16
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_MOST_EVENTS = 5
_SLOW = 3.0
"""A step that takes this many times the usual is reported."""
_PHASE_STYLES = {"running": "green", "finished": "green", "failed": "bold red", "gone": "bold red"}
_EVENT_STYLES = {Weight.NOTE: "", Weight.WARNING: "yellow", Weight.FAILURE: "bold red"}

Row = tuple[str, Text]


class Drawn:
    """A rich renderable that draws the present state of `standing`."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._standing.lock:
            parts = list(_parts(self._standing, console, options))
        yield from parts


def _parts(standing: Standing, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
    width = min(options.max_width, _WIDEST)
    blocks = _ASCII_BLOCKS if options.ascii_only else _BLOCKS
    panel = Panel(
        Group(_progress(standing, width - 4), Text(), _numbers(standing, blocks, width - 4)),
        title=Text.assemble(("treadwheel", "bold"), f"  {_tail(standing.title, width - 36)}"),
        title_align="left",
        subtitle=_state(standing),
        subtitle_align="right",
        box=box.ASCII if options.ascii_only else box.ROUNDED,
        border_style="red" if standing.phase in ("failed", "gone") else "bright_black",
        width=width,
        padding=(0, 1),
    )
    yield panel
    free = console.size.height - (13 if width >= _WIDE else 18)
    for sentence in list(standing.told)[-max(min(_MOST_EVENTS, free), 1) :]:
        yield _event(sentence, width)


def spark(values: Sequence[float], *, width: int, blocks: str = _BLOCKS) -> str:
    """A curve of `values` in up to `width` characters. Each is a mean, and the lowest mean is the lowest block. Flat if all means are equal
    or too far apart for a scale."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [place * len(values) // width for place in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low or not all(map(math.isfinite, (*means, high - low))):
        return blocks[0] * width
    return "".join(blocks[round((mean - low) / (high - low) * (len(blocks) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2 days, 1:00:00`."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else str(timedelta(seconds=whole))


def _tail(title: str, most: int) -> str:
    """The end of a path, its most informative part."""
    return title if len(title) <= max(most, 12) else f"…{title[-max(most, 12) + 1 :]}"


def _state(standing: Standing) -> Text:
    word = {"gone": "the driver is gone", "stopped": "preempted" if standing.is_preempted else "stopped"}
    state = word.get(standing.phase, standing.phase)
    return Text.assemble((state, _PHASE_STYLES.get(standing.phase, "yellow")))


def _progress(standing: Standing, width: int) -> RenderableType:
    """Bar, pace and time left; before the first step, the present stage."""
    total = max(standing.num_steps, 1)
    bar = ProgressBar(
        total=total,
        completed=min(standing.version, total),
        complete_style="cyan",
        finished_style="green",
        style="bright_black",
    )
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    share = f"{standing.version / total:4.0%}" if width >= 60 else ""
    row.add_row(Text.assemble("step ", (f"{standing.version}", "bold"), f" of {standing.num_steps}"), bar, share)
    return Group(row, Text(_pace(standing), style="dim", no_wrap=True, overflow="ellipsis"))


def _pace(standing: Standing) -> str:
    now = standing.now()
    if standing.is_over:
        return _looking_back(standing)
    if standing.phase == "stopping":
        return "stopping: saves what it has learned"
    if standing.is_learning_again:
        return "learns recorded steps again"
    pace, at = standing.pace.seconds_per_step, standing.pace.last_at
    waits = f": {standing.stage}" if standing.stage else ""
    if pace is None or at is None:
        what = "starting" if standing.phase == "starting" else f"step {standing.version + 1}"
        return f"{what} for {duration(now - (at or standing.up_since or standing.began))}{waits}"
    parts = [f"{_seconds(pace)} a step"]
    if now - at > max(_SLOW * pace, 5.0):
        parts.append(f"step {standing.version + 1} takes {duration(now - at)} so far{waits}")
    left = standing.pace.seconds_left(standing.num_steps, now=now) or 0.0
    parts.append(f"about {duration(left)} left")
    if left > 600:
        parts.append(f"done at {time.strftime('%H:%M' if left < 64_800 else '%a %H:%M', time.localtime(now + left))}")
    return ", ".join(parts)


def _looking_back(standing: Standing) -> str:
    pace, ended = standing.pace.seconds_per_step, standing.ended
    parts = [f"{_seconds(pace)} a step"] if pace is not None else []
    return ", ".join([*parts, *([f"{duration(ended - standing.began)} in all"] if ended is not None else [])])


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _numbers(standing: Standing, blocks: str, width: int) -> RenderableType:
    left, right, workers = list(_learning(standing, blocks)), list(_flow(standing)), ("workers", _health(standing))
    if width + 4 < _WIDE:
        return _grid([*left, *right, workers])
    both = Table.grid(expand=True, padding=(0, 2))
    both.add_column(ratio=11)
    both.add_column(ratio=10)
    both.add_row(_grid(left), _grid(right))
    return Group(both, _grid([workers]))


def _grid(rows: Sequence[Row]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim", min_width=9)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in rows:
        grid.add_row(label, value)
    return grid


def _learning(standing: Standing, blocks: str) -> Iterator[Row]:
    """Rows about learning."""
    yield "reward", _course(standing.rewards, standing, blocks, style="bold green")
    numbers = standing.numbers
    if standing.held_out_rewards:
        held_out = _course(standing.held_out_rewards, standing, blocks, style="bold cyan")
        succeed = f"{numbers.get('eval/accuracy', math.nan):.3f}"
        if succeed not in ("nan", f"{standing.held_out_rewards[-1][1]:.3f}"):
            held_out.append(f"  {succeed} succeed", style="dim")
        yield "held-out", held_out
    kl = (("learner/kl_reference_k3_mean", "the reference"), ("learner/kl_old_k3_mean", "the old policy"))
    if found := next(((numbers[name], whom) for name, whom in kl if name in numbers), None):
        yield "KL", Text.assemble((f"{found[0]:.4f}", "bold"), (f" nats to {found[1]}", "dim"))
    if (entropy := numbers.get("learner/entropy_mean")) is not None:
        yield "entropy", Text.assemble((f"{entropy:.3f}", "bold"), (" nats", "dim"))
    if (mismatch := numbers.get("mismatch/mean_abs_nats")) is not None:
        yield "mismatch", Text.assemble((f"{mismatch:.2g}", "bold"), (" nats, engine and learner", "dim"))


def _course(points: Sequence[tuple[int, float]], standing: Standing, blocks: str, *, style: str) -> Text:
    if not points:
        return Text("none yet", style="dim")
    (first, began), (version, last) = points[0], points[-1]
    text = Text.assemble((f"{last:.3f}", style))
    if len(points) > 1:
        text.append(f"  {spark([value for _, value in points], width=_SPARK_WIDTH, blocks=blocks)}", style=style[5:])
        text.append(f"  from {began:.3f}", style="dim")
    if version != standing.version or first == version:
        text.append(f"  at step {version}", style="dim")
    return text


def _flow(standing: Standing) -> Iterator[Row]:
    """Rows about speed and staleness."""
    numbers = standing.numbers
    for label, name in (("sampling", "speed/sampling_tokens_per_s"), ("learning", "speed/learning_tokens_per_s")):
        if name in numbers:
            yield label, Text.assemble((f"{numbers[name]:,.0f}", "bold"), (" tokens/s", "dim"))
    if (staleness := numbers.get("staleness/max")) is not None:
        bound = standing.max_off_policy_steps
        most = " steps" if bound is None else f" of at most {bound} steps"
        yield "staleness", Text.assemble((f"{staleness:.0f}", "bold"), (most, "dim"))
    wait, step_s = numbers.get("buffer/learner_wait_s"), numbers.get("time/step_s")
    if wait is not None and step_s:
        share = f" of {_seconds(step_s)} ({wait / step_s:.0%})"
        yield "wait", Text.assemble((f"{wait:.1f} s", "bold"), (f"{share} for groups", "dim"))


def _health(standing: Standing) -> Text:
    serving, wanted = standing.num_serving, standing.num_known
    text = Text("not up yet", style="dim")
    if serving is not None:
        text = Text.assemble((f"{serving} of {wanted}", "bold" if serving == wanted else "bold yellow"))
        text.append(" serve", style="dim")
    if standing.num_restarts:
        text.append(f", {standing.num_restarts} restart{'s' if standing.num_restarts > 1 else ''}", style="yellow")
    if (waits := standing.not_up) and not standing.is_over:
        first, more = waits[0], f" +{len(waits) - 1}" if len(waits) > 1 else ""
        text.append(f", {first.actor}{more} {first.phase} {duration(standing.now() - first.since)}", style="yellow")
    return text


def _event(sentence: Told, width: int) -> Text:
    style = _EVENT_STYLES[sentence.weight]
    at = time.strftime("%H:%M:%S", time.localtime(sentence.at))
    line = Text.assemble((f"  {at}  ", "dim"), (sentence.words, style), no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line
