"""All runs at a glance."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deploy.viewer.page import render
from deploy.viewer.pages.overview import facts
from deploy.viewer.runs import Run


def runs(found: list[Run]) -> dict[str, Any]:
    return {"runs": [_row(run) for run in found]}


def _row(run: Run) -> dict[str, Any]:
    state = run.state()
    return {"name": run.name, "place": run.place, "state": state, **facts(run.metrics(), run.config(), state=state)}


def _show(request: Request) -> Response:
    return render(request, "runs.html", run=None, here="runs", data=runs(request.app.state.runs.all()))


def _show_json(request: Request) -> Response:
    return JSONResponse(runs(request.app.state.runs.all()))


ROUTES = [Route("/runs.json", _show_json), Route("/runs", _show)]
