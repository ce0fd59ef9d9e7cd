"""Tools with a JSON schema of their arguments, such as a server's tools. For a typed function, `@tool` makes the schema."""

from collections.abc import Callable
from typing import Any

import jsonschema
import jsonschema.validators
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from cluster.contracts.errors import DataError
from cluster.contracts.tools import OnError, Tool, function_schema, wrong_arguments


def schema_tool(
    call: Callable[..., Any],
    *,
    name: str,
    description: str,
    parameters: dict[str, Any],
    timeout_s: float = 60.0,
    on_error: OnError = "fail",
) -> Tool:
    """`call` gets the model's arguments by keyword, after they passed the check against `parameters`. Raises DataError for an invalid
    schema and for a `$ref` out of it: nothing is ever fetched."""
    try:
        checked = closed_validator(parameters)
    except jsonschema.SchemaError as error:
        raise DataError(f"the parameters of tool {name!r} are no JSON schema: {error.message}") from error
    except ValueError as error:
        raise DataError(f"the parameters of tool {name!r} {error}") from error

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        if mistakes := [(each.absolute_path, each.message) for each in checked.iter_errors(arguments)]:
            raise wrong_arguments(name, mistakes)
        return arguments

    return Tool(
        name=name,
        call=call,
        schema=function_schema(name, description, parameters),
        timeout_s=timeout_s,
        on_error=on_error,
        check=check,
    )


def closed_validator(schema: Any) -> Any:
    """A validator for `schema` that fetches nothing. Raises SchemaError for an invalid schema, and ValueError for a `$ref` out of it."""
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    _refuse_unresolved(schema, validator.META_SCHEMA["$schema"])
    return validator(schema, registry=SPECIFICATIONS)


def _refuse_unresolved(schema: Any, dialect: str) -> None:
    """Raises ValueError for a reference that is neither in the schema nor in a specification of JSON schema."""
    root = Resource.from_contents(schema, default_specification=specification_with(dialect))
    waiting = [(root, SPECIFICATIONS.resolver_with_root(root))]
    while waiting:
        part, resolver = waiting.pop()
        reference = part.contents.get("$ref") if isinstance(part.contents, dict) else None
        try:
            if isinstance(reference, str):
                resolver.lookup(reference)
            waiting += [(each, resolver.in_subresource(each)) for each in part.subresources()]
        except (Unresolvable, ValueError) as error:
            raise ValueError(f"refer to {reference!r}, which is not in the schema; put it under `$defs`") from error
