"""What a parameter's annotation may say of when it acts: `holes: Annotated[Literal["skip", "discount"], InertWith("gamma", 1.0)]`."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InertWith:
    """The parameter changes nothing while another is at this value: a parameter of the variant, or a field of the algorithm section."""

    name: str
    value: Any
