"""The variants that a run file may name, by kind: meaning, and parameters with types and defaults."""

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

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
    names,
    parameters,
    type_hints,
)
from learner.algorithms.registry.homes import HOMES
from learner.algorithms.registry.presets import PRESETS
from learner.algorithms.registry.resolving import FILLED_IN


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    setting: str
    """The setting of a run file that names a variant of this kind."""
    home: Home


KINDS = {
    "rewards": Kind(setting="reward.judge and reward.parts.judge", home=REWARDS),
    "environments": Kind(setting="environment and environments", home=ENVIRONMENTS),
    "reply_parsers": Kind(setting="episodes.parser", home=REPLY_PARSERS),
    "prompts": Kind(setting="prompts, evaluation.prompts and algorithm.sft.prompts", home=PROMPTS),
    "transports": Kind(setting="weights.transport", home=TRANSPORTS),
    "sinks": Kind(setting="metrics.sinks", home=SINKS),
    "advantages": Kind(setting="algorithm.advantage", home=HOMES["advantage"]),
    "losses": Kind(setting="algorithm.policy_loss", home=HOMES["policy_loss"]),
    "value_losses": Kind(setting="algorithm.value.loss", home=HOMES["value.loss"]),
    "aggregations": Kind(setting="algorithm.aggregation and algorithm.value.aggregation", home=HOMES["aggregation"]),
    "corrections": Kind(setting="algorithm.corrections", home=HOMES["corrections"]),
    "filters": Kind(setting="algorithm.filters", home=HOMES["filters"]),
    "selections": Kind(setting="algorithm.selection", home=HOMES["selection"]),
    "reward_shaping": Kind(setting="algorithm.reward_shaping", home=HOMES["reward_shaping"]),
    "advantage_shaping": Kind(setting="algorithm.advantage_shaping", home=HOMES["advantage_shaping"]),
}

_PROSE_ENDS = re.compile(r"\bRaises [A-Z]|^(?:Formula|Source|Degenerate|Peers):", re.MULTILINE)
"""Where the meaning of a docstring ends: errors and sections follow, which docs/algorithms.md has in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    name: str
    meaning: str
    parameters: tuple[str, ...]
    """Each as `name: type = default`, or `name: type (required)`."""


def overview() -> Iterator[str]:
    """Every kind with its setting and its names. Imports no variant."""
    for word, kind in KINDS.items():
        yield f"{word} ({kind.setting}): {', '.join(names(kind.home))}"
    yield f"presets (algorithm.preset): {', '.join(PRESETS)}"


def listing(word: str) -> Iterator[str]:
    """One kind in full. Raises ConfigError for a kind that does not exist."""
    if word == "presets":
        for name, bundle in PRESETS.items():
            written = yaml.safe_dump(bundle, default_flow_style=True, sort_keys=False, width=10_000)
            yield f"{name}: {written.strip()}"
        return
    if word not in KINDS:
        known = [*KINDS, "presets"]
        close = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"{word!r} is not a kind of variant; {hint}there are: {', '.join(known)}")
    yield f"{KINDS[word].setting}: a name, or {{name: ..., parameter: ...}}; your own as 'my_package.module:name'"
    for each in described(KINDS[word]):
        yield f"{each.name}: {each.meaning}"
        yield from (f"    {parameter}" for parameter in each.parameters)


def described(kind: Kind) -> list[Described]:
    """The variants of a kind. One that cannot be imported here, for example because a package is missing, has the error as its meaning."""
    return [_described(name, kind) for name in names(kind.home)]


def _described(name: str, kind: Kind) -> Described:
    try:
        found = find(Plugin(name=name), home=kind.home, field=kind.setting)
    except ConfigError as error:
        return Described(name=name, meaning=str(error), parameters=())
    return Described(
        name=name, meaning=_meaning(found, name), parameters=tuple(shown_parameters(found, home=kind.home))
    )


def _meaning(found: Callable[..., Any], name: str) -> str:
    """The prose of its docstrings: of its module if that is named after it, its own, and that of a class's `__init__`."""
    texts = [inspect.getdoc(found)]
    if found.__module__.endswith(f".{name}"):
        texts.insert(0, inspect.getdoc(inspect.getmodule(found)))
    if inspect.isclass(found) and "__init__" in vars(found):
        texts.append(inspect.cleandoc(found.__init__.__doc__ or ""))
    return " ".join(" ".join(_PROSE_ENDS.split(text or "", maxsplit=1)[0] for text in texts).split())


def shown_parameters(found: Callable[..., Any], *, home: Home) -> Iterator[str]:
    """Parameters that a run file may set, each as in `Described.parameters`."""
    hints = type_hints(found)
    for name, parameter in parameters(found, home=home).items():
        typed = name if name not in hints else f"{name}: {_type(hints[name])}"
        if name in FILLED_IN:
            yield f"{typed} = {FILLED_IN[name]}"
        elif parameter.default is inspect.Parameter.empty:
            yield f"{typed} (required)"
        else:
            yield f"{typed} = {_value(parameter.default)}"


def _type(hint: Any) -> str:
    """In words for authors of run files: `'add' | 'clamp'`, `number | none`, `list of text`."""
    origin = typing.get_origin(hint)
    if origin is Callable:
        return "function"
    if origin in (list, Sequence):
        return f"list of {_type(typing.get_args(hint)[0])}"
    if origin is typing.Literal:
        return " | ".join(repr(choice) for choice in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(each) for each in typing.get_args(hint))
    if origin is not None:
        return str(hint).replace("typing.", "")
    return {float: "number", int: "integer", str: "text", bool: "true or false", type(None): "none"}.get(
        hint, hint.__name__ if inspect.isclass(hint) else str(hint)
    )


def _value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
