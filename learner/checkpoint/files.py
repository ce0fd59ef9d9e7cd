"""Checkpoints on disk: written aside, synced, renamed into place. Tensors are safetensors, the rest JSON, never pickle.

    step-000010/manifest.json    the learner's small state, and size and digest of every other file
    step-000010/model/           the weights as a Hugging Face folder, for `from_pretrained` and `vllm serve`
    step-000010/adapter/         with LoRA: the adapter alone, as a peft folder
    step-000010/state-00000-of-00001.safetensors    one per rank: float32 weights, moments, random number generator

A folder without a manifest is not a checkpoint. A save that is killed leaves a folder whose name begins with a dot; the next save
removes it.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cluster.contracts.errors import CheckpointError
from cluster.record.run_directory import checkpoint_step
from cluster.record.storage import sync_folder

MANIFEST = "manifest.json"
MODEL = "model"
ADAPTER = "adapter"
_SAVING, _REMOVING = ".saving", ".removing"
_OURS = "treadwheel-checkpoint"
"""Stands in every manifest of ours, whatever its format and whether or not it is whole."""
FORMAT = f"{_OURS}-3"
"""Another number whenever `learner` or the state files hold something else: what an earlier version left out cannot be restored."""


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint is. Written last, with a digest of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    format: str = FORMAT
    policy_version: int
    num_ranks: int
    """That saved; any number may restore."""
    parameters_digest: str
    """Of the trained parameters' names and shapes: another model's checkpoint is foreign."""
    metric: float | None
    """Higher is better; None is not compared."""
    learner: dict[str, Any]
    """The learner's own small state."""
    extra: dict[str, Any]
    """The caller's, given back by restore."""
    files: dict[str, FileEntry]
    """Every other file of the checkpoint by its path."""
    digest: str = ""
    """SHA-256 of everything above; empty until it is written."""

    def sealed(self, files: Mapping[str, FileEntry]) -> "Manifest":
        """With these files, and the digest."""
        complete = self.model_copy(update={"files": dict(files)})
        return complete.model_copy(update={"digest": complete.own_digest()})

    def own_digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()


def state_name(rank: int, num_ranks: int) -> str:
    return f"state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def parameters_digest(shapes: Mapping[str, Iterable[int]]) -> str:
    """SHA-256 of names and shapes."""
    return hashlib.sha256(
        json.dumps({name: list(shape) for name, shape in sorted(shapes.items())}).encode()
    ).hexdigest()


# Writing


@contextlib.contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Disk errors inside become the CheckpointError of a save that failed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {directory} was not saved: {error}; the last good one stands") from error


def aside_of(directory: Path) -> Path:
    """The hidden folder next to `directory` that the checkpoint is written into."""
    return directory.with_name(f".{directory.name}{_SAVING}")


def begin(directory: Path) -> Path:
    """That folder, empty."""
    aside = aside_of(directory)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """One safetensors file, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return seal(path)


def seal(path: Path) -> FileEntry:
    """Syncs a file and takes its digest."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(size_bytes=path.stat().st_size, sha256=_sha256(path))


def commit(aside: Path, directory: Path, manifest: Manifest) -> None:
    """Makes the folder, with its sealed manifest, a checkpoint under its final name, replacing one of that name."""
    with open(aside / MANIFEST, "w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(aside):
        sync_folder(folder)
    replaced = _hide(directory) if directory.exists() else None
    os.rename(aside, directory)
    sync_folder(directory.parent)
    if replaced is not None:
        discard(replaced)


def discard(folder: Path) -> None:
    """Removes a folder that is not, or no longer, a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, *, keep_last: int, keep_best: bool) -> None:
    """Removes all but the newest and the one with the best metric; also what saves left that were killed."""
    for left in (*root.glob(f".*{_SAVING}"), *root.glob(f".*{_REMOVING}")):
        discard(left)
    found = checkpoints(root)
    kept = set(found[-keep_last:])
    if keep_best:
        rated = [(metric, path) for path in found if (metric := _metric(path)) is not None]
        kept |= {path for _, path in sorted(rated)[-1:]}
    for path in found:
        if path not in kept:
            discard(_hide(path))


# Reading


def checkpoints(root: Path) -> list[Path]:
    """All below `root`, oldest first."""
    if not root.is_dir():
        return []
    found = ((checkpoint_step(path.name), path) for path in root.iterdir() if path.is_dir())
    return [path for _, path in sorted((step, path) for step, path in found if step is not None)]


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError when there is none, or it is not ours."""
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST}{_offer(directory)}") from error
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: {MANIFEST} cannot be read or was altered{_offer(directory)}"
        ) from error
    if manifest.digest != manifest.own_digest():
        raise _unfit(directory, f"was altered: {MANIFEST} has another digest")
    return manifest


