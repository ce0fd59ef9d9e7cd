"""Files that the command line writes where it is told to: all of one or nothing, and what was there stays until the new one is whole."""

import os
import tempfile
from pathlib import Path

from cluster.contracts.errors import StorageError
from cluster.record.local_files import sync_folder, write_synced


def write_whole(path: str, text: str, *, option: str) -> None:
    """Raises StorageError naming the option. What is there and no file, as a pipe, is written to as it is."""
    place = Path(os.path.realpath(path))
    try:
        if place.exists() and not place.is_file():
            place.write_text(text, encoding="utf-8")
            return
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as aside:
            written = Path(aside) / place.name
            write_synced(written, text.encode())
            written.replace(place)
        sync_folder(place.parent)
    except OSError as error:
        raise StorageError(f"{option}={path!r} cannot be written: {error.strerror}") from error
