import pytest

from actors.environments.numbers import first_number


@pytest.mark.parametrize(
    ("text", "number"), [("17", 17), ("I say -3, not 4", -3), ("no", None), ("", None), ("007", 7), ("٣", None)]
)
def test_the_first_number_counts(text, number):
    assert first_number(text) == number


def test_endless_digits_are_a_number_too():
    assert first_number("1" * 5000) == int("1" * 1000)
