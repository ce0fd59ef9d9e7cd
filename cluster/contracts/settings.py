"""Settings: fields of sections, each with a mark that says what the setting decides.

The mark is in the field's type (`num_ranks: Layout[PositiveInt] = 1`), or is the default of its section (`class SamplingConfig(Section,
mark=Mark.MATHEMATICS)`). The marks decide what a resumed run may change.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from cluster.contracts.checked import Checked

T = TypeVar("T")


class Mark(StrEnum):
    MATHEMATICS = "mathematics"
    """Decides what is computed. Fixed for the whole run."""
    LAYOUT = "layout"
    """Decides where and in which portions the same mathematics is computed: resources that change the rounding, or the order in which
    groups meet the weights. A resumed run may change it unless it is deterministic."""
    RESOURCES = "resources"
    """Changes no number that is learned. A resumed run may always change it."""


Mathematics = Annotated[T, Mark.MATHEMATICS]
Layout = Annotated[T, Mark.LAYOUT]
Resources = Annotated[T, Mark.RESOURCES]
MOST_ACTORS = 100_000
"""Most actors of a kind. The limit catches typing mistakes, which would fill the driver's memory with plans."""
NumActors = Annotated[int, Field(gt=0, le=MOST_ACTORS)]


class Section(Checked):
    """A part of the configuration."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
    default_mark: ClassVar[Mark | None] = None
    """Mark of the fields without one of their own; None: each field must have one."""

    def __init_subclass__(cls, *, mark: Mark | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.default_mark = mark


def fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All settings of `section` by full name, sections before their own settings."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        inner = section_in(field)
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


def section_in(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds; None for a plain value or a plug-in."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, Section):
            return kind
    return None


def marks(section: type[Section], prefix: str = "", mark: Mark | None = None) -> Iterator[tuple[str, Mark | None]]:
    """The mark of every setting by full name; None for a setting without one, and for a section whose settings have different marks.

    `mark`, given where a section is declared as a field, applies to its settings without a mark.
    """
    for name, field in section.model_fields.items():
        inner = section_in(field)
        default = inner.default_mark if inner else section.default_mark
        own = next((each for each in field.metadata if isinstance(each, Mark)), mark)
        yield f"{prefix}{name}", own or default
        if inner:
            yield from marks(inner, f"{prefix}{name}.", own)


def entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values of nested mappings by full name: `("learner.num_ranks", 1)`. An empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from entries(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """As `entries`, without empty mappings."""
    return ((name, value) for name, value in entries(values) if not isinstance(value, Mapping))


def in_words(value: Any) -> Any:
    """The value with infinities and NaN as texts, `-inf`, since JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {name: in_words(each) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [in_words(each) for each in cast("Sequence[Any]", value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Unequal values of nested mappings: full name -> (left, right), with None for a missing value."""
    a, b = dict(flat(left)), dict(flat(right))
    return {name: (a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)}
