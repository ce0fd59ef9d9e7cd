"""docs/algorithms.md: every variant of the mathematics with its formula, source, degenerate case, peers and parameters."""

import json
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import Home, Plugin, find, names
from deploy.docs import filled, rows
from deploy.listing import shown_parameters
from learner.algorithms import kl
from learner.algorithms.objective import Objective
from learner.algorithms.registry.homes import HOMES, OF_A_GROUP, OF_THE_BATCH, OF_THE_ROWS
from learner.algorithms.registry.presets import PRESETS, VERSIONS
from learner.algorithms.registry.variants import docstring_sections

_RESULTS = Path(__file__).parents[2] / "tests" / "golden" / "results.json"

_TITLES = {
    "advantage": "Advantages",
    "policy_loss": "Policy losses",
    "value.loss": "Value losses",
    "aggregation": "Aggregations: weights over the whole batch of a step",
    "corrections": "Off-policy corrections",
    "filters": "Filters",
    "selection": "Selections: which trajectories of an over-sampled group train",
    "reward_shaping": "Shaping of rewards",
    "advantage_shaping": "Shaping of advantages",
}


def page() -> str:
    """The whole of docs/algorithms.md."""
    return filled(
        "algorithms",
        group=_listed(OF_A_GROUP),
        batch=_listed(OF_THE_BATCH),
        rows=_listed(OF_THE_ROWS),
        variants="\n\n".join(_section(title, HOMES[field], field) for field, title in _TITLES.items()),
        estimators=_estimators(),
        presets=_presets(),
        golden=_golden(),
    )


def _listed(known: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(known))


def _section(title: str, home: Home, field: str) -> str:
    entries = [_entry(name, find(Plugin(name=name), home=home, field=field), home=home) for name in names(home)]
    is_list = typing.get_origin(AlgorithmConfig.model_fields[field.partition(".")[0]].annotation) is tuple
    shown = f"[{{name: {names(home)[0]}}}]" if is_list else f"{{name: {names(home)[0]}}}"
    keys = " or ".join(f"`algorithm.{key}`" for key, each in HOMES.items() if each is home)
    note = f"Set by {keys}, such as `{shown}`, with parameters beside the name; the functions lie in `{home.package}`."
    return "\n\n".join([f"## {title}", note, *entries])


def _estimators() -> str:
    home = Home(
        package=kl.__name__,
        offers=frozenset({"policy_logprobs_BT", "rollout_logprobs_BT", "other_logprobs_BT", "loss_mask_BT"})
        | {"policy_partition_BTP", "other_partition_BTP"},
    )
    functions = kl.ESTIMATORS | {"partition_kl": kl.partition_kl}
    return "\n\n".join(_entry(name, function, home=home) for name, function in functions.items())


def _entry(name: str, function: Callable[..., Any], *, home: Home) -> str:
    sections = docstring_sections(function)
    labels = [each for each in ("Formula", "Gradient", "Source", "Degenerate", "Peers") if sections.get(each)]
    lines = [f"### `{name}`", "", sections["summary"], "", *(f"* {label}: {sections[label]}" for label in labels)]
    shown = ", ".join(f"`{parameter}`" for parameter in shown_parameters(function, home=home))
    return "\n".join([*lines, f"* Parameters: {shown or 'none'}"])


def _presets() -> str:
    made = {name: Objective.from_config(AlgorithmConfig.model_validate(bundle)) for name, bundle in PRESETS.items()}
    head = "| preset | version | minimises | expands to |\n|---|---|---|---|\n"
    return head + rows(
        (f"`{name}`", VERSIONS.get(name, ""), f"`{made[name].formula()['text']}`", f"`{json.dumps(bundle)}`")
        for name, bundle in PRESETS.items()
    )


def _golden() -> str:
    def listed(reasons: Mapping[str, Any]) -> str:
        """Number and reason of each."""
        return "; ".join(
            f"{each if isinstance(each, int) else len(each)}: {reason}" for reason, each in reasons.items()
        )

    return rows(
        (
            peer,
            f"`{function}`",
            str(row["passed"]),
            listed(row["unsupported"]),
            listed(row["not_compared"]),
            str(row["peer_raised"] or ""),
        )
        for peer, functions in json.loads(_RESULTS.read_text()).items()
        for function, row in functions.items()
    )
