"""The list of all runs, and the comparison of several: curves, settings, passports."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cluster.contracts.errors import TreadwheelError
from cluster.contracts.settings import flat, in_words
from deploy.reports.passport import is_mathematical
from deploy.viewer.page import page, run_of
from deploy.viewer.runs import Run
from deploy.viewer.series import compared, facts, spark, values

_MOST = 6
"""Most runs in one comparison: there are so many distinguishable colours."""
_MOST_CHARACTERS = 200
"""Characters of the reason why a run cannot be read."""
_ALWAYS_DIFFERENT = ("run_dir",)
"""Settings that a comparison leaves out."""


def runs(found: Sequence[Run]) -> dict[str, Any]:
    return {"runs": [_row(run) for run in found], "most": _MOST}


def _row(run: Run) -> dict[str, Any]:
    """The row of a run. A run that cannot be read gets one too, with the reason."""
    try:
        return _made(run, run.glance(), run.config(), state=run.state())
    except (TreadwheelError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {**_made(run, [], {}, state="damaged"), "reason": " ".join(str(error).split())[:_MOST_CHARACTERS]}


def _made(run: Run, steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, state: str) -> dict[str, Any]:
    row = {"name": run.name, "place": run.place, "state": state, "reason": None}
    return {**row, "spark": spark(values(steps, "reward/mean")), **facts(steps, config, state=state)}


def comparison(found: Sequence[Run]) -> dict[str, Any]:
    """Compares at least one run. Lists the settings and passport entries that differ; None: the run does not have the entry."""
    configs = [dict(flat(run.config())) for run in found]
    passports = differences([dict(flat(run.passport())) for run in found])
    return {
        "runs": [run.name for run in found],
        "panels": compared({run.name: run.metrics() for run in found}),
        "settings": [row for row in differences(configs) if row["name"] not in _ALWAYS_DIFFERENT],
        "mathematics": [row for row in passports if is_mathematical(row["name"])],
        "tools": [row for row in passports if not is_mathematical(row["name"])],
        "without_passport": [run.name for run in found if not run.passport()],
    }


def differences(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Names whose values are not all equal, with the value in each of `entries`, or None."""
    names = sorted({name for values_of in entries for name in values_of})
    rows = [{"name": name, "values": [in_words(values_of.get(name)) for values_of in entries]} for name in names]
    return [row for row in rows if len({json.dumps(value, sort_keys=True) for value in row["values"]}) > 1]


def _asked(request: Request) -> list[Run]:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 1 <= len(names) <= _MOST:
        raise HTTPException(400, f"{len(names)} runs to compare; choose 2 to {_MOST} on the list of runs")
    return [run_of(request, name) for name in names]


ROUTES = [
    *page("/runs", lambda _, request: runs(request.app.state.runs.all()), template="runs.html"),
    *page("/compare", lambda _, request: comparison(_asked(request)), template="compare.html"),
]
