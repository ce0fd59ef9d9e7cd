"""Variants by name: one registry for every kind of plug-in.

A variant is one function or class. It is registered by lying in the home package of its kind with the right signature. Settings name it by
its import path below that package: `grpo` below `learner.algorithms.advantages`, `math_verify` below `actors.rewards`. A user's own variant
has its full path, `my_pkg.rewards:judge`. Parameters are checked against signature and annotations before anything starts.
"""

import difflib
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ImportString,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from cluster.contracts.checked import Checked, refuse_bool_as_number
from cluster.contracts.discovery import Takes, callables
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.hiding import is_secret, shown
from cluster.contracts.importing import importing
from cluster.contracts.own_prompts import prompt_at
from cluster.contracts.protocols import PromptSource
from cluster.contracts.unimported import why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The package of the variants of one kind, and how they are called."""

    package: str
    """A package, or a module of functions."""
    called_with: tuple[str, ...] = ()
    """Arguments that every call passes by keyword. A variant must take them all."""
    offers: frozenset[str] = frozenset()
    """Arguments that a variant gets if it has a parameter of that name."""
    reserved: frozenset[str] = frozenset()
    """Names that no parameter may have, since they will get a meaning."""
    works_on: frozenset[str] = frozenset()
    """Allowed names of a variant's first parameter, which distinguish this kind from similar ones. Empty: any name."""
    advice: str = ""
    """Added to the error about a missing parameter of a user's own function."""

    @property
    def given(self) -> frozenset[str]:
        """Parameters that settings may not set, since the caller supplies them."""
        return self.offers | frozenset(self.called_with)

    def refusal(self, takes: Takes) -> str | None:
        """Why a callable with these parameters is not a variant of this kind; None if it is one."""
        missing = [name for name in self.called_with if name not in takes.names and not takes.accepts_any]
        if missing:
            return f"does not take {', '.join(missing)}; it is called with {', '.join(self.called_with)}"
        if taken := sorted(self.reserved & {*takes.names}):
            return f"has the parameter {taken[0]}, which is a reserved name; rename it"
        first = takes.names[0] if takes.names else "missing"
        if self.works_on and first not in self.works_on:
            return f"is of another kind: its first parameter is {first}, and must be one of {', '.join(sorted(self.works_on))}"
        return None


OF_ONE_OR_ALL = {
    "prompt": "prompts",
    "completion": "completions",
    "messages": "all_messages",
    "token_ids": "all_token_ids",
    "finish_reason": "finish_reasons",
    "seed": "seeds",
    "scores": "all_scores",
}
"""Parameters of a judge of one trajectory, and their lists for a judge of the whole group."""
OF_EITHER = ("columns", "rewards", "servers")
"""Parameters of both kinds of judge: the prompt's columns, the rewards of the other parts, and the URLs of `reward.servers`."""

REWARDS = Home(
    package="actors.rewards",
    offers=frozenset((*OF_ONE_OR_ALL, *OF_ONE_OR_ALL.values(), *OF_EITHER)),
    advice="columns of the prompt are in the parameter `columns`, and a function written for TRL, verl or OpenRLHF is called by the judge "
    "of that name, as {name: trl, function: 'my_package.module:name'}",
)
# `episodes` is reserved for environments of a whole group.
ENVIRONMENTS = Home(package="actors.environments", called_with=("episode",), reserved=frozenset({"episodes"}))
REPLY_PARSERS = Home(package="actors.reply_parsers", called_with=("text", "tools"))
PROMPTS = Home(package="actors.prompts")
TRANSPORTS = Home(package="cluster.weights", called_with=("timeout_s",))
SINKS = Home(package="cluster.sinks", called_with=("directory", "num_steps"))


class Plugin(Checked):
    """A variant's name and parameters. YAML: `grpo`, or `{name: grpo, epsilon: 1e-6}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    params: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "params" not in value:
            fields = cast(dict[str, Any], value)
            own = {key: item for key, item in fields.items() if cls._is_own(key, item)}
            own_names = set(cls.model_fields) - {"name", "params"}
            params = {key: item for key, item in fields.items() if key not in own}
            if fields.get("name") is not None:
                return {**own, "params": params}
            unnamed = [key for key in params if not difflib.get_close_matches(str(key), own_names, cutoff=0.8)]
            if unnamed and "sources" not in own:  # with several sources it is a parameter of none of them
                first = unnamed[0]
                given = shown(params[first], str(first))
                raise ValueError(f"{first}={given} is given without a name; write {{name: NAME, {first}: ...}}")
            return fields
        return cast(Any, value)

    @classmethod
    def _is_own(cls, key: str, value: Any) -> bool:
        """Whether a key is a setting of this class and not a parameter of the variant."""
        return key in cls.model_fields

    @model_serializer(mode="wrap")
    def _to_short_form(self, fields: SerializerFunctionWrapHandler) -> Any:
        whole = fields(self)
        defaults = {key: each.get_default(call_default_factory=True) for key, each in type(self).model_fields.items()}
        own = {key: whole[key] for key in defaults if key != "params" and getattr(self, key) != defaults[key]}
        return self.name if own.keys() == {"name"} and not self.params else {**own, **self.params}


def names(home: Home) -> list[str]:
    """All variants of a home. Nothing is imported."""
    return sorted(_modules(home))


def parameter_names(name: str, *, home: Home) -> tuple[str, ...]:
    """The parameters of a variant, or of a user's own function by full path; empty if it does not exist. Nothing is imported."""
    module, _, attribute = name.partition(":")
    try:
        found = callables(module).get(attribute) if attribute else callables(home.package).get(name)
    except (ImportError, ValueError, OSError):  # no such package, or a built-in module without a file
        return ()
    return found[1].names if found else ()


