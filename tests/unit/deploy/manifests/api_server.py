"""What the API server does with a resource of KubeRay before it keeps it: defaults applied, nulls dropped, unknown fields refused."""

import functools
import json
from pathlib import Path

import jsonschema

SCHEMAS = Path(__file__).parent / "schemas"


@functools.cache
def _known():
    found = [json.loads(file.read_text(encoding="utf-8")) for file in SCHEMAS.glob("*.json")]
    return {each["kind"]: (each["schema"], jsonschema.Draft7Validator(_strict(each["schema"]))) for each in found}


def problems(resource):
    """Paths with what is wrong there; empty for a resource that the API server takes."""
    schema, validator = _known()[resource["kind"]]
    whole = _defaulted(resource, schema)
    return [f"{error.json_path}: {error.message}"[:300] for error in validator.iter_errors(whole)]


def _strict(node):
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string") is True:
        node = {key: value for key, value in node.items() if key != "type"}
    is_closed = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if is_closed and "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        # The API server's own field, of which the definition says no more than that it is there.
        known = node["properties"]
        if "metadata" in known and "apiVersion" in known:
            known = known | {"metadata": {"type": "object"}}
        node = node | {"properties": known, "additionalProperties": False}
    return {key: _strict(value) for key, value in node.items()}


def _defaulted(value, schema):
    if isinstance(value, list):
        return [_defaulted(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    defaults = {name: each["default"] for name, each in properties.items() if "default" in each}
    written = {name: each for name, each in value.items() if each is not None}
    return {
        name: _defaulted(each, properties.get(name, others if isinstance(others, dict) else {}))
        for name, each in (defaults | written).items()
    }
