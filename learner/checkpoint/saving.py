"""Saves and restores a rank's part of a checkpoint. All ranks write one together; any number of ranks can restore it.

A save in the background copies the state and writes while training goes on, if every rank has room for its copy. Ranks that write
communicate over a process group of their own, separate from training's.
"""

import hashlib
import json
import socket
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cluster.contracts.config import CheckpointConfig
from cluster.contracts.errors import CheckpointError
from cluster.freed_memory import return_freed_memory
from learner.checkpoint import writing
from learner.checkpoint.manifest import ADAPTER, MODEL, FileEntry, Manifest, parameters_digest, state_name
from learner.checkpoint.model_folder import ModelFolder
from learner.checkpoint.places import Place
from learner.checkpoint.reading import read_manifest
from learner.checkpoint.states import States
from learner.checkpoint.targets import Target, target_of
from learner.distributed import Ranks, local
from learner.memory import free_bytes
from learner.optimizer import Optimizer

_WEIGHT = "weight/"
_MOMENT = "moment/"
_RNG = "rng/cpu"

T = TypeVar("T")


class SmallState(Protocol):
    """State that changes while a run learns and is not a tensor."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """One rank's part of a checkpoint, not yet written."""

    directory: str
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
        # The driver's deadline, whose error names the setting, must pass first. It begins when training waits for the writing.
        self._ranks, self._beside, self._config = ranks, ranks.beside(timeout_s=2 * config.timeout_s), config
        self._small: dict[str, SmallState] = {"objective": objective, "optimizer": optimizer, "guard": guard}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        if ranks.rank == 0:
            self._thread.submit(model.read_ahead)  # a failed read is tried again by the first save, which tells of it
        self._writing: Future[None] | None = None
        self._written: tuple[str, int, float | None] | None = None
        """Directory, version and metric of the last checkpoint that all ranks wrote; None after a restore."""

    def save(
        self, directory: str, *, policy_version: int, extra: Mapping[str, Any], in_background: bool = False
    ) -> None:
        """The checkpoint is on the disk when this returns; with `in_background`, its state is copied. Raises CheckpointError on every rank
        if this save fails, or if a background save before it failed. `finish` or the next save raises the error of a background save.

        A checkpoint that was saved already is not written again, unless `metric` of `extra` is new: a run that is stopped during a save
        requests the same one again.
        """
        failed: CheckpointError | None = None
        try:
            self.finish()
        except CheckpointError as error:  # raised on every rank; this version is saved all the same
            failed = error
        *written, metric = self._written or (None, None)
        is_saved = written == [directory, policy_version] and extra.get("metric") in (None, metric)
        if not is_saved:
            write = self._write_a_copy if in_background else self._write
            write(self._snapshot(directory, policy_version=policy_version, extra=extra))
        if failed is not None:
            raise failed

    def _write_a_copy(self, snapshot: _Snapshot) -> None:
        """Writes in the background; at once if a rank has no room for a copy."""
        if not self._is_room_for_copies():
            return self._write(snapshot)
        # Directly to the CPU: a second copy on the device may not fit.
        state = {name: tensor.to("cpu", copy=True) for name, tensor in snapshot.state.items()}
        weights, adapter = self._kept(snapshot.weights), self._kept(snapshot.adapter)
        copy = replace(snapshot, state=state, weights=weights, adapter=adapter)

        def write() -> None:
            try:
                self._write(copy)
            finally:
                for kept in (state, weights, adapter):
                    kept.clear()
                return_freed_memory()

        self._writing = self._thread.submit(write)

    def _kept(self, gathered: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copies, on the rank that writes them. Gathered now, because the writing thread must not use training's process group."""
        if self._ranks.rank == 0:
            are_copies = self._ranks.device.type == "cuda"  # copied to the CPU when gathered
            return [(name, tensor if are_copies else tensor.clone()) for name, tensor in gathered]
        _iterate(gathered)
        return []

    def finish(self) -> None:
        """Waits for a checkpoint that is being written. Raises its error, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits for a checkpoint that is being written, and ends the thread that writes."""
        self._thread.shutdown()

    def restore(self, directory: str) -> Manifest:
        """Restores the rank's state, reading only the rows of its own shards.

        Raises CheckpointError naming a checkpoint that is torn, altered or foreign. The rank may then have a part of its state.
        """
        self.finish()
        self._written = None
        place = Place.of(directory)
        manifest = read_manifest(place, expected_parameters=self._parameters_digest(), expected_base=self._model.base)
        states = States(place, manifest)
        masters = self._optimizer.masters()
        moments: dict[str, Tensor] = {}
        for name in states.names():
            kind, _, key = name.partition("/")
            if f"{kind}/" == _WEIGHT:
                states.load(masters[key], name)
            elif f"{kind}/" == _MOMENT:
                moments[key] = states.like(masters[key.partition("/")[2]], name)
        self._optimizer.copy_masters()
        self._optimizer.load_state(moments)
        generator = states.of_rank(_RNG, self._ranks.rank)
        if generator is not None:
            torch.set_rng_state(generator)
        for name, part in self._small.items():
            part.load_state_dict(manifest.learner[name])
        return manifest

    def export(self, directory: Path, *, policy_version: int, extra: Mapping[str, Any]) -> None:
        """Writes the weights as a Hugging Face folder; `extra` as in `save`. Raises CheckpointError if it exists or cannot be written."""
        weights = self._model.weights()
        try:
            if self._ranks.rank == 0:
                if directory.exists():
                    raise CheckpointError(f"{directory} exists; export into another folder")
                with writing.saving(directory):
                    aside = writing.begin(directory)
                    self._model.write(aside, weights, policy_version=policy_version, extra=extra)
                    writing.place(aside, directory)
        finally:
            _iterate(weights)
            if self._ranks.rank == 0:
                writing.discard(writing.aside_of(directory))

    def _write(self, snapshot: _Snapshot) -> None:
        """Every rank writes its state. Rank 0 also writes the model and, after all ranks have written, the manifest."""
        directory, is_first = snapshot.directory, self._ranks.rank == 0
        save_id, *_ = self._beside.texts(uuid.uuid4().hex[:12])
        target = self._together(directory, lambda: target_of(directory, is_first=is_first, save_id=save_id))
        try:
            is_wanted = self._together(directory, lambda: target.begin(snapshot.manifest))
            if not self._first_of("" if is_wanted else "it stands"):
                own = self._together(directory, lambda: self._write_own(snapshot, target))
                manifest = snapshot.manifest.sealed(self._of_all_ranks(own))
                self._together(directory, lambda: self._commit(target, manifest) if is_first else None)
            self._written = directory, snapshot.manifest.policy_version, snapshot.manifest.metric
        except CheckpointError:
            target.abandon()
            raise
        finally:
            target.close()

    def _commit(self, target: Target, manifest: Manifest) -> None:
        target.commit(manifest)
        target.prune(keep_last=self._config.keep_last, keep_best=self._config.keep_best)

    def _together(self, directory: str, work: Callable[[], T]) -> T:
        """Does this rank's work and waits for all ranks to do theirs. If any fails, raises CheckpointError on all ranks, with the message
        of the first that failed: a failed rank must not leave the others waiting in the next collective operation.
        """
        try:
            with writing.saving(directory):
                result = work()
        except CheckpointError as error:
            raise CheckpointError(self._first_of(str(error) or repr(error))) from error
        except Exception as error:
            why = f"checkpoint {directory} was not saved: {error!r}; the last good one stands"
            raise CheckpointError(self._first_of(why)) from error
        if why := self._first_of(""):
            raise CheckpointError(why)
        return result

    def _first_of(self, own: str) -> str:
        """The first non-empty text of all ranks."""
        return next(filter(None, self._beside.texts(own)), "")

    def _write_own(self, snapshot: _Snapshot, target: Target) -> dict[str, FileEntry]:
        """Writes and delivers this rank's files. Returns their entries by path in the checkpoint."""
        aside = target.folder()
        try:
            name = state_name(self._ranks.rank, self._ranks.size)
            state = {key: tensor.cpu() for key, tensor in snapshot.state.items()}
            written = {name: writing.write_tensors(aside / name, state, in_blocks=True)}
            if self._ranks.rank == 0:
                version, extra = snapshot.manifest.policy_version, snapshot.manifest.extra
                model = self._model.write(aside / MODEL, snapshot.weights, policy_version=version, extra=extra)
                adapter = self._model.write_adapter(
                    aside / ADAPTER, snapshot.adapter, policy_version=version, extra=extra
                )
                written |= {f"{MODEL}/{path}": entry for path, entry in model.items()}
                written |= {f"{ADAPTER}/{path}": entry for path, entry in adapter.items()}
            target.deliver(written)
            return written
        finally:
            # Gathering needs all ranks: those that write no weights, or whose writing failed, iterate too.
            _iterate(snapshot.weights)
            _iterate(snapshot.adapter)

    def _snapshot(self, directory: str, *, policy_version: int, extra: Mapping[str, Any]) -> _Snapshot:
        manifest = Manifest(
            policy_version=policy_version,
            num_ranks=self._ranks.size,
            parameters_digest=self._parameters_digest(),
            base=self._model.base,
            metric=extra.get("metric"),
            rated_by=extra.get("rated_by", ""),
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
        """This rank's shards and random state, not copied."""
        weights = {f"{_WEIGHT}{name}": master.detach() for name, master in self._optimizer.masters().items()}
        moments = {f"{_MOMENT}{name}": value for name, value in self._optimizer.state().items()}
        tensors = weights | moments | {_RNG: torch.get_rng_state()}
        return {name: local(tensor) for name, tensor in tensors.items()}

    def _is_room_for_copies(self) -> bool:
        """Whether every machine has memory for the copies of all its ranks. All ranks get the same answer."""
        if self._do_copies_fit():
            return True
        return_freed_memory()
        return self._do_copies_fit()

    def _do_copies_fit(self) -> bool:
        size_bytes = sum(tensor.nbytes for tensor in self._state().values())
        if self._ranks.rank == 0:
            size_bytes += self._model.size_bytes()
        machine = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7])
        own = torch.tensor([machine, size_bytes, free_bytes(torch.device("cpu"))])
        ranks = [part.tolist() for part in self._beside.stack(own)]
        needed: Counter[int] = Counter()
        for machine, size_bytes, _ in ranks:
            needed[machine] += size_bytes
        return all(needed[machine] < free for machine, _, free in ranks)

    def _parameters_digest(self) -> str:
        return parameters_digest({name: master.shape for name, master in self._optimizer.masters().items()})

    def _of_all_ranks(self, own: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """The entries of all ranks' files, in order of rank."""
        text = json.dumps({name: entry.model_dump() for name, entry in own.items()})
        return {
            name: FileEntry.model_validate(entry)
            for each in self._beside.texts(text)
            for name, entry in json.loads(each).items()
        }


def _iterate(gathered: Iterable[Any]) -> None:
    deque(gathered, maxlen=0)
