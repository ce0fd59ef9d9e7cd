"""Several attempts at a real task of reasoning_gym."""

from dataclasses import replace

import pytest

from actors.environments.reasoning_gym import reasoning_gym as attempts_at
from actors.prompts.reasoning_gym import reasoning_gym
from cluster.contracts.episodes import Logged
from cluster.contracts.errors import EpisodeOver
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.adapters import hosted_variant
from tests.unit.actors.environments.played import ScriptedEpisode, play
from tests.unit.actors.environments.scripted import Scripted, task

WRONG = "That is not right. Try again."
PROMPT = reasoning_gym(task="chain_sum", size=10)[0]
RIGHT = PROMPT.columns["answer"]
SUM = replace(task(), columns=PROMPT.columns)
FULL = EpisodeOver("full")


NEAR = f"It is {RIGHT}"
NEAR_SCORE = len(RIGHT) / len(NEAR)
"""Amid other text an answer has a part of the score."""


@pytest.mark.parametrize(
    ("answers", "reward", "num_attempts"),
    [
        ([RIGHT], 1.0, 1),
        (["no idea", RIGHT], 0.5, 2),
        (["a", "b", "c", RIGHT], 0.0, 3),
        ([NEAR, "no idea", FULL], NEAR_SCORE, 2),
    ],
)
def test_each_further_attempt_is_worth_less_and_the_best_one_counts(answers, reward, num_attempts):
    episode = ScriptedEpisode(answers, columns=PROMPT.columns)
    assert play(attempts_at, episode, discount=0.5) == reward
    assert episode.logged["attempts"] == num_attempts
    assert episode.heard == [None, *[WRONG] * (len(answers) - 1 if num_attempts < 3 else 2)]


def test_the_last_attempt_may_count_alone():
    episode = ScriptedEpisode([NEAR, "no idea"], columns=PROMPT.columns)
    assert play(attempts_at, episode, attempts=2, counts="last") == 0.0
    assert episode.logged == {"attempts": 2, "first_score": NEAR_SCORE}


def test_a_missing_tag_is_told_as_such():
    lines = [RIGHT, f"<answer>1{RIGHT}</answer>", f"<answer>{RIGHT}</answer>"]
    episode = ScriptedEpisode(lines, columns=PROMPT.columns)
    assert play(attempts_at, episode, answer_tag="answer", discount=1.0) == 1.0
    assert episode.heard == [None, "Put your answer into <answer>...</answer>.", WRONG]


@pytest.mark.slow  # a process
async def test_an_episode_without_an_attempt_has_no_score_and_a_foreign_prompt_is_a_failure():
    async with hosted_variant("reasoning_gym") as host:
        right = await host.run(SUM, Scripted(RIGHT))
        over = await host.run(SUM, Scripted(FULL))
        foreign = await host.run(task(), Scripted("1"))
    assert (right.reward, right.events[0]) == (1.0, Logged(name="attempts", value=1.0))
    assert (over.reward, over.limit) == (None, FULL.limit)
    assert (foreign.reward, foreign.status) == (None, RewardStatus.ERROR)
    assert "environment=reasoning_gym needs the column 'answer'" in (foreign.message or "")
