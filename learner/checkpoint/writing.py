"""Checkpoints on a disk: written into a hidden folder, synced, renamed into place, and removed.

A killed save leaves a folder whose name begins with a dot; the next save removes it. If it was replacing a checkpoint of the same version,
the old one may be left under such a name too: `adopt` renames it back.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cluster.contracts.errors import CheckpointError, StorageError
from cluster.record.local_files import make_folder, sync_folder, write_synced
from cluster.record.storage import Storage
from learner.checkpoint.digests import entry_of
from learner.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from learner.checkpoint.reading import superfluous

_SAVING, _REMOVING, _REPLACED = ".saving", ".removing", ".replaced"


@contextlib.contextmanager
def saving(directory: "Path | str") -> Iterator[None]:
    """Turns errors of disk and store into the CheckpointError of a failed save."""
    try:
        yield
    except (OSError, SafetensorError, StorageError) as error:
        raise CheckpointError(f"checkpoint {directory} was not saved: {error}; the last good one stands") from error


def aside_of(directory: Path, *, save_id: str | None = None) -> Path:
    """The hidden folder next to `directory` into which its files are written. Saves that may overlap have a `save_id` each."""
    own = "" if save_id is None else f".{save_id}"
    return directory.with_name(f".{directory.name}{own}{_SAVING}")


def begin(directory: Path, *, save_id: str | None = None) -> Path:
    """Makes `aside_of` these, empty."""
    aside = aside_of(directory, save_id=save_id)
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(os.path.abspath(aside.parent))
    aside.mkdir()
    return aside


def remove_unfinished(root: Path) -> None:
    """Removes the folders of saves that were begun and not finished. Their processes were killed, or were given up and may still write:
    then their save fails."""
    for left in root.glob(f".*{_SAVING}"):
        # Renamed first: a process that commits at this moment makes a whole checkpoint or none.
        with contextlib.suppress(OSError):
            _hide(left, suffix=_REMOVING)
    for left in root.glob(f".*{_REMOVING}"):
        discard(left)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, in_blocks: bool = False) -> FileEntry:
    """Writes one safetensors file, synced to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return seal(path, in_blocks=in_blocks)


def seal(path: Path, *, in_blocks: bool = False) -> FileEntry:
    """Syncs a file and computes its digest; with `in_blocks`, also one for each block."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return entry_of(path, in_blocks=in_blocks)


def commit(aside: Path, directory: Path, manifest: Manifest) -> None:
    """Makes the folder a checkpoint under its final name. An old checkpoint of that name is hidden, and `prune` removes it."""
    write_synced(aside / MANIFEST, manifest.as_json())
    _sync_folders(aside)
    if directory.exists():
        _hide(directory, suffix=_REPLACED)
    try:
        os.rename(aside, directory)
    except OSError:
        adopt(directory.parent)
        raise
    sync_folder(directory.parent)


def place(aside: Path, directory: Path) -> None:
    """Gives the folder its final name. Its files are sealed."""
    _sync_folders(aside)
    os.rename(aside, directory)
    sync_folder(directory.parent)


def _sync_folders(folder: Path) -> None:
    for each, _, _ in os.walk(folder):
        sync_folder(each)


def discard(folder: Path) -> None:
    """Removes a folder that is not a checkpoint, or no longer one."""
    shutil.rmtree(folder, ignore_errors=True)


def adopt(root: Path) -> None:
    """Renames hidden checkpoints back whose replacement never took their place, because of a kill or a failure."""
    for hidden in root.glob(f".*{_REPLACED}"):
        directory = root / hidden.name[1 : -len(_REPLACED)]
        if not directory.exists():
            with contextlib.suppress(OSError):
                os.rename(hidden, directory)


def prune(root: Path, *, keep_last: int, keep_best: bool) -> None:
    """Removes checkpoints that are not kept, and leftovers of removals that were killed."""
    adopt(root)
    replaced = (hidden for hidden in root.glob(f".*{_REPLACED}") if (root / hidden.name[1 : -len(_REPLACED)]).exists())
    # Folders of unfinished saves stay: the ranks that took the place of these ones may write them.
    for left in (*root.glob(f".*{_REMOVING}"), *replaced):
        discard(left)
    with contextlib.suppress(StorageError):  # the save has succeeded; the next one prunes again
        for place in superfluous(Storage(str(root)), keep_last=keep_last, keep_best=keep_best):
            with contextlib.suppress(OSError):
                discard(_hide(root / place.name, suffix=_REMOVING))


def _hide(directory: Path, *, suffix: str) -> Path:
    """Renames a checkpoint before its removal, so that a kill half-way leaves no torn checkpoint under its name."""
    hidden = directory.with_name(f".{directory.name}{suffix}")
    discard(hidden)
    os.rename(directory, hidden)
    return hidden
