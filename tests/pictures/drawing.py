"""A run as an SVG that is legible on light and on dark pages: one panel a metric, the run in colour, others thin behind it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from deploy.reports.panels import spread
from tests.pictures.numbers import Column
from tests.pictures.runs import STANDS_FOR

_LINE, _THIN, _TEXT = "#d9601a", "#8a94a0", "#7d8791"
"""Each has enough contrast with white and with near black."""
_COLUMNS = 3
_POINTS = "eval/"
"""Metrics that begin so are measured at a few steps only."""
_MAGNITUDES = ("learner/kl_", "learner/gradient_norm", "mismatch/")
"""Metrics that begin so may be logarithmic; a share or a reward is not."""
_LABEL_GAP = 0.11
"""Of an axis' height, between two labels."""
_FAR, _DECADES = 30, 1e7
"""From this ratio on an axis is logarithmic; it shows at most so much."""


def draw(
    run: Mapping[str, Column], others: Mapping[str, Mapping[str, Column]], *, shown: Sequence[str], file: Path
) -> None:
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": file.name, "font.size": 9}):
        num_rows = math.ceil(len(shown) / _COLUMNS)
        figure = Figure(figsize=(9.0, 2.2 * num_rows), layout=ConstrainedLayoutEngine(wspace=0.05))
        FigureCanvasSVG(figure)
        for place, metric in enumerate(shown, start=1):
            axes = figure.add_subplot(num_rows, _COLUMNS, place)
            there = STANDS_FOR.get(metric, metric)
            behind = {name: _until(max(run[metric]), other[there]) for name, other in others.items() if there in other}
            _draw(axes, metric, behind, run[metric])
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


def _draw(axes: Axes, metric: str, others: Mapping[str, Column], own: Column) -> None:
    columns = (own, *others.values())
    is_log = metric.startswith(_MAGNITUDES) and _are_far_apart(columns)
    lowest = min(value for column in columns for value in column.values())
    highest = max(value for column in columns for value in column.values())
    if is_log:
        axes.set_yscale("log")
        axes.set_ylim(max(lowest, highest / _DECADES), highest * 2)
    else:
        axes.set_ylim(min(0.0, lowest), highest * 1.08 or 1.0)
    marker = "o" if metric.startswith(_POINTS) else None
    for column in others.values():
        axes.plot(*_line(column), color=_THIN, linewidth=1.0, marker=marker, markersize=3, clip_on=is_log)
    axes.plot(*_line(own), color=_LINE, linewidth=2.0, marker=marker, markersize=4, clip_on=is_log)
    axes.set_xlim(0, max(own))
    axes.set_title(metric, fontsize=9, loc="left", color=_TEXT, family="monospace")
    axes.set_xlabel("step", color=_TEXT, fontsize=8)
    axes.tick_params(colors=_TEXT, labelsize=8, length=0, which="both")
    axes.grid(axis="y", color=_THIN, alpha=0.3, linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_THIN)
    if others:
        _label(axes, {"this run": (own, _LINE)} | {name: (column, _THIN) for name, column in others.items()})


def _until(last: int, column: Column) -> Column:
    return {step: value for step, value in column.items() if step <= last}


def _line(column: Column) -> tuple[list[int], list[float]]:
    return list(column), list(column.values())


def _label(axes: Axes, lines: Mapping[str, tuple[Column, str]]) -> None:
    """Beside the ends of the lines, so that no legend has to be looked up."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [float(to_axes.transform((0, column[max(column)]))[1]) for column, _ in lines.values()]
    places = spread(ends, gap=_LABEL_GAP, low=0.02, high=0.98)
    for (name, (_, color)), place in zip(lines.items(), places, strict=True):
        axes.text(
            1.02, place, name.replace("_", " "), color=color, fontsize=8, va="center", transform=axes.transAxes
        )  # fmt: skip


def _are_far_apart(columns: Sequence[Column]) -> bool:
    """Whether one run's values are far beyond another's."""
    middles = [statistics.median(column.values()) for column in columns]
    return min(middles) > 0 and max(middles) > _FAR * min(middles)
