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
