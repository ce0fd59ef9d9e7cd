"""Rewards as dots on one axis, and how many of them fall where. Pure functions."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PLACES = 60
"""Dots that would lie nearer to each other than this part of the axis stand in one heap."""
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
        """How many of the values lie in each of so many equal parts."""
        found = [0] * num_bins
        for value in values:
            found[min(int(self.place(value) * num_bins), num_bins - 1)] += 1
        return found

    def ticks(self) -> list[dict[str, float]]:
        """Round numbers, each with its `value` and its place in `percent`."""
        return [{"value": value, "percent": percent(self.place(value))} for value in round_numbers(self.low, self.high)]


def round_numbers(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Five at most, between the two. With `is_whole` none is a fraction."""
    rough = high / 4 - low / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if is_whole else (1, 2, 2.5, 5, 10)
    width = next(unit * factor for factor in factors if unit * factor >= rough * (1 - 1e-9))
    width = max(1.0, width) if is_whole else width
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    # 3 * 0.1 is not 0.3.
    return [float(f"{number * width:.12g}") for number in range(first, last + 1)]


def axis_of(values: Sequence[float]) -> Axis:
    """From the smallest to the largest. Equal ones are in the middle; none are as between 0 and 1."""
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
    """For each value its heap on the axis in `percent`, its place in the heap `dx` and `dy`, and its radius `r`, in pixels."""
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
    """Bars over the axis, those without a value left out: `percent` of the left edge, `count`, and the height as a `share` of the
    highest."""
    counts = axis.counts(values, num_bins)
    most = max(counts, default=0)
    return [
        {"percent": percent(bar / num_bins), "count": count, "share": round(count / most, 4)}
        for bar, count in enumerate(counts)
        if count
    ]


def mean_and_spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation over the values themselves (not of a larger population); None where there are none."""
    if not values:
        return {"mean": None, "std": None}
    # Divided first: sums of very large numbers would overflow.
    number = len(values)
    mean = sum(value / number for value in values)
    return {"mean": mean, "std": math.hypot(*((value - mean) / math.sqrt(number) for value in values))}
