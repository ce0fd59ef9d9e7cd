"""Curves as SVG: the coordinates of a panel's parts. A template writes the SVG, and a style sheet colours it for light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.reports.panels import Curve, Mark, Panel, Point, bound_shown, height, limits, spread, tick_words, ticks
from deploy.viewer.dots import round_numbers

WIDTH, HEIGHT = 400.0, 226.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 298.0, 10.0, 200.0
"""Edges of the plot; labels are to the right of it."""
_LABEL_GAP = 16.0
_LONGEST_LABEL = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    x: float
    y: float
    low: float | None
    """`low` and `high` are the ends of the error bar; None: the error is not known."""
    high: float | None
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    x: float
    y: float
    words: str
    color: int | None = None
    """None: the colour of bounds and axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    path: str
    """The `d` of a path."""
    color: int
    kind: str
    """`line`, `pale` or `mean`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    title: str
    unit: str
    words: str
    """The curves in words, for screen readers."""
    heights: tuple[Label, ...]
    steps: tuple[Label, ...]
    strokes: tuple[Stroke, ...]
    dots: tuple[tuple[int, Dot], ...]
    """(colour, dot)."""
    bound: float | None
    """The y of the bound."""
    labels: tuple[Label, ...]
    marks: tuple[tuple[float, Mark], ...]
    """(x, mark)."""


def drawing(panel: Panel, interruptions: Sequence[Mark], versions: tuple[int, int]) -> Drawing:
    """`versions` are the first and last step of all panels."""
    scale = _Scale(panel, versions)
    curves = panel.curves
    bound = bound_shown(panel)
    return Drawing(
        title=panel.title,
        unit=panel.unit,
        words="; ".join(map(_words, curves)) + (f"; {panel.bound[1]}" if panel.bound else ""),
        heights=tuple(
            Label(x=LEFT - 6, y=scale.y(value), words=tick_words(value, is_log=panel.is_log)) for value in ticks(panel)
        ),
        steps=tuple(
            Label(x=scale.x(step), y=BOTTOM + 18, words=f"{step:,.0f}")
            for step in round_numbers(versions[0], max(versions[1], versions[0] + 1), is_whole=True)
        ),
        strokes=tuple(stroke for curve in curves if curve.is_line for stroke in _strokes(curve, scale)),
        dots=tuple((curve.color, dot) for curve in curves if not curve.is_line for dot in _dots(curve, scale)),
        bound=bound and scale.y(bound[0]),
        labels=_labels(panel, scale),
        # The step that a run did not finish is on no axis.
        marks=tuple((scale.x(min(mark.step, versions[1])), mark) for mark in interruptions),
    )


class _Scale:
    """From steps and values to coordinates."""

    def __init__(self, panel: Panel, versions: tuple[int, int]) -> None:
        self._low, self._high = limits(panel)
        self._first, self._last = versions
        self._is_log = panel.is_log

    def x(self, step: float) -> float:
        share = (step - self._first) / max(self._last - self._first, 1)
        return round(LEFT + 4 + share * (RIGHT - LEFT - 8), 1)

    def y(self, value: float) -> float:
        share = height(value, self._low, self._high, is_log=self._is_log)
        return round(BOTTOM - share * (BOTTOM - TOP), 1)


def _strokes(curve: Curve, scale: _Scale) -> list[Stroke]:
    kind = "pale" if curve.is_long else "line"
    strokes = [Stroke(path=_path(curve.points, scale), color=curve.color, kind=kind)]
    if curve.mean:
        strokes.append(Stroke(path=_path(curve.mean, scale), color=curve.color, kind="mean"))
    return strokes


def _path(points: Sequence[Point], scale: _Scale) -> str:
    """A single point becomes a line of no length, whose round caps draw a dot."""
    places = [f"{scale.x(step)} {scale.y(value)}" for step, value in points]
    return "M" + "L".join(places if len(places) > 1 else places * 2)


def _dots(curve: Curve, scale: _Scale) -> list[Dot]:
    errors = curve.errors or (None,) * len(curve.points)
    return [
        Dot(
            x=scale.x(step),
            y=scale.y(value),
            low=None if error is None else scale.y(value - error),
            high=None if error is None else scale.y(value + error),
            words=f"step {step}: {value:.4g}" + (f" ± {error:.2g}" if error is not None else ""),
        )
        for (step, value), error in zip(curve.points, errors, strict=True)
    ]


def _labels(panel: Panel, scale: _Scale) -> tuple[Label, ...]:
    written: list[tuple[str, float, int | None]] = [
        (curve.label, scale.y(curve.end), curve.color) for curve in panel.curves
    ]
    if bound := bound_shown(panel):
        written.append((bound[1], scale.y(bound[0]), None))
    places = spread([y for _, y, _ in written], gap=_LABEL_GAP, low=TOP, high=BOTTOM)
    return tuple(
        Label(x=RIGHT + 8, y=y + 4, words=_short(words), color=color)
        for (words, _, color), y in zip(written, places, strict=True)
    )


def _words(curve: Curve) -> str:
    (first, start), (last, end) = curve.points[0], curve.points[-1]
    if first == last:
        return f"{curve.label}: {end:.4g} in step {last}"
    return f"{curve.label}: {start:.4g} in step {first}, {end:.4g} in step {last}"


def _short(words: str) -> str:
    return words if len(words) <= _LONGEST_LABEL else f"{words[: _LONGEST_LABEL - 1]}…"
