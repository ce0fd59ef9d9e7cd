"""What is new in a run, as server-sent events: it goes on where the browser's last message ended."""

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
"""A comment, so that no proxy takes a quiet run for a dead connection."""


async def follow(request: Request) -> StreamingResponse:
    """`news` with new `steps` and `marks`, and how `actors`, `facts` and `state` are; `again` when the page's lines are no longer true:
    then it must load them anew; `away` while the run cannot be read, with the `reason`."""
    run = await asyncio.to_thread(run_of, request, request.path_params["run"])
    after = request.headers.get("last-event-id") or request.query_params.get("after", "")
    # nginx holds a response back until it has 4 kB of it, unless it is told not to.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_messages(run, after), media_type="text/event-stream", headers=headers)


async def _messages(run: Run, after: str) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    quiet_s, before, seen = 0.0, "", None
    while True:
        if told := await asyncio.to_thread(_new, run, after, seen):
            name, news, after, seen = told
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
    """As `since`, with how the run stands; None while it stands as it did when it was `seen`."""
    try:
        if (standing := run.standing()) == seen:
            return None
        name, news, now = since(run, after)
    except TreadwheelError as error:  # a store that does not answer; the next look may find it
        return "away", {"reason": str(error)}, after, None
    return name, news, now, standing if name == "news" else None


def since(run: Run, after: str) -> tuple[str, dict[str, Any], str]:
    """Kind of message, its content, and the mark to go on from. A mark that is not of this process's reading means `again`."""
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
