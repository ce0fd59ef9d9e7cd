import json

import pytest

from cluster.contracts.foreign import line_of


def _asserts(completion: str) -> float:
    assert completion
    return 1.0


def test_the_users_own_last_line_is_told_with_its_file():
    with pytest.raises(AssertionError) as raised:
        _asserts("")
    line = _asserts.__code__.co_firstlineno + 1
    assert line_of(raised.value) == f" (test_foreign.py, line {line})"


def test_a_line_in_a_library_is_not_the_users():
    with pytest.raises(ValueError, match="Expecting value") as raised:
        json.loads("x")
    here = line_of(raised.value)
    assert here.startswith(" (test_foreign.py, line "), "the call in the user's file, and not the library's line"
    assert line_of(ValueError("never raised")) == ""
