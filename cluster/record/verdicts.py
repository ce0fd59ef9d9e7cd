"""verdicts.jsonl: verdicts of judges that are costly to ask, so that a resumed run asks nothing twice.

A verdict's key is a digest of the judge and of everything it was asked. Failures are not kept. A verdict takes about 120 bytes on the disk
and 400 in memory. The newest `MOST_VERDICTS` are kept, and a file of twice as many is rewritten.
"""

import json
from collections.abc import Mapping, Sequence

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import VERDICTS, RunDirectory

MOST_VERDICTS = 100_000


class Verdicts:
    """Verdicts of one run. Writes only into a directory that is claimed."""

    def __init__(self, run_dir: RunDirectory) -> None:
        """Reads the file. Raises StorageError for a line that is not a verdict; a torn last line is left out."""
        self._run_dir = run_dir
        found = run_dir.read_json_lines(VERDICTS)
        self._num_lines = len(found)
        self.known: dict[str, str] = {}
        """JSON of each verdict by its key, the oldest first."""
        remember(self.known, {each["key"]: json.dumps(each["verdict"]) for each in found})

    def add(self, new: Mapping[str, str]) -> None:
        """Returns at once: the run directory's writer writes them."""
        remember(self.known, new)
        if not new or not self._run_dir.is_claimed:
            return
        self._num_lines += len(new)
        if self._num_lines > 2 * MOST_VERDICTS:
            lines = [_line(key, text) for key, text in self.known.items()]
            self._num_lines = len(lines)  # counted now: lines that come before its turn are written after it
            self._run_dir.writer.put(lambda: self._replace(lines, len(new)))
        else:
            lines = "\n".join(_line(key, text) for key, text in new.items())
            self._run_dir.writer.put(lambda: self._run_dir.append_line(VERDICTS, lines))

    def _replace(self, lines: Sequence[str], num_new: int) -> None:
        """In the writer's thread. If the store does not answer, the long file stays and the new lines, which are the last, wait like
        others."""
        try:
            self._run_dir.replace_lines(VERDICTS, lines)
        except StorageError:
            self._num_lines += 2 * MOST_VERDICTS  # the next one tries again
            self._run_dir.append_line(VERDICTS, "\n".join(lines[-num_new:]))


def remember(known: dict[str, str], new: Mapping[str, str]) -> None:
    """Adds `new` to `known`, and forgets the oldest beyond `MOST_VERDICTS`."""
    known |= new
    while len(known) > MOST_VERDICTS:
        del known[next(iter(known))]


def _line(key: str, text: str) -> str:
    return f'{{"key": "{key}", "verdict": {text}}}'
