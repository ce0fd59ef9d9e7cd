"""Distributions of rewards and their components over the trajectories of a step, and from step to step."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from cluster.contracts.errors import DataError, StorageError
from deploy.viewer.dots import Axis, mean_and_spread, percent
from deploy.viewer.runs import Run
from deploy.viewer.steps import RecordedStep, open_step

REWARD = "reward"
Number = TypeVar("Number", int, float)
_MOST_TRAJECTORIES = 40_000
"""Most trajectories on one page, over all its steps."""
MOST_STEPS = 40
_MOST_VALUES = 400
"""Values kept of each step and component: evenly spaced in sorted order."""
NUM_ROWS = 16
"""Rows of cells in the picture of a component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The values of one component in one step."""

    num: int
    """Trajectories that have the component."""
    num_without: int
    values: tuple[float, ...]
    """Sorted and thinned."""
    mean: float
    std: float
    smallest: tuple[int, int]
    """Ticket and sample of the trajectory with the smallest value."""
    largest: tuple[int, int]


def scores_of(run: Run, step: int) -> Mapping[str, Scores]:
    """By component; the reward itself is `reward`. Empty if the step's trajectories were removed or are damaged. A recorded step does not
    change, so it is read once."""
    record = run.chain().record(step)
    try:
        return _of(open_step(run, step)) if record is None else _read_once(run, step, record.trajectories_digest)
    except (HTTPException, DataError, StorageError):  # the step's own page says why
        return {}


@functools.lru_cache(maxsize=512)
def _read_once(run: Run, step: int, digest: str) -> Mapping[str, Scores]:
    return _of(open_step(run, step))


def _of(recorded: RecordedStep) -> Mapping[str, Scores]:
    found: dict[str, list[tuple[float, int, int]]] = {}
    num = 0
    for ticket in recorded.tickets:
        for row in recorded.columns(ticket, "sample_index", "reward", "reward_components").to_pylist():
            num += 1
            components = [(name, value) for name, value in row["reward_components"] if name != REWARD]
            for name, value in ((REWARD, row["reward"]), *components):
                if value is not None:
                    found.setdefault(name, []).append((value, ticket, row["sample_index"]))
    return {name: _scores(values, num) for name, values in found.items()}


def _scores(found: Sequence[tuple[float, int, int]], num_trajectories: int) -> Scores:
    ordered = sorted(found)
    values = [value for value, _, _ in ordered]
    return Scores(
        num=len(values),
        num_without=num_trajectories - len(values),
        values=tuple(_evenly(values, _MOST_VALUES)),
        smallest=ordered[0][1:],
        largest=ordered[-1][1:],
        **mean_and_spread(values),
    )


def chosen(steps: Sequence[int], *, num_trajectories: int, most: int = MOST_STEPS) -> list[int]:
    """At most `most` evenly spaced steps, including the first and the last; fewer if steps have very many trajectories."""
    return _evenly(steps, max(min(most, _MOST_TRAJECTORIES // max(num_trajectories, 1)), 2))


def _evenly(found: Sequence[Number], most: int) -> list[Number]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(found) <= most:
        return list(found)
    return [found[round(place * (len(found) - 1) / (most - 1))] for place in range(most)]


def picture(by_step: Mapping[int, Scores], axis: Axis) -> list[dict[str, Any]]:
    """One column per step with its `mean` and its `cells`. A cell has the `share` of the step's values that lie in it, and the `level` of
    its colour, 1 to 8. Places are percentages from the left and from the top."""
    width = 100 / max(len(by_step), 1)
    return [
        {
            "step": step,
            "mean": scores.mean,
            "num": scores.num,
            "left": round(number * width, 3),
            "width": round(width, 3),
            "mean_at": percent(1 - axis.place(scores.mean)),
            "cells": _cells(scores.values, axis),
        }
        for number, (step, scores) in enumerate(by_step.items())
    ]


def _cells(values: Sequence[float], axis: Axis) -> list[dict[str, Any]]:
    return [
        {
            "top": percent(1 - (row + 1) / NUM_ROWS),
            "share": round(count / len(values), 4),
            "level": max(1, round(8 * (count / len(values)) ** 0.5)),
        }
        for row, count in enumerate(axis.counts(values, NUM_ROWS))
        if count
    ]
