"""The viewer's web application and server."""

import os
import secrets
import signal
from collections.abc import Callable, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from cluster.contracts.errors import ConfigError, TreadwheelError
from deploy.listening import bound, in_url, is_loopback
from deploy.viewer import live, page
from deploy.viewer.runs import Run, Runs
from deploy.viewer.safety import LOOPBACK, Guard, name_of

_OURS = ("/run", "/static")


def create_app(
    roots: Sequence[str], *, token: str | None = None, hosts: Sequence[str] = (), root_path: str = ""
) -> Starlette:
    """Shows the runs at and below `roots`. Requests must name the host as loopback or one of `hosts`, and must have `token` if one is set.

    Raises ConfigError for a root that cannot be read and for an invalid `root_path`.
    """
    if root_path and (not root_path.startswith("/") or root_path.startswith(_OURS)):
        raise ConfigError(f"root_path={root_path!r} must begin with '/', and not with {' or '.join(_OURS)}")
    routes: list[BaseRoute] = [
        *page.routes(),
        Route("/run/{run}/live", live.follow),
        Mount("/static", StaticFiles(directory=page.HERE / "static"), name="static"),
    ]
    guard = Middleware(Guard, hosts=[*LOOPBACK, *hosts], token=token, root_path=root_path)
    app = Starlette(
        routes=routes, middleware=[guard], exception_handlers={HTTPException: _error, TreadwheelError: _error}
    )
    app.state.runs = Runs(roots)
    return app


def serve(
    roots: Sequence[str],
    *,
    host: str,
    port: int,
    trusted_hosts: Sequence[str],
    token: str | None,
    root_path: str,
    says: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT. Calls `says` with the URL. `port` 0 takes a free port.

    The viewer answers to loopback names, `host` and `trusted_hosts`. If other machines reach `host` and no `token` is given, it makes one
    and puts it into the URL; a given token is never printed. Raises ConfigError for an address that cannot be bound, for 0.0.0.0 or ::
    without a trusted host, for a trusted host that is not a host name, and as `create_app`.
    """
    if wrong := [each for each in trusted_hosts if name_of(in_url(each)) != each.lower() or not each]:
        raise ConfigError(f"--trusted-host {wrong[0]!r} is not a host name: leave out scheme, port and path")
    made: str | None = None
    if not is_loopback(host):
        if not trusted_hosts and host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"--host {host} is every address of this machine: say by which name browsers reach it, --trusted-host NAME"
            )
        made = None if token else secrets.token_urlsafe(24)
    app = create_app(roots, token=token or made, hosts=[host, *trusted_hosts], root_path=root_path)
    with bound(host, port) as listening:
        name = trusted_hosts[0] if trusted_hosts else host
        netloc = f"{in_url(name)}:{listening.getsockname()[1]}"
        says(f"viewing on http://{netloc}{root_path.rstrip('/')}/" + (f"?token={made}" if made else ""))
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1, server_header=False
        )
        # uvicorn raises the signal again after it has stopped; ignore it, so that the exit code is 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listening])


def token_of(variable: str | None) -> str | None:
    """The environment variable's value, stripped. Raises ConfigError if it is not set or empty."""
    if variable is None:
        return None
    if token := os.environ.get(variable, "").strip():
        return token
    raise ConfigError(f"--token-env {variable}: the environment has no such variable, or an empty one; set it")


def _error(request: Request, error: Exception) -> Response:
    status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, str(error))
    if request.url.path.endswith((".json", "/live")):
        return JSONResponse({"error": message}, status_code=status)
    return page.render(request, "error.html", run=_readable_run(request), here="", status=status, message=message)


def _readable_run(request: Request) -> Run | None:
    """The run of the request; None if there is none, or if its state cannot be read, which every page of a run shows."""
    try:
        run: Run | None = request.app.state.runs.get(request.path_params.get("run", ""))
        if run is not None:
            run.state()
    except TreadwheelError:
        return None
    return run
