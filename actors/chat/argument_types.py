"""Schemas of tools for transformers' parser, which converts a call's texts by the JSON types of its arguments but follows no `$ref`."""

from collections.abc import Iterator
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from actors.chat.rendering import Tool

_UNIONS = ("anyOf", "oneOf", "allOf")


def with_types(tool: Tool, *, keeps_texts: bool) -> dict[str, Any]:
    """The tool with the types of its arguments and nothing else of their schemas. `keeps_texts`: an argument that may be a text gets no
    type, so that "02139" stays one."""
    function: Any = tool.get("function")
    parameters: Any = function.get("parameters") if isinstance(function, dict) else None
    properties: Any = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return dict(tool)
    resolver = Registry[Any]().resolver_with_root(DRAFT202012.create_resource(parameters))
    types = {name: [*_types(schema, resolver, set())] for name, schema in properties.items()}
    kept = {name: {"type": [] if keeps_texts and "string" in each else each} for name, each in types.items()}
    return {**tool, "function": {**function, "parameters": {"properties": kept}}}


def _types(schema: Any, resolver: Any, followed: set[str]) -> Iterator[str]:
    """The types that a schema and the schemas that it refers to name. Each reference is followed once."""
    if not isinstance(schema, dict):
        return
    named, reference = schema.get("type"), schema.get("$ref")
    yield from [named] if isinstance(named, str) else named if isinstance(named, list) else ()
    if schema.get("nullable"):
        yield "null"
    for choice in (each for union in _UNIONS for each in schema.get(union) or ()):
        yield from _types(choice, resolver, followed)
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        try:
            found = resolver.lookup(reference)
        except (Unresolvable, ValueError):
            return
        yield from _types(found.contents, found.resolver, followed)
