"""true and false are no numbers."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt, ValidationError

from cluster.contracts.checked import Checked, refuse_bool_as_number


class Engine(Checked):
    num_threads: PositiveInt = 1
    timeout_s: float | None = None
    is_fast: bool = False


class Run(Checked):
    engine: Engine = Engine()
    betas: tuple[float, float] = (0.9, 0.999)


@pytest.mark.parametrize(
    ("value", "hint", "place"),
    [
        (True, int, ()),
        (False, float, ()),
        (False, Annotated[float, Field(gt=0)], ()),
        (True, PositiveInt | None, ()),
        (True, int | str, ()),
        (True, Literal[1] | float, ()),
        ([1, True], tuple[int, ...], (1,)),
        ((1, True), Sequence[int], (1,)),
        ([True, False], tuple[bool, float], (1,)),
        ({"a": [0.5, False]}, dict[str, list[float]], ("a", 1)),
        ({True: "x"}, dict[int, str], (1,)),
        ([True], list[float] | dict[str, float] | None, (0,)),
    ],
)
def test_true_and_false_are_refused_where_only_a_number_may_stand(value, hint, place):
    with pytest.raises(ValidationError) as caught:
        refuse_bool_as_number(value, hint)
    (problem,) = caught.value.errors()
    assert problem["loc"] == place and problem["input"] in (True, False)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, bool),
        (True, bool | int | None),
        (True, Literal["group", True] | float),
        (True, str),
        (True, Any),
        (1, int),
        ("true", int),
        ([True], tuple[bool, ...] | tuple[int, ...]),
        ([True], list[Any]),
        ([True], list),
        ([True], int),
        ({"a": True}, dict[str, float] | Engine),
    ],
)
def test_true_and_false_pass_where_the_type_takes_them_or_needs_something_else(value, hint):
    refuse_bool_as_number(value, hint)


def test_a_model_names_every_true_and_false_that_stands_for_a_number():
    with pytest.raises(ValidationError) as caught:
        Run.model_validate({"engine": {"num_threads": True, "timeout_s": False, "is_fast": True}, "betas": [0.9, True]})
    assert [(each["loc"], each["type"]) for each in caught.value.errors()] == [
        (("engine", "num_threads"), "int_type"),
        (("engine", "timeout_s"), "float_type"),
        (("betas", 1), "float_type"),
    ]
