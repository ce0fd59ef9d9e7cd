"""verdicts.jsonl: what judges said that cost something to ask, so that a resumed run asks nothing twice.

A verdict is found by a digest of all that its judge was asked and of the judge itself, and nothing failed is among them. About 120 bytes
each on the disk and 400 in memory; the newest `MOST_VERDICTS` are kept, and a file of twice as many is made anew.
"""

import json
from collections.abc import Mapping, Sequence

from cluster.contracts.errors import StorageError
from cluster.record.run_directory import VERDICTS, RunDirectory

MOST_VERDICTS = 100_000


class Verdicts:
    """Of one run. A directory that has no owner is not written."""

    def __init__(self, run_dir: RunDirectory) -> None:
        """Reads what is there. Raises StorageError for a line that is not JSON; a torn last one is left out."""
        self._run_dir = run_dir
        found = run_dir.read_json_lines(VERDICTS)
        self._num_lines = len(found)
        self.known: dict[str, str] = {}
        """JSON of each, by its key; the oldest first."""
        remember(self.known, {each["key"]: json.dumps(each["verdict"]) for each in found})

    def add(self, new: Mapping[str, str]) -> None:
        """Returns at once: the run directory's writer puts them on the disk."""
        remember(self.known, new)
        if not new or not self._run_dir.is_claimed:
            return
        self._num_lines += len(new)
        if self._num_lines > 2 * MOST_VERDICTS:
            lines = [_line(key, text) for key, text in self.known.items()]
            self._num_lines = len(lines)  # from here on: what comes while it waits for its turn stands behind it
            self._run_dir.writer.put(lambda: self._replace(lines, len(new)))
        else:
            lines = "\n".join(_line(key, text) for key, text in new.items())
            self._run_dir.writer.put(lambda: self._run_dir.append_line(VERDICTS, lines))

    def _replace(self, lines: Sequence[str], num_new: int) -> None:
        """In the writer's thread. A store that is away keeps the long file; the new lines, which are the last, wait for it as others do."""
        try:
            self._run_dir.replace_lines(VERDICTS, lines)
        except StorageError:
            self._num_lines += 2 * MOST_VERDICTS  # the next one tries again
            self._run_dir.append_line(VERDICTS, "\n".join(lines[-num_new:]))


def remember(known: dict[str, str], new: Mapping[str, str]) -> None:
    """Adds to what is known, and forgets the oldest beyond `MOST_VERDICTS`."""
    known |= new
    while len(known) > MOST_VERDICTS:
        del known[next(iter(known))]


def _line(key: str, text: str) -> str:
    return f'{{"key": "{key}", "verdict": {text}}}'
