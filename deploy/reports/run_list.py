"""`treadwheel runs`: the run directories below a folder or an object store's prefix, with their state and last numbers.

A folder that is damaged, foreign or unreadable never breaks the list: it is left out, or listed as damaged.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import yaml
from rich.table import Table
from rich.text import Text

from cluster.contracts.errors import TreadwheelError
from cluster.record.run_directory import EVENTS, METRICS, RUN_YAML, RunDirectory, wrong_in
from cluster.record.storage import Storage
from cluster.sinks.console.drawing import duration
from cluster.sinks.console.words import for_terminal

_DEEPEST = 3
"""Levels below the named folder: runs/sweep/seed-1."""
_MOST_BYTES = 4 << 20
"""Bytes read from the end of a file of lines, where the last numbers are."""
_MOST_BYTES_SEARCHED = 64 << 20
"""Bytes searched for the last evaluation, which may be thousands of steps old."""
_NUM_THREADS = 8
_HELD_OUT = "eval/reward"
_STYLES = {"running": "green", "failed": "red", "dead": "red", "damaged": "red", "preempted": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A run in one line. None: not known."""

    run_dir: str
    state: str
    """running, finished, stopped, failed, preempted, dead (its driver was killed), new (no driver has logged an event), damaged."""
    step: int | None = None
    num_steps: int | None = None
    reward: float | None = None
    held_out_reward: float | None = None
    sampling_tokens_per_s: float | None = None
    age_s: float | None = None
    """Seconds since it last wrote a step or an event."""
    reason: str | None = None
    """Why it failed, or what is damaged."""


def run_directories(folder: str) -> list[str]:
    """Run directories at or below `folder`, in order, each once by its own folder, however many links lead to it. Raises StorageError if
    an object store cannot be read."""
    if "://" in folder:
        store = Storage(folder)
        store.reach()
        return sorted(_in_store(store, "", depth=0))
    top = os.path.expanduser(folder)
    if not os.path.isdir(top):
        return []
    found: list[str] = []
    seen: set[str] = set()
    waiting = deque([(top, 0)])
    while waiting:
        place, depth = waiting.popleft()
        if (real := os.path.realpath(place)) in seen:
            continue
        seen.add(real)
        # No run lies inside another run, whose folders hold one file per step.
        if os.path.isfile(os.path.join(place, RUN_YAML)):
            found.append(place)
        elif depth < _DEEPEST:
            below = _folders(place)
            waiting.extendleft((each, depth + 1) for each in below if not os.path.islink(each))
            # Links come last, so that a run has the name of its own folder.
            waiting.extend((each, depth + 1) for each in below if os.path.islink(each))
    return sorted(found)


def _folders(place: str) -> list[str]:
    """Folders in a folder, links to folders included, hidden ones not; empty if it cannot be read."""
    try:
        paths = [os.path.join(place, each) for each in sorted(os.listdir(place)) if not each.startswith(".")]
    except OSError:
        return []
    return [each for each in paths if os.path.isdir(each)]


def _in_store(store: Storage, name: str, *, depth: int) -> Iterator[str]:
    if RUN_YAML in store.names(name):
        yield store.path(name) if name else store.url
    elif depth < _DEEPEST:
        for each in store.folders(name):
            yield from _in_store(store, f"{name}/{each}" if name else each, depth=depth + 1)


def listed(run_dirs: Sequence[str], *, now: float | None = None) -> list[Listed]:
    """All runs, as far as each can be read, the last one written first."""
    at = time.time() if now is None else now
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        found = list(threads.map(lambda run_dir: _listed(run_dir, at), run_dirs))
    return sorted(found, key=lambda each: (each.age_s is None, each.age_s or 0.0, each.run_dir))


