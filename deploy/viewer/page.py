"""What every page is made with: its two routes, its template, and its run."""

import functools
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from actors.writable import writable
from deploy.viewer import pages
from deploy.viewer.runs import Run

HERE = Path(__file__).parent
Data = Callable[[Any, Request], Mapping[str, Any]]
"""Of a run, or of None on a page that is of none."""
NAVIGATION = (
    ("overview", "", "Overview"),
    ("step", "step", "Steps"),
    ("rewards", "rewards", "Rewards"),
    ("ledger", "ledger", "Ledger"),
    ("actors", "actors", "Actors"),
    ("weights", "weights", "Weights"),
    ("search", "search", "Search"),
)
"""Module of a page, its path below the run's, and its name."""


class _Json(JSONResponse):
    """Also of texts with halves of characters, which a prompt's columns and the messages of errors may have."""

    def render(self, content: Any) -> bytes:
        return writable(json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))).encode()


def page(path: str, data: Data, *, template: str, here: str | None = None) -> list[Route]:
    """The page at `path` ("/run/{run}/...", or one that is of no run), and its JSON at the same path with `.json`. `here` is its entry of
    the navigation, if that is another than its module's."""
    here = here or data.__module__.rpartition(".")[2]

    def show(request: Request) -> Response:
        run = named_run(request)
        return render(request, template, run=run, here=here, data=data(run, request))

    def show_json(request: Request) -> Response:
        return _Json(data(named_run(request), request))

    # JSON first: "{step}" would take "12.json".
    json_path = f"{path}index.json" if path.endswith("/") else f"{path}.json"
    return [Route(json_path, show_json), Route(path, show)]


def named_run(request: Request) -> Run | None:
    """That the path names; None where it names none. Raises HTTPException, as `run_of`."""
    return run_of(request, request.path_params["run"]) if "run" in request.path_params else None


def run_of(request: Request, name: str) -> Run:
    """Raises HTTPException for a run that is not there."""
    run = request.app.state.runs.get(name)
    if run is None:
        raise HTTPException(404, f"there is no run {name!r} below the folders that this viewer was given")
    return run


def render(
    request: Request, template: str, *, run: Run | None, here: str, status: int = 200, **context: Any
) -> Response:
    runs = request.app.state.runs
    content = (
        _environment()
        .get_template(template)
        .render(
            root=request.scope.get("root_path", ""),
            run=run,
            runs=[each.name for each in runs.all()],
            here=here,
            navigation=NAVIGATION,
            status=status,
            **context,
        )
    )
    return HTMLResponse(writable(content), status_code=status, headers={"Cache-Control": "no-store"})


def routes() -> list[Route]:
    """Of all files in pages/."""
    found = (importlib.import_module(f"{pages.__name__}.{info.name}") for info in pkgutil.iter_modules(pages.__path__))
    return [route for module in found for route in module.ROUTES]


def asked_number(request: Request, name: str) -> float | None:
    """What the query says; None where it says nothing. Raises HTTPException for what is no number."""
    said = request.query_params.get(name, "").strip()
    if not said:
        return None
    try:
        value = float(said)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name}={said[:40]!r} is no number")
    return value


def asked_whole_number(request: Request, name: str) -> int | None:
    """The same, where halves make no sense."""
    value = asked_number(request, name)
    if value is not None and (value != int(value) or abs(value) > 1e15):
        raise HTTPException(400, f"{name}={value:g} is no whole number")
    return None if value is None else int(value)


@functools.cache
def _environment() -> Environment:
    made = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)
    made.filters |= {"number": number, "when": when, "seconds": seconds}
    return made


def number(value: float | None) -> str:
    """Four digits that count, and no more than it takes; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):  # sums of very large numbers overflow
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """`850 ms`, `12.3 s`, `4 min 10 s`, `2 h 5 min`."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def when(timestamp: float | None) -> str:
    """In UTC; the browser shows its own time beside it."""
    return "–" if timestamp is None else f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S} UTC"
