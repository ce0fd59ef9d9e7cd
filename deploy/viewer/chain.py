"""The ledger's chain for the pages: its valid records, and where it breaks. `treadwheel verify` checks it with the same code."""

import threading
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.contracts.errors import LedgerError, StorageError
from cluster.record.ledger import Record, checked
from cluster.record.recorder import digest_of, num_pruned_steps, step_of
from cluster.record.run_directory import TRAJECTORIES, RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    records: Sequence[Record] = ()
    """Records of the steps from 1 on, up to the place where the chain breaks."""
    problem: str | None = None
    """Why the chain breaks after the last of `records`; None: it does not."""
    is_torn: bool = False
    """The last line is incomplete: a driver is writing it, or a crash tore it."""

    def step_of(self, ticket: int) -> int | None:
        """The step that this group trained; None: no record names the group."""
        place = bisect_right(self.records, ticket, key=lambda record: record.groups[0]) - 1
        return self.records[place].step if place >= 0 and ticket in self.records[place].groups else None

    def record(self, step: int) -> Record | None:
        return self.records[step - 1] if 0 < step <= len(self.records) else None


class ChainReader:
    """Checks only records that are new or have changed. Reads all records of a file on a disk, but in an object store only the last known
    record and those after it: if that record has changed, the run was started over. Several threads may use it."""

    def __init__(self, directory: RunDirectory, *, every_s: float) -> None:
        """Reads nothing yet. `read` looks for new records every `every_s` seconds at most."""
        self._directory = directory
        self._every_s = every_s
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._chain = Chain()
        self._asked_at = float("-inf")

    def read(self) -> Chain:
        with self._lock:
            if time.monotonic() - self._asked_at >= self._every_s:
                try:
                    self._read_on()
                finally:
                    self._asked_at = time.monotonic()
            return self._chain

    def _read_on(self) -> None:
        known = [] if self._directory.is_local else self._lines
        last = known[-1:]
        found = self._directory.read_records(len(known) - len(last))
        if found[: len(last)] != last:
            known, last, found = [], [], self._directory.read_records()
        self._check([*known, *found[len(last) :]])
        if known and self._chain.problem:  # perhaps the run was started over
            self._check(self._directory.read_records())

    def _check(self, lines: list[str]) -> None:
        num_kept = len(self._chain.records)
        if lines[:num_kept] != self._lines[:num_kept]:
            num_kept = 0
        records = list(self._chain.records[:num_kept])
        problem = None
        try:
            for record in checked(lines[num_kept:], before=records[-1] if records else None):
                records.append(record)
        except LedgerError as error:
            problem = str(error).partition("\n")[0]
        self._lines, self._chain = (
            lines,
            Chain(records=records, problem=problem, is_torn=problem is None and len(lines) > len(records)),
        )


def ticket_of(event: Mapping[str, Any]) -> int | None:
    """The group that an event names; None: it names none."""
    group_id = str(event.get("group_id", ""))
    return int(group_id) if group_id.isdecimal() else None


def names_its_file(record: Record) -> bool:
    """Whether the record names a file of its step's trajectories. The viewer opens no other file, whatever a ledger says."""
    folder, _, name = record.trajectories.rpartition("/")
    return folder == TRAJECTORIES and step_of(name) == record.step


def check_files(directory: RunDirectory, records: Sequence[Record], *, most_bytes: int) -> dict[int, str]:
    """State of each step's file of trajectories: `as recorded`, `altered`, `missing`, `removed` (by `record.keep_trajectories`), or `not
    checked` once `most_bytes` were read."""
    states: dict[int, str] = {}
    for record in records:
        size = (directory.size_bytes(record.trajectories) or 0) if most_bytes > 0 else 1
        most_bytes = max(most_bytes - size, -1)
        states[record.step] = _checked_file(directory, record) if most_bytes >= 0 else "not checked"
    return states


def _checked_file(directory: RunDirectory, record: Record) -> str:
    if not names_its_file(record):
        return "altered"
    try:
        content = directory.read_file(record.trajectories)
    except StorageError:
        return "removed" if record.step <= num_pruned_steps(directory) else "missing"
    return "as recorded" if digest_of(content) == record.trajectories_digest else "altered"
