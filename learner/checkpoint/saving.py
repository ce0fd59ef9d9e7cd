"""A rank's checkpoints: what goes in, how all ranks write one together, how it comes back to any number of ranks.

`save_in_background` copies the state and writes while training goes on. It needs memory for the copy, and a single rank: writing is a
collective operation, for which several ranks interrupt their training.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cluster.contracts.config import CheckpointConfig
from cluster.contracts.errors import CheckpointError
from learner.checkpoint import files
from learner.checkpoint.files import ADAPTER, MODEL, FileEntry, Manifest
from learner.checkpoint.model_folder import ModelFolder
from learner.distributed import Ranks, fill, local
from learner.memory import free_bytes
from learner.optimizer import Optimizer

_WEIGHT = "weight/"
_MOMENT = "moment/"
_RNG = "rng/cpu"

T = TypeVar("T")


class SmallState(Protocol):
    """What changes while a run learns and is not a tensor."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """One rank's part of a checkpoint, not yet written."""

    directory: Path
    manifest: Manifest
    """Without files."""
    state: dict[str, Tensor]
    weights: Iterable[tuple[str, Tensor]]
    adapter: Iterable[tuple[str, Tensor]]


class Saver:
    """Saves and restores one rank."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        objective: SmallState,
        guard: SmallState,
        model: ModelFolder,
        ranks: Ranks,
        config: CheckpointConfig,
    ) -> None:
        self._optimizer, self._model = optimizer, model
        self._ranks, self._config = ranks, config
        self._small: dict[str, SmallState] = {"objective": objective, "optimizer": optimizer, "guard": guard}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._written: tuple[Path, int] | None = None
        """Folder and version of the last checkpoint that all ranks wrote; None after a restore."""

    def save(self, directory: Path, *, policy_version: int, extra: Mapping[str, Any]) -> None:
        """The checkpoint is on the disk when this returns. Raises CheckpointError when it is not, or when the one before is not.

        One that is on the disk stays as it is: a run that is stopped in a save asks for it again.
        """
        self._save(directory, policy_version=policy_version, extra=extra, by=self._write)

    def save_in_background(self, directory: Path, *, policy_version: int, extra: Mapping[str, Any]) -> None:
        """Returns once the state is copied; `finish`, or the next save, raises what went wrong with the writing."""
        by = self._write_a_copy if self._ranks.size == 1 and self._has_room_for_a_copy() else self._write
        self._save(directory, policy_version=policy_version, extra=extra, by=by)

    def _save(
        self, directory: Path, *, policy_version: int, extra: Mapping[str, Any], by: Callable[[_Snapshot], None]
    ) -> None:
        try:
            self.finish()
        finally:  # this version is saved also where the one before could not be
            if self._written != (directory, policy_version):
                by(self._snapshot(directory, policy_version=policy_version, extra=extra))

    def _write_a_copy(self, snapshot: _Snapshot) -> None:
        copy = replace(
            snapshot,
            # To the CPU at once: a second copy on the device may not fit.
            state={name: tensor.to("cpu", copy=True) for name, tensor in snapshot.state.items()},
            weights=[(name, tensor.clone()) for name, tensor in snapshot.weights],
            adapter=[(name, tensor.clone()) for name, tensor in snapshot.adapter],
        )
        self._writing = self._thread.submit(self._write, copy)

    def finish(self) -> None:
        """Waits for a checkpoint that is being written. Raises what went wrong with it, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits for a checkpoint that is being written, and ends the thread that writes."""
        self._thread.shutdown()

    def restore(self, directory: Path) -> Manifest:
        """The rank as it was when it saved. Raises CheckpointError naming a checkpoint that is torn, altered or foreign."""
        self.finish()
        self._written = None
        manifest = files.verify(directory, expected_parameters=self._parameters_digest())
        states = files.States(directory, num_ranks=manifest.num_ranks)
        masters = self._optimizer.masters()
        moments: dict[str, Tensor] = {}
        for name in states.names():
            if name.startswith(_WEIGHT):
                fill(masters[name.removeprefix(_WEIGHT)], states.tensor(name).to(self._ranks.device))
            elif name.startswith(_MOMENT):
                key = name.removeprefix(_MOMENT)
                moments[key] = _placed_like(masters[key.partition("/")[2]], states.tensor(name))
        self._optimizer.copy_masters()
        self._optimizer.load_state(moments)
        generator = states.of_rank(_RNG, self._ranks.rank)
        if generator is not None:
            torch.set_rng_state(generator)
        for name, part in self._small.items():
            part.load_state_dict(manifest.learner[name])
        return manifest

    def export(self, directory: Path) -> None:
        """The weights as a Hugging Face folder. Raises CheckpointError when the folder exists, or cannot be written."""
        weights = self._model.weights()
        try:
            if self._ranks.rank == 0:
                if directory.exists():
                    raise CheckpointError(f"{directory} exists; export into another folder")
                with files.saving(directory):
                    self._model.write(files.begin(directory), weights)
                    files.aside_of(directory).rename(directory)
        finally:
            _iterate(weights)
            if self._ranks.rank == 0:
                files.discard(files.aside_of(directory))

    def _write(self, snapshot: _Snapshot) -> None:
        """Every rank writes its state, rank 0 also the model and, once all have written, the manifest."""
        directory, is_first = snapshot.directory, self._ranks.rank == 0
        aside = files.aside_of(directory)
        try:
            self._together(directory, lambda: files.begin(directory) if is_first else None)
            written = self._together(directory, lambda: self._write_own(snapshot, aside))
            written |= self._state_entries(written[self._state_name()])
            self._together(directory, lambda: self._commit(snapshot, written) if is_first else None)
            self._written = directory, snapshot.manifest.policy_version
        finally:
            if is_first:
                files.discard(aside)

    def _commit(self, snapshot: _Snapshot, written: Mapping[str, FileEntry]) -> None:
        directory = snapshot.directory
        files.commit(files.aside_of(directory), directory, snapshot.manifest.sealed(written))
        files.prune(directory.parent, keep_last=self._config.keep_last, keep_best=self._config.keep_best)

    def _together(self, directory: Path, work: Callable[[], T]) -> T:
        """This rank's share of the work, once every rank has done its own. Raises CheckpointError on all of them if one could not.

        A rank that fails must not leave the others waiting for it in the next collective operation.
        """
        try:
            with files.saving(directory):
                done = work()
        except CheckpointError:
            self._num_failed(1)
            raise
        if self._num_failed(0):
            raise CheckpointError(
                f"checkpoint {directory} was not saved: another rank could not write its part; the last good one stands"
            )
        return done

    def _num_failed(self, own: int) -> int:
        return int(self._ranks.sum(torch.tensor(own, device=self._ranks.device)))

    def _write_own(self, snapshot: _Snapshot, aside: Path) -> dict[str, FileEntry]:
        """What this rank writes, by path in the checkpoint."""
        try:
            name = self._state_name()
            state = {key: tensor.cpu() for key, tensor in snapshot.state.items()}
            written = {name: files.write_tensors(aside / name, state)}
            if self._ranks.rank == 0:
                model = self._model.write(aside / MODEL, snapshot.weights)
                adapter = self._model.write_adapter(aside / ADAPTER, snapshot.adapter)
                written |= {f"{MODEL}/{path}": entry for path, entry in model.items()}
                written |= {f"{ADAPTER}/{path}": entry for path, entry in adapter.items()}
            return written
        finally:
            # Gathering takes all ranks: also those that write no weights, and one whose writing failed, go through them.
            _iterate(snapshot.weights)
            _iterate(snapshot.adapter)

    def _snapshot(self, directory: Path, *, policy_version: int, extra: Mapping[str, Any]) -> _Snapshot:
        manifest = Manifest(
            policy_version=policy_version,
            num_ranks=self._ranks.size,
            parameters_digest=self._parameters_digest(),
            metric=extra.get("metric"),
            learner={name: part.state_dict() for name, part in self._small.items()},
            extra=dict(extra),
            files={},
        )
        return _Snapshot(
            directory=directory,
            manifest=manifest,
            state=self._state(),
            weights=self._model.weights(),
            adapter=self._model.adapter(),
        )

    def _state(self) -> dict[str, Tensor]:
        """This rank's shards, not copied."""
        weights = {f"{_WEIGHT}{name}": master.detach() for name, master in self._optimizer.masters().items()}
        moments = {f"{_MOMENT}{name}": value for name, value in self._optimizer.state().items()}
        tensors = weights | moments | {_RNG: torch.get_rng_state()}
        return {name: local(tensor) for name, tensor in tensors.items()}

    def _has_room_for_a_copy(self) -> bool:
        size_bytes = sum(tensor.nbytes for tensor in self._state().values()) + self._model.size_bytes()
        return size_bytes < free_bytes(torch.device("cpu"))

    def _parameters_digest(self) -> str:
        return files.parameters_digest({name: master.shape for name, master in self._optimizer.masters().items()})

    def _state_name(self) -> str:
        return files.state_name(self._ranks.rank, self._ranks.size)

    def _state_entries(self, own: FileEntry) -> dict[str, FileEntry]:
        """The state files of all ranks. An entry travels as five integers: its size, and its digest's four quarters."""
        digest = torch.frombuffer(bytearray.fromhex(own.sha256), dtype=torch.uint8).view(torch.int64)
        packed = torch.cat([torch.tensor([own.size_bytes]), digest]).to(self._ranks.device)
        entries: dict[str, FileEntry] = {}
        for rank, part in enumerate(self._ranks.stack(packed)):
            size, quarters = int(part[0]), part[1:].cpu().contiguous()
            sha256 = quarters.view(torch.uint8).numpy().tobytes().hex()
            entries[files.state_name(rank, self._ranks.size)] = FileEntry(size_bytes=size, sha256=sha256)
        return entries


def _iterate(gathered: Iterable[Any]) -> None:
    deque(gathered, maxlen=0)


def _placed_like(master: Tensor, value: Tensor) -> Tensor:
    """A whole value sharded as the master is; a scalar (a step count) whole, on the master's device."""
    if value.ndim == 0 or not isinstance(master, DTensor):
        return value.to(master.device)
    placed = torch.zeros_like(master)
    fill(placed, value.to(placed.device))
    return placed
