"""Relations between parameters, for annotations: `holes: Annotated[Literal["skip", "discount"], InertWith("gamma", 1.0)]`.

Bounds of a single parameter are pydantic's: `cap: PositiveFloat`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

Ddof = Annotated[int, Field(ge=0, le=1)]
"""Delta degrees of freedom: a variance of n values divides by n − ddof."""


def _not_zero(value: float) -> float:
    if value == 0:
        raise ValueError("0 leaves nothing")
    return value


NonZeroFloat = Annotated[float, AfterValidator(_not_zero)]


@dataclass(frozen=True, slots=True)
class InertWith:
    """The parameter has no effect while another has this value: a parameter of the variant, or a field of the algorithm section."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class AtMost:
    """The parameter may not exceed another parameter of the variant."""

    name: str


@dataclass(frozen=True, slots=True)
class LessThan:
    """The parameter is the lower end of a range; another parameter of the variant is its upper end."""

    name: str
