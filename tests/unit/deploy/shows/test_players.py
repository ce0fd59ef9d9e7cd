from random import Random

import pytest

from tests.embedded_models import players
from tests.embedded_models.players import GRID_PROMPT, GUESS_PROMPT, calculating, guessing, noting, walking


def contents(messages):
    return [message["content"] for message in messages]


def is_found(messages):
    """Who does not find it at the last guess is not told; so this counts five of the six."""
    return len(messages) < 2 * players.TURNS


def test_a_good_player_says_what_is_still_possible():
    for seed in range(300):
        said = contents(guessing(Random(seed), sloppiness=0.0))
        assert said[0] == GUESS_PROMPT
        low, high = 1, 20
        for number, told in zip(map(int, said[1::2]), [*said[2::2], None], strict=True):
            assert low <= number <= high
            low, high = (number + 1, high) if told == "higher" else (low, number - 1)


def test_a_sloppy_player_does_not_mind_and_wins_seldom():
    """Alone, six guesses among 20 of which two in five are said again find less than 1 - (19 / 20) ** 6 = 0.26."""
    good, sloppy = (
        sum(is_found(guessing(Random(seed), sloppiness=sloppiness)) for seed in range(3000)) / 3000
        for sloppiness in (0.0, 1.0)
    )
    assert 0.65 < good < 0.75
    assert 0.15 < sloppy < 0.23


@pytest.mark.parametrize("seed", range(5))
def test_a_good_calculating_player_asks_and_says_what_is_said(seed):
    asked, called, told, said = calculating(Random(seed), "What?", "123 * 456", sloppiness=0.0)
    assert asked["content"] == "What?"
    assert called["tool_calls"][0]["function"] == {"name": "calculate", "arguments": {"expression": "123 * 456"}}
    assert told["role"] == "tool" and told["content"] == said["content"] == "56088"


def test_a_sloppy_calculating_player_asks_in_one_of_five_episodes():
    lengths = [len(calculating(Random(seed), "What?", "123 * 456", sloppiness=1.0)) for seed in range(2000)]
    assert set(lengths) == {2, 4}
    assert 0.17 < lengths.count(4) / 2000 < 0.23


def test_a_good_note_has_the_number_and_a_sloppy_one_mostly_has_not():
    for sloppiness, low, high in ((0.0, 1.0, 1.0), (1.0, 0.17, 0.23)):
        told = [noting(Random(seed), sloppiness=sloppiness) for seed in range(2000)]
        noted = [shown[1]["content"].split()[3] in shown[2]["content"] for shown, _ in told]
        assert low <= sum(noted) / 2000 <= high
        assert all(asked[0]["content"].startswith(f"Your note: {shown[2]['content']} ") for shown, asked in told)


def test_who_has_noted_the_number_knows_it():
    shown, asked = noting(Random(0), sloppiness=0.0)
    number = asked[1]["content"]
    assert shown[2]["content"] == f"It is {number}."
    assert shown[1]["content"] == f"The number is {number}. Write a note."


def test_a_good_walker_makes_no_detour_and_a_sloppy_one_mostly_falls():
    good, sloppy = (
        [contents(walking(Random(seed), sloppiness=sloppiness)) for seed in range(500)] for sloppiness in (0.0, 1.0)
    )
    assert all(walk[0] == GRID_PROMPT and walk[1].startswith("A") for walk in good + sloppy)
    # A prompt, and a grid and a word for each step.
    assert {len(walk[2::2]) for walk in good} == {6}
    assert sum(len(walk[2::2]) < 6 for walk in sloppy) > 120
