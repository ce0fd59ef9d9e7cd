"""A variant that config chose. Its parameter names say which tensors it gets; config sets its other parameters."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.contracts.errors import ConfigError, DataError, TreadwheelError
from cluster.contracts.foreign import described, line_of
from cluster.contracts.plugins import Plugin, resolve, type_hints
from learner.algorithms.registry.homes import HOMES, OF_A_GROUP, OF_THE_BATCH, SUPPLIED, SUPPLIED_TO

_MOST_SHOWN = 200
"""Characters of a returned value in a message."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A function that config chose, with its parameters bound."""

    field: str
    plugin: Plugin
    call: Callable[..., Any]
    asks: tuple[str, ...]
    """Names of the tensors that it takes. The first one, its first parameter, decides how the variant is called."""
    requires: tuple[str, ...]
    """The names in `asks` without a default."""

    @classmethod
    def from_plugin(cls, plugin: Plugin, *, field: str) -> "Variant":
        bound = resolve(plugin, home=HOMES[field.partition("[")[0]], field=field)
        wanted = {name: p for name, p in inspect.signature(bound).parameters.items() if name in SUPPLIED}
        requires = tuple(name for name, p in wanted.items() if p.default is inspect.Parameter.empty)
        return cls(field, plugin, bound, tuple(wanted), requires)

    def with_given(self, supply: Mapping[str, Any], **called_with: Any) -> Any:
        """Calls it with the tensors that it asks for and with `called_with`. A user's function gets copies, which it may change. Raises
        ConfigError for a required tensor that is missing, and DataError for an error of a user's function, which a restart would repeat."""
        missing = [name for name in self.requires if supply.get(name) is None]
        if missing:
            raise ConfigError(f"{self.field}={self.plugin.name!r} needs {missing[0]}, which this run does not supply")
        given = {name: supply[name] for name in self.asks if supply.get(name) is not None}
        given = {name: _copied(value) for name, value in given.items()} if self.is_own else given
        try:
            return self.call(**given, **called_with)
        except (TreadwheelError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # foreign code
            if not self.is_own:
                raise
            raise DataError(
                f"algorithm.{self.field}={self.plugin.name!r} raised {described(error)}{line_of(error)}"
            ) from error

    def tensor(self, result: object, *shapes: torch.Size) -> Tensor:
        """`result`, which it returned. Raises DataError unless it is a tensor of one of `shapes`: another one might be broadcast."""
        if isinstance(result, Tensor) and result.shape in shapes:
            return result
        raise self._refusal(_kind(result), wanted=f"a tensor of shape {_either(shapes)}")

    def mask(self, result: object, *shapes: torch.Size) -> Tensor:
        """`result`, which it returned. Raises DataError unless it is a tensor of bool and of one of `shapes`."""
        if isinstance(result, Tensor) and result.shape in shapes and result.dtype == torch.bool:
            return result
        raise self._refusal(_kind_and_type(result), wanted=f"a tensor of shape {_either(shapes)} and type torch.bool")

    def verdict(self, result: object) -> bool:
        """`result`, which a filter of a group returned. Raises DataError unless it is true or false: None would drop every group."""
        is_bool_tensor = isinstance(result, Tensor) and result.dtype == torch.bool and result.dim() == 0
        if is_bool_tensor or isinstance(result, bool | np.bool_):
            return bool(result)
        raise self._refusal(_kind_and_type(result), wanted="true or false")

    def places(self, result: Any, *, num_candidates: int, group_size: int) -> list[int]:
        """`result`, which a selection returned. Raises DataError unless it is the places of `group_size` different candidates: a mask would
        be read as the places 0 and 1."""
        try:
            places_G = result if isinstance(result, Tensor) else torch.as_tensor(list(result))
        except (TypeError, ValueError, RuntimeError):  # no numbers
            places_G = torch.empty(0)
        places = places_G.tolist()
        is_whole = places_G.dtype != torch.bool and not places_G.is_floating_point()
        if places_G.shape == (group_size,) and is_whole and len({*places} & {*range(num_candidates)}) == group_size:
            return places
        got = " ".join(str(places if isinstance(result, Tensor) else result).split())
        wanted = f"the places of {group_size} different candidates, whole numbers from 0 to {num_candidates - 1}"
        raise self._refusal(got if len(got) <= _MOST_SHOWN else f"{got[:_MOST_SHOWN]}...", wanted=wanted)

    def _refusal(self, got: str, *, wanted: str) -> DataError:
        return DataError(f"algorithm.{self.field}={self.plugin.name!r} returned {got}; it must return {wanted}")

    @property
    def is_own(self) -> bool:
        """It is a user's function, named by its full path."""
        return ":" in self.plugin.name

    @property
    def is_of_the_batch(self) -> bool:
        """It works on whole-batch tensors, so it runs before micro-batching."""
        return self.asks[0] in OF_THE_BATCH

    @property
    def is_of_a_group(self) -> bool:
        """It needs only one group, so the cluster can call it before there is a batch."""
        return self.asks[0] in OF_A_GROUP

    @property
    def may_ask_for(self) -> frozenset[str]:
        alternatives = SUPPLIED_TO[self.field.partition("[")[0]]
        return next((each for each in alternatives if self.asks[0] in each), alternatives[0])

    @property
    def part(self) -> str | None:
        """The part of the reward that it works on, from its parameter `part`; None: the whole reward."""
        return self.parameters.get("part") if "part_rewards_N" in self.asks else None

    @property
    def function(self) -> Callable[..., Any]:
        return self.call.func if isinstance(self.call, functools.partial) else self.call

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter that is not a tensor, defaults included, for the passport."""
        signature = inspect.signature(self.call)
        return {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if name not in SUPPLIED and parameter.default is not inspect.Parameter.empty
        }

    def constraints(self, name: str) -> tuple[Any, ...]:
        """The metadata of a parameter's annotation: its bounds, and `learner.algorithms.conditions`."""
        return getattr(type_hints(self.function, include_extras=True).get(name), "__metadata__", ())

    def describe(self) -> dict[str, Any]:
        sections = docstring_sections(self.function)
        return {
            "name": self.plugin.name,
            "function": f"{self.function.__module__}:{self.function.__qualname__}",
            "formula": sections.get("Formula", sections["summary"]),
            "source": sections.get("Source", ""),
            "parameters": self.parameters,
        }


def _kind(result: object) -> str:
    is_tensor = isinstance(result, Tensor)
    return f"a tensor of shape {tuple(result.shape)}" if is_tensor else f"a value of type {type(result).__name__}"


def _kind_and_type(result: object) -> str:
    return _kind(result) + (f" and type {result.dtype}" if isinstance(result, Tensor) else "")


def _either(shapes: Sequence[torch.Size]) -> str:
    return " or ".join(str(tuple(shape)) for shape in shapes)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def docstring_sections(function: Callable[..., Any]) -> dict[str, str]:
    """`summary`, and the text after `Formula:`, `Gradient:`, `Source:`, `Degenerate:` and `Peers:`."""
    sections: dict[str, str] = {"summary": ""}
    current = "summary"
    for line in (inspect.getdoc(function) or "").splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in ("Formula", "Gradient", "Source", "Degenerate", "Peers"):
            current, line = head, rest
        sections[current] = f"{sections.get(current, '')} {line.strip()}".strip()
    return sections
