"""Facts in a checkpoint about the run that made it, in addition to its configuration. JSON in a manifest, without times and paths."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

KEY = "provenance"
"""Its place in the `extra` of a checkpoint's manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    passport_digest: str | None = None
    """SHA-256 of the passport's mathematics; None while the run has no passport."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Package to version, from the passport; empty without one."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """Policy version to the metrics (`eval/...`) of its held-out evaluation, up to this checkpoint's version."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """From a checkpoint's `extra`, which may have no provenance."""
        known = dict(extra.get(KEY, {}))
        evaluations = {int(version): numbers for version, numbers in known.pop("evaluations", {}).items()}
        return cls(evaluations=evaluations, **known)

    def as_extra(self) -> dict[str, Any]:
        evaluations = {str(version): numbers for version, numbers in self.evaluations.items()}
        return {KEY: asdict(self) | {"evaluations": evaluations}}


def unknown(version: int) -> Provenance:
    """An empty provenance, for every version."""
    return Provenance()
