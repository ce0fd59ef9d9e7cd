"""Writes each step's trajectories before the learner sees them, and reads them back for recovery and replay.

An actor of its own, so that neither the controller nor the learner touches the bytes.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from cluster.contracts.errors import LedgerError
from cluster.contracts.schema import SCHEMA, summarize, validate
from cluster.contracts.types import GroupSummary


class Files(Protocol):
    """Whole files, written atomically: the run directory."""

    def write_file(self, name: str, content: pa.Buffer) -> None: ...

    def read_file(self, name: str) -> pa.Buffer: ...


def name_of(step: int) -> str:
    return f"trajectories/step-{step:06d}.arrow"


class Recorder:
    """One record batch a group, in the order consumed, in one Arrow file a step."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def record(self, step: int, *groups: pa.RecordBatch) -> tuple[str, str]:
        """(file name, digest of its content), on the disk when this returns."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            for group in groups:
                writer.write_batch(validate(group))
        content = sink.getvalue()
        self._files.write_file(name_of(step), content)
        return name_of(step), digest_of(content)

    def read(self, name: str, digest: str) -> Sequence[pa.RecordBatch]:
        """The groups of a step. Raises LedgerError when the file is not what was recorded."""
        content = self._files.read_file(name)
        if digest_of(content) != digest:
            raise LedgerError(f"{name} was altered after it was recorded: its digest is not {digest}")
        with pa.ipc.open_file(content) as reader:
            return [validate(reader.get_batch(i)) for i in range(reader.num_record_batches)]

    def holds(self, group: pa.RecordBatch) -> bool:
        """True if `group` could be brought here: the call itself fails when its node is gone."""
        return group.num_rows > 0

    def summaries(self, *groups: pa.RecordBatch) -> list[GroupSummary]:
        """What the controller knew of the groups that `read` returned."""
        return [summarize(group) for group in groups]


def digest_of(content: pa.Buffer) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