def _listed(run_dir: str, now: float) -> Listed:
    try:
        directory = RunDirectory(run_dir)
        settings = yaml.safe_load(directory.read_text(RUN_YAML))
        if not isinstance(settings, dict) or "num_steps" not in settings:
            return Listed(run_dir=run_dir, state="damaged", reason=f"{RUN_YAML} is not the settings of a run")
        return _read(directory, int(settings["num_steps"]), now)
    except (TreadwheelError, OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        return Listed(run_dir=run_dir, state="damaged", reason=" ".join(str(error).split())[:200])


def _read(directory: RunDirectory, num_steps: int, now: float) -> Listed:
    # Asked before the events are read: otherwise a driver that ends in between would seem to have been killed.
    was_living = directory.owner() is not None
    steps, events = _last_lines(directory, METRICS), _last_lines(directory, EVENTS)
    last: dict[str, Any] = {}
    for line in steps:
        last |= {name: value for name, value in line.items() if value is not None}
    times = [each["time"] for each in (*steps[-1:], *events[-1:]) if each.get("time")]
    state, reason = ("running", None) if was_living else _end(events)
    if state == "dead" and directory.owner():  # a new driver has started since
        state, reason = "running", None
    return Listed(
        run_dir=directory.url,
        state=state,
        step=last.get("policy_version", 0),
        num_steps=num_steps,
        reward=last.get("reward/mean"),
        held_out_reward=last.get(_HELD_OUT) if _HELD_OUT in last else _earlier_held_out(directory),
        sampling_tokens_per_s=last.get("speed/sampling_tokens_per_s"),
        age_s=max(now - max(times), 0.0) if times else None,
        reason=reason,
    )


def _end(events: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """(state, reason) of a run without a living driver."""
    is_stopped = False
    for event in reversed(events):
        kind = event.get("kind")
        if kind == "failed":
            return "failed", str(event.get("reason"))
        if kind == "finished":
            return "finished", None
        if kind == "preempted":
            return "preempted", event.get("message")
        if kind == "launched":
            break
        is_stopped = is_stopped or kind == "stopped"
    if is_stopped:
        return "stopped", None
    # Without "launched" too, a driver's first event: of a long file only the end is read.
    return ("dead", "its driver was killed") if events else ("new", None)


def _last_lines(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    """The complete lines at the end of a file, or all of an object store's."""
    if not directory.is_local:
        return directory.read_json_lines(name)
    return _parsed(name, _end_of(directory, name, most_bytes=_MOST_BYTES))


def _earlier_held_out(directory: RunDirectory) -> float | None:
    """The last held-out reward before the lines that `_last_lines` returns."""
    if not directory.is_local or (directory.size_bytes(METRICS) or 0) <= _MOST_BYTES:
        return None
    lines = _end_of(directory, METRICS, most_bytes=_MOST_BYTES_SEARCHED)
    found = _parsed(METRICS, [line for line in lines if f'"{_HELD_OUT}"'.encode() in line])
    return next((line[_HELD_OUT] for line in reversed(found) if line.get(_HELD_OUT) is not None), None)


def _end_of(directory: RunDirectory, name: str, *, most_bytes: int) -> list[bytes]:
    size = directory.size_bytes(name) or 0
    start = max(size - most_bytes, 0)
    return bytes(directory.read_range(name, start, size - start)).split(b"\n") if size else []


def _parsed(name: str, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:  # torn by a crash, or cut where the reading begins
            continue
        if isinstance(value, dict) and not wrong_in(name, value):
            found.append(value)
    return found


def table(runs: Sequence[Listed]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("run", overflow="fold")
    shown.add_column("state")
    for name in ("step", "reward", "held-out", "tokens/s", "last sign"):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        shown.add_row(
            Text(for_terminal(run.run_dir)),
            Text(run.state, style=_STYLES.get(run.state, "")),
            "" if run.step is None else f"{run.step} of {run.num_steps}",
            _number(run.reward, ".3f"),
            _number(run.held_out_reward, ".3f"),
            _number(run.sampling_tokens_per_s, ",.0f"),
            "" if run.age_s is None else f"{_age(run.age_s)} ago",
        )
    return shown


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _age(seconds: float) -> str:
    if seconds < 3600:
        return f"{duration(seconds)} min" if seconds >= 120 else f"{seconds:.0f} s"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
