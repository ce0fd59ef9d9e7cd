"""curves.png: a run on one page, from its metrics.jsonl."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.record.run_directory import RunDirectory
from cluster.sinks.jsonl import read_steps

NAME = "curves.png"
_PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("reward/mean", "sampled"), ("eval/accuracy", "held-out accuracy"))),
    (
        "KL, nats",
        (("learner/kl_reference_k3_mean", "to the reference"), ("learner/kl_rollout_k3_mean", "to the rollout policy")),
    ),
    ("entropy, nats", (("learner/entropy_mean", "policy"),)),
    ("tokens per second", (("speed/sampling_tokens_per_s", "sampling"), ("speed/learning_tokens_per_s", "learning"))),
    ("seconds", (("time/step_s", "step"), ("time/learning_s", "learning"), ("time/broadcast_s", "broadcast"))),
    ("off-policy steps", (("staleness/mean", "mean"), ("staleness/max", "maximum"))),
)
"""Title, then metric and label of each line. A panel without numbers is left out."""


def draw(directory: RunDirectory) -> bool:
    """Writes curves.png; False when there is nothing to draw yet."""
    steps = read_steps(directory)
    panels = [(title, found) for title, lines in _PANELS if (found := _series(steps, lines))]
    if not panels:
        return False
    directory.write_file(NAME, _page(panels, title=directory.url))
    return True


Series = tuple[str, list[int], list[float]]


def _series(steps: Mapping[int, Mapping[str, float]], lines: Sequence[tuple[str, str]]) -> list[Series]:
    """(label, policy versions, values) of the metrics that the run has."""
    found: list[Series] = []
    for metric, label in lines:
        points = [(version, numbers[metric]) for version, numbers in steps.items() if metric in numbers]
        if points:
            found.append((label, [version for version, _ in points], [value for _, value in points]))
    return found


def _unbroken(versions: Sequence[int]) -> list[slice]:
    """Stretches of consecutive steps. Only they get a line: between two evaluations nothing is known."""
    breaks = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1] + 1]
    return [slice(start, stop) for start, stop in zip([0, *breaks], [*breaks, len(versions)], strict=True)]


def _plot(axes: Any, series: Series, *, colour: str) -> None:
    label, versions, values = series
    parts = _unbroken(versions)
    marker = "o" if any(part.stop - part.start == 1 for part in parts) else None
    for part in parts:
        axes.plot(versions[part], values[part], color=colour, marker=marker, markersize=4, linewidth=1.4, label=label)
        label = None  # one entry in the legend


def _page(panels: Sequence[tuple[str, Sequence[Series]]], *, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_columns = min(len(panels), 3)
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(4.5 * num_columns, 3.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, lines) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        for number, series in enumerate(lines):
            _plot(axes, series, colour=f"C{number}")
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
