"""Checkpoints on disk: written aside, synced, renamed; safetensors and JSON, never pickle. The learner saves and restores.

    step-000010/manifest.json             digests of all files, and everything that is no tensor; what has none is no checkpoint
    step-000010/model/                    a Hugging Face folder, for `from_pretrained`, `vllm serve` and people
    step-000010/state-00000-of-00001.safetensors    one per rank: float32 weights, moments, random number generators

A process that is killed while it saves leaves a folder whose name begins with a dot; the next save removes it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cluster.contracts.errors import CheckpointError
from cluster.record.storage import sync_folder

MANIFEST = "manifest.json"
MODEL = "model"
MAX_FILE_BYTES = 4 * 1024**3
"""Weights of a model folder are split into files of at most this size (one tensor at least)."""


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint is. Written last."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    format: str = "treadwheel-checkpoint-1"
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


def state_name(rank: int, num_ranks: int) -> str:
    return f"state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def parameters_digest(shapes: Mapping[str, Iterable[int]]) -> str:
    """SHA-256 of names and shapes."""
    return hashlib.sha256(
        json.dumps({name: list(shape) for name, shape in sorted(shapes.items())}).encode()
    ).hexdigest()


def aside_of(directory: Path) -> Path:
    """The folder beside a checkpoint's own that it is written into."""
    return directory.with_name(f".{directory.name}.saving")


def begin(directory: Path) -> Path:
    """An empty folder beside `directory` to write into. Raises CheckpointError when it cannot be made."""
    aside = aside_of(directory)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise _failed(directory, error) from error
    return aside


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, directory: Path) -> FileEntry:
    """One safetensors file, on the disk when this returns. `directory` is the checkpoint that errors name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        return seal(path)
    except (OSError, SafetensorError) as error:
        raise _failed(directory, error) from error


def seal(path: Path) -> FileEntry:
    """Syncs a file and takes its digest."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return FileEntry(size_bytes=path.stat().st_size, sha256=_sha256(path))


def commit(aside: Path, directory: Path, manifest: Manifest) -> None:
    """Makes the folder a checkpoint under its final name, replacing one of that name. Raises CheckpointError (disk full)."""
    try:
        text = manifest.model_dump_json(indent=1)
        with open(aside / MANIFEST, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folders(aside)
        replaced = directory.with_name(f".{directory.name}.removing")
        # Renamed first: a kill in the middle of removing must not leave a torn checkpoint under its name.
        if directory.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(directory, replaced)
        os.rename(aside, directory)
        sync_folder(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise _failed(directory, error) from error


def discard(aside: Path) -> None:
    """Removes what a failed save has written, so that a full disk gets its space back."""
    shutil.rmtree(aside, ignore_errors=True)


def write_model(folder: Path, named: Iterable[tuple[str, Tensor]], *, directory: Path) -> dict[str, FileEntry]:
    """Weights of a Hugging Face folder, in bounded memory; entries by path below `folder`. `named` may be a generator that gathers."""
    parts: list[dict[str, Tensor]] = [{}]
    places: dict[str, int] = {}
    entries: dict[str, FileEntry] = {}
    used = total = 0

    def flush() -> None:
        name = f"part-{len(parts):05d}.safetensors"
        entries[name] = write_tensors(folder / name, parts[-1], directory=directory)
        parts[-1] = {}

    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if used and used + size > MAX_FILE_BYTES:
            flush()
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        places[name] = len(parts)
        used, total = used + size, total + size
    flush()
    names = {i: f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)}
    if len(parts) == 1:
        names = {1: "model.safetensors"}
    for index, name in names.items():
        os.rename(folder / f"part-{index:05d}.safetensors", folder / name)
        entries[name] = entries.pop(f"part-{index:05d}.safetensors")
    if len(parts) > 1:
        index_path = folder / "model.safetensors.index.json"
        weight_map = {name: names[place] for name, place in places.items()}
        index_path.write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}), encoding="utf-8"
        )
        entries[index_path.name] = seal(index_path)
    return entries


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError when there is none, or it is not ours."""
    try:
        return Manifest.model_validate_json((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is no checkpoint: it has no {MANIFEST}{_offer(directory)}") from error
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: {MANIFEST} cannot be read or was altered{_offer(directory)}"
        ) from error


def verify(directory: Path, *, expected_parameters: str | None = None) -> Manifest:
    """The manifest, once every file has its size and digest. Raises CheckpointError naming checkpoint, file and the one before."""
    manifest = read_manifest(directory)
    if expected_parameters is not None and manifest.parameters_digest != expected_parameters:
        raise CheckpointError(
            f"checkpoint {directory} is foreign: its parameters are not those of this run's model{_offer(directory)}"
        )
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {directory} is torn: {name} is missing{_offer(directory)}")
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CheckpointError(
                f"checkpoint {directory} is torn: {name} has {size} bytes instead of {entry.size_bytes}{_offer(directory)}"
            )
        if _sha256(path) != entry.sha256:
            raise CheckpointError(f"checkpoint {directory} was altered: {name} has another digest{_offer(directory)}")
    return manifest


def read_states(directory: Path, manifest: Manifest) -> "States":
    return States([directory / state_name(rank, manifest.num_ranks) for rank in range(manifest.num_ranks)])


class States:
    """The ranks' state files as whole tensors, one at a time: shards are parts of the first dimension, in order of rank."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [safe_open(path, framework="pt") for path in paths]

    def names(self) -> list[str]:
        return list(self._files[0].keys())

    def tensor(self, name: str) -> Tensor:
        """Whole: parts of every rank together, or rank 0's where it is no shard (a scalar)."""
        first = self._files[0].get_tensor(name)
        if len(self._files) == 1 or first.ndim == 0:
            return first
        return torch.cat([first, *(file.get_tensor(name) for file in self._files[1:])])

    def of_rank(self, name: str, rank: int) -> Tensor | None:
        """One rank's own, or None where that rank did not save."""
        return self._files[rank].get_tensor(name) if rank < len(self._files) else None


def checkpoints(root: Path) -> list[Path]:
    """All below `root`, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir()) if root.is_dir() else []


def prune(root: Path, *, keep_last: int, keep_best: bool) -> None:
    """Removes all but the newest, and the one with the best metric."""
    found = checkpoints(root)
    kept = set(found[-keep_last:])
    if keep_best:
        rated = [(m, path) for path in found if (m := read_manifest(path).metric) is not None]
        if rated:
            kept.add(max(rated)[1])
    for path in found:
        if path not in kept:
            # Renamed first: a half-removed folder must not look like a torn checkpoint.
            doomed = path.with_name(f".{path.name}.removing")
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _offer(directory: Path) -> str:
    """How to go on without this one."""
    before = [
        path for path in checkpoints(directory.parent) if path.name < directory.name and (path / MANIFEST).is_file()
    ]
    if before:
        return f"; the one before it is {before[-1]}: move {directory.name} away to resume from there"
    return "; there is none before it: move it away to start anew"


def _failed(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {directory} was not saved: {error}; the last good one stands")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_folder(folder)
