"""Variants by name. A variant is one function or class; config names it by its import path below its home package.

`grpo` with home `learner.algorithms.advantages` is the function of that module; `math_verify` with home `actors.rewards` is
the callable of the same name in `actors/rewards/math_verify.py`; a user's own goes by full path, `my_pkg.rewards:judge`.
Parameters are checked against the callable's signature and annotations before anything starts.
"""

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_serializer, model_validator

from cluster.contracts.errors import ConfigError


class Plugin(BaseModel):
    """A variant's name and parameters. YAML: `grpo`, or `{name: grpo, epsilon: 1e-6}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    params: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "params" not in value:
            fields = cast(dict[str, Any], value)
            params = {key: item for key, item in fields.items() if key != "name"}
            return {"name": fields.get("name"), "params": params} if "name" in fields else fields
        return cast(Any, value)

    @model_serializer
    def _to_short_form(self) -> Any:
        return {"name": self.name, **self.params} if self.params else self.name


def find(plugin: Plugin, *, home: str, field: str) -> Callable[..., Any]:
    """The callable that `plugin.name` means. Raises ConfigError naming `field` when it does not import."""
    module_path, _, attribute = plugin.name.partition(":")
    try:
        if attribute:
            found = getattr(importlib.import_module(module_path), attribute)
        else:
            found = _below(home, plugin.name)
    # A plug-in is foreign code: whatever its import raises is the user's to see, as one message.
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{field}={plugin.name!r} does not import: {type(error).__name__}: {error}; "
            f"use a name below {home} ({', '.join(names(home)) or 'none found'}) or a full path like 'my_package.module:name'"
        ) from error
    if not callable(found):
        raise ConfigError(f"{field}={plugin.name!r} is a {type(found).__name__}; it must be a function or a class")
    return found


def resolve(plugin: Plugin, *, home: str, field: str = "plugin", given: Collection[str] = ()) -> Callable[..., Any]:
    """The callable with the plug-in's parameters bound.

    `given` are the arguments that the caller supplies later. Raises ConfigError for an unknown parameter, one of a wrong
    type, a missing one, or a parameter that the caller supplies itself.
    """
    found = find(plugin, home=home, field=field)
    return functools.partial(found, **check_params(found, plugin, field=field, given=given))


def check_params(
    found: Callable[..., Any], plugin: Plugin, *, field: str, given: Collection[str] = ()
) -> dict[str, Any]:
    """The parameters, converted to their annotated types. Raises ConfigError as `resolve` does."""
    signature = inspect.signature(found)
    accepts_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    own = {
        name: p
        for name, p in signature.parameters.items()
        if name not in given and p.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    hints = _type_hints(found)
    checked: dict[str, Any] = {}
    for name, value in plugin.params.items():
        if name not in own and not accepts_any:
            known = ", ".join(own) or "none"
            raise ConfigError(f"{field}.{name}={value!r} is not a parameter of {plugin.name!r}; it takes: {known}")
        checked[name] = _convert(value, hints.get(name, Any), field=f"{field}.{name}")
    missing = [name for name, p in own.items() if p.default is inspect.Parameter.empty and name not in plugin.params]
    if missing:
        raise ConfigError(
            f"{field}={plugin.name!r} needs {', '.join(missing)}; write {field}: {{name: {plugin.name}, {missing[0]}: ...}}"
        )
    return checked


def names(home: str) -> list[str]:
    """The variants that `home` (a module of functions, or a package with one file per variant) offers."""
    module = importlib.import_module(home)
    paths = getattr(module, "__path__", None)
    if paths is None:
        own = [n for n, item in vars(module).items() if inspect.isfunction(item) and item.__module__ == home]
        return sorted(n for n in own if not n.startswith("_"))
    import pkgutil

    return sorted(info.name for info in pkgutil.iter_modules(paths) if not info.name.startswith("_"))


def _below(home: str, name: str) -> Any:
    module = importlib.import_module(home)
    if hasattr(module, "__path__"):
        return getattr(importlib.import_module(f"{home}.{name}"), name.rpartition(".")[2])
    return getattr(module, name)


def _type_hints(found: Callable[..., Any]) -> dict[str, Any]:
    target = found.__init__ if inspect.isclass(found) else found
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):  # annotations only importable for a type checker: names are still checked
        return {}


def _convert(value: Any, hint: Any, *, field: str) -> Any:
    if hint is Any:
        return value
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{field}={value!r} is not valid: {error.errors()[0]['msg']}; it must be {hint}") from error
