"""News of a run as server-sent events, continued from the browser's last message."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from cluster.contracts.errors import TreadwheelError
from deploy.viewer import fleet
from deploy.viewer.page import run_of
from deploy.viewer.runs import Run, Standing
from deploy.viewer.series import facts

_ALIVE_EVERY_S = 10.0
"""Seconds between comments, without which a proxy would close the connection of a quiet run."""


async def follow(request: Request) -> StreamingResponse:
    """Messages: `news` with new `steps` and `marks` and the current `actors`, `facts` and `state`; `again` if earlier lines have changed,
    so that the page must reload its data; `away` with a `reason` while the run cannot be read."""
    run = await asyncio.to_thread(run_of, request, request.path_params["run"])
    after = request.headers.get("last-event-id") or request.query_params.get("after", "")
    # Without the header nginx buffers 4 kB of a response before it sends any.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_messages(run, after), media_type="text/event-stream", headers=headers)


async def _messages(run: Run, after: str) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    quiet_s, before, seen = 0.0, "", None
    while True:
        if new := await asyncio.to_thread(_new, run, after, seen):
            name, news, after, seen = new
            message = f"event: {name}\ndata: {json.dumps(news)}\n\n"
            if name == "again" or message != before:
                before, quiet_s = message, 0.0
                yield f"id: {after}\n{message}"
        if quiet_s >= _ALIVE_EVERY_S:
            quiet_s = 0.0
            yield ": alive\n\n"
        await asyncio.sleep(run.poll_s)
        quiet_s += run.poll_s


def _new(run: Run, after: str, seen: Standing | None) -> tuple[str, dict[str, Any], str, Standing | None] | None:
    """As `since`, with the run's standing; None if it is still `seen`."""
    try:
        if (standing := run.standing()) == seen:
            return None
        name, news, now = since(run, after)
    except TreadwheelError as error:  # a store that does not answer now may answer later
        return "away", {"reason": str(error)}, after, None
    return name, news, now, standing if name == "news" else None


def since(run: Run, after: str) -> tuple[str, dict[str, Any], str]:
    """(kind of message, content, mark from which to continue). Without a mark of the current generation: `again`."""
    now = run.mark()
    found = re.fullmatch(r"(-?\d+)/(\d+)/([\d.]+)", after)
    if found is None or found[3] != now.rpartition("/")[2]:
        return "again", {}, now
    last, num_events, _ = now.split("/")
    steps = [line for line in run.metrics() if int(found[1]) < line["policy_version"] <= int(last)]
    events, state = fleet.versioned(run.events()), run.state()
    actors = fleet.actors(events, run.status(), state=state)
    news = {
        "steps": steps,
        "marks": fleet.marks(events[int(found[2]) : int(num_events)]),
        "actors": fleet.without_spans(actors),
        "facts": facts(run.metrics(), run.config(), state=state),
        "state": state,
    }
    return "news", news, now
