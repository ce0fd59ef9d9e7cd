"""One group: its prompt, and its completions side by side, the best reward first."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from starlette.requests import Request

from deploy.viewer.page import page
from deploy.viewer.runs import Run
from deploy.viewer.steps import Group, RecordedStep, Trajectory, neighbours, open_step

_MOST_CHARACTERS = 20_000
"""Characters shown of one completion; the trajectory's page shows all."""
_WORTH_FOLDING = 40
"""A common beginning of at least so many characters is shown only once."""


def group(run: Run, request: Request) -> dict[str, Any]:
    step, ticket = request.path_params["step"], request.path_params["ticket"]
    return {"run": run.name, **group_data(open_step(run, step), ticket)}


def group_data(step: RecordedStep, ticket: int) -> dict[str, Any]:
    """The group with its texts."""
    found, texts = step.group(ticket), step.completions(ticket)
    folded = common_beginning(list(texts.values()))
    data = told_of(step, found)
    for each in data["trajectories"]:
        text = texts[each["sample_index"]]
        each["text"] = text[len(folded) : len(folded) + _MOST_CHARACTERS]
        each["num_left_out"] = max(0, len(text) - len(folded) - _MOST_CHARACTERS)
    return {**data, "folded": folded}


def told_of(step: RecordedStep, found: Group) -> dict[str, Any]:
    """The group without its completions: its place, its prompt, and the results of each trajectory."""
    before, after = neighbours(step.tickets, found.ticket_index)
    text, columns = step.prompt(found.ticket_index)
    return {
        "step": step.step,
        "ticket": found.ticket_index,
        "place": step.tickets.index(found.ticket_index) + 1,
        "num_groups": len(step.tickets),
        "before": before,
        "after": after,
        "prompt_id": found.prompt_id,
        "seconds": found.seconds,
        "prompt": {
            "text": text,
            "messages": _conversation(columns.get("messages")),
            "columns": {name: value for name, value in columns.items() if name != "messages"},
        },
        "trajectories": [asdict(each) for each in sorted(found.trajectories, key=_best_first)],
    }


def common_beginning(texts: Sequence[str]) -> str:
    """The common beginning of all texts, up to the end of a word; "" if it is too short to fold, or there is only one text."""
    # The common beginning of the first and the last in alphabetical order is that of all.
    same = takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False))
    shared = "".join(letter for letter, _ in same) if len(texts) > 1 else ""
    if shared not in texts:
        shared = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    return shared if len(shared) >= _WORTH_FOLDING else ""


def _conversation(messages: Any) -> list[dict[str, Any]] | None:
    """None for content that is not a conversation: imported trajectories may have any column of that name."""
    is_one = isinstance(messages, list) and all(isinstance(each, dict) and "role" in each for each in messages)
    return messages if is_one else None


def _best_first(trajectory: Trajectory) -> tuple[float, int]:
    """Sort key: trajectories without a reward come last."""
    return (math.inf if trajectory.reward is None else -trajectory.reward, trajectory.sample_index)


ROUTES = page("/run/{run}/step/{step:int}/group/{ticket:int}", group, template="group.html", here="step")
