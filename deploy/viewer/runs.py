"""The runs below the viewer's folders, by short names, and their lines, each read once."""

import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import yaml

from cluster.contracts.errors import ConfigError, DamagedError, StorageError
from cluster.contracts.hiding import hidden
from cluster.metrics import ENDS
from cluster.record.run_directory import EVENTS, METRICS, PASSPORT, PHASES, RUN_YAML, STATUS, RunDirectory
from deploy.viewer.chain import Chain, ChainReader
from deploy.viewer.fleet import last_told
from deploy.viewer.series import SHOWN_OF_A_RUN
from deploy.viewer.tail import Tail

_LINES = {EVENTS, METRICS, "events", "metrics"}
"""A run that has begun has one of them; in an object store they are folders."""
_LOOK_EVERY_S, _LOOK_SHARE = 5.0, 20
"""Seconds between two looks for runs. A look at a large tree takes long: at most one part in `_LOOK_SHARE` of the time is spent on it."""
_FORGET_AFTER_S = 600.0
"""Seconds after which all lines of a run that nobody looks at are forgotten: those of a long run take 100 MB."""
_DEPTH = 3
"""Levels below a named folder that are searched for runs."""
_MOST_PHASES_BYTES = 8_000_000
"""Enough for the last thousands of steps."""
Standing = tuple[str, str, dict[str, Any]]
"""(mark, state, status) of a run."""


