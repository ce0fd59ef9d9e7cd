"""The provenance that a checkpoint records: the passport's digest, versions of libraries, and held-out evaluations."""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from cluster.contracts.errors import StorageError
from cluster.contracts.provenance import Provenance
from cluster.record.run_directory import EVENTS, PASSPORT, RunDirectory
from cluster.sinks.jsonl import read_steps


class RunProvenance:
    """A sink that collects the run's evaluations, after it has read those of earlier drivers."""

    def __init__(self, directory: RunDirectory, *, identity: str | None = None) -> None:
        """`identity`: that of the present evaluation. Earlier ones of another identity are left out: they cannot be compared with it."""
        self._directory = directory
        events = directory.read_json_lines(EVENTS)
        made = {each.get("policy_version"): each.get("identity") for each in events if each["kind"] == "evaluating"}
        self._evaluations = {
            version: of
            for version, each in read_steps(directory).items()
            # Events of earlier versions have no identity.
            if (of := _held_out(each)) and (identity is None or made.get(version) in (None, identity))
        }
        self._passport: dict[str, Any] = {}

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        if found := _held_out(metrics):
            self._evaluations[version] = found

    def event(self, record: Mapping[str, Any]) -> None:
        """Ignored."""

    def close(self) -> None: ...

    def is_evaluated(self, version: int) -> bool:
        return "eval/reward" in self._evaluations.get(version, {})

    def at(self, version: int) -> Provenance:
        """Provenance of `version`, with the run's first evaluation and the last up to `version`: all of them would let checkpoints grow."""
        with contextlib.suppress(StorageError):  # an unreadable passport must not prevent a save
            self._passport = self._passport or self._directory.read_json(PASSPORT)
        evaluations = dict(self._evaluations)  # copied: the run adds to it meanwhile
        made = sorted(each for each in evaluations if each <= version)
        return Provenance(
            passport_digest=digest_of(self._passport),
            versions=self._passport.get("versions", {}),
            evaluations={each: evaluations[each] for each in dict.fromkeys([*made[:1], *made[-1:]])},
        )


def digest_of(passport: Mapping[str, Any]) -> str | None:
    """SHA-256 of only the passport's mathematics; None if the passport has none."""
    if "mathematics" not in passport:
        return None
    return hashlib.sha256(json.dumps(passport["mathematics"], sort_keys=True).encode()).hexdigest()


def _held_out(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("eval/") and math.isfinite(value)}
