"""Writes out the variants of a resolved configuration with all parameters, so that two spellings of one variant become equal."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import (
    ENVIRONMENTS,
    PROMPTS,
    REPLY_PARSERS,
    REWARDS,
    SINKS,
    TRANSPORTS,
    Home,
    Plugin,
    find,
    parameters,
)

_HOMES = {
    "reward.judge": REWARDS,
    "environment": ENVIRONMENTS,
    "episodes.parser": REPLY_PARSERS,
    "prompts": PROMPTS,
    "evaluation.prompts": PROMPTS,
    "algorithm.sft.prompts": PROMPTS,
    "weights.transport": TRANSPORTS,
    "metrics.sinks": SINKS,
}
"""Homes of the variants outside the mathematics, by the setting that names them."""


def spelled_out(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run with each variant as a mapping of its name and all its parameters, defaults included. A variant that does not import stays
    as written."""
    return _spelled_section(run, "", homes_in(run))


def homes_in(run: Mapping[str, Any]) -> dict[str, Home]:
    """Home of the variants of each setting of a resolved configuration that names one or several, by the setting's full name."""
    from learner.algorithms.registry.homes import HOMES

    parts = {f"reward.parts.{name}.judge": REWARDS for name in run.get("reward", {}).get("parts", {})}
    written = {"prompts": run.get("prompts"), "evaluation.prompts": run.get("evaluation", {}).get("prompts")}
    several = {field: prompts["sources"] for field, prompts in written.items() if _is_of_several(prompts)}
    sources = {f"{field}.sources.{name}": PROMPTS for field, named in several.items() for name in named}
    homes = _HOMES | parts | sources | {f"algorithm.{field}": home for field, home in HOMES.items()}
    return homes | {f"environments.{name}": ENVIRONMENTS for name in run.get("environments", {})}


def _spelled_section(section: Mapping[str, Any], prefix: str, homes: Mapping[str, Home]) -> dict[str, Any]:
    spelled = dict(section)
    for name, value in section.items():
        if value is not None and not _is_of_several(value) and (home := homes.get(f"{prefix}{name}")):
            spelled[name] = (
                [_variant(each, home) for each in value] if isinstance(value, list) else _variant(value, home)
            )
        elif isinstance(value, Mapping):
            spelled[name] = _spelled_section(cast(Mapping[str, Any], value), f"{prefix}{name}.", homes)
    return spelled


def _is_of_several(prompts: Any) -> bool:
    return isinstance(prompts, Mapping) and "name" not in prompts


def _variant(value: Any, home: Home) -> Any:
    plugin = Plugin.model_validate(value)
    return {"name": plugin.name, **_defaults(plugin, home), **plugin.params}


def _defaults(plugin: Plugin, home: Home) -> dict[str, Any]:
    try:
        taken = parameters(find(plugin, home=home, field="variant"), home=home)
    except ConfigError:
        return {}
    defaults = {name: each.default for name, each in taken.items() if each.default is not inspect.Parameter.empty}
    # YAML has no tuples.
    return {name: list(each) if isinstance(each, tuple) else each for name, each in defaults.items()}
