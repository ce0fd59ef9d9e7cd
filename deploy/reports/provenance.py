"""What a checkpoint may say of its run: the passport's digest, the versions of libraries, and the held-out evaluations so far."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cluster.contracts.errors import StorageError
from cluster.contracts.provenance import Provenance
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.sinks.jsonl import read_steps


class RunProvenance:
    """Listens to the run's metrics, after it has read those of its earlier parts."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._evaluations = {version: of for version, each in read_steps(directory).items() if (of := _held_out(each))}
        self._passport: dict[str, Any] = {}

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        if found := _held_out(metrics):
            self._evaluations[version] = found

    def event(self, record: Mapping[str, Any]) -> None:
        """Events say nothing of it."""

    def close(self) -> None: ...

    def is_evaluated(self, version: int) -> bool:
        return "eval/reward" in self._evaluations.get(version, {})

    def at(self, version: int) -> Provenance:
        """Of the first evaluation and the last one: a checkpoint that told of all of them would grow with the run."""
        with contextlib.suppress(StorageError):  # a card that says less is no reason to save nothing
            self._passport = self._passport or self._directory.read_json(PASSPORT)
        evaluations = dict(self._evaluations)  # the run goes on meanwhile
        made = sorted(each for each in evaluations if each <= version)
        return Provenance(
            passport_digest=digest_of(self._passport),
            versions=self._passport.get("versions", {}),
            evaluations={each: evaluations[each] for each in dict.fromkeys([*made[:1], *made[-1:]])},
        )


def digest_of(passport: Mapping[str, Any]) -> str | None:
    """SHA-256 of what the run computes, whatever it was computed with; None where the passport does not say."""
    if "mathematics" not in passport:
        return None
    return hashlib.sha256(json.dumps(passport["mathematics"], sort_keys=True).encode()).hexdigest()


def _held_out(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("eval/") and value == value}