def verify(directory: Path, *, expected_parameters: str | None = None, below: str = "") -> Manifest:
    """The manifest, once every file `below` a folder of the checkpoint has its size and digest.

    `expected_parameters` is asked for a checkpoint that is to be restored. Raises CheckpointError naming checkpoint, file and the one
    before, or the version that wrote it.
    """
    manifest = read_manifest(directory)
    if expected_parameters is not None:
        _refuse_foreign(directory, manifest, expected_parameters)
    for name, entry in manifest.files.items():
        if not name.startswith(below):
            continue
        path = directory / name
        if not path.is_file():
            raise _unfit(directory, f"is torn: {name} is missing")
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise _unfit(directory, f"is torn: {name} has {size} bytes instead of {entry.size_bytes}")
        if _sha256(path) != entry.sha256:
            raise _unfit(directory, f"was altered: {name} has another digest")
    return manifest


def _refuse_foreign(directory: Path, manifest: Manifest, expected_parameters: str) -> None:
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"checkpoint {directory} was written by another version of treadwheel, in format {manifest.format!r} instead of {FORMAT!r}; "
            f"go on with that version, or begin another run_dir with its weights: model.path={directory / MODEL}"
        )
    if manifest.parameters_digest != expected_parameters:
        raise _unfit(directory, "is foreign: its parameters are not those of this run's model")


def verify_model(folder: Path) -> None:
    """Checks a model folder that is part of a checkpoint, as `verify` does; one that is in none of ours passes."""
    folder = folder.expanduser().resolve()
    manifest = folder.parent / MANIFEST
    if folder.name == MODEL and manifest.is_file() and _OURS.encode() in manifest.read_bytes():
        verify(folder.parent, below=f"{MODEL}/")


class States:
    """The ranks' state files as whole tensors, one at a time: shards are parts of the first dimension, in order of rank."""

    def __init__(self, directory: Path, *, num_ranks: int) -> None:
        names = [state_name(rank, num_ranks) for rank in range(num_ranks)]
        self._files = [safe_open(directory / name, framework="pt") for name in names]

    def names(self) -> list[str]:
        return list(self._files[0].keys())

    def tensor(self, name: str) -> Tensor:
        """Whole: parts of every rank together, or rank 0's where it is not sharded (a scalar)."""
        first = self._files[0].get_tensor(name)
        if len(self._files) == 1 or first.ndim == 0:
            return first
        return torch.cat([first, *(file.get_tensor(name) for file in self._files[1:])])

    def of_rank(self, name: str, rank: int) -> Tensor | None:
        """One rank's own, or None where that rank did not save."""
        return self._files[rank].get_tensor(name) if rank < len(self._files) else None


def _unfit(directory: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {directory} {problem}{_offer(directory)}")


def _offer(directory: Path) -> str:
    """How to go on without this one."""
    before = [
        path for path in checkpoints(directory.parent) if path.name < directory.name and (path / MANIFEST).is_file()
    ]
    if before:
        return f"; the one before it is {before[-1]}: move {directory.name} away to resume from there"
    return "; there is none before it: move it away to start anew"


def _metric(directory: Path) -> float | None:
    try:
        return read_manifest(directory).metric
    except CheckpointError:  # another checkpoint's damage does not fail the save that prunes
        return None


def _hide(directory: Path) -> Path:
    """Renames a checkpoint before it is removed: a kill half-way must not leave a torn one under its name."""
    hidden = directory.with_name(f".{directory.name}{_REMOVING}")
    discard(hidden)
    os.rename(directory, hidden)
    return hidden


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
