"""One step: its groups with each trajectory's reward as a dot, workers, staleness, dropped groups and why. And the list of steps."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cluster.contracts.errors import DataError, StorageError
from deploy.viewer import fleet
from deploy.viewer.chain import Chain, ticket_of
from deploy.viewer.dots import Axis, axis_of, dots, histogram, mean_and_spread, percent
from deploy.viewer.episodes import EpisodeFacts
from deploy.viewer.page import asked_whole_number, page
from deploy.viewer.pages.group import common_beginning
from deploy.viewer.runs import Run
from deploy.viewer.steps import Group, RecordedStep, Trajectory, asked, neighbours, open_step, recorded_steps

PER_PAGE = 50
"""Groups of a step, or steps of a run."""
_MOST_ROWS = 50
_MOST_CHARACTERS = 2000
"""Characters of a prompt from which its line is made."""
_FACTS = (
    ("reward/mean", "Reward"),
    ("eval/accuracy", "Held-out accuracy"),
    ("learner/advantage_std", "Advantage, spread"),
    ("learner/kl_reference_k3_mean", "KL to the reference"),
    ("learner/entropy_mean", "Entropy"),
    ("mismatch/mean_abs_nats", "Mismatch, mean"),
    ("learner/clip_fraction", "Clipped"),
    ("learner/gradient_norm", "Gradient norm"),
    ("staleness/max", "Staleness"),
    ("tokens/completion_mean", "Completion, tokens"),
    ("tokens/truncated_share", "Cut at the limit"),
    ("time/step_s", "Seconds"),
)
_NOT_LISTED = {"learner/advantage_std", "tokens/truncated_share", "learner/clip_fraction", "mismatch/mean_abs_nats"}
_SORTS = {
    "order": lambda row: row["place"],
    "reward": lambda row: (row["mean"] is None, row["mean"]),
    "spread": lambda row: -(row["std"] or 0.0),
    "length": lambda row: -row["longest"],
    "staleness": lambda row: -(row["staleness"] or 0),
    "time": lambda row: -row["seconds"],
}


def steps(run: Run, request: Request) -> dict[str, Any]:
    """Steps, the newest first. The query's `before` is the step after the newest one shown."""
    lines = run.metrics()
    by_step = {line["policy_version"]: line for line in lines}
    recorded = set(recorded_steps(run))
    numbers = sorted(by_step.keys() | recorded)
    newest = numbers[-1] if numbers else 0
    before = min(asked_whole_number(request, "before") or newest + 1, newest + 1)
    shown = [number for number in numbers if number < before][-PER_PAGE:][::-1]
    listed = [(name, label) for name, label in _FACTS if name not in _NOT_LISTED]
    columns = [(name, label) for name, label in listed if any(line.get(name) is not None for line in lines)]
    return {
        "num_steps": len(numbers),
        "newest": newest,
        "before": before,
        "columns": [label for _, label in columns],
        "rows": [
            {
                "step": number,
                "is_recorded": number in recorded,
                "numbers": [by_step.get(number, {}).get(name) for name, _ in columns],
            }
            for number in shown
        ],
        "newer": before + PER_PAGE if before <= newest else None,
        "older": shown[-1] if shown and shown[-1] > numbers[0] else None,
    }


