"""Tools that bring a JSON schema of their arguments, such as those of a server: `@tool` makes one of a typed function."""

from collections.abc import Callable
from typing import Any

import jsonschema
import jsonschema.validators

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
    """`call` gets the arguments by keyword, as the model wrote them once they fit `parameters`. Raises DataError for what is no schema."""
    validator = jsonschema.validators.validator_for(parameters)
    try:
        validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise DataError(f"the parameters of tool {name!r} are no JSON schema: {error.message}") from error

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        if mistakes := [(each.absolute_path, each.message) for each in validator(parameters).iter_errors(arguments)]:
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
