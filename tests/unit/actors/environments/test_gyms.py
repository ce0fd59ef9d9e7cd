"""Gymnasium's own environments, and one of a user's, played in real host processes."""

from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from actors.environments.gyms import _reading
from cluster.contracts.episodes import Earned, EpisodeEnd, Logged
from cluster.contracts.errors import EpisodeOver, Limit, ToolError
from cluster.contracts.types import RewardStatus
from tests.unit.actors.environments.adapters import hosted_variant
from tests.unit.actors.environments.scripted import Scripted, task

pytestmark = pytest.mark.slow  # all of it: each environment is a process

HERE = "tests.unit.actors.environments.test_gyms"
NAMES = ["left", "down", "right", "up"]
FROZEN_LAKE = {"id": "FrozenLake-v1", "is_slippery": False, "actions": NAMES}
OFFER = "Answer with one of: left, down, right, up."


class Riddle(gymnasium.Env):
    """A text in, a text out."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        return f"Say {self.np_random.integers(1000)}.", {}

    def step(self, action: str):
        return "Go on.", float(len(action)), action == "stop", False, {}


gymnasium.register("Riddle-v0", entry_point=Riddle)


def in_words(observation: Any) -> str:
    return f"You hold {observation[0]}."


def stick_or_hit(text: str) -> int:
    if text not in ("stick", "hit"):
        raise ToolError("stick or hit?")
    return int(text == "hit")


@pytest.mark.parametrize("kind", ["gym", "gym_blocking"])
async def test_steps_earn_their_rewards_until_the_game_ends(kind):
    model = Scripted("I go down.", "1", "2, no, Right!", "Down", "right", "right")
    async with hosted_variant(kind, **FROZEN_LAKE) as host:
        end = await host.run(task(), model)
    logged = (Logged(name="steps", value=6.0), Logged(name="unreadable_actions", value=0.0))
    assert end == EpisodeEnd(reward=0.0, events=(Earned(reward=1.0, name=None), *logged))
    assert model.heard[:2] == [
        f"0\n[S]FFF\nFHFH\nFFFH\nHFFG\n{OFFER}",
        "4\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG",
    ]
    assert [asked.events for asked in model.asked] == [(), *[(Earned(reward=0.0, name=None),)] * 5]


async def test_a_game_that_is_told_to_draw_nothing_shows_its_observations_alone():
    model = Scripted(EpisodeOver("full", limit=Limit.CONTEXT))
    async with hosted_variant("gym", render_mode=None, **FROZEN_LAKE) as host:
        await host.run(task(), model)
    assert model.heard == [f"0\n{OFFER}"]


async def test_a_reply_without_an_action_is_answered_and_counted_and_takes_no_step():
    model = Scripted("Hm.", "7", "rightwards", "<think>left</think>", "down", EpisodeOver("full", limit=Limit.CONTEXT))
    async with hosted_variant("gym", unreadable_reward=-0.1, **FROZEN_LAKE) as host:
        end = await host.run(task(), model)
    assert model.heard[1:5] == [f"There is no action in that. {OFFER}"] * 4
    assert model.asked[1].events == (Earned(reward=-0.1, name=None),)
    assert end.limit is Limit.CONTEXT
    assert end.events == (Logged(name="steps", value=1.0), Logged(name="unreadable_actions", value=4.0))


@pytest.mark.parametrize(
    ("reply", "action"), [("我选1号", 1), ("我选right吧", 2), ("2번", 2), ("rightwards 1", 1), ("1, naïve2", 1)]
)
def test_an_action_is_read_beside_characters_of_scripts_without_spaces(reply, action):
    _, read = _reading(spaces.Discrete(3), ["left", "down", "right"])
    assert read(reply) == action


async def test_all_episodes_of_a_task_meet_the_same_game():
    async with hosted_variant("gym", id=f"{HERE}:Riddle-v0") as host:
        models = [Scripted(" stop "), Scripted("stop"), Scripted("stop")]
        ends = [await host.run(task(seed=seed), model) for seed, model in zip((5, 5, 6), models, strict=True)]
    first, same, other = (model.heard for model in models)
    assert first == same != other
    assert [end.events[0] for end in ends] == [Earned(reward=4.0, name=None)] * 3


async def test_an_action_that_is_named_by_a_number_is_the_one_of_that_name():
    """Down, down, right, right, down, right, where 1 is left, 2 down, 3 right and 4 up; 0 is none, though Gymnasium has it."""
    model = Scripted(*"0223323")
    async with hosted_variant("gym", **FROZEN_LAKE | {"actions": ["1", "2", "3", "4"]}) as host:
        end = await host.run(task(), model)
    assert Earned(reward=1.0, name=None) in end.events and Logged(name="unreadable_actions", value=1.0) in end.events


async def test_functions_of_the_user_write_observations_and_read_actions():
    model = Scripted("double", "stick")
    functions = {"render": f"{HERE}:in_words", "parse": f"{HERE}:stick_or_hit"}
    async with hosted_variant("gym", id="Blackjack-v1", **functions) as host:
        end = await host.run(task(seed=1), model)
    assert model.heard == ["You hold 20.", "stick or hit?"]
    assert end.events[1:] == (Logged(name="steps", value=1.0), Logged(name="unreadable_actions", value=1.0))


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"id": "CartPole-v1", "actions": ["left"]}, "are 1 names, and there are 2 actions"),
        ({"id": "Pendulum-v1"}, "name a function that reads it: parse: my_module:parse"),
        ({"id": "Nowhere-v1"}, "doesn't exist"),
    ],
)
async def test_what_cannot_be_played_is_the_environments_failure_and_says_why(params, why):
    async with hosted_variant("gym", **params) as host:
        end = await host.run(task(), Scripted())
    assert (end.reward, end.status, end.failed_stage) == (None, RewardStatus.ERROR, "environment")
    assert why in (end.message or "")
