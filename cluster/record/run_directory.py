"""A run's directory, local or s3:// or gs://: one owner at a time, whole files atomically, lines durably. No pickle.

The driver claims it; the recorder and readers (`treadwheel info`) open it without a claim. A directory belongs to one run: once a
step is finished, another configuration is refused unless only settings differ that `resume_rules` lets change.
"""

import contextlib
import errno
import json
import os
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import yaml

from cluster.contracts.errors import ConfigError, StorageError
from cluster.record.ledger import NAME as LEDGER
from cluster.record.lock import Claim, claim_local, claim_remote, owner_of
from cluster.record.resume_rules import check_same_run, differing

RUN_YAML = "run.yaml"
PASSPORT = "passport.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
STATUS = "status.json"

_REMOTE_FLUSH_S = 20.0
"""Object stores cannot append: lines that need not be durable at once are written together, at most this late."""


class RunDirectory:
    """Files of one run by name ("metrics.jsonl", "ledger/ledger.jsonl")."""

    def __init__(self, url: str, *, filesystem: pafs.FileSystem | None = None) -> None:
        """Touches nothing. `filesystem` is for tests and stores that a URL does not describe; `url` is then a path in it."""
        self.url = url
        self._files, self._root = (filesystem, url) if filesystem else _filesystem_of(url)
        self.is_local = isinstance(self._files, pafs.LocalFileSystem)
        self._claim: Claim | None = None
        self._remote_lines: dict[str, _RemoteLines] = {}

    def path(self, name: str = "") -> str:
        """Where `name` lies: an absolute path, or a URL for an object store."""
        return self._at(name) if self.is_local else posixpath.join(self.url, name)

    # Ownership

    def check(self, run_yaml: str) -> None:
        """Raises ConfigError when the directory cannot be written, or belongs to another configuration. Changes nothing."""
        if self.is_local:
            _check_writable(self.url, self._root)
        if self._has_finished_a_step():
            check_same_run(self._run_yaml(), yaml.safe_load(run_yaml), run_dir=self.url)

    def claim(self, run_yaml: str) -> bool:
        """Takes the directory for this process; True when it holds an earlier part of this run.

        Raises ConfigError when it belongs to another configuration, cannot be written, or a living driver has it. A dead one's is
        taken over. What a run left that never finished a step is removed if this one computes something else.
        """
        self.check(run_yaml)
        try:
            self._files.create_dir(self._root, recursive=True)
            self._claim = (
                claim_local(self._at("driver.lock"))
                if self.is_local
                else claim_remote(self._files, self._at("driver.lock"))
            )
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.url!r} cannot be written: {_reason(error)}; mend that, or name another run_dir"
            ) from error
        is_resumed = self.exists(RUN_YAML)
        if is_resumed and differing(self._run_yaml(), yaml.safe_load(run_yaml)):
            self._start_over()
        for name in (METRICS, EVENTS):
            self._cut_torn_line(name)
        self.write_file(RUN_YAML, run_yaml.encode())
        return is_resumed

    def release(self) -> None:
        """Writes what waits and gives the directory back. May be called twice."""
        self.flush()
        if self._claim:
            self._claim.release()
            self._claim = None

    def owner(self) -> dict[str, Any] | None:
        """Host, pid and start of the living driver; None when there is none."""
        with _naming(self.path("driver.lock")):
            return owner_of(self._files, self._at("driver.lock"))

    def _run_yaml(self) -> dict[str, Any]:
        return yaml.safe_load(self.read_text(RUN_YAML))

    def _has_finished_a_step(self) -> bool:
        """A recorded step is finished when the next one is recorded or an event knows its version."""
        if not self.exists(RUN_YAML):
            return False
        recorded = self.read_lines(LEDGER)
        return len(recorded) > 1 or any(event.get("policy_version", 0) > 0 for event in self.read_json_lines(EVENTS))

    def _start_over(self) -> None:
        for name in (LEDGER, METRICS, PASSPORT, *(f"trajectories/{file}" for file in self.names("trajectories"))):
            self.remove(name)

    # Whole files

    def remove(self, name: str) -> None:
        """Deletes a file, if it is there."""
        with _naming(self.path(name)), contextlib.suppress(FileNotFoundError):
            self._files.delete_file(self._at(name))

    def exists(self, name: str) -> bool:
        with _naming(self.path(name)):
            return self._files.get_file_info(self._at(name)).type != pafs.FileType.NotFound

    def names(self, folder: str = "") -> list[str]:
        """Names in `folder`, sorted; empty when it is not there."""
        selector = pafs.FileSelector(self._at(folder), allow_not_found=True)
        with _naming(self.path(folder)):
            return sorted(info.base_name for info in self._files.get_file_info(selector))

    def read_file(self, name: str) -> pa.Buffer:
        with _naming(self.path(name)), self._files.open_input_file(self._at(name)) as file:
            return file.read_buffer()

    def read_text(self, name: str) -> str:
        return self.read_file(name).to_pybytes().decode()

    def write_file(self, name: str, content: "pa.Buffer | bytes") -> None:
        """All of it or nothing, on the disk when this returns. Raises StorageError (disk full, no permission)."""
        target = self._at(name)
        with _naming(self.path(name)):
            self._files.create_dir(posixpath.dirname(target), recursive=True)
            if not self.is_local:
                with self._files.open_output_stream(target) as stream:
                    stream.write(content)
                return
            aside = f"{target}.tmp-{os.getpid()}"
            try:
                with open(aside, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside)
            sync_folder(os.path.dirname(target))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write_file(name, (json.dumps(content, indent=2) + "\n").encode())

    # Lines

    def append_line(self, name: str, line: str) -> None:
        """Returns once the line is on the disk (the ledger's promise)."""
        self._append(name, line, is_durable=True)

    def append_json(self, name: str, record: Mapping[str, Any]) -> None:
        """One JSON line, readable at once on a local disk; an object store shows it within `_REMOTE_FLUSH_S`."""
        self._append(name, json.dumps(record), is_durable=False)

    def read_lines(self, name: str) -> list[str]:
        """All lines, a torn last one included; empty when there is none."""
        if name in self._remote_lines:
            return list(self._remote_lines[name].lines)
        return self.read_text(name).splitlines() if self.exists(name) else []

    def read_json_lines(self, name: str) -> list[dict[str, Any]]:
        """Each whole line's object. The last line of a living or killed run may be torn, and is left out."""
        lines = self.read_lines(name)
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise StorageError(f"{self.path(name)} line {number} is not JSON: {error}") from error
        return records

    def replace_lines(self, name: str, lines: Sequence[str]) -> None:
        self._remote_lines.pop(name, None)
        self.write_file(name, "".join(f"{line}\n" for line in lines).encode())

    def flush(self) -> None:
        """Writes lines that an object store has not got yet."""
        for name, pending in self._remote_lines.items():
            if pending.is_dirty:
                self.write_file(name, pending.content())
                pending.written()

    def _append(self, name: str, line: str, *, is_durable: bool) -> None:
        if not self.is_local:
            self._append_remote(name, line, is_durable=is_durable)
            return
        path = self._at(name)
        with _naming(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # One write call: a reader sees a whole line, or a torn last one, and never two mixed.
            with open(path, "ab+", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                is_torn = before > 0 and os.pread(file.fileno(), 1, before - 1) != b"\n"
                content = f"{chr(10) * is_torn}{line}\n".encode()
                if file.write(content) != len(content):  # an almost full disk takes a part without an error
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if is_durable:
                    os.fsync(file.fileno())

    def _append_remote(self, name: str, line: str, *, is_durable: bool) -> None:
        if name not in self._remote_lines:
            self._remote_lines[name] = _RemoteLines(self.read_lines(name))
        pending = self._remote_lines[name]
        pending.add(line)
        if is_durable or pending.age_s() >= _REMOTE_FLUSH_S:
            self.write_file(name, pending.content())
            pending.written()
            if self._claim:
                self._claim.renew()

    def _cut_torn_line(self, name: str) -> None:
        if self.exists(name) and (text := self.read_text(name)) and not text.endswith("\n"):
            self.replace_lines(name, text.splitlines()[:-1])

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root


class _RemoteLines:
    """A file of lines in an object store, which can only be written whole."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.is_dirty = False
        self._written_at = time.monotonic()

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.is_dirty = True

    def age_s(self) -> float:
        return time.monotonic() - self._written_at

    def content(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines).encode()

    def written(self) -> None:
        self.is_dirty = False
        self._written_at = time.monotonic()


def _filesystem_of(url: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in url:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(url))
    try:
        return pafs.FileSystem.from_uri(url)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"run_dir={url!r} cannot be opened: {error}; use a local path, s3://bucket/path or gs://bucket/path"
        ) from error


def _check_writable(url: str, root: str) -> None:
    """The folder, or the first one above it that exists, must take new files."""
    place = root
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise ConfigError(f"run_dir={url!r} cannot be written: {place} is no folder; name another run_dir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run_dir={url!r} cannot be written: no permission for {place}; get it, or name another run_dir"
        )


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes names that were created, replaced or removed in a local folder outlast a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Says which file a disk error is about."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: {_reason(error)}; free space or fix its permissions, then start the same command again"
        ) from error


def _reason(error: OSError) -> str:
    """The system's words; pyarrow's errors bring their own."""
    return error.strerror or str(error)
