"""The target of one save: a folder that all ranks write into, or an object store to which each rank uploads its own files.

In both the first rank turns the written files into a checkpoint by one atomic act: a rename, or creating the manifest last.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from cluster.contracts.errors import AlreadyExistsError, CheckpointError, StorageError
from cluster.record.run_directory import checkpoint_step
from cluster.record.storage import Storage
from learner.checkpoint import writing
from learner.checkpoint.manifest import MANIFEST, Manifest
from learner.checkpoint.places import Place
from learner.checkpoint.reading import checkpoints, read_manifest, superfluous
from learner.checkpoint.scratch import Scratch

_SAVED_LATER = "was not saved: a save that began later removed its files; the last good one stands"


class FolderTarget:
    """One rank's end of one save, on a disk or a shared file system that all ranks mount."""

    def __init__(self, directory: str, *, is_first: bool, save_id: str) -> None:
        self._directory, self._is_first, self._save_id = Path(directory), is_first, save_id

    def begin(self, manifest: Manifest) -> bool:
        """Prepares the save; every rank calls it. False on the first rank if the checkpoint of this version exists and stays."""
        if self._is_first:
            writing.remove_unfinished(self._directory.parent)
            writing.begin(self._directory, save_id=self._save_id)
        return True

    def folder(self) -> Path:
        """The folder that this rank writes its files into."""
        return writing.aside_of(self._directory, save_id=self._save_id)

    def deliver(self, files: Iterable[str]) -> None:
        """Brings this rank's files, named by path below `folder`, to the checkpoint's place."""

    def commit(self, manifest: Manifest) -> None:
        """Makes the files a checkpoint. The first rank calls it after all ranks have delivered."""
        if not self.folder().is_dir():
            raise CheckpointError(f"checkpoint {self._directory} {_SAVED_LATER}")
        written = Storage(str(self.folder()))
        for name, entry in manifest.files.items():
            if written.size_bytes(name) != entry.size_bytes:
                raise CheckpointError(
                    f"checkpoint {self._directory} was not saved: a rank wrote {name}, and the first rank does not find it in "
                    f"{self.folder()}: the machines do not share run_dir; mount one file system there on all of them, or name an "
                    "object store (s3://...); the last good one stands"
                )
        writing.commit(self.folder(), self._directory, manifest)

    def prune(self, *, keep_last: int, keep_best: bool) -> None:
        """Removes checkpoints that are not kept, and leftovers of removals that were killed."""
        writing.prune(self._directory.parent, keep_last=keep_last, keep_best=keep_best)

    def abandon(self) -> None:
        """Removes this rank's files of a save that all ranks know to have failed. A rank that only lost contact with the others must not
        call it: the first rank may be about to commit."""
        # Every rank removes: without a shared file system the first rank's removal does not reach the others' files.
        writing.discard(self.folder())

    def close(self) -> None:
        """Removes temporary files, whether the save succeeded or failed."""
        if self._is_first:
            writing.discard(self.folder())


class StoreTarget:
    """One rank's end of one save in an object store, by way of a folder on the rank's local disk.

    Each save has a folder of its own, which its manifest names, because another driver may be saving the same step.
    """

    def __init__(self, url: str, *, is_first: bool, save_id: str) -> None:
        self._place, self._is_first, self._save_id = Place.of(url), is_first, save_id
        self._manifest, self._files = f"{self._place.name}/{MANIFEST}", f"{self._place.name}/{save_id}"
        self._scratch: Scratch | None = None

    def begin(self, manifest: Manifest) -> bool:
        self._scratch = Scratch()
        if not self._is_first or not self._place.exists(MANIFEST):
            return True
        standing = read_manifest(self._place)
        if standing.policy_version != manifest.policy_version:
            raise CheckpointError(f"{self._place} stands already, of version {standing.policy_version}; move it away")
        if manifest.metric not in (None, standing.metric):  # it was saved before its evaluation
            update = {name: getattr(manifest, name) for name in ("metric", "rated_by", "extra")}
            updated = standing.model_copy(update=update)
            self._place.root.write_file(self._manifest, updated.sealed(standing.files).as_json())
        return False

    def folder(self) -> Path:
        assert self._scratch is not None, "begin comes first"
        return self._scratch.folder

    def deliver(self, files: Iterable[str]) -> None:
        for name in files:
            self._place.root.upload(f"{self._files}/{name}", str(self.folder() / name))

    def commit(self, manifest: Manifest) -> None:
        named = manifest.model_copy(update={"folder": self._save_id})
        self._refuse_removed(named)
        try:
            self._place.root.create(self._manifest, named.sealed(manifest.files).as_json())
        except AlreadyExistsError:
            if read_manifest(self._place).folder == self._save_id:
                return  # the store's answer was lost, and another driver has updated the metric since
            self._remove_own()
            raise
        try:
            # Again: until the manifest was there, a later save took the folder for that of a failed one.
            with contextlib.suppress(StorageError):
                self._refuse_removed(named)
        except CheckpointError:
            self._place.root.remove(self._manifest)
            raise

    def _refuse_removed(self, named: Manifest) -> None:
        """Raises CheckpointError if a file of this save is gone, and removes the others."""
        place = self._place.holding(named)
        if any(place.size_bytes(name) != entry.size_bytes for name, entry in named.files.items()):
            self._remove_own()
            raise CheckpointError(f"checkpoint {place} {_SAVED_LATER}")

    def _remove_own(self) -> None:
        with contextlib.suppress(StorageError):
            self._place.root.remove_folder(self._files)

    def prune(self, *, keep_last: int, keep_best: bool) -> None:
        root = self._place.root
        with contextlib.suppress(StorageError):  # the save has succeeded; the next one prunes again
            for place in superfluous(root, keep_last=keep_last, keep_best=keep_best):
                root.remove(f"{place.name}/{MANIFEST}")  # first, so that a partial removal leaves no checkpoint
                root.remove_folder(place.name)
            whole = {place.name for place in checkpoints(root)}
            for name in set(root.names()) - whole:
                step = checkpoint_step(name)
                if step is not None and step < (checkpoint_step(self._place.name) or 0):
                    root.remove_folder(name)
            # This step's checkpoint is final: other folders are saves that failed or will fail.
            for name in set(root.names(self._place.name)) - {MANIFEST, self._save_id}:
                root.remove_folder(f"{self._place.name}/{name}")

    def abandon(self) -> None: ...

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()


Target = FolderTarget | StoreTarget


def target_of(directory: str, *, is_first: bool, save_id: str) -> Target:
    """`directory` is a path or a URL, `is_first` is true for the rank that commits, and `save_id` is the same on all ranks."""
    if "://" in directory:
        return StoreTarget(directory, is_first=is_first, save_id=save_id)
    return FolderTarget(directory, is_first=is_first, save_id=save_id)
