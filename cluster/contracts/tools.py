"""Tools that a model may call: typed functions with a JSON schema, which is given or made from their signatures and docstrings."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from cluster.contracts.errors import ConfigError, ToolError
from cluster.contracts.plugins import type_hints

OnError = Literal["fail", "tell"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function with a schema. Defined in a class, it is a method and can be called as one."""

    name: str
    call: Callable[..., Any]
    schema: dict[str, Any]
    """In the form of chat templates."""
    timeout_s: float
    """Deadline of a call."""
    on_error: OnError
    """Effect of an exception or a missed deadline. `fail`: the environment fails. `tell`: the model gets it as text, like a ToolError."""
    check: Callable[[dict[str, Any]], dict[str, Any]]
    """Converts the arguments to the types of the parameters. Raises ToolError with all mistakes."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Calls the function itself, without checks."""
        return self.call(*args, **named)

    def __get__(self, instance: Any, owner: type | None = None) -> "Tool":
        return self if instance is None else dataclasses.replace(self, call=self.call.__get__(instance, owner))

    def checked(self, arguments: dict[str, Any] | str) -> dict[str, Any]:
        """As `check`, for arguments that a model wrote."""
        if isinstance(arguments, str):
            raise ToolError(f"the arguments of {self.name} must be a JSON object, not {arguments[:200]!r}")
        return self.check(arguments)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, timeout_s: float = ..., on_error: OnError = ...) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, timeout_s: float = 60.0, on_error: OnError = "fail"
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Makes a function, synchronous or not, into a tool, as `@tool` or `@tool(timeout_s=2)`.

    Raises ConfigError for a function without a docstring, or with a parameter that has no type.
    """

    def made(function: Callable[..., Any]) -> Tool:
        name = function.__name__
        described, described_each = _docstring(function)
        if not described:
            raise ConfigError(f"tool {name!r} has no docstring, which tells the model what it does")
        arguments = _arguments(function, described_each)
        return Tool(
            name=name,
            call=function,
            schema=function_schema(name, described, _untitled(arguments.model_json_schema())),
            timeout_s=timeout_s,
            on_error=on_error,
            check=partial(_checked, arguments),
        )

    return made if function is None else made(function)


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the form of chat templates. `parameters` is a JSON schema."""
    about = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": about}


def as_tool(function: Tool | Callable[..., Any]) -> Tool:
    """Raises ConfigError as `tool`."""
    return function if isinstance(function, Tool) else tool(function)


def _checked(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        made = model.model_validate(arguments)
    except ValidationError as error:
        raise wrong_arguments(model.__name__, ((each["loc"], each["msg"]) for each in error.errors())) from error
    return {str(model.model_fields[name].alias): getattr(made, name) for name in made.model_fields_set}


def wrong_arguments(name: str, mistakes: Iterable[tuple[Iterable[str | int], str]]) -> ToolError:
    """An error with all mistakes. Each is a place in the arguments and a reason."""
    wrong = "; ".join(": ".join(filter(None, [".".join(map(str, place)), why])) for place, why in mistakes)
    return ToolError(f"wrong arguments of {name}: {wrong}")


def _arguments(function: Callable[..., Any], described: dict[str, str]) -> type[BaseModel]:
    """A pydantic model of the parameters. Its fields are numbered, since a parameter may have the name of a method of models."""
    hints = type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(_parameters(function)):
        if parameter.name not in hints or parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"tool {function.__name__!r}: parameter {parameter.name!r} needs a type and a name")
        default = ... if parameter.default is parameter.empty else parameter.default
        hint = hints[parameter.name]
        if text := described.get(parameter.name):
            hint = Annotated[hint, Field(description=text)]
        fields[f"field_{number}"] = (hint, Field(default, alias=parameter.name))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise ConfigError(f"tool {function.__name__!r} takes {parameter}; name its parameters")
        if number > 0 or parameter.name != "self":  # a method, before it is bound
            yield parameter


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before `Args:`, and the text about each parameter after it."""
    text, _, listed = (inspect.getdoc(function) or "").partition("Args:\n")
    return text.strip(), dict(re.findall(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.+)$", listed, re.MULTILINE))


def _untitled(schema: Any) -> Any:
    """The schema without pydantic's titles, which repeat the names. A parameter named `title` has a schema there, not a text."""
    if isinstance(schema, list):
        return [_untitled(each) for each in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    named = cast(dict[str, Any], schema)
    return {name: _untitled(each) for name, each in named.items() if name != "title" or isinstance(each, dict)}
