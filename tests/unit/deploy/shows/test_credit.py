"""Controls of the shows put credit where it must not go."""

from typing import Any

import torch

from tests.integration.credit import MARK, Marking, behind_the_mark, marked_note
from tests.unit.actors.environments.played import ScriptedEpisode, play


class Noted(ScriptedEpisode):
    def __init__(self, lines):
        super().__init__(lines, seed=3)  # the number is 40
        self.happened = []

    def earn(self, reward):
        self.happened.append(reward)

    def rewrite(self, messages):
        self.happened.append("rewritten")


def test_the_note_is_marked_and_the_mark_given_back():
    episode: Any = Noted(["It is 40.", "40"])
    returned = play(marked_note, episode)
    assert returned == 1.0 - MARK
    assert episode.happened == [MARK, "rewritten"]
    assert Marking(episode).seed == 3


def test_tokens_up_to_the_mark_have_no_advantage():
    """A note of two tokens, an answer of two; in the second row of one and one."""
    token_rewards_NT = torch.tensor([[0.0, MARK, 0.0, 2.0], [MARK, 2.0, 0.0, 0.0]])
    advantages_NT = torch.tensor([[0.5, 0.5, 0.5, 0.5], [-0.5, -0.5, 0.0, 0.0]])
    kept_NT = behind_the_mark(advantages_NT, token_rewards_NT=token_rewards_NT)
    assert kept_NT.tolist() == [[0.0, 0.0, 0.5, 0.5], [0.0, -0.5, 0.0, 0.0]]
