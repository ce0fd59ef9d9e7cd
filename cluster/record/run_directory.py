"""A run's directory, on a disk or in an object store: one owner at a time, and one run.

The owner, which writes, needs a claim. Reading, and adding trajectories, needs none. Once a step is finished, another configuration is
refused, unless it differs only in settings that `resume_rules` lets change.
"""

import contextlib
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from cluster.contracts.errors import ConfigError, DamagedError, StorageError
from cluster.contracts.hiding import hidden
from cluster.record import store_claim
from cluster.record.ledger import NAME as LEDGER
from cluster.record.line_checks import wrong_event, wrong_phase, wrong_status, wrong_step, wrong_verdict
from cluster.record.local_files import make_folder, naming, reason, remove_leftovers
from cluster.record.lock import Claim, in_use, owner_of
from cluster.record.resume_rules import check_same_run, differing, moved, with_new_settings
from cluster.record.step_objects import StepObjects
from cluster.record.storage import Storage
from cluster.record.store_claim import StoreClaim
from cluster.record.writer import Writer

RUN_YAML = "run.yaml"
PASSPORT = "passport.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"
REPORT, CURVES = "report.html", "curves.png"
STATUS = "status.json"
PHASES = "phases.jsonl"
"""One line for each phase of an actor."""
VERDICTS = "verdicts.jsonl"
TRACKED = "tracked.json"
"""The run's name at trackers, the same for all its drivers."""
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
LEARNED = "learned"
TENSORBOARD, QUARANTINE = "tensorboard", "quarantine"
CHECKPOINT_MANIFEST = "manifest.json"
_CHECKS = {
    METRICS: wrong_step,
    EVENTS: wrong_event,
    PHASES: wrong_phase,
    VERDICTS: wrong_verdict,
    STATUS: wrong_status,
}
_LOCK = "driver.lock"
_PROBE = "driver.probe"
_VARIABLE = re.compile(r"\$(\w|\{)")
_JOBS_COPY = "/runtime_resources/working_dir_files/"
"""Part of the path of a copy that Ray makes of the `working_dir` of `ray job submit`."""
_OWNER_ONLY = 0o700
"""Only the owner may read the folder: trajectories and logs may hold texts of users."""

SpelledOut = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def wrong_in(name: str, line: Mapping[str, Any]) -> str | None:
    """A mistake in a line of this file, or in the one object that it holds, in words; None: readers can rely on it."""
    check = _CHECKS.get(name)
    return check and check(line)


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint, below `CHECKPOINTS`."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name, such as that of a checkpoint that was renamed."""
    found = re.fullmatch(r"step-(\d+)", name)
    return int(found[1]) if found else None


def checkpoints_of(files: Storage, folder: str = CHECKPOINTS) -> dict[int, str]:
    """Names of the checkpoints' folders in `folder` by step, in order. In an object store a folder without a manifest is not a
    checkpoint: its save is under way, or was broken off."""
    found = {checkpoint_step(name): name for name in files.names(folder)}
    named = {step: found[step] for step in sorted(step for step in found if step is not None)}
    if files.is_local:
        return named
    manifests = {step: posixpath.join(folder, name, CHECKPOINT_MANIFEST) for step, name in named.items()}
    return {step: name for step, name in named.items() if files.exists(manifests[step])}


