"""docs/algorithms.md: every variant of the mathematics with its formula, source, degenerate case, peers and parameters."""

import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.plugins import Home, Plugin, find, names, parameters
from deploy.docs import NOTE
from deploy.docs.kl_table import table
from deploy.docs.sampling import SAMPLING
from learner.algorithms import kl
from learner.algorithms.objective import Objective
from learner.algorithms.objective.statistics import reported_names
from learner.algorithms.registry.homes import HOMES, OF_A_GROUP, OF_THE_BATCH, OF_THE_ROWS
from learner.algorithms.registry.presets import PRESETS, VERSIONS
from learner.algorithms.registry.variants import docstring_sections

_RESULTS = Path(__file__).parents[2] / "tests" / "golden" / "results.json"

_INTRODUCTION = """\
# The mathematics, by name

{note}

ρ = π/π_old with π the learner's policy now, π_old ("proximal") the policy at the start of the step, μ the rollout policy that sampled
(`rollout_logprobs`), A the advantage, r a reward, m the loss mask, sg the stop of a gradient. Everything is per completion token and
masked by the explicit loss mask; masked entries give neither value nor gradient, even if they are inf or NaN. Every part is chosen in
`algorithm:` by its name and parameters, or is a function of yours by full path (`my_package.module:function`), which gets the tensors
that it names as parameters:

* once per group: {group};
* before micro-batching, for the whole batch of a step: {batch};
* for the rows of a micro-batch, with the present policy: {rows}.

All else in its signature is a parameter that config may set; one called `max_length` is `sampling.max_tokens` unless it does."""

