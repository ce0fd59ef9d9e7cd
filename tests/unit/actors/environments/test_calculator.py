import pytest

from actors.environments.calculator import calculate, calculator
from cluster.contracts.errors import DataError, ToolError
from tests.unit.actors.environments.played import ScriptedEpisode, play


@pytest.mark.parametrize(
    ("expression", "value"), [("123 * 456", "56088"), ("2 + 3 * 4", "14"), ("(2 + 3) * -4", "-20"), (" 7", "7")]
)
def test_whole_numbers_are_calculated(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "2 **", "2 ** 9", "1 / 2", "1.5", "True", "a", "f(1)", "1 2", "1\0"])
def test_everything_else_is_told_to_the_model(expression):
    with pytest.raises(ToolError, match="no expression of whole numbers"):
        calculate(expression)


def test_long_expressions_are_refused():
    assert calculate("1" + "+1" * 49) == "50"
    with pytest.raises(ToolError, match="at most 100 characters"):
        calculate("1" + "+1" * 50)


def test_nesting_is_no_way_to_break_it():
    assert calculate("-" * 99 + "1") == "-1"
    assert calculate("(" * 49 + "1" + ")" * 49) == "1"


@pytest.mark.parametrize(("said", "reward"), [("56088", 1.0), ("It is 56088.", 1.0), ("56089", 0.0), ("no idea", 0.0)])
def test_the_right_number_pays(said, reward):
    episode = ScriptedEpisode([said], columns={"answer": "56088"})
    assert play(calculator, episode) == reward
    assert episode.logged == {"called": 0.0}


def test_a_prompt_without_an_answer_is_an_error():
    with pytest.raises(DataError, match="needs a column `answer`"):
        play(calculator, ScriptedEpisode(["1"]))
