"""The numbers that are drawn, kept as one small CSV file a run."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.pictures.runs import NUMBERS

Column = dict[int, float]
"""Value by step; a step that was not measured has none."""


def kept(name: str) -> dict[str, Column]:
    """Metrics of a run."""
    with _file(name).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    metrics = [metric for metric in rows[0] if metric != "step"]
    return {metric: {int(row["step"]): float(row[metric]) for row in rows if row[metric]} for metric in metrics}


def keep(name: str, steps: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> None:
    """Of the lines of a metrics.jsonl, to four digits; a metric that the run has nowhere is left out."""
    metrics = [metric for metric in metrics if any(metric in step for step in steps)]
    with _file(name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", *metrics))
        for step in steps:
            values = (step.get(metric) for metric in metrics)
            writer.writerow((step["policy_version"], *("" if value is None else f"{value:.4g}" for value in values)))


def _file(name: str) -> Path:
    return NUMBERS / f"{name}.csv"
