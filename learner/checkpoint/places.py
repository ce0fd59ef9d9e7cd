"""The place of a checkpoint: a folder on a disk, or a prefix in an object store, with the same methods for both."""

import os
import posixpath
from dataclasses import dataclass, replace

import pyarrow as pa

from cluster.record.storage import Storage
from learner.checkpoint.manifest import MANIFEST, Manifest


@dataclass(frozen=True, slots=True)
class Place:
    """The folder `name` below `root`. Methods take file names relative to it."""

    root: Storage
    name: str
    folder: str = ""
    """The manifest's `folder`; set by `holding`."""

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> "Place":
        """The place at a path or URL. Raises StorageError for a URL of an unknown kind."""
        parent, name = os.path.split(str(directory).rstrip("/"))
        return cls(Storage(parent), name)

    def __str__(self) -> str:
        return self.root.path(self.name)

    def is_there(self) -> bool:
        """Whether the folder exists; in an object store, whether its manifest does: a prefix without one is an unfinished save."""
        return self.root.exists(self.name) if self.root.is_local else self.exists(MANIFEST)

    def holding(self, manifest: Manifest) -> "Place":
        """This place, for reading the files that the manifest lists."""
        return replace(self, folder=manifest.folder)

    def path(self, file: str) -> str:
        return self.root.path(f"{self.name}/{file}")

    def exists(self, file: str) -> bool:
        return self.root.exists(f"{self.name}/{file}")

    def size_bytes(self, file: str) -> int | None:
        """None for a missing file."""
        return self.root.size_bytes(posixpath.join(self.name, self.folder, file))

    def read_text(self, file: str) -> str:
        return self.root.read_text(f"{self.name}/{file}")

    def read_range(self, file: str, start: int, length: int) -> pa.Buffer:
        return self.root.read_range(posixpath.join(self.name, self.folder, file), start, length)
