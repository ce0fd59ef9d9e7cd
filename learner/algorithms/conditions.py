"""What a parameter's annotation may say of others: `holes: Annotated[Literal["skip", "discount"], InertWith("gamma", 1.0)]`.

Bounds of its own are pydantic's: `cap: PositiveFloat`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

Ddof = Annotated[int, Field(ge=0, le=1)]
"""What a variance's number of values is less by."""


@dataclass(frozen=True, slots=True)
class InertWith:
    """The parameter changes nothing while another is at this value: a parameter of the variant, or a field of the algorithm section."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class AtMost:
    """The parameter is a part of another of the variant."""

    name: str


@dataclass(frozen=True, slots=True)
class LessThan:
    """The parameter is the lower end of a range, and another of the variant its upper end."""

    name: str
