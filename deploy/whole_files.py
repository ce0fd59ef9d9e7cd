"""Files that the command line writes: a file is written as a whole or not at all, and an old one stays until the new one is complete."""

import os
import tempfile
from pathlib import Path

from cluster.contracts.errors import StorageError
from cluster.record.local_files import sync_folder, write_synced


def write_whole(path: str, text: str, *, option: str) -> None:
    """Raises StorageError that names the option. An existing path that is not a regular file, such as a pipe, is written to directly."""
    place = Path(os.path.realpath(path))
    try:
        if place.exists() and not place.is_file():
            place.write_text(text, encoding="utf-8")
            return
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
            written = Path(temporary) / place.name
            write_synced(written, text.encode())
            written.replace(place)
        sync_folder(place.parent)
    except OSError as error:
        raise StorageError(f"{option}={path!r} cannot be written: {error.strerror}") from error
