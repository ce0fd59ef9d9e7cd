import pytest

from actors.environments.calculator import calculate, calculator
from cluster.contracts.errors import DataError, EpisodeOver, Limit, ToolError
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


class CallingEpisode(ScriptedEpisode):
    """Calls the calculator before each line, and notes what it said."""

    async def ask(self, messages=None, *, tools=()):
        [calculator] = tools
        self.tool, self.answers = calculator, [calculator("123 * 456"), calculator("123 * 456")]
        self.num_calls += 2
        return await super().ask(messages)


@pytest.mark.parametrize(("said", "reward"), [("56088", 1.0), ("It is 56088.", 1.0), ("56089", 0.0), ("no idea", 0.0)])
def test_the_right_number_pays(said, reward):
    episode = ScriptedEpisode([said], columns={"answer": "56088"})
    assert play(calculator, episode) == reward
    assert episode.logged == {"called": 0.0, "right": reward}


def test_a_call_has_its_price_whether_it_helped_or_not():
    episode = CallingEpisode(["56088"], columns={"answer": "56088"})
    assert play(calculator, episode, price=0.1) == pytest.approx(1 - 2 * 0.1)
    assert episode.answers == ["56088", "56088"]
    assert episode.logged == {"called": 1.0, "right": 1.0}
    assert play(calculator, CallingEpisode(["7"], columns={"answer": "56088"}), price=0.1) == pytest.approx(-0.2)


def test_calls_cost_as_much_at_a_limit():
    episode = CallingEpisode([EpisodeOver("full", limit=Limit.CONTEXT)], columns={"answer": "56088"})
    assert play(calculator, episode, price=0.1) == pytest.approx(-0.2)
    assert episode.logged == {"called": 1.0, "right": 0.0}


def test_a_broken_calculator_looks_as_the_other_one_does_and_answers_anything():
    first, again = (CallingEpisode(["7"], columns={"answer": "56088"}, seed=1) for _ in range(2))
    for episode in (first, again):
        play(calculator, episode, tool="broken")
    assert first.tool.schema == calculate.schema
    assert "56088" not in first.answers
    assert first.answers == again.answers  # the seed's: all episodes of a group hear the same
    assert all(10_000 <= int(answer) <= 999_999 for answer in first.answers)


def test_a_prompt_without_an_answer_is_an_error():
    with pytest.raises(DataError, match="needs a column `answer`"):
        play(calculator, ScriptedEpisode(["1"]))
