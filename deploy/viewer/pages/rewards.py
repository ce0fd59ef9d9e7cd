"""Rewards: distributions of each component over the steps, failures of judges with their messages, and examples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from cluster.contracts.types import PART_LEFT
from deploy.viewer import fleet, series
from deploy.viewer.chain import Chain, ticket_of
from deploy.viewer.dots import axis_of, percent
from deploy.viewer.page import page
from deploy.viewer.runs import Run
from deploy.viewer.scores import MOST_STEPS, NUM_ROWS, REWARD, Scores, chosen, picture, scores_of
from deploy.viewer.steps import num_readable, open_step, recorded_steps

_MOST_COMPONENTS, _MOST_FAILURES, _MOST_EXAMPLES = 12, 40, 5
_MOST_CHARACTERS = 160
_MOST_LINES = 6
"""Of one panel: there are so many distinguishable colours."""


def rewards(run: Run, request: Request) -> dict[str, Any]:
    steps = recorded_steps(run)
    by_step = _scores(run, steps)
    lines = run.metrics()
    newest = max(by_step, default=None)
    names = sorted({name for scores in by_step.values() for name in scores}, key=lambda name: (name != REWARD, name))
    found = failures(fleet.versioned(run.events()), run.chain(), set(steps))
    return {
        "run": run.name,
        "num_recorded": len(steps),
        "steps": sorted(by_step),
        "cell_height": percent(1 / NUM_ROWS),
        "components": [
            _component(name, {step: scores[name] for step, scores in by_step.items() if name in scores})
            for name in names[:_MOST_COMPONENTS]
        ],
        "num_left_out": max(len(names) - _MOST_COMPONENTS, 0),
        "examples": [] if newest is None else _examples(run, newest, by_step[newest], names[:_MOST_COMPONENTS]),
        "failures": [each for each in found if each["kind"] != PART_LEFT],
        "left_parts": [each for each in found if each["kind"] == PART_LEFT],
        "panels": _panels(lines),
    }


def _scores(run: Run, steps: Sequence[int]) -> dict[int, Mapping[str, Scores]]:
    if not steps:
        return {}
    newest = scores_of(run, steps[-1])
    size = max((scores.num + scores.num_without for scores in newest.values()), default=0)
    read = chosen(steps, num_trajectories=size, most=num_readable(run, steps[-1], most=MOST_STEPS))
    return {step: scores for step in read if (scores := scores_of(run, step))}


def _component(name: str, by_step: Mapping[int, Scores]) -> dict[str, Any]:
    axis = axis_of([end for scores in by_step.values() for end in (scores.values[0], scores.values[-1])])
    last = by_step[max(by_step)]
    numbers = {"num": last.num, "num_without": last.num_without, "mean": last.mean, "std": last.std}
    return {"name": name, "ticks": axis.ticks(), "columns": picture(by_step, axis), "last": numbers}


def _examples(run: Run, step: int, scores: Mapping[str, Scores], names: Sequence[str]) -> list[dict[str, Any]]:
    """The trajectories with the smallest and the largest value of each component in `step`."""
    recorded = open_step(run, step)
    examples: list[dict[str, Any]] = []
    for name in (name for name in names if name in scores):
        of = scores[name]
        for end, (ticket, sample), value in (
            ("lowest", of.smallest, of.values[0]),
            ("highest", of.largest, of.values[-1]),
        ):
            text = " ".join(recorded.completions(ticket)[sample][: 4 * _MOST_CHARACTERS].split())[:_MOST_CHARACTERS]
            place = {"step": step, "ticket": ticket, "sample": sample}
            examples.append({"name": name, "end": end, "value": value, **place, "text": text})
    return examples


def failures(events: Iterable[Mapping[str, Any]], chain: Chain, recorded: set[int]) -> list[dict[str, Any]]:
    """Failures of judges by kind, the most frequent first. Examples are groups whose step is recorded: dropped groups cannot be shown."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["kind"] != "reward_failure":
            continue
        for failure in event.get("failures", ()):
            step = fleet.step_of(event)
            new = {"kind": failure["kind"], "count": 0, "num_groups": 0, "first": step, "messages": [], "examples": []}
            row = found.setdefault(failure["kind"], new)
            row["count"] += failure["count"]
            row["num_groups"] += 1
            row["last"] = step
            if failure["message"] not in row["messages"] and len(row["messages"]) < _MOST_EXAMPLES:
                row["messages"].append(failure["message"])
            if (example := _example(event, chain, recorded)) and len(row["examples"]) < _MOST_EXAMPLES:
                row["examples"].append(example)
    return sorted(found.values(), key=lambda row: -row["count"])[:_MOST_FAILURES]


def _example(event: Mapping[str, Any], chain: Chain, recorded: set[int]) -> dict[str, Any] | None:
    ticket = ticket_of(event)
    step = None if ticket is None else chain.step_of(ticket)
    return {"step": step, "ticket": ticket} if step in recorded else None


def _panels(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for line in lines for name in line)
    of_rewards = [name for name in names if name.startswith("reward/")]
    failed = [name for name in of_rewards if name.endswith(("/num_failed", "/num_errors", "/num_timeouts"))]
    sources = [name for name in of_rewards if name.startswith("reward/mean/")]
    parts = [name for name in of_rewards if name not in (*failed, *sources)]
    took = [name for name in names if name.startswith("time/") and name.endswith("judging_s")]
    failing = [name for name in failed if any(line.get(name) for line in lines)]
    wanted = (
        ("Means", "", parts, "reward/"),
        ("By source", "", sources, "reward/mean/"),
        ("Failures", "trajectories", failing, "reward/"),
        ("Judging", "s a group", took, "time/"),
    )
    made = (
        series.panel(lines, title, _unit(unit, found), False, [(n, _label(n, prefix)) for n in found[:_MOST_LINES]])
        for title, unit, found, prefix in wanted
    )
    return [panel for panel in made if panel]


def _unit(unit: str, names: Sequence[str]) -> str:
    """The unit, and `6 of 9` if some of the names are left out."""
    return f"{unit}, {_MOST_LINES} of {len(names)}".removeprefix(", ") if len(names) > _MOST_LINES else unit


def _label(name: str, prefix: str) -> str:
    words = name.removeprefix(prefix).removesuffix("judging_s").strip("/")
    return {"mean": "reward", "": "all"}.get(words, words.replace("_", " "))


ROUTES = page("/run/{run}/rewards", rewards, template="rewards.html")
