from random import Random

import pytest

from actors.environments.guess import guess
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import ENVIRONMENTS, Plugin, resolve
from tests.unit.actors.environments.played import ScriptedEpisode, play

SEED = 3
SECRET = 8
"""Of that seed, among 1..20."""


def test_the_seed_makes_the_secret():
    assert Random(SEED).randint(1, 20) == SECRET


def test_every_guess_hears_where_the_secret_is_and_the_prompt_comes_first():
    episode = ScriptedEpisode(["10", "5", "I say 8!"], seed=SEED)
    assert play(guess, episode) == pytest.approx(1.0 - 0.5 * 2 / 6)
    assert episode.heard == [None, "lower", "higher"]
    assert episode.logged == {"solved": 1.0}


def test_the_first_guess_pays_1_and_the_last_still_more_than_half():
    assert play(guess, ScriptedEpisode(["8"], seed=SEED)) == 1.0
    assert play(guess, ScriptedEpisode(["1"] * 5 + ["8"], seed=SEED)) == pytest.approx(1.0 - 0.5 * 5 / 6)


def test_nothing_is_paid_after_the_last_guess():
    episode = ScriptedEpisode(["1"] * 6 + ["8"], seed=SEED)
    assert play(guess, episode) == 0.0
    assert episode.heard == [None, *["higher"] * 5]
    assert episode.logged == {"solved": 0.0}


def test_words_without_a_number_are_a_guess_too():
    episode = ScriptedEpisode(["eight", "8"], seed=SEED)
    assert play(guess, episode, turns=2) == 0.75
    assert episode.heard == [None, "?"]


def test_noise_says_the_same_words_and_means_nothing():
    heard: list[str] = []
    for seed in range(200):
        episode = ScriptedEpisode(["0"] * 6, seed=seed)
        assert play(guess, episode, feedback="noise") == 0.0
        heard += episode.heard[1:]
    assert set(heard) == {"higher", "lower"}
    assert 450 < heard.count("higher") < 550


def test_noise_still_pays_for_the_secret():
    assert play(guess, ScriptedEpisode(["8"], seed=SEED), feedback="noise") == 1.0


@pytest.mark.parametrize(("name", "value"), [("top", 0), ("turns", 0), ("feedback", "kind")])
def test_wrong_parameters_are_refused_before_anything_starts(name, value):
    with pytest.raises(ConfigError, match=rf"environment\.{name}={value!r}"):
        resolve(Plugin(name="guess", params={name: value}), home=ENVIRONMENTS, field="environment")
