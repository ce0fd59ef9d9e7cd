"""The common part of all trackers: the run's identity, its settings and passport as flat parameters, and a few trajectories of a step."""

import contextlib
import importlib
import json
import math
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from cluster.contracts.errors import ConfigError, StorageError
from cluster.contracts.settings import entries
from cluster.metrics import ENDS
from cluster.record.recorder import step_of
from cluster.record.run_directory import PASSPORT, TRACKED, TRAJECTORIES, RunDirectory

_MAX_CHARACTERS = 500
"""Longest parameter; every tracker takes this many characters."""
_TRAJECTORY = ("group_id", "sample_index", "reward", "finish_reason", "prompt_text", "completion_text")


class Ending:
    """How a driver ends, according to its events. A killed driver sends none."""

    def __init__(self) -> None:
        self.kind: str | None = None
        """One of `ENDS`, or `preempted`: stopped because a node announced its end. None before the end."""
        self.reason = ""
        self._notice = ""

    def hear(self, record: Mapping[str, Any]) -> str | None:
        """Returns the kind of end if this event is the end."""
        if record["kind"] == "preempted":
            self._notice = str(record.get("message") or "a node went away")
        if record["kind"] not in ENDS:
            return None
        is_preempted = record["kind"] == "stopped" and self._notice
        self.kind = "preempted" if is_preempted else str(record["kind"])
        self.reason = self._notice if is_preempted else str(record.get("reason") or "")
        return self.kind


class Tracked:
    in_store: tuple[str, ...] = ()
    """Variables of which a run in an object store needs one. Otherwise the tracker's files would stay on the driver's machine."""

    project_from: str | None = None
    """The tracker's own variable that names the project."""

    def __init__(
        self,
        *,
        directory: RunDirectory,
        num_steps: int,
        project: str | None = None,
        name: str | None = None,
        num_trajectories: int = 4,
    ) -> None:
        """The tracker's run is opened with the first step. Without `project` it is in that of `project_from`, else in `treadwheel`. Raises
        ConfigError as `_check_place`."""
        self._check_place(directory)
        self._directory = directory
        self._id = identity(directory)
        named = os.environ.get(self.project_from) if self.project_from else None
        self._project, self._name = project or named or "treadwheel", name or directory.name
        self._num_trajectories = num_trajectories
        self._run: Any = None
        self._told = 0
        self._ending = Ending()

    def _check_place(self, directory: RunDirectory) -> None:
        """Raises ConfigError for a run in an object store without one of `in_store`."""
        if self.in_store and not directory.is_local and not any(name in os.environ for name in self.in_store):
            tracker = type(self).__name__.lower()
            raise ConfigError(
                f"run_dir={directory.url!r}: {tracker} keeps a run offline on a disk; set {' or '.join(self.in_store)}, or leave "
                f"{tracker} out"
            )

    def _trajectories(self, version: int) -> list[dict[str, Any]]:
        """Some trajectories of the step that made policy `version`; none if that step was logged before."""
        is_new, self._told = version > self._told, max(version, self._told)
        return trajectories(self._directory, version, self._num_trajectories) if is_new else []


def tracker(package: str) -> Any:
    """The tracker's package. Raises ModuleNotFoundError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; pip install 'treadwheel[{package.partition('.')[0]}]'") from error


@contextlib.contextmanager
def without_terminal() -> Iterator[None]:
    """Makes a tracker without a login raise an error instead of asking the terminal for one. The terminal shows the run, so nobody would
    answer, and a thread that still waits for a line at the run's end makes the process end with a fatal error."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def identity(directory: RunDirectory) -> str:
    """Sixteen letters and digits, the same for every driver of this run. They are kept in the run directory, whose owner calls this."""
    if known := directory.read_json(TRACKED):
        return known["id"]
    made = uuid.uuid4().hex[:16]
    directory.write_json(TRACKED, {"id": made})
    return made


def parameters(directory: RunDirectory) -> dict[str, str | int | float | bool]:
    """Settings by full name, and the passport's entries below `passport.`. Both hide secrets. The passport is there from the first step
    on."""
    found = (*entries(directory.settings()), *entries(directory.read_json(PASSPORT), "passport."))
    return {name: value if isinstance(value, int | float | bool) else _cut(value) for name, value in found}


def trajectories(directory: RunDirectory, version: int, number: int) -> list[dict[str, Any]]:
    """Up to `number` trajectories of the step that made policy `version`, the best reward first; empty if they cannot be read."""
    try:
        files = [name for name in directory.names(TRAJECTORIES) if step_of(name) == version] if number else []
        if len(files) != 1:  # two in an object store: only the ledger knows which counts, and a tracker needs none
            return []
        content = directory.read_file(f"{TRAJECTORIES}/{files[0]}")
    except StorageError:  # removed (`record.keep_trajectories`), or the store is unavailable: the numbers count
        return []
    with pa.ipc.open_file(content) as reader:
        rows = reader.read_all().select(_TRAJECTORY).to_pylist()
    rows.sort(key=lambda row: -math.inf if row["reward"] is None else row["reward"], reverse=True)
    if len(rows) <= number:
        return rows
    spread = max(number - 1, 1)
    return [rows[place * (len(rows) - 1) // spread] for place in range(number)]


def finite_only(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
