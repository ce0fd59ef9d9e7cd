"""Tools for all pages: their two routes, templates, the run of a request, query parameters, and numbers as text."""

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
from cluster.record.storage import finite
from deploy.viewer import pages
from deploy.viewer.runs import Run

HERE = Path(__file__).parent
Data = Callable[[Any, Request], Mapping[str, Any]]
"""Makes a page's data from its run, or from None on a page without a run."""
NAVIGATION = (
    ("overview", "", "Overview"),
    ("step", "step", "Steps"),
    ("rewards", "rewards", "Rewards"),
    ("ledger", "ledger", "Ledger"),
    ("actors", "actors", "Actors"),
    ("weights", "weights", "Weights"),
    ("search", "search", "Search"),
)
"""(module of the page, its path below the run's, its name)."""


class _Json(JSONResponse):
    """JSON of any text and number. Prompts' columns and error messages may have lone surrogates, which are replaced. Sums of very large
    numbers, which overflow, become null."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return writable(text).encode()


def page(path: str, data: Data, *, template: str, here: str | None = None) -> list[Route]:
    """Routes of the page at `path` ("/run/{run}/...", or a path without a run) and of its JSON at the same path with `.json`. `here` is the
    page's entry in the navigation; by default its module's."""
    here = here or data.__module__.rpartition(".")[2]

    def show(request: Request) -> Response:
        run = named_run(request)
        return render(request, template, run=run, here=here, data=data(run, request))

    def show_json(request: Request) -> Response:
        return _Json(data(named_run(request), request))

    # JSON first: "{step}" would match "12.json".
    json_path = f"{path}index.json" if path.endswith("/") else f"{path}.json"
    return [Route(json_path, show_json), Route(path, show)]


def named_run(request: Request) -> Run | None:
    """The run that the path names; None if it names none. Raises as `run_of`."""
    return run_of(request, request.path_params["run"]) if "run" in request.path_params else None


def run_of(request: Request, name: str) -> Run:
    """Raises HTTPException 404 for an unknown run."""
    run = request.app.state.runs.get(name)
    if run is None:
        raise HTTPException(404, f"there is no run {name!r} below the folders that this viewer was given")
    return run


def render(
    request: Request, template: str, *, run: Run | None, here: str, status: int = 200, **context: Any
) -> Response:
    content = _TEMPLATES.get_template(template).render(
        root=request.scope.get("root_path", ""),
        run=run,
        runs=[each.name for each in request.app.state.runs.all()],
        here=here,
        navigation=NAVIGATION,
        status=status,
        **context,
    )
    return HTMLResponse(writable(content), status_code=status, headers={"Cache-Control": "no-store"})


def routes() -> list[Route]:
    """Routes of all files in pages/."""
    found = (importlib.import_module(f"{pages.__name__}.{info.name}") for info in pkgutil.iter_modules(pages.__path__))
    return [route for module in found for route in module.ROUTES]


def asked_number(request: Request, name: str) -> float | None:
    """The number in the query; None if it has none. Raises HTTPException 400 for a value that is not a finite number."""
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name}={text[:40]!r} is not a number")
    return value


def asked_whole_number(request: Request, name: str) -> int | None:
    """As `asked_number`, for a whole number."""
    value = asked_number(request, name)
    if value is not None and (value != int(value) or abs(value) > 1e15):
        raise HTTPException(400, f"{name}={value:g} is not a whole number")
    return None if value is None else int(value)


def templates(folder: Path, **options: Any) -> Environment:
    """The templates of a folder. They get the filters `number`, `when` and `seconds`, and an unknown name in them is an error."""
    made = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, **options)
    made.filters |= {"number": number, "when": when, "seconds": seconds}
    return made


def number(value: float | None) -> str:
    """At most four significant digits; whole numbers in full; a dash for None."""
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
    """In UTC. Scripts of the viewer replace it by the reader's local time."""
    return "–" if timestamp is None else f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S} UTC"


_TEMPLATES = templates(HERE / "templates")
