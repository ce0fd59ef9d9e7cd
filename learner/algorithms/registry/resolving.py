"""Completes the algorithm section of a run file: expands its preset, fills in parameters that other settings determine."""

from collections.abc import Mapping
from typing import Any

from cluster.contracts.plugins import Home, parameter_names
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import expand

FILLED_IN = {"max_length": "sampling.max_tokens"}
"""Parameters that a run file need not set, and the setting that they come from."""


def resolved(raw: Mapping[str, Any], *, max_tokens: int | None, max_turns: int | None = None) -> dict[str, Any]:
    """`max_tokens` is `sampling.max_tokens`, the longest completion; None fills nothing in. `max_turns` is `episodes.max_turns`, or None if
    all episodes have one turn. With more turns only sampled tokens are bounded, which aggregations count: `max_length` of no other variant
    is filled in.

    Raises ConfigError as `expand` does.
    """
    section = expand(raw)
    bounded = HOMES if max_turns is None else ("aggregation", "value.aggregation")
    known = {} if max_tokens is None else {"max_length": max_tokens * (max_turns or 1)}

    def filled(field: str, value: Any) -> Any:
        if field not in bounded:
            return value
        if isinstance(value, list | tuple):
            return [_with_known(each, HOMES[field], known) for each in value]
        return _with_known(value, HOMES[field], known)

    value = section.get("value")
    if isinstance(value, Mapping):
        section["value"] = {key: filled(f"value.{key}", item) for key, item in value.items()}
    return {key: filled(key, item) for key, item in section.items()}


def _with_known(variant: Any, home: Home, known: Mapping[str, Any]) -> Any:
    """The variant with the known parameters that it takes and does not set. Validation refuses anything that is not a variant."""
    named = {"name": variant} if isinstance(variant, str) else variant
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str) or "params" in named:
        return variant
    takes = parameter_names(named["name"], home=home)
    missing = {name: value for name, value in known.items() if name in takes and name not in named}
    return {**named, **missing} if missing else variant
