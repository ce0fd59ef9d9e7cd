import pytest

from actors.environments import grid as grids
from actors.environments.grid import GOAL, START, STEPS, grid, make_grid, step_from
from tests.unit.actors.environments.played import ScriptedEpisode, play

SEED = 1
DRAWN = "A.OO\n....\n..O.\n...G"
"""Of that seed: six steps from the start to the goal, as down, down, down, right, right, right."""


class EarningEpisode(ScriptedEpisode):
    def __init__(self, lines, *, seed=SEED):
        super().__init__(lines, seed=seed)
        self.earned = []

    def earn(self, reward):
        self.earned.append(reward)


def test_the_seed_makes_the_grid():
    assert make_grid(SEED).drawn(START) == DRAWN
    assert make_grid(SEED).drawn(START) != make_grid(SEED + 1).drawn(START)


def test_every_goal_can_be_reached():
    for seed in range(300):
        distances = make_grid(seed).distances
        assert distances[GOAL] == 0 and distances[START] == 6


def test_distances_lead_around_the_holes():
    distances = make_grid(SEED).distances
    assert distances[3, 2] == 1 and distances[2, 1] == 3
    assert distances[1, 2] == 3  # to the right and down: below it is a hole
    assert (2, 2) not in distances


def test_at_the_edge_and_for_other_words_nobody_moves():
    assert [step_from(START, word) for word in ("up", "left", "down", "right", "dance")] == [
        START,
        START,
        (1, 0),
        (0, 1),
        START,
    ]


def test_each_step_earns_and_the_goal_1_more():
    episode = EarningEpisode(["Down", "up", "down", "down", "down", "right", "right", "right"])
    assert play(grid, episode) == 0.0
    assert episode.earned == pytest.approx([0.1, -0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1.1])
    assert episode.heard[:3] == [DRAWN, "..OO\nA...\n..O.\n...G", DRAWN]
    assert episode.logged == {"arrived": 1.0}


def test_a_hole_is_the_end_and_earns_nothing():
    episode = EarningEpisode(["right", "right", "left"])
    play(grid, episode)
    assert episode.earned == pytest.approx([0.1])
    assert episode.logged == {"arrived": 0.0}


def test_the_turns_end_the_walk():
    episode = EarningEpisode(["up", "what?", "down"])
    play(grid, episode, turns=2)
    assert episode.earned == [0.0, 0.0]
    assert episode.logged == {"arrived": 0.0}


def test_a_place_is_drawn_over_the_goal():
    assert make_grid(SEED).drawn(GOAL).endswith("A")
    assert set(STEPS) == {"up", "down", "left", "right"} and grids.SIDE == 4
