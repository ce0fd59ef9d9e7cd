"""Loads a validated RunConfig from a YAML file and `a.b=c` overrides, and writes it back. One ConfigError names all mistakes."""

import contextlib
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cluster.contracts.config import AlgorithmConfig, RunConfig, SamplingConfig
from cluster.contracts.environment_config import EpisodesConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.hiding import hidden, was_hidden
from cluster.contracts.plugins import Plugin
from cluster.contracts.settings import Section, fields, flat, section_in
from deploy.config.spelling import spelled_out
from deploy.config.yaml_text import dumped, has_comment, has_folded_text, parse, read_yaml

_NAMED_BY_USERS = ("sources", "by_source", "parts", "models", "servers")
"""Settings whose keys are names of the user's."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that `path` and `overrides` (`optimizer.learning_rate=3e-4`) describe.

    An override of null resets a setting that cannot be null to its default, and a variant that a preset sets to the preset's. It is refused
    where another value of the preset would stay. `algorithm.preset=ppo` replaces the file's algorithm section.

    Raises one ConfigError for all mistakes: setting, value, way out.
    """
    return validated(read(path) or {}, overrides, source=str(path))


def quiet(config: RunConfig) -> RunConfig:
    """The same run, with a console that prints only warnings."""
    sinks = tuple(
        sink.model_copy(update={"params": {**sink.params, "quiet": True}}) if sink.name == "console" else sink
        for sink in config.metrics.sinks
    )
    return config.model_copy(update={"metrics": config.metrics.model_copy(update={"sinks": sinks})})


def read(path: str | Path) -> Any:
    """The run file's values, not yet checked."""
    return read_yaml(path, way_out="name a run file; `treadwheel init` makes one")


def validated(values: Any, overrides: Sequence[str] = (), *, source: str = "the configuration") -> RunConfig:
    """As `load`, from values that are read already."""
    config = as_recorded(values, overrides, source=source)
    refuse_hidden(config, source=source)
    return config


def refuse_hidden(config: RunConfig, *, source: str) -> None:
    """Raises ConfigError for settings that are hidden in the run file that they come from."""
    lost = [name for name, value in flat(config.model_dump(mode="json")) if was_hidden(value)]
    if lost:
        raise ConfigError(f"{source}: the value of {', '.join(lost)} is hidden there; write {lost[0]}=VALUE again")


def as_recorded(values: Any, overrides: Sequence[str], *, source: str, is_complete: bool = False) -> RunConfig:
    """As `validated`, but settings may be hidden: enough to tell of a run, not to start one. `is_complete`: a run's own settings, in which
    a parameter that is missing has the value that the variant gives it."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must be a mapping of sections such as 'model:', got {type(values).__name__}")
    problems: list[str] = []
    settings: list[tuple[str, Any]] = []
    for override in overrides:
        with _noting(problems):
            settings.append(_setting(override))
    if any(name == "algorithm.preset" and value is not None for name, value in settings):
        # The preset replaces the whole section, not only the settings that the file leaves out.
        values = values | {"algorithm": {}}
    preset = _preset(values, settings)
    for name, value in settings:
        with _noting(problems):
            _set(name, value, values, preset=preset)
    algorithm = values.get("algorithm")
    if isinstance(algorithm, dict):
        values = {name: section for name, section in values.items() if name != "algorithm"}
        with _noting(problems):  # of a section with an unknown preset, only that problem counts
            from learner.algorithms.registry.resolving import resolved

            is_played = any(map(_is_played, _environments(values)))
            values["algorithm"] = resolved(
                algorithm,
                max_tokens=None if is_complete else _value(values, "sampling", "max_tokens", of=SamplingConfig),
                max_turns=_value(values, "episodes", "max_turns", of=EpisodesConfig) if is_played else None,
            )
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += explained(error)
        raise ConfigError(_joined(problems, source=source)) from error
    if problems:
        raise ConfigError(_joined(problems, source=source))
    return config


def explained(error: ValidationError, *, within: str | None = None) -> list[str]:
    """The error's problems, each with the setting and a way out. `within`: the validated section, if it was not a whole run."""
    details = error.errors(include_url=False)
    for detail in details:
        detail["loc"] = (*([within] if within else ()), *detail["loc"])
    return [_explain(detail) for detail in details]


def resolved_yaml(config: RunConfig) -> str:
    """Every setting with its value, as in run.yaml. Values that look like secrets are hidden: secrets come from the environment."""
    return dumped(hidden(config.model_dump(mode="json")))


