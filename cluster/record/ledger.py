"""What the learner consumed, append-only: which groups, in which order, in which step. Written and synced before the step.

Each line carries the digest of the trajectories that it names and of the line before it, so that a lost, altered or reordered
record shows. A tail that a crash tore is cut back to the last whole line, and said so. Replay and recovery feed from here.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.contracts.errors import LedgerError

NAME = "ledger/ledger.jsonl"


class Journal(Protocol):
    """Durable lines: the run directory."""

    def append_line(self, name: str, line: str) -> None:
        """Returns once the line is on the disk."""
        ...

    def read_lines(self, name: str) -> list[str]:
        """All lines, a torn last one included; empty when there is none."""
        ...

    def replace_lines(self, name: str, lines: Sequence[str]) -> None: ...


class ReadOnly:
    """Another journal, looked at and left as it is, a torn tail included: for verification and replay."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def append_line(self, name: str, line: str) -> None:
        raise AssertionError(f"{name} is open for reading only")

    def read_lines(self, name: str) -> list[str]:
        return self._journal.read_lines(name)

    def replace_lines(self, name: str, lines: Sequence[str]) -> None:
        """Leaves the torn line where it is."""


class Record(BaseModel):
    """One step's consumption."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """The policy version that the step makes: 1 for the first."""
    groups: tuple[int, ...]
    """Start indices, in the order consumed."""
    next_index: int
    """Where a run that resumes after this step starts its next group."""
    trajectories: str
    """File in the run directory."""
    trajectories_digest: str
    previous: str
    """Digest of the record before; empty for the first."""

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()


class Ledger:
    """The run's record of consumption. One writer: the controller."""

    def __init__(self, journal: Journal) -> None:
        """Reads what is there. Raises LedgerError for a record that contradicts the ones before it."""
        self._journal = journal
        lines = journal.read_lines(NAME)
        self.records, self.num_cut = _read(lines)
        if self.num_cut:
            journal.replace_lines(NAME, lines[: len(self.records)])

    @property
    def version(self) -> int:
        """The last step with a record."""
        return self.records[-1].step if self.records else 0

    @property
    def next_index(self) -> int:
        return self.records[-1].next_index if self.records else 0

    def append(self, *, groups: Sequence[int], trajectories: str, trajectories_digest: str) -> Record:
        """The record of the next step, on the disk when this returns. Raises LedgerError if a group was consumed before."""
        if not groups or min(groups) < self.next_index or list(groups) != sorted(set(groups)):
            raise LedgerError(
                f"step {self.version + 1} would consume groups {list(groups)[:8]} from {self.next_index} on: never twice, in order"
            )
        record = Record(
            step=self.version + 1,
            groups=tuple(groups),
            next_index=groups[-1] + 1,
            trajectories=trajectories,
            trajectories_digest=trajectories_digest,
            previous=self.records[-1].digest if self.records else "",
        )
        self._journal.append_line(NAME, record.model_dump_json())
        self.records.append(record)
        return record

    def after(self, version: int) -> list[Record]:
        """Records of the steps after `version`: what a learner restored to it is fed again."""
        return self.records[version:]


def _read(lines: Sequence[str]) -> tuple[list[Record], int]:
    """(whole records, lines cut off the end)."""
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.model_validate(json.loads(line))
        except (json.JSONDecodeError, ValidationError) as error:
            if number == len(lines):
                return records, 1
            raise LedgerError(
                f"{NAME} line {number} of {len(lines)} is not a record, and is not the last one: {error}"
            ) from error
        _check_follows(record, records, number)
        records.append(record)
    return records, 0


def _check_follows(record: Record, before: Sequence[Record], number: int) -> None:
    previous = before[-1] if before else None
    if record.step != (previous.step if previous else 0) + 1:
        raise LedgerError(
            f"{NAME} line {number}: step {record.step} does not follow step {previous.step if previous else 0}"
        )
    if record.previous != (previous.digest if previous else ""):
        raise LedgerError(f"{NAME} line {number}: the record before it was altered (its digest does not match)")
    if previous and min(record.groups) < previous.next_index:
        raise LedgerError(f"{NAME} line {number}: group {min(record.groups)} was consumed before")
