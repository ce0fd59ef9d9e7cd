"""`treadwheel info`, `passport diff`, and the summary that `train` prints at its end, from a run directory."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.settings import differences, in_words
from cluster.contracts.types import PART_LEFT
from cluster.record.resume_rules import without_folder
from cluster.record.run_directory import CURVES, EVENTS, PASSPORT, REPORT, RUN_YAML, STATUS, VERDICTS, RunDirectory
from cluster.sinks.console.drawing import duration
from cluster.sinks.console.words import for_terminal
from cluster.sinks.jsonl import read_steps
from deploy.config import loading as configuration
from deploy.config.written import settings_in
from deploy.reports.costs import of_actors, total
from deploy.reports.summary import Summary
from deploy.viewer.fleet import last_told

_MOST_REASONS = 5
"""Reasons for failed rewards that are shown."""
_SHOWN = (
    "reward/mean",
    "eval/reward",
    "eval/accuracy",
    "staleness/max",
    "speed/sampling_tokens_per_s",
    "speed/learning_tokens_per_s",
    "time/step_s",
    "time/broadcast_s",
)


def config_of(directory: RunDirectory, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in run.yaml, with `overrides`; secrets are hidden there. Prompts that a script gave as rows are those in the
    directory, which may have been moved. Raises ConfigError if the directory contains no run, or a damaged one."""
    directory.reach()
    if not directory.exists(RUN_YAML):
        raise ConfigError(f"{directory.url!r} holds no run (no {RUN_YAML}); name the run_dir of a run")
    settings = settings_in(directory)
    prompts = settings.get("prompts")
    if isinstance(prompts, dict) and (rows := without_folder(prompts.get("path"))) and directory.exists(rows):
        settings["prompts"] = {**prompts, "path": directory.path(rows)}
    # Of overrides of the algorithm, what a run file need not say is filled in.
    is_complete = not any(each.startswith("algorithm") for each in overrides)
    return configuration.as_recorded(settings, overrides, source=directory.path(RUN_YAML), is_complete=is_complete)


def table(directory: RunDirectory) -> Table:
    """Progress, numbers, failures and checkpoints."""
    shown = Table(title=directory.url, show_header=False, box=None, title_justify="left")
    for name, value in _rows(directory):
        shown.add_row(for_terminal(name), for_terminal(value))
    return shown


def print_summary(directory: RunDirectory, summary: Summary) -> None:
    """Prints a run's gains and where its files are."""
    print(f"{summary.num_steps} steps in {summary.train_seconds:.0f} s; {summary.trained_tokens:,} tokens trained")
    held_out = (summary.eval_reward_first, summary.eval_reward_last)
    accuracy = (summary.eval_first, summary.eval_last)
    for name, (first, last) in (
        ("reward", (summary.reward_first, summary.reward_last)),
        # Rewards of 0 and 1 have their accuracy as mean.
        ("held-out reward", (None, None) if held_out == accuracy else held_out),
        ("held-out accuracy", accuracy),
    ):
        if first is not None and last is not None:
            print(f"{name}: {first:.3f} -> {last:.3f}")
    pages = [name for name in (REPORT, CURVES) if directory.exists(name)]
    print(f"everything is in {directory.path()}" + (f" ({', '.join(pages)})" if pages else ""))


def passport_differences(left: str, right: str) -> dict[str, tuple[Any, Any]]:
    """Entries that differ between two passports: name -> (left, right)."""
    return differences(_passport(left), _passport(right))