def refuse_unknown(plugin: Plugin, *, home: Home, field: str) -> None:
    """Raises ConfigError as `resolve` for an unknown variant or parameter. A user's own function passes: nothing is imported."""
    if ":" in plugin.name:
        return
    _module_of(plugin.name, home=home, field=field)
    takes = callables(home.package)[plugin.name][1]
    own = [name for name in takes.names if name not in home.given]
    _refuse_unknown_params(plugin, own, accepts_any=takes.accepts_any, home=home, field=field)


def find(plugin: Plugin, *, home: Home, field: str) -> Callable[..., Any]:
    """The callable that `plugin.name` names. Raises ConfigError naming `field` if there is none, or if it is of another kind."""
    found = _imported(plugin.name, field=field) if ":" in plugin.name else _variant(plugin.name, home=home, field=field)
    if not callable(found):
        raise ConfigError(
            f"{field}={plugin.name!r} is of type {type(found).__name__}; it must be a function or a class"
        )
    try:
        takes = _takes(found)
    except ValueError as error:
        raise ConfigError(
            f"{field}={plugin.name!r} has no signature, like some functions in C; call it in a function of your own"
        ) from error
    if why := home.refusal(takes):
        raise ConfigError(f"{field}={plugin.name!r} {why}")
    return found


def _variant(name: str, *, home: Home, field: str) -> Any:
    module = _module_of(name, home=home, field=field)
    try:
        with importing():
            return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a file that a user added to the package
        raise ConfigError(
            f"{field}={name!r} does not import: {type(error).__name__}: {error}; mend it, or use one of "
            f"{home.package}: {', '.join(names(home))}"
        ) from error


def _imported(path: str, *, field: str) -> Any:
    """The object at an import path. Raises ConfigError naming `field` if it does not import."""
    module, _, attribute = path.partition(":")
    try:
        with importing():
            return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # foreign code: the user sees what its import raises, as one message
        raise ConfigError(f"{field}={path!r} does not import: {why_not(path, error)}") from error


def resolve(plugin: Plugin, *, home: Home, field: str) -> Callable[..., Any]:
    """The callable with the plug-in's parameters bound; the caller supplies the rest.

    Raises ConfigError as `find` does, and for a parameter that is unknown, missing, of a wrong type, or supplied by the caller.
    """
    found = find(plugin, home=home, field=field)
    return functools.partial(found, **check_params(found, plugin, home=home, field=field))


def prompt_source(plugin: Plugin, *, field: str) -> PromptSource:
    """An opened prompt source. Raises ConfigError as `resolve` does, and for a source that refuses its parameters or a row, raises an error
    while it opens, is empty, or whose first prompt `prompt_at` refuses."""
    found = resolve(plugin, home=PROMPTS, field=field)
    try:
        source: PromptSource = found()
        num_prompts = len(source)
        if num_prompts:
            prompt_at(source, 0)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{field}={plugin.name!r}: {error}") from error
    except Exception as error:  # foreign code
        raise ConfigError(f"{field}={plugin.name!r} cannot be opened: {type(error).__name__}: {error}") from error
    if num_prompts == 0:
        raise ConfigError(f"{field}={plugin.name!r} has no prompts; give a source with at least one")
    return source


def check_params(found: Callable[..., Any], plugin: Plugin, *, home: Home, field: str) -> dict[str, Any]:
    """The parameters, converted to their annotated types. Raises ConfigError as `resolve` does."""
    own = parameters(found, home=home)
    _refuse_unknown_params(plugin, [*own], accepts_any=_takes(found).accepts_any, home=home, field=field)
    hints = type_hints(found, include_extras=True)
    checked = {
        name: _convert(value, hints.get(name, Any), field=f"{field}.{name}") for name, value in plugin.params.items()
    }
    missing = [name for name, p in own.items() if p.default is inspect.Parameter.empty and name not in plugin.params]
    if missing:
        raise ConfigError(
            f"{field}={plugin.name!r} needs {', '.join(missing)}; write {field}: {{name: {plugin.name}, {missing[0]}: ...}}"
            + (f"; {home.advice}" if home.advice and ":" in plugin.name else "")
        )
    return checked