class RunDirectory(Storage):
    """The files of one run, with an owner."""

    def __init__(self, url: str) -> None:
        """Touches nothing. Raises ConfigError for a URL of an unknown kind, and for one that names no folder."""
        if not url.strip() or "\0" in url:
            raise ConfigError(f"run_dir={url!r} names no folder; name one, or '.' for the current folder")
        try:
            super().__init__(url)
        except StorageError as error:
            raise ConfigError(f"run_dir={url!r} cannot be opened: {error}") from error
        self.writer = Writer()
        """For files that the event loop writes without waiting: events, status.json."""
        self.moved: dict[str, tuple[Any, Any]] = {}
        """`resume_rules.moved` between the driver before and this one, once the directory is claimed."""
        self._claim: Claim | StoreClaim | None = None
        self._steps = StepObjects(self._store, file=LEDGER) if self._store else None

    @property
    def name(self) -> str:
        """The run's name: the last part of its path or URL."""
        return self.path().rpartition("/")[2]

    @property
    def is_claimed(self) -> bool:
        """Whether this object holds the claim."""
        return self._claim is not None

    def checkpoints(self) -> dict[int, str]:
        """Names of the checkpoints' folders by step, in order."""
        return checkpoints_of(self)

    def settings(self) -> dict[str, Any]:
        """Settings of run.yaml as they are written there; empty without the file. Raises DamagedError for a file without settings."""
        if not self.exists(RUN_YAML):
            return {}
        damaged = f"{self.path(RUN_YAML)} is damaged: it holds no settings; bring it back from a copy"
        try:
            found = yaml.safe_load(self.read_text(RUN_YAML))
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise DamagedError(damaged) from error
        if not isinstance(found, dict):
            raise DamagedError(damaged)
        return found

    def read_json(self, name: str) -> dict[str, Any]:
        """Also raises DamagedError for content that is `wrong_in` the file."""
        content = super().read_json(name)
        if why := wrong_in(name, content):
            raise DamagedError(f"{self.path(name)} {why}; remove the file, or bring it back from a copy")
        return content

    def read_json_lines(self, name: str) -> list[dict[str, Any]]:
        """Also raises DamagedError for a line that is `wrong_in` the file."""
        lines = super().read_json_lines(name)
        for number, line in enumerate(lines, start=1):
            if why := wrong_in(name, line):
                raise self._damaged(name, number, why)
        return lines

    def _written(self, spelled_out: SpelledOut) -> Mapping[str, Any]:
        """Settings of run.yaml, spelled out. An earlier version may have written secrets, which are hidden here, and fewer settings."""
        return spelled_out(hidden(with_new_settings(self.settings())))

    def make(self) -> None:
        """Makes the folder, readable only by its owner. An existing one stays as it is."""
        if self.is_local:
            with naming(self.path()):
                make_folder(self.path(), mode=_OWNER_ONLY)

    def refuse_if_busy(self) -> None:
        """Raises InUseError when another driver has the directory. It reads only one small file, so call it before everything else."""
        self.reach()
        if not self.is_claimed and (owner := self.owner()):
            raise in_use(self.url, owner)

    def check(self, run_yaml: str, *, spelled_out: SpelledOut = dict) -> None:
        """Raises ConfigError if the directory is in use, cannot be written, or belongs to another configuration. Alters no existing file.

        `spelled_out` writes a configuration's variants out, so that two spellings of one configuration are the same.
        """
        self.check_place()
        self.refuse_if_busy()
        self._check_same_run(run_yaml, spelled_out)

    def claim(self, run_yaml: str, *, spelled_out: SpelledOut = dict) -> None:
        """Claims the directory for this process. `spelled_out` as for `check`.

        Raises ConfigError when a living driver has it, it cannot be written, or it belongs to another configuration. A dead driver's
        directory is taken over. The files of a run that never finished a step are removed if this run computes something else.
        """
        self.check_place()
        self._claim = StoreClaim(self._store, _LOCK) if self._store else self._locked()
        try:
            self._take_over(run_yaml, spelled_out)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Writes all waiting lines and gives the claim back. May be called twice."""
        with contextlib.ExitStack() as last:
            last.callback(self._give_back)
            is_lost = isinstance(self._claim, StoreClaim) and self._claim.is_lost
            last.callback(self.compact_lines if self.is_claimed and not is_lost else self.flush_lines)
            self.writer.finish()

    def _give_back(self) -> None:
        claim, self._claim = self._claim, None
        if claim:
            claim.release()

    def check_claim(self) -> None:
        """Raises ClaimLostError once another driver has taken the directory, which happens only in object stores."""
        if isinstance(self._claim, StoreClaim):
            self._claim.check()

    def owner(self) -> str | None:
        """The living driver, such as `process 4711 on node-1`; None when there is none. In a store whose last driver did not give the claim
        back, this writes a small object, to read the store's clock."""
        if self._store:
            return store_claim.owner_of(self._store, _LOCK)
        with naming(self.path(_LOCK)):
            return owner_of(self.path(_LOCK))

    def owner_seen(self) -> str | None:
        """As `owner`, but writes nothing: in a store it uses this machine's clock."""
        return store_claim.owner_by_this_clock(self._store, _LOCK) if self._store else self.owner()

    # The ledger's journal

    def append_record(self, step: int, line: str) -> None:
        self.check_claim()
        if not self._steps:
            self.append_line(LEDGER, line)
            return
        try:
            self._steps.append_record(step, line)
        except StorageError:
            if isinstance(self._claim, StoreClaim):
                # A driver that stood still for longer than a request may take learns here that another one has taken over.
                self._claim.renew()
                self._claim.check()
            raise

    def read_records(self, after: int = 0) -> list[str]:
        return self._steps.read_records(after) if self._steps else self.read_lines(LEDGER)[after:]

    def cut_records(self, number: int) -> None:
        if self._steps:
            self._steps.cut_records(number)
        elif number:
            self.replace_lines(LEDGER, self.read_lines(LEDGER)[:number])
        else:
            self.remove(LEDGER)

    def _locked(self) -> Claim:
        try:
            make_folder(self.path(), mode=_OWNER_ONLY)
            return Claim(self.path(_LOCK))
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.url!r} cannot be written: {reason(error)}; mend that, or name another run_dir"
            ) from error

    def check_place(self) -> None:
        """Raises ConfigError if neither the folder, nor the first existing one above it, takes new files, or if they would not last;
        StorageError if the store takes none."""
        self.reach()
        if self._store:
            self.write_file(_PROBE, b"")
            return self.remove(_PROBE)
        place = self.path()
        if _VARIABLE.search(place) and not os.path.lexists(place):
            raise ConfigError(
                f"run_dir={self.url!r} names a variable, which only a shell replaces; write its value, or set run_dir on the command line"
            )
        if _JOBS_COPY in os.path.realpath(place):
            raise ConfigError(
                f"run_dir={self.url!r} lies in a job's copy of its folder, which Ray removes; name an absolute path on a file system "
                "that all nodes mount, or an object store"
            )
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise ConfigError(f"run_dir={self.url!r} cannot be written: {place} is no folder; name another run_dir")
        try:
            # Only writing a file proves it: root passes every permission check, and some file systems take no files.
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.url!r} cannot be written: {place} takes no files ({reason(error)}); mend that, or name another run_dir"
            ) from error

    def _take_over(self, run_yaml: str, spelled_out: SpelledOut) -> None:
        self._check_same_run(run_yaml, spelled_out)
        ours = spelled_out(yaml.safe_load(run_yaml))
        theirs = self._written(spelled_out) if self.exists(RUN_YAML) else ours
        if differing(theirs, ours):
            self._start_over()
        else:
            self.moved = moved(theirs, ours)
        for name in (METRICS, EVENTS, VERDICTS, PHASES):
            self.remove_torn_line(name)
        if self.is_local:
            for folder in ("", TRAJECTORIES, LEARNED):
                remove_leftovers(self.path(folder))
        self.write_file(RUN_YAML, run_yaml.encode())

    def _check_same_run(self, run_yaml: str, spelled_out: SpelledOut) -> None:
        if self.exists(RUN_YAML) and self.has_finished_a_step():
            ours = spelled_out(yaml.safe_load(run_yaml))
            check_same_run(self._written(spelled_out), ours, run_dir=self.url)

    def has_finished_a_step(self) -> bool:
        """A recorded step is finished when the next one is recorded, an event names its version, or a checkpoint has it."""
        if self.checkpoints() or len(self.read_records()) > 1:  # a store has an object for each record
            return True
        return any(event.get("policy_version", 0) > 0 for event in self.read_json_lines(EVENTS))

    def _start_over(self) -> None:
        if isinstance(self._claim, StoreClaim) and (former := self._claim.lapsed):
            raise ConfigError(
                f"run_dir={self.url!r} holds the beginning of another run, and {former}, which drove it, never gave the directory back: "
                f"should it wake, it writes into this run; name another run_dir, or remove {self.path(_LOCK)} if it is surely gone"
            )
        of_steps = [f"{folder}/{file}" for folder in (TRAJECTORIES, LEARNED) for file in self.names(folder)]
        self.cut_records(0)
        for name in (METRICS, EVENTS, PASSPORT, VERDICTS, TRACKED, PHASES, REPORT, CURVES, *of_steps):
            self.remove(name)
        for folder in (TENSORBOARD, QUARANTINE):
            self.remove_folder(folder)
