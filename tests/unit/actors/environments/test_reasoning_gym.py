"""Several attempts at a real task of reasoning_gym."""

from dataclasses import replace

import pytest

from actors.prompts.reasoning_gym import reasoning_gym
from cluster.contracts.episodes import Logged
from cluster.contracts.errors import EpisodeOver
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.adapters import hosted_variant
from tests.unit.actors.environments.scripted import Scripted, task

pytestmark = pytest.mark.slow  # all of it: each environment is a process

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
async def test_each_further_attempt_is_worth_less_and_the_best_one_counts(answers, reward, num_attempts):
    model = Scripted(*answers)
    async with hosted_variant("reasoning_gym", discount=0.5) as host:
        end = await host.run(SUM, model)
    assert end.reward == reward
    assert end.events[0] == Logged(name="attempts", value=float(num_attempts))
    assert model.heard == [WRONG] * (len(answers) - 1 if num_attempts < 3 else 2)


async def test_the_last_attempt_may_count_alone():
    model = Scripted(f"It is {RIGHT}", "no idea")
    async with hosted_variant("reasoning_gym", attempts=2, counts="last") as host:
        assert (await host.run(SUM, model)).reward == 0.0


async def test_a_missing_tag_is_told_as_such():
    model = Scripted(RIGHT, f"<answer>1{RIGHT}</answer>", f"<answer>{RIGHT}</answer>")
    async with hosted_variant("reasoning_gym", answer_tag="answer", discount=1.0) as host:
        assert (await host.run(SUM, model)).reward == 1.0
    assert model.heard == ["Put your answer into <answer>...</answer>.", WRONG]


async def test_an_episode_without_an_attempt_has_no_score_and_a_foreign_prompt_is_a_failure():
    async with hosted_variant("reasoning_gym") as host:
        over = await host.run(SUM, Scripted(FULL))
        foreign = await host.run(task(), Scripted("1"))
    assert (over.reward, over.limit) == (None, FULL.limit)
    assert (foreign.reward, foreign.status) == (None, RewardStatus.ERROR)
    assert "environment=reasoning_gym needs the column 'answer'" in (foreign.message or "")