def parameters(found: Callable[..., Any], *, home: Home) -> dict[str, inspect.Parameter]:
    """The parameters that settings may set."""
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    every = inspect.signature(found).parameters.items()
    return {name: parameter for name, parameter in every if name not in home.given and parameter.kind in named}


def _refuse_unknown_params(plugin: Plugin, own: Sequence[str], *, accepts_any: bool, home: Home, field: str) -> None:
    for name, value in plugin.params.items():
        if name not in home.given and (name in own or accepts_any):
            continue
        known = ", ".join(own) or "none"
        if is_secret(name):
            raise ConfigError(
                f"{field}.{name} is not a parameter of {plugin.name!r}; secrets come from the environment; it takes: {known}"
            )
        raise ConfigError(
            f"{field}.{name}={shown(value, name)} is not a parameter of {plugin.name!r}; it takes: {known}"
        )


@functools.cache
def _modules(home: Home) -> dict[str, str]:
    """Variant to its module. Cached, since every variant of every objective asks."""
    return {name: module for name, (module, takes) in callables(home.package).items() if home.refusal(takes) is None}


def _module_of(name: str, *, home: Home, field: str) -> str:
    modules = _modules(home)
    if name in modules:
        return modules[name]
    close = difflib.get_close_matches(name, modules, n=1)
    stem, dot, end = name.rpartition(".")
    if home is PROMPTS and end in _DATA:
        hint = f"write a file as {{name: file, path: {name}}}; "
    elif dot:
        hint = f"did you mean '{stem}:{end}'? "
    else:
        hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"{field}={name!r} is not there; {hint}{home.package} has: {', '.join(sorted(modules)) or 'nothing'}; "
        "write your own with its full path, 'my_package.module:name'"
    )


_DATA = ("json", "jsonl", "ndjson", "parquet", "arrow", "feather", "csv")
"""Extensions of files of prompts, including unsupported ones."""


def _takes(found: Callable[..., Any]) -> Takes:
    parameters = inspect.signature(found).parameters.values()
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return Takes(
        tuple(each.name for each in parameters if each.kind not in variadic),
        any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
    )


def is_async(call: Callable[..., Any]) -> bool:
    """Whether a call returns an awaitable. Looks through bound parameters and callable objects."""
    inner = inspect.unwrap(getattr(call, "func", call))
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def type_hints(found: Callable[..., Any], *, include_extras: bool = False) -> dict[str, Any]:
    """Type hints of the parameters. `include_extras` keeps the arguments of `Annotated`: bounds, and when a parameter acts."""
    target = found.__init__ if inspect.isclass(found) else found
    try:
        return typing.get_type_hints(target, include_extras=include_extras)
    except (NameError, TypeError):  # annotations that only a type checker can import: names are still checked
        return {}


def _convert(value: Any, hint: Any, *, field: str) -> Any:
    if hint is Any:
        return value
    if isinstance(value, str) and _is_import_path(hint) and (":" in value or "." in value):
        found = _imported(value if ":" in value else ":".join(value.rsplit(".", 1)), field=field)
    else:
        found = value
    # A model has its own configuration.
    config = None if _is_model(hint) else ConfigDict(arbitrary_types_allowed=True)
    try:
        refuse_bool_as_number(value, hint)
        return TypeAdapter(hint, config=config).validate_python(found)
    except ValidationError as error:
        kind = _in_words(hint)
        first = error.errors()[0]
        why, given = first["msg"], first["input"]
        if model := next((each for each in (hint, *typing.get_args(hint)) if _is_model(each)), None):
            inner = ".".join(map(str, (field, *first["loc"])))
            number = f"={given}" if isinstance(given, int | float) else ""  # a text may contain a token
            known = ", ".join(model.model_fields)
            raise ConfigError(
                f"{inner}{number}: {why.removeprefix('Value error, ')}; {field} takes: {known}"
            ) from error
        # A function named by its path may be of any kind.
        way_out = "name one that imports, as 'my_package.module:name'" if kind is None else f"it must be {kind}"
        raise ConfigError(f"{field}={shown(value, field.rpartition('.')[2])} is not valid: {why}; {way_out}") from error


_IMPORT_STRING: Any = ImportString
"""Type checkers see an annotation, not a class."""


def _is_import_path(hint: Any) -> bool:
    return any(isinstance(each, _IMPORT_STRING) or _is_import_path(each) for each in typing.get_args(hint))


_KINDS: Mapping[Any, str | None] = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
    types.NoneType: "null",
    Callable: "a function, as 'my_package.module:name'",
    Any: None,
}


def _in_words(hint: Any) -> str | None:
    """A parameter's type for people who write YAML; None for any type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _in_words(inner[0])
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_in_words(each) or "anything" for each in inner)
    return _KINDS.get(origin or hint, getattr(hint, "__name__", str(hint)))


def _is_model(hint: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(hint, type) and issubclass(hint, BaseModel)
