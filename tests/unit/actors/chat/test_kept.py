import pytest

from actors.chat import kept
from actors.chat.kept import Kept


def counted(made, value):
    def make():
        made.append(value)
        return value

    return make


def test_an_input_that_comes_again_is_made_once():
    results, made = Kept[int](), []
    for given, value in [({"a": 1}, 1), ({"a": 1}, 2), ({"a": True}, 3), ({"a": "1"}, 4)]:
        results.of(given, counted(made, value))
    assert made == [1, 3, 4]
    assert results.of({"a": 1}, counted(made, 5)) == 1


def test_the_one_that_was_not_used_for_longest_goes_first(monkeypatch):
    monkeypatch.setattr(kept, "_MOST", 2)
    results, made = Kept[str](), []
    for given in "abaca":
        results.of(given, counted(made, given))
    results.of("b", counted(made, "b"))
    assert made == ["a", "b", "c", "b"]


def test_a_long_input_is_made_each_time(monkeypatch):
    monkeypatch.setattr(kept, "_LONGEST", 10)
    results, made = Kept[str](), []
    for _ in range(2):
        results.of("x" * 20, counted(made, "x"))
    assert made == ["x", "x"]


def test_an_exception_is_not_kept():
    results = Kept[int]()
    with pytest.raises(ZeroDivisionError):
        results.of("a", lambda: 1 // 0)
    assert results.of("a", lambda: 1) == 1
