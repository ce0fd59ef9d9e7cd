"""Writes each step's trajectories before the learner sees them, reads them back for recovery and replay, removes old ones if told to. The
record of learning is written beside them.

An actor of its own, so that neither the controller nor the learner touches the bytes.
"""

import hashlib
import re
from collections.abc import Sequence

import pyarrow as pa

from cluster.contracts.errors import LedgerError
from cluster.contracts.learned import Learned, read_learned, written_learned
from cluster.contracts.schema import SCHEMA, as_one, joined, summarize, upgraded, validate
from cluster.contracts.types import GroupSummary
from cluster.record.run_directory import LEARNED, TRAJECTORIES, checkpoints_of
from cluster.record.storage import Storage

PRUNED = f"{TRAJECTORIES}/pruned.json"
"""File with the number of first steps whose trajectories were removed. Missing until some were."""


def name_of(step: int, digest: str = "") -> str:
    """Name of a step's file. In an object store it has the content's digest, so that a driver that was taken for dead and wakes writes into
    no file of the next one. The ledger says which file of a step counts."""
    return f"{TRAJECTORIES}/step-{step:06d}{'-' if digest else ''}{digest[:12]}.arrow"


def step_of(name: str) -> int | None:
    """The step of a trajectories' file, by its name without folder; None for another file."""
    found = re.fullmatch(r"step-(\d+)(-[0-9a-f]+)?\.arrow", name)
    return int(found[1]) if found else None


def learned_name(trajectories: str) -> str:
    """Name of the record of learning for a file of trajectories such as `trajectories/step-000012.arrow`: the same, in another folder.

    So a driver that was taken for dead writes into no file of the next one, and a step that is learned again replaces its record.
    """
    return f"{LEARNED}/{trajectories.rpartition('/')[2]}"


def learned_of(files: Storage, trajectories: str) -> Learned | None:
    """The record of learning for a file of trajectories; None if the step has none. Raises DataError as `read_learned`."""
    name = learned_name(trajectories)
    return read_learned(files.read_file(name)) if files.exists(name) else None


def num_pruned_steps(files: Storage) -> int:
    """The last step whose trajectories were removed; 0 when all are there."""
    return files.read_json(PRUNED).get("steps", 0)


class Recorder:
    """Writes one Arrow file per step, with one record batch per group in the order consumed."""

    def __init__(self, files: Storage, *, keep_steps: int | None = None, keep_checkpoints: int = 1) -> None:
        """Keeps the trajectories of the last `keep_steps` steps (None: all), and those that the last `keep_checkpoints` checkpoints
        need."""
        self._files = files
        self._keep_steps = keep_steps
        self._keep_checkpoints = keep_checkpoints

    def record(self, step: int, *pieces: pa.RecordBatch | list[int]) -> tuple[pa.RecordBatch, tuple[str, str]]:
        """Joins the pieces to groups and writes them durably. Returns the groups as one batch, for the ranks, and (file, digest)."""
        groups = joined(pieces)
        everything = as_one(groups)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            for group in groups:
                writer.write_batch(upgraded(group))
        content = sink.getvalue()
        digest = digest_of(content)
        name = name_of(step, "" if self._files.is_local else digest)
        self._files.write_file(name, content)
        if self._keep_steps is not None:
            self._prune(min(step - self._keep_steps, self._restarts_from()))
        return everything, (name, digest)

    def read(self, name: str, digest: str) -> Sequence[pa.RecordBatch]:
        """The groups of a step. Raises LedgerError when the file is not what was recorded, or was removed."""
        step = step_of(name.rpartition("/")[2])
        if step and not self._files.exists(name) and step <= (pruned := num_pruned_steps(self._files)):
            raise LedgerError(
                f"{name} was removed (record.keep_trajectories): only steps after {pruned} can be learned again; "
                "go on from a newer checkpoint"
            )
        content = self._files.read_file(name)
        if digest_of(content) != digest:
            raise LedgerError(f"{name} was altered after it was recorded: its digest is not {digest}")
        with pa.ipc.open_file(content) as reader:
            return [validate(reader.get_batch(i)) for i in range(reader.num_record_batches)]

    def record_learned(self, trajectories: str, policy_version: int, *parts: pa.RecordBatch) -> None:
        """Writes the ranks' record of learning for a file of trajectories. `policy_version` is the one before the step."""
        self._files.write_file(learned_name(trajectories), written_learned(parts, policy_version=policy_version))

    def forget_learned(self, trajectories: str) -> None:
        """Removes the record of learning of a step that is learned again."""
        self._files.remove(learned_name(trajectories))

    def holds(self, *pieces: pa.RecordBatch | list[int]) -> bool:
        """True if a group's pieces reached this actor. The call itself fails when the node of a piece is lost."""
        return bool(pieces)

    def _restarts_from(self) -> int:
        """The oldest step that a run may be restored to, when all but one of the kept checkpoints are damaged."""
        steps = list(checkpoints_of(self._files))
        return steps[-self._keep_checkpoints] if len(steps) >= self._keep_checkpoints else 0

    def _prune(self, last: int) -> None:
        """Removes the trajectories of the steps up to `last`. Writes that down first, because a missing file is an error otherwise."""
        if last <= num_pruned_steps(self._files):
            return
        self._files.write_json(PRUNED, {"steps": last})
        for folder in (TRAJECTORIES, LEARNED):
            for name in self._files.names(folder):
                if (step := step_of(name)) is not None and step <= last:
                    self._files.remove(f"{folder}/{name}")

    def summaries(self, *groups: pa.RecordBatch) -> list[GroupSummary]:
        """Summaries, as the controller had them, of the groups that `read` returned."""
        return [summarize(group) for group in groups]


def digest_of(content: pa.Buffer) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
