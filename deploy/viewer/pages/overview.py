"""A run at a glance: curves that grow, what happened, who is well. And the front page, which is this one where there is one run."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from deploy.viewer import fleet, live, series
from deploy.viewer.page import page
from deploy.viewer.runs import Run, latest

_LAST_EVENTS = 200


def overview(run: Run, request: Request) -> dict[str, Any]:
    mark = live.mark(run)  # first: what comes meanwhile is told again, and never left out
    steps, events, status, state = run.metrics(), run.events(), run.status(), run.state()
    config = run.config()
    marks = fleet.marks(events)
    found = fleet.actors(events, status, state=state)
    return {
        "run": run.name,
        "place": run.place,
        "state": state,
        "mark": mark,
        "poll_s": run.poll_s,
        "facts": facts(steps, config, state=state),
        "panels": series.panels(steps, config),
        "marks": [mark for mark in marks if mark["kind"] not in ("started", "checkpoint")][-_LAST_EVENTS:],
        "events": marks[-_LAST_EVENTS:][::-1],
        "actors": [{name: value for name, value in actor.items() if name != "spans"} for actor in found],
        "now": time.time(),
    }


def facts(steps: list[dict[str, Any]], config: dict[str, Any], *, state: str) -> dict[str, Any]:
    """Numbers beside the name of the run; None for one that it has not."""
    numbers = latest(steps)
    done = steps[-1]["policy_version"] if steps else 0
    recent = [seconds for _, seconds in series.values(steps[-20:], "time/step_s")]
    step_s = sum(recent) / len(recent) if recent else None
    wanted = config.get("num_steps")
    return {
        "step": done,
        "num_steps": wanted,
        "model": (config.get("model") or {}).get("path"),
        "reward": numbers.get("reward/mean"),
        "eval": numbers.get("eval/accuracy"),
        "step_s": step_s,
        "left_s": step_s * (wanted - done) if step_s and wanted and state == "running" else None,
        "sampling": numbers.get("speed/sampling_tokens_per_s"),
        "learning": numbers.get("speed/learning_tokens_per_s"),
        "staleness": numbers.get("staleness/max"),
        "bound": (config.get("buffer") or {}).get("max_off_policy_steps"),
        "last_step_at": numbers.get("time"),
    }


def front(request: Request) -> Response:
    """The one run, or the list of them."""
    runs, root = request.app.state.runs, request.scope.get("root_path", "")
    found = runs.all()
    return RedirectResponse(f"{root}/run/{found[0].name}/" if runs.is_one else f"{root}/runs", status_code=307)


ROUTES = [Route("/", front), *page("/run/{run}/", overview, template="overview.html")]
