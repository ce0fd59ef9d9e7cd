"""Every option of the algorithm section with values to set it to, found in the declarations: a new one needs no word here."""

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import Plugin, find, names, parameters, type_hints
from cluster.contracts.settings import Section, section_in
from learner.algorithms.registry.homes import HOMES

REQUIRED: dict[str, dict[str, Any]] = {
    "rejection": {"high": 0.2},
    "overlong_penalty": {"max_length": 6, "cache": 3},
    "reward_clip": {"low": -0.5, "high": 0.5},
    "return_bounds": {"low": -2.0, "high": 0.2},
    "reward_scale": {"factor": 2.0},
    "truncation_penalty": {"coefficient": 0.5},
    "column_weights": {"column": "difficulty"},
    "advantage_clip": {"low": -0.5, "high": 0.5},
}
"""Parameters without a default."""

_BITES = {
    "max_length": 3, "cap": 0.7, "floor": 0.9, "constant_weight": 0.5, "ratio_cap": 1.05, "dual_clip": 1.5, "delta": 1.1,
    "log_ratio_clamp": 0.1, "log_ratio_max": 0.01, "log_weight_min": -0.05, "clip_range": 0.01, "epsilon_max": 1.1, "epsilon_min": 0.9,
    "cov_low": 4.9, "cov_high": 1.1, "cov_share": 0.3, "length_epsilon": 0.1, "low": 0.15, "high": 1.1, "ddof": 0, "epsilon": 0.3,
    "part_weight": 0.5,
}  # fmt: skip
"""Numbers that change something on a small batch, where half the default would not."""


_BESIDE: dict[str, dict[str, Any]] = {"epsilon_mode": {"epsilon": 0.3}}
"""What makes another parameter's change large enough to be seen."""


BESIDE: dict[str, dict[str, Any]] = {
    **{
        name: {"proximal": "recompute"}
        for name in ("decoupled", "icepop", "rejection", "self_normalised_tis", "sequence_mask", "tis")
    },
    "none": {"kl": {"reward": {"coefficient": 0.1, "credit": "token"}}},
}
"""What a variant cannot be without."""


def variants(field: str) -> Iterator[dict[str, Any]]:
    """Every variant of a field, with the parameters that have no default."""
    for name in names(HOMES[field]):
        yield {"name": name} | REQUIRED.get(name, {})


def changes_of(variant: dict[str, Any], field: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The variant and the variant with one parameter changed, for each parameter and each value worth setting."""
    home = HOMES[field]
    function = find(Plugin(name=variant["name"]), home=home, field=field)
    hints = type_hints(function)
    for name, parameter in parameters(function, home=home).items():
        before = variant.get(name, parameter.default)
        for value in _values(name, hints[name], before):
            beside = variant | _BESIDE.get(name, {})
            yield beside, beside | {name: value}


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting that is neither a section nor a variant, by its full name."""
    return _settings(AlgorithmConfig, "")


def values_of(path: str, field: FieldInfo) -> list[Any]:
    """Values worth setting, other than the default."""
    default = inspect.Parameter.empty if field.is_required() else field.default
    return _values(path.rpartition(".")[2], field.annotation, default)


def with_set(section: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the section with `path` set; a list gets the value as its only entry."""
    head, _, rest = path.partition(".")
    if rest:
        return section | {head: with_set(section.get(head) or {}, rest, value)}
    is_list = typing.get_origin(AlgorithmConfig.model_fields[head].annotation) is tuple if head in HOMES else False
    return section | {head: [value] if is_list else value}


def _settings(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_in(field)
        if inner is not None:
            yield from _settings(inner, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in HOMES:
            yield f"{prefix}{name}", field


def _values(name: str, hint: Any, before: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        found = list(typing.get_args(hint))
    elif typing.get_origin(hint) in (types.UnionType, typing.Union):
        found = [value for each in typing.get_args(hint) for value in _values(name, each, before)]
    elif typing.get_origin(hint) is typing.Annotated:
        found = _values(name, typing.get_args(hint)[0], before)
    elif typing.get_origin(hint) is dict:
        found = [{"format": 0.3, "right": 0.7}]
    elif hint is bool:
        found = [True, False]
    elif hint in (int, float):
        is_scaled = isinstance(before, int | float) and before != 0
        found = [_BITES[name] if name in _BITES else hint(before * 0.5) if is_scaled else hint(1)]
    elif hint is str:
        found = ["format"] if name == "part" else []
    else:
        found = [None] if hint is type(None) else []
    return [value for value in found if value != before]
