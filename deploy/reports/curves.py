"""curves.png: a run on one page, from its metrics.jsonl."""

import io
import math
from collections.abc import Mapping, Sequence

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
    panels = [(title, found) for title, wanted in _PANELS if (found := curves(steps, wanted))]
    if not panels:
        return False
    directory.write_file(NAME, _page(panels, range(min(steps), max(steps) + 1), title=directory.url))
    return True


def curves(steps: Mapping[int, Mapping[str, float]], wanted: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
    """By label, a value for every policy version, of the metrics that the run has.

    NaN, where a line breaks, for a version without one: between two evaluations nothing is known.
    """
    versions = range(min(steps, default=0), max(steps, default=-1) + 1)
    return {
        label: [steps.get(version, {}).get(metric, math.nan) for version in versions]
        for metric, label in wanted
        if any(metric in numbers for numbers in steps.values())
    }


def _marker(values: Sequence[float]) -> str | None:
    """A value alone between two breaks has no line to be seen by."""
    known = [False, *(not math.isnan(value) for value in values), False]
    return "o" if any(known[i - 1 : i + 2] == [False, True, False] for i in range(1, len(known) - 1)) else None


def _page(panels: Sequence[tuple[str, Mapping[str, list[float]]]], versions: Sequence[int], *, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_columns = min(len(panels), 3)
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(4.5 * num_columns, 3.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, lines) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        for label, values in lines.items():
            axes.plot(versions, values, marker=_marker(values), markersize=4, linewidth=1.4, label=label)
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
