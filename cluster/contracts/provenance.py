"""What a checkpoint says of the run that made it, besides its configuration. JSON in a manifest; no times and no places."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

KEY = "provenance"
"""Its place in the `extra` of a checkpoint's manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    passport_digest: str | None = None
    """SHA-256 of the passport's mathematics; None where the run has no passport yet."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Package to version, as the passport has them; empty without one."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """Policy version to the numbers (`eval/...`) of its held-out evaluation, up to this checkpoint's version."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """From a checkpoint's `extra`; of one that says nothing, nothing is known."""
        told = dict(extra.get(KEY, {}))
        evaluations = {int(version): numbers for version, numbers in told.pop("evaluations", {}).items()}
        return cls(evaluations=evaluations, **told)

    def as_extra(self) -> dict[str, Any]:
        told = asdict(self)
        return {KEY: told | {"evaluations": {str(version): each for version, each in self.evaluations.items()}}}


def unknown(version: int) -> Provenance:
    """Of a run that tells nothing, whatever the version."""
    return Provenance()