def full_yaml(config: RunConfig) -> str:
    """As `resolved_yaml`, with every parameter of every variant: an equivalent run file without presets and defaults."""
    return dumped(hidden(spelled_out(config.model_dump(mode="json"))))


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Adds a ConfigError of the block to `problems`."""
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def _setting(override: str) -> tuple[str, Any]:
    """As `parsed`. Also raises ConfigError for an empty value: `run_dir=$OUT` with an unset OUT would mean the default."""
    name, value = parsed(override)
    if not override.partition("=")[2].strip():
        raise ConfigError(f"override {override!r} has no value; write one, or {name}=null for the default")
    return name, value


def parsed(override: str) -> tuple[str, Any]:
    """Name and value of an override."""
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise ConfigError(f"override {override!r} is not of the form section.setting=value, such as num_steps=20")
    source = f"override {hidden(override)!r}"
    value = parse(text, source=source)
    if has_comment(text):
        raise ConfigError(
            f"{source}: YAML takes all from '#' on for a comment; "
            f"write \"{name}='...'\" with both pairs of quotes, or leave the comment out"
        )
    if has_folded_text(text):
        raise ConfigError(
            f"{source}: YAML takes a line break in a text for a space; "
            "write \\n between double quotes, or the text into the run file as a block (`|`)"
        )
    return name, value


def _preset(values: Mapping[str, Any], settings: Sequence[tuple[str, Any]]) -> str | None:
    """The preset that is in force after all overrides, since it may come after an override of one of its settings."""
    section = values.get("algorithm")
    for name, value in settings:
        if name in ("algorithm", "algorithm.preset"):
            section = value if name == "algorithm" else {"preset": value}
    preset = section.get("preset") if isinstance(section, dict) else None
    return preset if isinstance(preset, str) else None


def _of_preset(preset: str | None, name: str) -> Any:
    """The preset's value of a setting; None if it leaves the setting out."""
    if preset is None:
        return None
    from learner.algorithms.registry.presets import PRESETS

    value: Any = {"algorithm": PRESETS.get(preset, {})}
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _set(name: str, value: Any, values: dict[str, Any], *, preset: str | None) -> None:
    keys = name.split(".")
    place = values
    for depth, key in enumerate(keys[:-1]):
        place = _enter(place, key, name=".".join(keys[: depth + 1]), preset=preset)
    if value is None and not _takes_null(name):
        _refuse_to_keep(name, preset)
        place.pop(keys[-1], None)  # back to the default
    else:
        place[keys[-1]] = value


def _takes_null(name: str) -> bool:
    field = dict(fields(RunConfig)).get(name)
    return field is None or type(None) in typing.get_args(field.annotation)


def _refuse_to_keep(name: str, preset: str | None) -> None:
    """Raises ConfigError if the preset sets the setting, unless to a variant: null would seem to take it out."""
    field, kept = dict(fields(RunConfig))[name], _of_preset(preset, name)
    if kept is None or isinstance(field.default, Plugin):
        return
    if isinstance(kept, Mapping):
        way_out = " ".join(f"{name}.{key}=null" for key in kept)
    elif field.is_required():
        way_out = f"{name}=VALUE"
    else:
        way_out = f"{name}={[*field.default] if isinstance(field.default, tuple) else field.default}"
    raise ConfigError(
        f"{name}=null leaves {_short(kept)} of algorithm.preset={preset!r} in force; write {way_out} instead"
    )


def _enter(place: dict[str, Any], key: str, *, name: str, preset: str | None) -> dict[str, Any]:
    inner = place.get(key)
    if isinstance(inner, str):
        inner = {"name": inner}  # a plug-in's short form: `advantage: grpo`, then algorithm.advantage.epsilon=1e-4
    elif inner is None:
        # A parameter without a name belongs to the preset's variant; the default's name would replace that variant.
        inner = {} if _of_preset(preset, name) is not None else _default_plugin(name)
    if not isinstance(inner, dict):
        raise ConfigError(f"{name}={inner!r} has no settings below it; override {name} itself")
    place[key] = own = {**inner}  # a copy: other places of a YAML anchor keep their values
    return own


def _default_plugin(name: str) -> dict[str, Any]:
    """The default of a plug-in field, so that one of its parameters can be set alone; empty for a section."""
    field = dict(fields(RunConfig)).get(name)
    return {"name": field.default.name, **field.default.params} if field and isinstance(field.default, Plugin) else {}


