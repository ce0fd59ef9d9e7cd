"""Where a checkpoint lies: in a folder on a disk, or below a prefix of an object store. What follows is the same for both."""

import os
import posixpath
from dataclasses import dataclass, replace

import pyarrow as pa

from cluster.record.storage import Storage
from learner.checkpoint.manifest import MANIFEST, Manifest


@dataclass(frozen=True, slots=True)
class Place:
    """The folder `name` below `root`. Files are named below the folder."""

    root: Storage
    name: str
    folder: str = ""
    """Below it, of the files that its manifest names; known of what `holding` returns."""

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> "Place":
        """Of a path or a URL. Raises StorageError for a URL of an unknown kind."""
        parent, name = os.path.split(str(directory).rstrip("/"))
        return cls(Storage(parent), name)

    def __str__(self) -> str:
        return self.root.path(self.name)

    def is_there(self) -> bool:
        """On a disk a folder; in an object store a manifest: without it, it is a save under way, or what that left."""
        return self.root.exists(self.name) if self.root.is_local else self.exists(MANIFEST)

    def holding(self, manifest: Manifest) -> "Place":
        """This place, with the files that its manifest names."""
        return replace(self, folder=manifest.folder)

    def path(self, file: str) -> str:
        return self.root.path(f"{self.name}/{file}")

    def exists(self, file: str) -> bool:
        return self.root.exists(f"{self.name}/{file}")

    def size_bytes(self, file: str) -> int | None:
        """None for a file that is not there."""
        return self.root.size_bytes(posixpath.join(self.name, self.folder, file))

    def read_text(self, file: str) -> str:
        return self.root.read_text(f"{self.name}/{file}")

    def read_range(self, file: str, start: int, length: int) -> pa.Buffer:
        return self.root.read_range(posixpath.join(self.name, self.folder, file), start, length)
