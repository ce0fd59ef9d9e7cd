"""Runs by short names, found below the folders that the viewer was given, and their lines, read on from where they were read last."""

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
"""A run has some: in a store they are folders of objects."""
_LOOK_EVERY_S, _LOOK_SHARE = 5.0, 20
"""A look at a large tree takes long: at most this share of the time is spent looking."""
_DEPTH = 3
"""Folders below a named one that may hold runs."""
_MOST_PHASES_BYTES = 8_000_000
"""Those of the last thousands of steps."""
Standing = tuple[str, str, dict[str, Any]]
"""Mark, state and status of a run."""


class Run:
    """One run directory. Several threads may read it; none writes."""

    def __init__(self, name: str, directory: RunDirectory) -> None:
        self.name = name
        """In URLs."""
        self.directory = directory
        self.poll_s = 1.0 if directory.is_local else 5.0
        """How often it is worth to look for something new."""
        self._metrics, self._events = (Tail(directory, name) for name in (METRICS, EVENTS))
        self._shown = Tail(directory, METRICS, keep=_shown_in_a_list)
        self._drivers = Tail(directory, EVENTS, keep=_told_by_a_driver)
        self._phases = Tail(directory, PHASES, newest_bytes=_MOST_PHASES_BYTES)
        self._chain = ChainReader(directory, every_s=self.poll_s)

    @property
    def place(self) -> str:
        return self.directory.path()

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl by policy version, each version once."""
        return self._metrics.records(key="policy_version")

    def glance(self) -> list[dict[str, Any]]:
        """As `metrics`, with the numbers of a list of runs alone: all numbers of many long runs take gigabytes."""
        return (self._metrics if self._metrics.is_read else self._shown).records(key="policy_version")

    def events(self) -> list[dict[str, Any]]:
        return self._events.records()

    def phases(self) -> list[dict[str, Any]]:
        """Who did what when; empty for a run that recorded no phases."""
        return self._phases.records()

    def chain(self) -> Chain:
        """What the ledger says was consumed, checked."""
        return self._chain.read()

    def mark(self) -> str:
        """Where the run stands now: its last step, its number of events, and the generation of both, which changes when lines that were
        there before are no longer what they were: a resumed run writes its last steps again."""
        metrics, events = self.metrics(), self.events()
        generation = f"{self._metrics.generation}.{self._events.generation}"
        return f"{metrics[-1]['policy_version'] if metrics else -1}/{len(events)}/{generation}"

    def status(self) -> dict[str, Any]:
        """What each actor was doing at `time`, oldest news first; no actors where the run has not said so yet."""
        try:
            return self.directory.read_json(STATUS)
        except DamagedError:  # an object store without atomic reads, or a file that is torn
            return {"time": 0.0, "actors": []}

    def config(self) -> dict[str, Any]:
        """What run.yaml says, without what is secret. Raises DamagedError for one that is torn."""
        if not self.directory.exists(RUN_YAML):
            return {}
        try:
            return _parsed(self.directory.read_text(RUN_YAML))
        except (ValueError, yaml.YAMLError) as error:
            said = str(error).partition("\n")[0]
            raise DamagedError(f"{self.directory.path(RUN_YAML)} is not the settings of a run: {said}") from error

    def passport(self) -> dict[str, Any]:
        return self.directory.read_json(PASSPORT)

    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed`, `killed`, or `starting`."""
        if self.directory.is_local and self.directory.owner_seen():
            return "running"
        told = last_told((self._events if self._events.is_read else self._drivers).records())
        is_over = told is not None and told["kind"] in ENDS
        if not is_over and not self.directory.is_local and self.directory.owner_seen():
            return "running"
        return "starting" if told is None else "killed" if told["kind"] == "launched" else told["kind"]

    def standing(self) -> Standing:
        """What changes when anything does that a live page shows. Of a long run it costs a small part of what is shown."""
        return self.mark(), self.state(), self.status()


def _shown_in_a_list(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in SHOWN_OF_A_RUN if name in line}


def _told_by_a_driver(event: dict[str, Any]) -> dict[str, Any] | None:
    """How it ended, or that it was launched."""
    return {"kind": event["kind"]} if last_told([event]) else None


@functools.lru_cache(maxsize=256)
def _parsed(run_yaml: str) -> dict[str, Any]:
    """Nobody may change it: a live page asks every second."""
    settings = yaml.safe_load(run_yaml) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"it holds {settings!r:.40}")
    return hidden(settings)


class Runs:
    """All runs at and below `roots`. A run that appears later is found later; no name ever changes its run."""

    def __init__(self, roots: Sequence[str]) -> None:
        """Raises ConfigError when a root is missing, or cannot be reached."""
        self._roots = [RunDirectory(root) for root in roots]
        for root in self._roots:
            root.reach()
            if not (os.path.isdir(root.path()) if root.is_local else root.names()):
                raise ConfigError(f"{root.url!r} is no folder; name a run directory, or a folder that holds some")
        self._by_place: dict[str, Run] = {}
        self._there: list[Run] = []
        """Those whose folders were not removed since."""
        self._next_look = 0.0
        self._lock = threading.Lock()
        self.all()

    def all(self) -> list[Run]:
        """By their names. A folder below a root that cannot be read is left out, and so is a run whose folder was removed from a disk.
        Raises StorageError for a root."""
        with self._lock:
            if (began := time.monotonic()) >= self._next_look:
                try:
                    for root in self._roots:
                        self._look(root, relative="", depth=_DEPTH)
                    found = self._by_place.values()
                    self._there = [run for run in found if not run.directory.is_local or os.path.isdir(run.place)]
                finally:  # the page that says that a root is away asks for all runs too
                    self._next_look = began + max(_LOOK_EVERY_S, _LOOK_SHARE * (time.monotonic() - began))
            return sorted(self._there, key=lambda run: run.name)

    def get(self, name: str) -> Run | None:
        return next((run for run in self.all() if run.name == name), None)

    @property
    def is_one(self) -> bool:
        """One run was named, and no folder of runs: its overview is the front page."""
        return len(self._roots) == 1 and [run.place for run in self.all()] == [self._roots[0].path()]

    def _look(self, folder: RunDirectory, *, relative: str, depth: int) -> None:
        if folder.path() in self._by_place:
            return
        names = folder.names()
        if RUN_YAML in names and not _LINES.isdisjoint(names):
            self._by_place[folder.path()] = Run(self._free_name(relative or folder.path()), folder)
            return
        for name in (each for each in names if depth and not each.startswith(".")):
            with contextlib.suppress(StorageError):  # a colleague's folder, lost+found
                if _is_folder(folder, name):
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


def _is_folder(folder: RunDirectory, name: str) -> bool:
    if folder.is_local:
        return os.path.isdir(folder.path(name))
    return "." not in name or folder.exists(f"{name}/{RUN_YAML}")