def step(run: Run, request: Request) -> dict[str, Any]:
    """One step. The query's `sort` is one of `_SORTS`, `from` the place of the first group shown."""
    number = int(request.path_params["step"])
    lines = {line["policy_version"]: line for line in run.metrics()}
    recorded, why = _opened(run, number)
    if recorded is None and number not in lines:
        raise HTTPException(404, why)
    groups = recorded.groups() if recorded else []
    line = lines.get(number, {})
    numbers = {name: value for name, value in sorted(line.items()) if name not in ("policy_version", "time")}
    known = sorted({*lines, *recorded_steps(run), number})
    previous, following = neighbours(known, number)
    rewards = [each.reward for group in groups for each in group.trajectories if each.reward is not None]
    axis = axis_of(rewards)
    sort = request.query_params.get("sort", "order")
    rows = sorted((_row(place, group) for place, group in enumerate(groups)), key=_SORTS.get(sort, _SORTS["order"]))
    first = max(asked_whole_number(request, "from") or 0, 0)
    shown = [_drawn(row, axis, recorded) for row in rows[first : first + PER_PAGE] if recorded]
    prompts = [row["prompt"] for row in shown]
    shared = common_beginning(prompts) if len(set(prompts)) > 1 else ""
    detailed, damage = _detailed(run, recorded)
    events = fleet.versioned(run.events())
    during = [event for event in events if fleet.step_of(event) == number and event["kind"] != "started"]
    return {
        "step": number,
        "previous": previous,
        "next": following,
        "why": why,
        "facts": [{"label": label, "value": line[name]} for name, label in _FACTS if line.get(name) is not None],
        "numbers": [
            {"name": name, "value": value} for name, value in numbers.items() if isinstance(value, int | float)
        ],
        "num_groups": len(groups),
        "num_trajectories": sum(len(group.trajectories) for group in groups),
        "ticks": axis.ticks(),
        "bars": histogram(rewards, axis),
        "sort": sort if sort in _SORTS else "order",
        "sorts": list(_SORTS),
        "from": first,
        "earlier": max(first - PER_PAGE, 0) if first else None,
        "later": first + PER_PAGE if first + PER_PAGE < len(rows) else None,
        "shared": shared,
        "num_detailed": len(detailed),
        "damage": damage,
        "rows": [
            {**row, "prompt": _short(row["prompt"], shared), "is_detailed": row["ticket"] in detailed} for row in shown
        ],
        "workers": workers(groups),
        "failed": failed(groups),
        "dropped": dropped(number, run.chain(), events),
        "marks": fleet.marks(during)[-_MOST_ROWS:],
    }


def _opened(run: Run, number: int) -> tuple[RecordedStep | None, str]:
    """(the step, or None; why it cannot be shown)."""
    try:
        return open_step(run, number), ""
    except HTTPException as error:
        return None, error.detail


def _detailed(run: Run, recorded: RecordedStep | None) -> tuple[set[int], str]:
    """(groups in the record of learning, what is wrong with that record). Empty in an object store, which gives only whole files."""
    if recorded is None or not run.directory.is_local:
        return set(), ""
    try:
        learned = recorded.learned()
    except (DataError, StorageError) as error:
        return set(), str(error)
    return {ticket for ticket, _ in learned.places} if learned else set(), ""


def _row(place: int, group: Group) -> dict[str, Any]:
    """The row of a group, without its dots."""
    trajectories = group.trajectories
    lengths = [each.num_tokens for each in trajectories]
    return {
        "place": place,
        "ticket": group.ticket_index,
        "prompt_id": group.prompt_id,
        "seconds": group.seconds,
        **mean_and_spread([each.reward for each in trajectories if each.reward is not None]),
        "shortest": min(lengths),
        "longest": max(lengths),
        "staleness": _most_stale(trajectories),
        "workers": sorted({each.worker for each in trajectories}),
        "num_cut": sum(each.finish_reason == "length" for each in trajectories),
        "num_aborted": sum(each.finish_reason == "aborted" for each in trajectories),
        "num_failed": sum(each.reward_status in ("error", "timeout") for each in trajectories),
        "episodes": episodes([each.episode for each in trajectories if each.episode is not None]),
        "trajectories": trajectories,
    }