_DECISIONS = """\
## Decided once

| question | here | otherwise |
|---|---|---|
| a group whose rewards are all equal | exactly 0, detected as max == min | `zero_variance: rounding`, as the peers |
| a group of one | 0 for `grpo`, `dr_grpo`; an error for `rloo`, `pass_at_k` | `singleton: zero`, `raw` or `error` |
| a group is | what one ticket sampled | `streaming`: what its prompt earned in earlier steps joins it |
| a trajectory with nothing unmasked | refused before the step, by name; the functions give it 0 | `empty_rows: count` counts it |
| a batch of which filters leave nothing | loss 0, no step; verl and OpenRLHF give NaN | |
| where a trajectory's reward lands over time | its last unmasked token | `reward_placement: every_token` |
| a reward of a turn on a masked token (an environment's answer) | goes to the last unmasked token before it, which earned it; \
before the first such token, or not finite: refused by name | |
| holes in the mask (tool output) under GAE and returns | skipped: the successor is the next unmasked token | `holes: discount` |
| the denominator under an entropy filter | all tokens: dropped ones stay in the denominator | `denominator: kept` |
| the denominator without a dropped trajectory | it leaves the batch and its denominators | |
| the log-probs of π_old | the rollout's own log-probs, engine's rounding included | `proximal`; preset `gspo` takes the learner's own, \
its bounds being tighter than that rounding |
| clamps on log-ratios | none | `log_ratio_clamp` of losses, corrections and of each term of `kl` |
| ddof of a group's spread | 1 | `ddof: 0` |
| ddof of reported spreads | 0: they describe the batch | |
| the clip fraction counts | tokens whose loss a bound changed | `ratio_outside` counts ratios beyond 0.8 to 1.2 |
| KL in the reward, for an advantage per trajectory | the sum over its tokens is taken off its reward | `kl.reward.credit`: off the \
advantage, `to_go` or `token` by token |
| losses left as they are, one per token (torchrl `reduction="none"`) | a run minimises one number | aggregation `sum` |
| an option that can change nothing beside the others | refused, with the way out | |
| numbers per token | computed in float64 from the model's float32 | |
| extreme ratios | exact down to log-probs of -700; a gradient beyond float32 is inf, and the step is skipped | clips and clamps |"""

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
    parts = [_introduction(), _DECISIONS, SAMPLING]
    parts += [_section(title, HOMES[field], field) for field, title in _TITLES.items()]
    parts += [_kl(), _presets(), _statistics(), _golden()]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _introduction() -> str:
    def listed(known: frozenset[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(known))

    names = {"group": listed(OF_A_GROUP), "batch": listed(OF_THE_BATCH), "rows": listed(OF_THE_ROWS)}
    return _INTRODUCTION.format(note=NOTE, **names)


def _section(title: str, home: Home, field: str) -> str:
    entries = [_entry(name, find(Plugin(name=name), home=home, field=field), home=home) for name in names(home)]
    is_list = typing.get_origin(AlgorithmConfig.model_fields[field.partition(".")[0]].annotation) is tuple
    shown = f"[{{name: {names(home)[0]}}}]" if is_list else f"{{name: {names(home)[0]}}}"
    keys = " or ".join(f"`algorithm.{key}`" for key, each in HOMES.items() if each is home)
    note = f"Set by {keys}, such as `{shown}`, with parameters beside the name; the functions lie in `{home.package}`."
    return "\n\n".join([f"## {title}", note, *entries])


def _kl() -> str:
    note = (
        "`kl.loss` and `kl.reward` pull towards the reference, `kl.rollout` towards the policy that sampled. A run may have all three; "
        "each has a coefficient and an estimator of its own."
    )
    home = Home(
        package=kl.__name__,
        offers=frozenset({"policy_logprobs_BT", "rollout_logprobs_BT", "other_logprobs_BT", "loss_mask_BT"}),
    )
    entries = [_entry(name, function, home=home) for name, function in kl.ESTIMATORS.items()]
    return "\n\n".join(["## KL estimators", note, table(), *entries])


def _entry(name: str, function: Callable[..., Any], *, home: Home) -> str:
    sections = docstring_sections(function)
    lines = [f"### `{name}`", "", sections["summary"], ""]
    lines += [
        f"* {label}: {sections[label]}"
        for label in ("Formula", "Gradient", "Source", "Degenerate", "Peers")
        if sections.get(label)
    ]
    lines.append(f"* Parameters: {_parameters(function, home=home)}")
    return "\n".join(lines)


def _parameters(function: Callable[..., Any], *, home: Home) -> str:
    shown = [
        f"`{name}` (required)"
        if parameter.default is inspect.Parameter.empty
        else f"`{name}` = {_literal(parameter.default)}"
        for name, parameter in parameters(function, home=home).items()
    ]
    return ", ".join(shown) or "none"


def _literal(value: Any) -> str:
    return "none" if value is None else str(value)


def _presets() -> str:
    note = (
        "`preset: dapo` expands to ordinary configuration; your own fields override it, and `treadwheel check RUN.yaml --resolve` prints "
        "what comes of it, every parameter included. Presets that are named for a system are of the version that the table says, and are "
        "held against its own numbers through a run's objective (`tests/golden/test_presets.py`)."
    )
    lines = ["## Presets", "", note, "", "| preset | version | minimises | expands to |", "|---|---|---|---|"]
    for name, bundle in PRESETS.items():
        made = Objective.from_config(AlgorithmConfig.model_validate(bundle))
        shown = (f"`{name}`", VERSIONS.get(name, ""), f"`{made.formula()['text']}`", f"`{json.dumps(bundle)}`")
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _statistics() -> str:
    lines = ["## Statistics, every step", "", "| name | meaning |", "|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {text} |" for name, text in reported_names().items()])


def _golden() -> str:
    lines = [
        "## Agreement with the real systems",
        "",
        "Variants of golden vectors, made by running the peers, per function of theirs; values, and gradients where they were recorded.",
        "`python -m tests.golden --record` renews the numbers; the vectors lie in `tests/golden/vectors`.",
        "",
        "| peer | function | pass | unsupported, with the reason | outputs not compared in those that pass | the peer raised |",
        "|---|---|---|---|---|---|",
    ]
    for peer, functions in json.loads(_RESULTS.read_text()).items():
        for function, row in functions.items():
            reasons = "; ".join(f"{count}: {reason}" for reason, count in row["unsupported"].items())
            left_out = "; ".join(f"{len(names)}: {reason}" for reason, names in row["not_compared"].items())
            lines.append(
                f"| {peer} | `{function}` | {row['passed']} | {reasons} | {left_out} | {row['peer_raised'] or ''} |"
            )
    return "\n".join(lines)
