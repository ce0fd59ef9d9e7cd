"""Search over recorded trajectories by the fields of a form, the newest first. Each answer says how far it searched."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request

from deploy.viewer import fleet
from deploy.viewer.looking import Place, Wanted, look
from deploy.viewer.page import asked_number, asked_whole_number, page
from deploy.viewer.runs import Run
from deploy.viewer.steps import recorded_steps

_FIELDS = ("text", "min_reward", "max_reward", "worker", "staleness", "steps", "environment", "failed_stage")
_MOST_CHARACTERS = 200


def search(run: Run, request: Request) -> dict[str, Any]:
    """The query has the form's fields: `steps` is `12` or `10-20`. `from` is the place where the previous answer stopped."""
    asked = {name: request.query_params.get(name, "")[:_MOST_CHARACTERS] for name in _FIELDS}
    wanted = _wanted(request, asked)
    steps = recorded_steps(run)
    answer = look(run, wanted, steps, start=_start(request))
    further = None
    if answer.further:
        place = f"{answer.further.step}.{answer.further.num_groups}"
        further = urlencode({**{name: value for name, value in asked.items() if value}, "from": place})
    workers = {
        actor["name"]
        for actor in fleet.actors(run.events(), run.status(), state="")
        if actor["name"].startswith("rollout")
    }
    return {
        **asdict(answer),
        "asked": asked,
        "num_recorded": len(steps),
        "further": further,
        "workers": sorted(workers),
        "environments": _environments(run.config()),
    }


def _environments(config: Mapping[str, Any]) -> list[str]:
    """Names of the run's environments, as in its trajectories; none for a run of single turns."""
    if named := config.get("environments"):
        return sorted(named)
    setting = config.get("environment") or "single_turn"
    name = str(setting.get("name") if isinstance(setting, dict) else setting)
    label = name.rpartition(":")[2].rpartition(".")[2]
    return [] if label == "single_turn" else [label]


def _wanted(request: Request, asked: dict[str, str]) -> Wanted:
    first, last = _steps(asked["steps"].strip())
    return Wanted(
        text=asked["text"],
        min_reward=asked_number(request, "min_reward"),
        max_reward=asked_number(request, "max_reward"),
        worker=asked["worker"].strip(),
        staleness=asked_whole_number(request, "staleness"),
        environment=asked["environment"].strip(),
        failed_stage=asked["failed_stage"].strip(),
        first_step=first,
        last_step=last,
    )


def _steps(text: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    if found := re.fullmatch(r"(\d{1,12})(?:\s*[-–]\s*(\d{1,12}))?", text):
        return int(found[1]), int(found[2] or found[1])
    raise HTTPException(400, f"steps={text[:40]!r} is neither a step, such as 12, nor a range, such as 10-20")


def _start(request: Request) -> Place | None:
    found = re.fullmatch(r"(\d{1,12})\.(\d{1,12})", request.query_params.get("from", ""))
    return Place(step=int(found[1]), num_groups=int(found[2])) if found else None


ROUTES = page("/run/{run}/search", search, template="search.html")
