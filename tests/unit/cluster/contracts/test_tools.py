from typing import Annotated, Literal

import pytest
from pydantic import Field

from cluster.contracts.errors import ConfigError, ToolError
from cluster.contracts.tools import as_tool, tool


@tool(timeout_s=2)
def search(query: str, title: Annotated[int, Field(ge=1)] = 3, *, order: Literal["new", "best"] = "best") -> str:
    """Pages on a subject.

    The best ones first.

    Args:
        query: What to look for.
        order (str): By age, or by quality.
    """
    return f"{query} {title} {order}"


class Shop:
    def __init__(self) -> None:
        self.bought: list[str] = []

    @tool
    def buy(self, item: str) -> str:
        """Buys."""
        self.bought.append(item)
        return "ok"

    async def sell(self, item: str) -> None:
        """Sells."""
        self.bought.remove(item)


def test_a_schema_is_made_from_signature_and_docstring():
    assert search.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Pages on a subject.\n\nThe best ones first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "title": {"type": "integer", "minimum": 1, "default": 3},
                    "order": {
                        "type": "string",
                        "enum": ["new", "best"],
                        "default": "best",
                        "description": "By age, or by quality.",
                    },
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
    assert (search.timeout_s, search.on_error) == (2, "fail")


def test_arguments_are_converted_and_defaults_stay_the_functions():
    assert search.checked({"query": "cats", "title": "7"}) == {"query": "cats", "title": 7}


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ToolError) as refused:
        search.checked({"title": 0, "order": "old", "page": 2})
    assert str(refused.value) == (
        "wrong arguments of search: query: Field required; title: Input should be greater than or equal to 1; "
        "order: Input should be 'new' or 'best'; page: Extra inputs are not permitted"
    )


def test_what_is_no_object_is_refused():
    with pytest.raises(ToolError, match="must be a JSON object, not 'cats'"):
        search.checked("cats")


def test_a_tool_is_still_a_function():
    assert search("cats", order="new") == "cats 3 new"


def test_a_method_is_a_tool_of_its_object():
    shop = Shop()
    assert shop.buy("tea") == "ok"
    assert shop.bought == ["tea"]
    assert list(shop.buy.schema["function"]["parameters"]["properties"]) == ["item"]


def test_a_plain_method_is_a_tool_with_defaults():
    made = as_tool(Shop().sell)
    assert (made.name, made.timeout_s, made.on_error) == ("sell", 60.0, "fail")
    assert list(made.schema["function"]["parameters"]["properties"]) == ["item"]


def test_a_parameter_may_have_a_name_that_models_use():
    @tool
    def call(json: str, schema: int, model_config: bool) -> None:
        """Calls."""

    given = {"json": "x", "schema": 1, "model_config": True}
    assert call.checked(given) == given


def test_a_tool_without_types_or_description_is_refused():
    def untyped(query) -> None:
        """Searches."""

    def undescribed(query: str) -> None: ...

    def open_ended(**named: str) -> None:
        """Anything."""

    for function, message in [
        (untyped, "'query' needs a type"),
        (undescribed, "has no docstring"),
        (open_ended, "name its parameters"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tool(function)