class Run:
    """One run directory. Several threads may read it; none writes."""

    def __init__(self, name: str, directory: RunDirectory) -> None:
        self.name = name
        """In URLs."""
        self.directory = directory
        self.poll_s = 1.0 if directory.is_local else 5.0
        """Seconds between two looks for news."""
        self._metrics, self._events = (Tail(directory, name) for name in (METRICS, EVENTS))
        self._shown = Tail(directory, METRICS, keep=_shown_in_a_list)
        self._drivers = Tail(directory, EVENTS, keep=_told_by_a_driver)
        self._phases = Tail(directory, PHASES, newest_bytes=_MOST_PHASES_BYTES)
        self._chain = ChainReader(directory, every_s=self.poll_s)
        self._used_at = time.monotonic()

    @property
    def place(self) -> str:
        return self.directory.path()

    def metrics(self) -> list[dict[str, Any]]:
        """The last line of metrics.jsonl for each policy version, in order."""
        return self._used(self._metrics).records(key="policy_version")

    def glance(self) -> list[dict[str, Any]]:
        """As `metrics`, with only the numbers that a list of runs shows: all numbers of many long runs take gigabytes."""
        return (self._metrics if self._metrics.is_read else self._shown).records(key="policy_version")

    def events(self) -> list[dict[str, Any]]:
        return self._used(self._events).records()

    def phases(self) -> list[dict[str, Any]]:
        """Lines of phases.jsonl; empty if the run recorded none."""
        return self._used(self._phases).records()

    def chain(self) -> Chain:
        """The ledger, checked."""
        return self._chain.read()

    def mark(self) -> str:
        """The run's last step, its number of events, and the generation of both, which changes when earlier lines change: a resumed run
        writes its last steps again."""
        metrics, of_metrics = self._used(self._metrics).versioned_records(key="policy_version")
        events, of_events = self._events.versioned_records()
        return f"{metrics[-1]['policy_version'] if metrics else -1}/{len(events)}/{of_metrics}.{of_events}"

    def status(self) -> dict[str, Any]:
        """status.json: each actor's phase at `time`. No actors if the run has not written it yet."""
        try:
            return self.directory.read_json(STATUS)
        except DamagedError:  # a torn file, or an object store without atomic reads
            return {"time": 0.0, "actors": []}

    def config(self) -> dict[str, Any]:
        """The settings in run.yaml, without secrets. Raises DamagedError for a torn file."""
        if not self.directory.exists(RUN_YAML):
            return {}
        try:
            return _parsed(self.directory.read_text(RUN_YAML))
        except (ValueError, yaml.YAMLError) as error:
            why = str(error).partition("\n")[0]
            raise DamagedError(f"{self.directory.path(RUN_YAML)} is not the settings of a run: {why}") from error

    def passport(self) -> dict[str, Any]:
        return self.directory.read_json(PASSPORT)

    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed`, `killed`, or `starting`."""
        if self.directory.is_local and self.directory.owner_seen():
            return "running"
        last = last_told((self._events if self._events.is_read else self._drivers).records())
        is_over = last is not None and last["kind"] in ENDS
        if not is_over and not self.directory.is_local and self.directory.owner_seen():
            return "running"
        return "starting" if last is None else "killed" if last["kind"] == "launched" else last["kind"]

    def forget_unused(self) -> None:
        """Forgets the lines, except those for a list of runs, if no page has asked for them for some minutes."""
        if time.monotonic() - self._used_at > _FORGET_AFTER_S:
            for tail in (self._metrics, self._events, self._phases):
                tail.forget()

    def _used(self, tail: Tail) -> Tail:
        self._used_at = time.monotonic()
        return tail

    def standing(self) -> Standing:
        """Changes whenever anything on a live page changes. For a long run it is much cheaper than the page's data."""
        return self.mark(), self.state(), self.status()


def _shown_in_a_list(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in SHOWN_OF_A_RUN if name in line}


def _told_by_a_driver(event: dict[str, Any]) -> dict[str, Any] | None:
    """The kind of an event at a driver's start or end; None for any other event."""
    return {"kind": event["kind"]} if last_told([event]) else None


@functools.lru_cache(maxsize=256)
def _parsed(run_yaml: str) -> dict[str, Any]:
    """Cached, since a live page asks every second: callers must not change the result."""
    settings = yaml.safe_load(run_yaml) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"it holds {settings!r:.40}")
    return hidden(settings)


def _behind_links(folder: RunDirectory) -> RunDirectory:
    return RunDirectory(os.path.realpath(folder.path())) if folder.is_local else folder


class Runs:
    """All runs at and below `roots`, each once, however many links lead to it. New runs are found later. A name always means the same
    run."""

    def __init__(self, roots: Sequence[str]) -> None:
        """Raises ConfigError if a root is missing or cannot be reached."""
        self._roots = [RunDirectory(root) for root in roots]
        for root in self._roots:
            root.reach()
            if not (os.path.isdir(root.path()) if root.is_local else root.names()):
                raise ConfigError(f"{root.url!r} is no folder; name a run directory, or a folder that contains some")
        self._by_place: dict[str, Run] = {}
        self._there: list[Run] = []
        """Runs whose folders still exist."""
        self._next_look = 0.0
        self._lock = threading.Lock()
        self.all()

    def all(self) -> list[Run]:
        """All runs, sorted by name. Leaves out folders below a root that cannot be read, and runs whose folders were removed from a disk.
        Raises StorageError if a root cannot be read."""
        with self._lock:
            if (began := time.monotonic()) >= self._next_look:
                try:
                    for root in self._roots:
                        self._look(root, relative="", depth=_DEPTH)
                    found = self._by_place.values()
                    self._there = [run for run in found if not run.directory.is_local or os.path.isdir(run.place)]
                    for run in found:
                        run.forget_unused()
                finally:  # after an error too: the page that reports it also asks for all runs
                    self._next_look = began + max(_LOOK_EVERY_S, _LOOK_SHARE * (time.monotonic() - began))
            return sorted(self._there, key=lambda run: run.name)

    def get(self, name: str) -> Run | None:
        return next((run for run in self.all() if run.name == name), None)

    @property
    def is_one(self) -> bool:
        """Whether the viewer was given one run directory: its overview is then the front page."""
        return len(self._roots) == 1 and [run.place for run in self.all()] == [_behind_links(self._roots[0]).path()]

    def _look(self, folder: RunDirectory, *, relative: str, depth: int) -> None:
        folder = _behind_links(folder)
        if folder.path() in self._by_place:
            return
        names = folder.names()
        if RUN_YAML in names and not _LINES.isdisjoint(names):
            self._by_place[folder.path()] = Run(self._free_name(relative or folder.path()), folder)
            return
        below_it = [each for each in (folder.folders() if depth else ()) if not each.startswith(".")]
        # Links come last, so that a run has the name of its own folder.
        for name in sorted(below_it, key=lambda each: os.path.islink(folder.path(each))):
            with contextlib.suppress(StorageError):  # another user's folder, lost+found
                below = RunDirectory(folder.path(name))
                self._look(below, relative=f"{relative}/{name}".strip("/"), depth=depth - 1)

    def _free_name(self, path: str) -> str:
        parts = path.rstrip("/").split("/")
        is_root = path.startswith("/") or "://" in path
        wanted = re.sub(r"[^\w.-]+", "-", "-".join(parts[-1:] if is_root else parts))
        taken = {run.name for run in self._by_place.values()}
        number = 1
        while (name := wanted if number == 1 else f"{wanted}-{number}") in taken:
            number += 1
        return name