def _value(values: Mapping[str, Any], section: str, name: str, *, of: type[Section]) -> Any:
    """A setting's value in a run file, or its default. An invalid value counts as the default; it is reported with all other mistakes."""
    written = values.get(section)
    try:
        return getattr(
            of.model_validate({name: written[name]} if isinstance(written, dict) and name in written else {}), name
        )
    except ValidationError:
        return of.model_fields[name].default


def _environments(values: Mapping[str, Any]) -> list[Any]:
    named = values.get("environments")
    return [*named.values()] if isinstance(named, dict) and named else [values.get("environment")]


def _is_played(environment: Any) -> bool:
    """As `RunConfig.is_played`, for an environment as a run file writes it."""
    return environment not in (None, "single_turn", {"name": "single_turn"})


def _explain(detail: ErrorDetails) -> str:
    known = dict(fields(RunConfig))
    if detail["type"] == "extra_forbidden":
        return _unknown(detail, known)
    name, setting = _name_of(detail["loc"]), _setting_of(detail["loc"])
    meaning = known[setting].description if setting in known else None
    hint = f" ({_first_sentence(meaning)})" if meaning else ""
    if detail["type"] == "missing":
        inner = section_in(known[setting]) if setting in known else None
        needed = [each for each, field in inner.model_fields.items() if field.is_required()] if inner else []
        return f"{name} is missing; set {f'{name}.{needed[0]}' if needed else 'it'}{hint}"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return f"{name}: {message}" if name else message
    if detail["type"] == "model_type":
        why = _form(setting, known)
    elif wanted := _IN_WORDS.get(detail["type"]):
        why = f"it must be {wanted}"
    else:
        why = _lower_first(detail["msg"])
    return f"{name}={_short(hidden(detail['input'], name))} is not valid: {why}{hint}"


_IN_WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}
"""Kinds of pydantic's errors, in the terms of YAML."""


def _form(setting: str, known: Mapping[str, FieldInfo]) -> str:
    """The required form of a setting that is a mapping: a section, or a variant with parameters."""
    inner = section_in(known[setting]) if setting in known else None
    if inner is None or issubclass(inner, Plugin):
        return "it must be a name, or a mapping of name and parameters"
    # The preset is expanded before validation, so the section's class lacks it.
    preset = ("preset",) if inner is AlgorithmConfig else ()
    return f"it must be a mapping of settings; there are: {', '.join((*preset, *inner.model_fields))}"


def _unknown(detail: ErrorDetails, known: Mapping[str, FieldInfo]) -> str:
    *place, key = detail["loc"]
    parent = _setting_of(place)
    name = ".".join(filter(None, (_name_of(place), str(key))))
    setting = ".".join(filter(None, (parent, str(key))))
    section, dot, rest = str(key).partition(".")
    way_out = f"write {section}: {{{rest}: ...}}" if dot and setting in known else _suggestion(setting, known)
    return f"{name}={_short(hidden(detail['input'], name))} is not a setting; {way_out}"


def _setting_of(location: Sequence[int | str]) -> str:
    """The setting's name without names of the user's: of `reward.parts.right.weight` it is `reward.parts.weight`."""
    around = zip((None, *location), location, strict=False)
    return _name_of([part for before, part in around if before not in _NAMED_BY_USERS])


def _name_of(location: Sequence[int | str]) -> str:
    # A union's branch names (`LoraConfig`, `function-before[...]`) are pydantic's.
    parts = [
        str(part)
        for before, part in zip((None, *location), location, strict=False)
        if before in _NAMED_BY_USERS or isinstance(part, int) or re.fullmatch(r"[a-z0-9_]+", part)
    ]
    return ".".join(parts)


def _suggestion(name: str, known: Mapping[str, FieldInfo]) -> str:
    parent, _, key = name.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == parent}
    if elsewhere := [each for each in known if each.rpartition(".")[2] == key]:
        return f"did you mean {min(elsewhere, key=lambda each: each.count('.'))}?"
    if close := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean {siblings[close[0]]}?"
    return f"{parent or 'the top level'} has: {', '.join(siblings) or 'no settings'}"


def _joined(found: Sequence[str], *, source: str) -> str:
    problems = list(dict.fromkeys(found))
    if len(problems) == 1:
        return f"{source}: {problems[0]}"
    return f"{source}: {len(problems)} problems" + "".join(f"\n  {problem}" for problem in problems)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_sentence(text: str) -> str:
    return text.split("\n")[0].split(". ")[0].rstrip(".")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
