"""The overview of a run: live curves, events, state of actors. And the front page: a redirect to the only run, or to the list of runs."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from deploy.viewer import fleet, series
from deploy.viewer.page import page
from deploy.viewer.runs import Run

_LAST_EVENTS = 200


def overview(run: Run, request: Request) -> dict[str, Any]:
    mark = run.mark()  # first: news that arrive meanwhile are then sent twice, and never lost
    steps, events, status, state = run.metrics(), run.events(), run.status(), run.state()
    config = run.config()
    marks = fleet.marks(fleet.versioned(events))
    found = fleet.actors(events, status, state=state)
    return {
        "run": run.name,
        "place": run.place,
        "state": state,
        "mark": mark,
        "facts": series.facts(steps, config, state=state),
        "panels": series.panels(steps, config),
        "marks": [mark for mark in marks if mark["kind"] not in ("started", "checkpoint")][-_LAST_EVENTS:],
        "events": marks[-_LAST_EVENTS:][::-1],
        "actors": fleet.without_spans(found),
        "now": time.time(),
    }


def front(request: Request) -> Response:
    """Redirects to the only run, or to the list of runs."""
    runs, root = request.app.state.runs, request.scope.get("root_path", "")
    found = runs.all()
    return RedirectResponse(f"{root}/run/{found[0].name}/" if runs.is_one else f"{root}/runs", status_code=307)


ROUTES = [Route("/", front), *page("/run/{run}/", overview, template="overview.html")]