def _rows(directory: RunDirectory) -> Iterator[tuple[str, str]]:
    config = config_of(directory)
    # First: a driver that ends meanwhile has logged its end by the time the events are read.
    owner = directory.owner()
    steps, events = read_steps(directory), directory.read_json_lines(EVENTS)
    done = max(steps, default=0)
    yield "model", config.model.path
    yield "steps", f"{done} of {config.num_steps}"
    yield "driver", owner or f"none: {_end(events)}"
    if steps:
        latest: dict[str, float] = {}
        for numbers in steps.values():
            latest.update(numbers)
        for name in _SHOWN:
            if name in latest:
                yield name, f"{latest[name]:,.4g}"
        yield "last step", f"{_ago(latest['time'])}"
        yield from _costs(steps)
    for kind, count in sorted(Counter(event["kind"] for event in events).items()):
        last = next(event for event in reversed(events) if event["kind"] == kind)
        detail = last.get("message") or last.get("reason") or ""
        yield f"event {kind}", f"{count}, last {_ago(last['time'])} {detail}".rstrip()
    for message, count in failed_rewards(events)[:_MOST_REASONS]:
        yield "failed rewards", f"{count:,} times {message}"
    for message, count in left_parts(events)[:_MOST_REASONS]:
        yield "rewards without a part", f"{count:,} times {message}"
    if kept := len(directory.read_lines(VERDICTS)):
        yield "verdicts kept", f"{kept:,}"
    if checkpoints := directory.checkpoints():
        yield "checkpoints", ", ".join(checkpoints.values())
    for doing in directory.read_json(STATUS).get("actors", ()) if owner else ():
        since = time.time() - doing["since"]
        yield doing["actor"], f"{doing['phase']} for {since:.0f} s, policy version {doing['policy_version']}"


def _costs(steps: Mapping[int, Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Time of each kind of actor and how it was spent, then idle GPU-hours. Nothing for a run that did not record it."""
    lines = list(steps.values())
    for actors in of_actors(lines):
        waits = ", ".join(f"{cause} {share:.0%}" for cause, share in actors.waits if round(100 * share))
        after = f", waits for {waits}" if waits else ""
        yield f"time of {actors.kind}", f"{duration(actors.seconds)}: busy {actors.busy:.0%}{after}"
    if any("cost/gpu_hours" in line for line in lines):
        yield "idle GPU-hours", f"{total(lines, 'cost/idle_gpu_hours'):,.3g} of {total(lines, 'cost/gpu_hours'):,.3g}"


def failed_rewards(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Why rewards failed: the message of each kind and how often, the most frequent kind first. Of several messages the first is named."""
    return _counted(events, lambda kind: kind != PART_LEFT)


def left_parts(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Why rewards lack a part but are known, in the same form."""
    return _counted(events, lambda kind: kind == PART_LEFT)


def _counted(events: Sequence[Mapping[str, Any]], is_asked_for: Callable[[str], bool]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    messages: dict[str, dict[str, None]] = {}
    for failure in (failure for event in events for failure in event.get("failures", ())):
        if is_asked_for(failure["kind"]):
            counts[failure["kind"]] += failure["count"]
            messages.setdefault(failure["kind"], {})[failure["message"]] = None
    return [(_as_one(kind, list(messages[kind])), count) for kind, count in counts.most_common()]


def _as_one(kind: str, messages: Sequence[str]) -> str:
    first = messages[0]
    return first if len(messages) == 1 else f"{kind}, first: {first.removeprefix(f'{kind}: ')}"


def _end(events: Sequence[Mapping[str, Any]]) -> str:
    """How the last driver ended, in words."""
    last = last_told(events)
    if last is None:
        return "the run has not started"
    ends = {"finished": "the run is finished", "stopped": "the run was stopped", "launched": "it was killed"}
    return ends.get(last["kind"]) or f"the run failed: {last['reason']}"


def _passport(place: str) -> dict[str, Any]:
    folder, name = place, PASSPORT
    if place.endswith(".json") and not os.path.isdir(place):
        folder, name = os.path.split(place)
    directory = RunDirectory(folder or ".")
    directory.reach()
    passport = directory.read_json(name)
    if "mathematics" not in passport:
        raise ConfigError(f"{place!r} has no passport; name a run directory or its {PASSPORT}")
    return in_words(passport)  # passports of earlier versions have numbers


def _ago(then: float) -> str:
    seconds = max(time.time() - then, 0.0)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
