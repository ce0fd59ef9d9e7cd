from random import Random

import pytest

from actors.environments.note_to_self import note_to_self
from tests.unit.actors.environments.played import ScriptedEpisode, play

SEED = 3
NUMBER = 40
"""Of that seed, with two digits."""


class Rewritable(ScriptedEpisode):
    def rewrite(self, messages):
        self.heard.append(messages)


def test_the_seed_makes_the_number():
    assert Random(SEED).randint(10, 99) == NUMBER


def test_the_note_is_all_that_the_second_segment_sees():
    episode = Rewritable(["It is 40.", "40"], seed=SEED)
    assert play(note_to_self, episode) == 1.0
    assert episode.heard == [
        "The number is 40. Write a note.",
        [{"role": "user", "content": "Your note: It is 40. What is the number?"}],
        None,
    ]


@pytest.mark.parametrize(
    ("note", "said", "noted", "remembered"),
    [
        ("It is 40.", "40", 1.0, 1.0),
        ("It is 40.", "41", 1.0, 0.0),
        ("I know it.", "40", 0.0, 1.0),
        ("It is 4.", "4", 0.0, 0.0),
        ("", "no idea", 0.0, 0.0),
    ],
)
def test_the_answer_pays_and_not_the_note(note, said, noted, remembered):
    episode = Rewritable([note, said], seed=SEED)
    assert play(note_to_self, episode) == remembered
    assert episode.logged == {"noted": noted, "remembered": remembered}


def test_a_number_of_one_digit():
    episode = Rewritable(["", ""], seed=SEED)
    play(note_to_self, episode, digits=1)
    assert episode.heard[0] == f"The number is {Random(SEED).randint(1, 9)}. Write a note."
