"""Rewards as dots on an axis, and as histograms. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PLACES = 60
"""Dots closer together than one part in `_PLACES` of the axis form a heap."""
_HEIGHT_PX = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    low: float
    high: float

    def place(self, value: float) -> float:
        """0 at the left end, 1 at the right one."""
        # Halves: the difference of two very large numbers would overflow.
        return min(max((value / 2 - self.low / 2) / (self.high / 2 - self.low / 2), 0.0), 1.0)

    def counts(self, values: Sequence[float], num_bins: int) -> list[int]:
        """Number of values in each of `num_bins` equal parts of the axis."""
        found = [0] * num_bins
        for value in values:
            found[min(int(self.place(value) * num_bins), num_bins - 1)] += 1
        return found

    def ticks(self) -> list[dict[str, float]]:
        """Round numbers on the axis, each as `value` and `percent`."""
        return [{"value": value, "percent": percent(self.place(value))} for value in round_numbers(self.low, self.high)]


def round_numbers(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """At most five round numbers between `low` and `high`, with `is_whole` only whole ones."""
    rough = high / 4 - low / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if is_whole else (1, 2, 2.5, 5, 10)
    width = next(unit * factor for factor in factors if unit * factor >= rough * (1 - 1e-9))
    width = max(1.0, width) if is_whole else width
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    # 3 * 0.1 is not 0.3.
    return [float(f"{number * width:.12g}") for number in range(first, last + 1)]


def axis_of(values: Sequence[float]) -> Axis:
    """An axis from the smallest to the largest value. Equal values are in its middle; without values it goes from 0 to 1."""
    if not values:
        return Axis(low=0.0, high=1.0)
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        room = abs(low) / 2 or 0.5
        return Axis(low=low - room, high=high + room)
    return Axis(low=low, high=high)


def percent(part: float) -> float:
    return round(part * 100, 2)


def dots(values: Sequence[float], axis: Axis) -> list[dict[str, float]]:
    """For each value: `percent` of its heap on the axis, and in pixels its offset in the heap, `dx` and `dy`, and its radius `r`."""
    heaps: defaultdict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        heaps[round(axis.place(value) * _PLACES)].append(index)
    placed: list[dict[str, float]] = [{} for _ in values]
    for heap in heaps.values():
        pitch = 8.0 if len(heap) <= 24 else 5.0
        num_rows = min(len(heap), int(_HEIGHT_PX // pitch))
        num_columns = math.ceil(len(heap) / num_rows)
        middle = sum(axis.place(values[index]) for index in heap) / len(heap)
        for number, index in enumerate(heap):
            column, row = divmod(number, num_rows)
            in_column = min(num_rows, len(heap) - column * num_rows)
            placed[index] = {
                "percent": percent(middle),
                "dx": (column - (num_columns - 1) / 2) * pitch,
                "dy": (row - (in_column - 1) / 2) * pitch,
                "r": round(pitch * 0.43, 2),
            }
    return placed


def histogram(values: Sequence[float], axis: Axis, *, num_bins: int = 24) -> list[dict[str, float]]:
    """The bars that have a value: `percent` of the left edge, `count`, and the height as a `share` of the highest bar."""
    counts = axis.counts(values, num_bins)
    most = max(counts, default=0)
    return [
        {"percent": percent(bar / num_bins), "count": count, "share": round(count / most, 4)}
        for bar, count in enumerate(counts)
        if count
    ]


def mean_and_spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation (divided by the number of values); None without values."""
    if not values:
        return {"mean": None, "std": None}
    mean = sum(values) / len(values)
    return {"mean": mean, "std": math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))}
