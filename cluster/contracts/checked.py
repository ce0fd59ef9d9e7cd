"""Refuses true and false where a number is needed: pydantic would read them as 1 and 0."""

import itertools
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails


class Checked(BaseModel):
    """A model whose numbers are never true or false."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        # Most values are numbers and texts: for them this look is all that the check costs.
        if info.field_name is not None and isinstance(value, bool | list | tuple | dict):
            refuse_bool_as_number(cast("object", value), cls.model_fields[info.field_name].annotation)
        return cast("object", value)


class _Found(NamedTuple):
    place: tuple[int | str, ...]
    """Index or key of each list or mapping around it."""
    needed: type
    """int or float."""
    given: bool


def refuse_bool_as_number(value: object, hint: Any) -> None:
    """Raises ValidationError if the value holds true or false where its type needs a number. A type may take both."""
    if found := _bool_as_number(value, hint):
        kind = f"{found.needed.__name__}_type"
        raise ValidationError.from_exception_data(
            "number", [InitErrorDetails(type=kind, loc=found.place, input=found.given)]
        )


def _bool_as_number(value: object, hint: Any) -> _Found | None:
    kinds = _kinds(hint)
    if isinstance(value, bool):
        numbers = [kind for kind in kinds if kind in (int, float)]
        return (
            _Found((), numbers[-1], value) if numbers and not any(_takes_bool(kind, value) for kind in kinds) else None
        )
    if not isinstance(value, list | tuple | dict):
        return None
    whole = cast("Sequence[Any] | dict[Any, Any]", value)
    found = [_first_within(whole, kind) for kind in kinds if _may_hold(kind, whole)]
    return found[0] if found and all(found) else None


def _kinds(hint: Any) -> list[Any]:
    """The types of a union, each without its annotations."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _kinds(inner[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for each in inner for kind in _kinds(each)]
    return [hint]


def _takes_bool(kind: Any, value: bool) -> bool:
    is_literal = typing.get_origin(kind) is Literal
    return kind in (bool, Any, object) or (is_literal and any(each is value for each in typing.get_args(kind)))


def _may_hold(kind: Any, whole: Sequence[Any] | dict[Any, Any]) -> bool:
    """Whether a type of a union is one for this list or mapping. A class that is no collection may read either in its own way."""
    origin = typing.get_origin(kind) or kind
    if origin in (bool, int, float, str, types.NoneType, Literal):
        return False
    is_collection = isinstance(origin, type) and issubclass(origin, Collection)
    return not is_collection or issubclass(origin, Mapping) == isinstance(whole, dict)


def _first_within(whole: Sequence[Any] | dict[Any, Any], kind: Any) -> _Found | None:
    inner = ((key, _bool_as_number(item, each)) for key, item, each in _items(whole, kind))
    return next((found._replace(place=(key, *found.place)) for key, found in inner if found), None)


def _items(whole: Sequence[Any] | dict[Any, Any], kind: Any) -> Iterator[tuple[int | str, Any, Any]]:
    """Place, value and type of each item, and of each key of a mapping; nothing if the type leaves them open."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if not inner or not isinstance(origin, type) or not issubclass(origin, Collection):
        return
    if isinstance(whole, dict):
        for key, item in whole.items():
            yield key, key, inner[0]
            yield key, item, inner[-1]
        return
    hints = inner if origin is tuple and Ellipsis not in inner else itertools.repeat(inner[0])
    for index, (item, each) in enumerate(zip(whole, hints, strict=False)):
        yield index, item, each
