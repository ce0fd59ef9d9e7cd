"""The algorithm section of a run file made whole: its preset expanded, parameters filled in that other settings determine."""

from collections.abc import Mapping
from typing import Any

from cluster.contracts.plugins import Home, parameter_names
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import expand

FILLED_IN = {"max_length": "sampling.max_tokens"}
"""Parameters of any variant that a run file need not set, and the setting that they come from."""

_OF_SAMPLED_TOKENS = ("aggregation", "value.aggregation")


def resolved(raw: Mapping[str, Any], *, max_tokens: int, max_turns: int | None = None) -> dict[str, Any]:
    """`max_tokens` is `sampling.max_tokens`: the longest completion that may be sampled. `max_turns` is `episodes.max_turns`, None where
    all have one turn: of an episode only the sampled tokens have a bound, those that aggregations count. Other variants must be told.

    Raises ConfigError as `expand` does.
    """
    section = expand(raw)
    bounded = HOMES if max_turns is None else _OF_SAMPLED_TOKENS
    known = {"max_length": max_tokens * (max_turns or 1)}

    def filled(value: Any, field: str) -> Any:
        return _filled(value, field, known) if field in bounded else value

    value = section.get("value")
    if isinstance(value, Mapping):
        section["value"] = {key: filled(item, f"value.{key}") for key, item in value.items()}
    return {key: filled(item, key) for key, item in section.items()}


def _filled(value: Any, field: str, known: Mapping[str, Any]) -> Any:
    """A variant, or a list of them, with the parameters that it has and leaves out. Anything else is left to validation."""
    home = HOMES.get(field)
    if home is None:
        return value
    if isinstance(value, list | tuple):
        return [_with_known(each, home, known) for each in value]
    return _with_known(value, home, known)


def _with_known(variant: Any, home: Home, known: Mapping[str, Any]) -> Any:
    named = {"name": variant} if isinstance(variant, str) else variant
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str) or "params" in named:
        return variant
    takes = parameter_names(named["name"], home=home)
    missing = {name: value for name, value in known.items() if name in takes and name not in named}
    return {**named, **missing} if missing else variant
