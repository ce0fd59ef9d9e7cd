"""Variants get what they ask for by parameter name. One table of names; config binds what is left."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin, find, resolve

HOMES = {
    "advantage": "learner.algorithms.advantages",
    "policy_loss": "learner.algorithms.losses",
    "aggregation": "learner.algorithms.aggregation",
    "value.loss": "learner.algorithms.values",
    "value.aggregation": "learner.algorithms.aggregation",
    "reward_shaping": "learner.algorithms.shaping",
    "advantage_shaping": "learner.algorithms.shaping",
    "filters": "learner.algorithms.filters",
    "corrections": "learner.algorithms.ratios",
}
"""Config field to the module whose functions it names."""

OF_THE_BATCH = frozenset(
    {
        "rewards_N", "group_index_N", "completion_lengths_N", "truncated_N", "reward_components_NK", "loss_mask_NT", "token_rewards_NT",
        "values_NT", "entropies_NT", "rollout_logprobs_NT", "proximal_logprobs_NT", "reference_logprobs_NT", "policy_versions_NT",
        "lags_NT", "advantages_NT",
    }
)  # fmt: skip
"""Supplied before micro-batching, for the whole batch of the step."""

OF_THE_ROWS = frozenset(
    {
        "policy_logprobs_BT", "proximal_logprobs_BT", "rollout_logprobs_BT", "reference_logprobs_BT", "advantages_BT", "loss_mask_BT",
        "lags_BT", "entropies_BT", "values_BT", "old_values_BT", "returns_BT", "covariances_BT", "batch_covariances_M",
    }
)  # fmt: skip
"""Supplied for the rows of a micro-batch, with the present policy."""

SUPPLIED = OF_THE_BATCH | OF_THE_ROWS | {"rewards_G", "logprobs_NT", "losses_NT"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A function that config chose, with its parameters bound."""

    field: str
    plugin: Plugin
    call: Callable[..., Any]
    asks: tuple[str, ...]
    """Names of the tensors it wants."""
    requires: tuple[str, ...]
    """Those of them without a default."""

    @classmethod
    def from_plugin(cls, plugin: Plugin, *, field: str) -> "Variant":
        home = HOMES[field.partition("[")[0]]
        function = find(plugin, home=home, field=field)
        _refuse_foreign_helpers(function, plugin, home=home, field=field)
        bound = resolve(plugin, home=home, field=field, given=SUPPLIED)
        wanted = {name: p for name, p in inspect.signature(function).parameters.items() if name in SUPPLIED}
        requires = tuple(name for name, p in wanted.items() if p.default is inspect.Parameter.empty)
        return cls(field, plugin, bound, tuple(wanted), requires)

    def with_given(self, supply: Mapping[str, Any]) -> Any:
        """Calls it with what it asks for. Raises ConfigError naming a tensor that the run does not have."""
        missing = [name for name in self.requires if supply.get(name) is None]
        if missing:
            raise ConfigError(f"{self.field}={self.plugin.name!r} needs {missing[0]}, which this run does not supply")
        return self.call(**{name: supply[name] for name in self.asks if supply.get(name) is not None})

    @property
    def is_of_the_batch(self) -> bool:
        """It asks for whole-batch tensors, so it runs before micro-batching."""
        return any(name.endswith(("_NT", "_N")) for name in self.asks)

    @property
    def function(self) -> Callable[..., Any]:
        return self.call.func if isinstance(self.call, functools.partial) else self.call

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter that is not a tensor, defaults included: what the passport writes down."""
        signature = inspect.signature(self.call)
        return {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if name not in SUPPLIED and parameter.default is not inspect.Parameter.empty
        }

    def describe(self) -> dict[str, Any]:
        sections = docstring_sections(self.function)
        return {
            "name": self.plugin.name,
            "function": f"{self.function.__module__}:{self.function.__qualname__}",
            "formula": sections.get("Formula", sections["summary"]),
            "source": sections.get("Source", ""),
            "parameters": self.parameters,
        }


def docstring_sections(function: Callable[..., Any]) -> dict[str, str]:
    """`summary`, and the text after `Formula:`, `Source:`, `Degenerate:` and `Peers:`."""
    sections: dict[str, str] = {"summary": ""}
    current = "summary"
    for line in (inspect.getdoc(function) or "").splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in ("Formula", "Source", "Degenerate", "Peers"):
            current, line = head, rest
        sections[current] = f"{sections.get(current, '')} {line.strip()}".strip()
    return sections


def variants(home: str) -> dict[str, Callable[..., Any]]:
    """The functions of a home module that config may name: public, and documented with a formula."""
    found = vars(importlib.import_module(home)).items()
    return {name: item for name, item in sorted(found) if inspect.isfunction(item) and _is_variant(name, item)}


def _is_variant(name: str, function: Callable[..., Any]) -> bool:
    return not name.startswith("_") and "Formula" in docstring_sections(function)


def _refuse_foreign_helpers(function: Callable[..., Any], plugin: Plugin, *, home: str, field: str) -> None:
    """`advantage: over_groups` imports, but is no advantage."""
    if ":" not in plugin.name and plugin.name not in variants(home):
        raise ConfigError(f"{field}={plugin.name!r} is not a variant; choose one of {', '.join(variants(home))}")
