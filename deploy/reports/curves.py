"""curves.png: a run on one page, from its metrics.jsonl and events.jsonl."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.record.run_directory import CURVES, EVENTS, RunDirectory
from deploy.reports import panels
from deploy.reports.panels import Curve, Mark, Panel
from deploy.viewer.dots import round_numbers
from deploy.viewer.fleet import versioned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#0b6e7a", "#c05600", "#0060a8", "#a8437f", "#7a6a00", "#4b4fa8")
"""Okabe and Ito's colours, darkened for white paper; colour-blind readers can tell them apart."""
_INK, _SOFT, _LINE, _WARN, _BAD = "#16202a", "#566472", "#dde2e7", "#8a5a00", "#c4271b"
_LABEL_GAP = 0.085
"""Smallest distance between two labels, as a share of the axis' height."""


def draw(directory: RunDirectory, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Writes curves.png from the lines of metrics.jsonl; False if there is nothing to draw yet."""
    shown = panels.panels(steps, directory.settings())
    if not shown:
        return False
    interruptions = panels.marks(versioned(directory.read_json_lines(EVENTS)))
    title = f"{directory.name}, {steps[-1]['policy_version']} steps"
    directory.write_file(CURVES, page(shown, interruptions, title=title))
    return True


def page(shown: Sequence[Panel], interruptions: Sequence[Mark], *, title: str) -> bytes:
    """The panels as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    num_columns = min(len(shown), 3)
    num_rows = math.ceil(len(shown) / num_columns)
    figure = Figure(
        figsize=(5.0 * num_columns, 2.9 * num_rows + 0.7),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    for place, panel in enumerate(shown, start=1):
        _draw_panel(figure.add_subplot(num_rows, num_columns, place), panel, interruptions, panels.steps_of(shown))
    figure.suptitle(_plain(title), fontsize=12, fontweight="bold", color=_INK, x=0.01, ha="left")
    if key := _key(shown, interruptions):
        figure.supxlabel(key, fontsize=8.5, color=_SOFT, x=0.01, ha="left")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()


def _draw_panel(axes: "Axes", panel: Panel, interruptions: Sequence[Mark], versions: tuple[int, int]) -> None:
    low, high = panels.limits(panel)
    first, last = versions
    if panel.is_log:
        axes.set_yscale("log")
    room = max(last - first, 1) * 0.015
    axes.set(xlim=(first - room, max(last, first + 1) + room), ylim=(low, high))
    axes.set_title(panel.title, fontsize=10.5, fontweight="bold", color=_INK, loc="left")
    axes.set_title(panel.unit, fontsize=8.5, color=_SOFT, loc="right")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    heights = panels.ticks(panel)
    axes.set_yticks(heights, [panels.tick_words(height, is_log=panel.is_log) for height in heights])
    axes.set_yticks([], minor=True)
    axes.set_xticks(round_numbers(first, max(last, first + 1), is_whole=True))
    axes.tick_params(labelsize=8.5, colors=_SOFT, length=0)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for mark in interruptions:
        # The step that a run did not finish is on no axis.
        _draw_mark(axes, min(mark.step, last), is_failure=mark.is_failure)
    for curve in panel.curves:
        _draw_curve(axes, curve)
    _write_labels(axes, panel, low, high)


def _draw_mark(axes: "Axes", step: int, *, is_failure: bool) -> None:
    if is_failure:
        at_the_bottom = axes.get_xaxis_transform()
        axes.plot([step], [0.0], marker="^", color=_BAD, markersize=5, transform=at_the_bottom, clip_on=False)
    else:
        axes.axvline(step, color=_SOFT, linewidth=0.9, linestyle=(0, (2, 2)))


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    color = _COLORS[curve.color - 1]
    steps, values = zip(*curve.points, strict=True)
    if not curve.is_line:
        errors = [error or 0.0 for error in curve.errors] or None
        axes.errorbar(
            steps, values, yerr=errors, fmt="o", color=color, markersize=5.5, markeredgecolor="white", elinewidth=1.4,
            capsize=2.5, clip_on=False, zorder=4,
        )  # fmt: skip
        return
    width, alpha = (1.0, 0.3) if curve.is_long else (1.6, 1.0)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, values, color=color, linewidth=width, alpha=alpha, marker=marker)
    if curve.mean:
        axes.plot(*zip(*curve.mean, strict=True), color=color, linewidth=2.0)


def _write_labels(axes: "Axes", panel: Panel, low: float, high: float) -> None:
    """Writes each label beside the end of its line, instead of a legend."""
    written = [(curve.label, curve.end, _COLORS[curve.color - 1]) for curve in panel.curves]
    if bound := panels.bound_shown(panel):
        axes.axhline(bound[0], color=_WARN, linewidth=1.3, linestyle=(0, (5, 3)))
        written.append((bound[1], bound[0], _WARN))
    wanted = [panels.height(value, low, high, is_log=panel.is_log) for _, value, _ in written]
    places = panels.spread(wanted, gap=_LABEL_GAP, low=0.02, high=0.98)
    for (label, _, color), place in zip(written, places, strict=True):
        axes.text(1.02, place, _plain(label)[:24], color=color, fontsize=8.5, va="center", transform=axes.transAxes)


def _key(shown: Sequence[Panel], interruptions: Sequence[Mark]) -> str:
    curves = [curve for panel in shown for curve in panel.curves]
    kinds = {mark.is_failure for mark in interruptions}
    keys = (
        ("point: one measurement, bar: one standard error", any(not curve.is_line for curve in curves)),
        ("dotted vertical line: the run was resumed", False in kinds),
        ("▲ an actor failed and was replaced", True in kinds),
        ("strong line: the mean of the pale one", any(curve.mean for curve in curves)),
    )
    return "     ".join(text for text, is_there in keys if is_there)


def _plain(text: str) -> str:
    """Escapes dollar signs, between which matplotlib reads formulas."""
    return text.replace("$", r"\$")