def _drawn(row: Mapping[str, Any], axis: Axis, recorded: RecordedStep) -> dict[str, Any]:
    scored: Sequence[Trajectory] = [each for each in row["trajectories"] if each.reward is not None]
    placed = dots([each.reward for each in scored if each.reward is not None], axis)
    mean, std = row["mean"], row["std"]
    span = None
    if mean is not None:
        ends = [percent(axis.place(mean + sign * std)) for sign in (-1, 1)]
        span = {"mean": percent(axis.place(mean)), "start": ends[0], "width": round(ends[1] - ends[0], 2)}
    return {
        **{name: value for name, value in row.items() if name != "trajectories"},
        "prompt": line_of(*recorded.prompt(row["ticket"])),
        "span": span,
        "dots": [
            {
                "sample": each.sample_index,
                "reward": each.reward,
                "num_tokens": each.num_tokens,
                "finish": each.finish_reason,
                "episode": each.episode and asdict(each.episode),
                **place,
            }
            for each, place in zip(scored, placed, strict=True)
        ],
    }


def episodes(facts: Sequence[EpisodeFacts]) -> dict[str, Any] | None:
    """Totals over a group's episodes; None for single turns."""
    if not facts:
        return None
    turns = [each.num_turns for each in facts]
    return {
        "environment": facts[0].environment,
        "fewest_turns": min(turns),
        "most_turns": max(turns),
        "num_calls": sum(each.num_calls for each in facts),
        "num_malformed_calls": sum(each.num_malformed_calls for each in facts),
        "failed_stages": Counter(each.failed_stage for each in facts if each.failed_stage).most_common(),
    }


def line_of(text: str, columns: Mapping[str, Any]) -> str:
    """The beginning of a prompt's question, in one line."""
    return " ".join(asked(text, columns)[:_MOST_CHARACTERS].split())


def _most_stale(trajectories: Sequence[Trajectory]) -> int | None:
    """None if no trajectory has a token."""
    return max((each.staleness for each in trajectories if each.staleness is not None), default=None)


def _short(text: str, shared: str) -> str:
    line = f"…{text.removeprefix(shared)}" if shared else text
    return line if len(line) <= 100 else f"{line[:99]}…"


def workers(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Trajectories, tokens and mean reward of each worker."""
    by_name: dict[str, list[Trajectory]] = {}
    for group in groups:
        for each in group.trajectories:
            by_name.setdefault(each.worker, []).append(each)
    return [
        {
            "worker": name,
            "num_trajectories": len(sampled),
            "num_tokens": sum(each.num_tokens for each in sampled),
            "staleness": _most_stale(sampled),
            **mean_and_spread([each.reward for each in sampled if each.reward is not None]),
        }
        for name, sampled in sorted(by_name.items())
    ]


def failed(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Failed rewards by message, the most frequent first, each with the first trajectory that has it."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], tuple[int, int]] = {}
    for group in groups:
        for each in group.trajectories:
            if each.reward_status in ("error", "timeout"):
                key = (each.reward_status, " ".join((each.reward_message or "no message").split())[:300])
                counts[key] += 1
                examples.setdefault(key, (group.ticket_index, each.sample_index))
    return [
        {"status": key[0], "message": key[1], "count": count, "ticket": examples[key][0], "sample": examples[key][1]}
        for key, count in counts.most_common(_MOST_ROWS)
    ]


def dropped(number: int, chain: Chain, events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Groups dropped after the last group of the step before and up to the last group of this step. Events have the reasons."""
    record, before = chain.record(number), chain.record(number - 1)
    if record is None:
        return {"num": 0, "reasons": [], "tickets": []}
    missing = set(range(before.next_index if before else 0, record.next_index)) - set(record.groups)
    reasons: dict[int, str] = {}
    for event in events if missing else ():
        if event["kind"] in ("drop", "quarantine") and (ticket := ticket_of(event)) in missing:
            reasons[ticket] = " ".join(str(event["reason"]).split())[:300]
    tickets = [{"ticket": ticket, "reason": reasons.get(ticket, "no event says why")} for ticket in sorted(missing)]
    counts = Counter(each["reason"] for each in tickets)
    return {"num": len(tickets), "reasons": counts.most_common(_MOST_ROWS), "tickets": tickets[:_MOST_ROWS]}


ROUTES = [
    *page("/run/{run}/step", steps, template="steps.html"),
    *page("/run/{run}/step/{step:int}", step, template="step.html"),
]
