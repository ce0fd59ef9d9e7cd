"""Tools that bring a JSON schema."""

import pytest

from actors.schema_tools import schema_tool
from cluster.contracts.errors import DataError, ToolError

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
    "additionalProperties": False,
}


def forecast():
    return schema_tool(lambda **given: given, name="forecast", description="The weather.", parameters=PARAMETERS)


def test_the_model_sees_the_schema_that_was_given():
    about = {"name": "forecast", "description": "The weather.", "parameters": PARAMETERS}
    assert forecast().schema == {"type": "function", "function": about}


def test_arguments_that_fit_the_schema_are_handed_on():
    assert forecast()(**forecast().checked({"city": "Oslo", "days": [1]})) == {"city": "Oslo", "days": [1]}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "wrong arguments of forecast: 'city' is a required property"),
        ({"city": 1, "days": [1, "2"]}, r"city: 1 is not of type 'string'; days\.1: '2' is not of type 'integer'"),
        ({"city": "Oslo", "town": "x"}, "'town' was unexpected"),
        ('{"city": ', "must be a JSON object"),
    ],
)
def test_all_that_is_wrong_is_told_to_the_model(arguments, why):
    with pytest.raises(ToolError, match=why):
        forecast().checked(arguments)


def test_parameters_that_are_no_schema_are_refused():
    with pytest.raises(DataError, match="parameters of tool 'x' are no JSON schema"):
        schema_tool(print, name="x", description="", parameters={"type": "thing"})


def with_reference(to: str, **definitions):
    schema = {"type": "object", "properties": {"city": {"$ref": to}}, "$defs": definitions}
    return schema_tool(print, name="x", description="", parameters=schema)


def test_a_reference_within_the_schema_holds():
    tool = with_reference("#/$defs/name", name={"type": "string"})
    assert tool.checked({"city": "Oslo"}) == {"city": "Oslo"}
    with pytest.raises(ToolError, match="1 is not of type 'string'"):
        tool.checked({"city": 1})


def test_a_reference_to_a_dialects_own_schema_holds():
    tool = with_reference("http://json-schema.org/draft-07/schema#")
    with pytest.raises(ToolError, match="wrong arguments of x"):
        tool.checked({"city": {"type": 3}})


@pytest.mark.parametrize("to", ["#/$defs/none", "#nowhere", "http://[", "other.json"])
def test_a_reference_to_nothing_is_refused(to):
    with pytest.raises(DataError, match="parameters of tool 'x' refer to"):
        with_reference(to)


def test_no_reference_makes_this_machine_read_a_file_or_an_address(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    for address in (file.as_uri(), "http://127.0.0.1:9/schema.json"):
        with pytest.raises(DataError, match="which is not in the schema"):
            with_reference(address)


def test_a_property_that_is_named_as_a_reference_is_a_property():
    schema = {"type": "object", "properties": {"$ref": {"type": "string", "enum": ["a"]}}}
    tool = schema_tool(print, name="x", description="", parameters=schema)
    assert tool.checked({"$ref": "a"}) == {"$ref": "a"}
