"""Reads numbers in a model's text."""

import re

_MAX_DIGITS = 1000
"""Python refuses to read numbers of more than 4,300 digits."""


def first_number(text: str) -> int | None:
    """The first whole number, with its minus sign. None if there is none."""
    found = re.search(rf"-?[0-9]{{1,{_MAX_DIGITS}}}", text)
    return None if found is None else int(found[0])
