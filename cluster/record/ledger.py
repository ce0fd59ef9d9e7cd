"""The groups that the learner consumed, by step and in order. Append-only; written and synced before the step.

Each line carries the digest of the trajectories that it names and of the line before it, so that a lost, altered or reordered
record shows. A last line that a crash tore is not read; the next record replaces it. In an object store each record is an object that is
created only if it does not exist: of two drivers, one records a step, and the other stops.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.contracts.errors import LedgerError

NAME = "ledger/ledger.jsonl"


class Journal(Protocol):
    """Where records are kept: the run directory."""

    def append_record(self, step: int, line: str) -> None:
        """Returns once it is durable. Raises LedgerError when another driver recorded that step before."""
        ...

    def read_records(self, after: int = 0) -> list[str]:
        """The lines of all steps after step `after`. A torn last line, which has no end, is "" whatever it holds."""
        ...

    def cut_records(self, number: int) -> None:
        """Keeps only the first `number` records."""
        ...

    def check_claim(self) -> None:
        """Raises ClaimLostError once another driver has taken over."""
        ...


class Record(BaseModel):
    """One step's consumption."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """The policy version that the step makes: 1 for the first."""
    groups: Annotated[tuple[int, ...], Field(min_length=1)]
    """Start indices, in the order consumed."""
    next_index: int
    """Index of the next group of a run that resumes after this step."""
    trajectories: str
    """File in the run directory."""
    trajectories_digest: str
    previous: str
    """Digest of the previous record; empty for the first."""
    pass_rates: dict[str, float] | None = None
    """Pass rate by prompt, of groups judged up to this step, dropped ones too. None without `prompts.difficulty`."""

    @property
    def line(self) -> str:
        return self.model_dump_json(exclude_none=True)

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.line.encode(), digest_size=16).hexdigest()


class Ledger:
    """The run's record of consumption. One writer: the learner. Only the last record is kept in memory."""

    def __init__(self, journal: Journal, *, num_steps: int | None = None) -> None:
        """Reads all records, or the first `num_steps` for a ledger that is only read. Writes nothing.

        Raises LedgerError for a record that contradicts the ones before it.
        """
        self._journal = journal
        self.is_whole = num_steps is None
        """False for a ledger that is only read."""
        self._last: Record | None = None
        lines = journal.read_records()[:num_steps]
        for record in checked(lines):
            self._last = record
        self.num_torn_lines = len(lines) - self.version
        """1 when a crash tore the last line, else 0."""

    @property
    def version(self) -> int:
        """The last step with a record."""
        return self._last.step if self._last else 0

    @property
    def next_index(self) -> int:
        return self._last.next_index if self._last else 0

    def append(
        self,
        *,
        groups: Sequence[int],
        trajectories: str,
        trajectories_digest: str,
        pass_rates: dict[str, float] | None = None,
    ) -> Record:
        """Records the next step. The record is on the disk when this returns, so do not call it in an event loop.

        Raises LedgerError for a group that was consumed before, and when another driver recorded this step before.
        """
        assert self.is_whole, "a part of a ledger is only read"
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
            previous=self._last.digest if self._last else "",
            pass_rates=pass_rates,
        )
        if self.num_torn_lines:
            self._journal.cut_records(self.version)
            self.num_torn_lines = 0
        self._journal.append_record(record.step, record.line)
        self._last = record
        return record

    def check_claim(self) -> None:
        """Raises ClaimLostError once another driver has taken over. This one must then write nothing more."""
        self._journal.check_claim()

    def records(self) -> Iterator[Record]:
        """All of them, read from the disk."""
        return checked(self._journal.read_records()[: self.version])

    def after(self, version: int) -> list[Record]:
        """Records of the steps after `version`, read from the disk, which a learner restored to `version` learns again."""
        return [_parsed(line) for line in self._journal.read_records(version)[: self.version - version]]


def checked(lines: Sequence[str], *, before: Record | None = None) -> Iterator[Record]:
    """The record of each line, checked against the one before; without a torn last line. `before` is the record before the first line.

    Raises LedgerError at the first record that contradicts the ones before it."""
    first = before.step + 1 if before else 1
    for number, line in enumerate(lines, start=first):
        try:
            record = _parsed(line)
        except json.JSONDecodeError as error:
            last = first + len(lines) - 1
            if number == last:
                return
            raise LedgerError(
                f"{NAME} line {number} of {last} is not a record, and is not the last one: {error}"
            ) from error
        except ValidationError as error:  # a whole line is not torn, and removing it would lose a step
            wrong = error.errors(include_url=False)[0]
            field = ".".join(map(str, wrong["loc"])) or "it"
            raise LedgerError(
                f"{NAME} line {number} is not a record of this version of treadwheel ({field}: {wrong['msg']}); go on with the version "
                "that wrote it, or bring it back from a copy"
            ) from error
        _check_follows(record, before, number)
        yield record
        before = record


def _parsed(line: str) -> Record:
    return Record.model_validate(json.loads(line))


def _check_follows(record: Record, before: Record | None, number: int) -> None:
    step = before.step if before else 0
    if record.step != step + 1:
        raise LedgerError(f"{NAME} line {number}: step {record.step} does not follow step {step}")
    if record.previous != (before.digest if before else ""):
        raise LedgerError(f"{NAME} line {number}: the record before it was altered (its digest does not match)")
    if before and min(record.groups) < before.next_index:
        raise LedgerError(f"{NAME} line {number}: group {min(record.groups)} was consumed before")
    if list(record.groups) != sorted(set(record.groups)) or record.groups[-1] >= record.next_index:
        raise LedgerError(
            f"{NAME} line {number}: groups {list(record.groups)[:8]} are not in start order, each once, below {record.next_index}"
        )
